"""Prompts about documented objects of Python, in two files that share no object.

train.jsonl    prompts to answer (generate-responses), {"id", "category", "objects", "turns"}
heldout.jsonl  prompts for evaluation, in the same layout
prompts.json   their provenance, their counts, and the SHA-256 of each file; written last
"""

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from data_prep.python_docs.instructions import Instruction, as_lines, halves, make_instructions, read_subjects
from data_prep.python_docs.modules import PACKAGES, STANDARD_LIBRARY
from data_prep.python_docs.settings import PromptsConfig
from data_prep.python_docs.subjects import Collector
from data_prep.text.benchmarks import prompt_file
from data_prep.text.prompt_records import Prompt, as_record
from data_prep.text.prompts import read_prompts
from data_prep.text.records import turn_key
from data_prep.text.sources import Split
from outrider.errors import UserError
from outrider.files import require_writable, write_atomically, write_json
from outrider.processes import from_main, join_processes, only_run_of
from outrider.run_dirs import finished

RECORD_FILE = "prompts.json"
FILES: dict[Split, str] = {"train": "train.jsonl", "heldout": "heldout.jsonl"}
_FEWEST, _HELDOUT = 10, 12  # prompts of a user's file at least, and of them to be held out


def write_prompts(config: PromptsConfig) -> None:
    """Write both files to `config.out_dir`. Raises `UserError`. Under a launcher, only the main process writes."""
    state = join_processes()
    folder = require_writable(config.out_dir)
    with only_run_of(state, folder, "prompts"):
        from_main(state, lambda: _write(config, folder))


def _write(config: PromptsConfig, folder: Path) -> None:
    if config.file is not None:
        _write_own(config, config.file, folder)
        return
    installed = [name for name in config.packages if find_spec(name) is not None]
    for name in sorted(set(config.packages) - set(installed)):
        print(f"python_docs: {name} is not installed; nothing is asked about it", flush=True)
    identity: dict[str, object] = {
        **config.deciding(),
        "python": platform.python_version(),
        "versions": _versions(installed),
    }
    if finished(folder / RECORD_FILE, identity, config.resume, config):
        print(f"{folder}: finished already")
        return
    modules = [*STANDARD_LIBRARY, *(module for name in installed for module in PACKAGES[name])]
    collector = Collector(config.quoted_chars)
    subjects = read_subjects(modules, collector)
    for name, why in collector.skipped.items():
        print(f"python_docs: {name} is left out, it cannot be imported ({why})", flush=True)
    parted = halves(subjects, config.heldout_fraction)
    made = {split: make_instructions(own, config.per_object) for split, own in parted.items()}
    held = {turn_key(one.turns[0]) for one in made["heldout"]}  # two objects may be shown by one name
    made["train"] = [one for one in made["train"] if turn_key(one.turns[0]) not in held]
    files: dict[str, dict[str, object]] = {split: _save(some, folder / FILES[split]) for split, some in made.items()}
    write_json(folder / RECORD_FILE, {"made_of": identity, "left_out": collector.skipped, **files})
    counts = " ".join(f"{split}={about['prompts']}" for split, about in files.items())
    print(f"write_prompts out_dir={folder} objects={len(subjects)} {counts}", flush=True)


def _write_own(config: PromptsConfig, file: str, folder: Path) -> None:
    """The prompts of a file, each once, the held-out ones evenly spread; all of one first turn are on one side."""
    path = prompt_file(file, "file")
    prompts = [*{prompt.turns: prompt for prompt in read_prompts(str(path))}.values()]
    identity = {**config.deciding(), "file": hashlib.sha256(path.read_bytes()).hexdigest()}
    if finished(folder / RECORD_FILE, identity, config.resume, config):
        print(f"{folder}: finished already")
        return
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(turn_key(prompt.turns[0]), []).append(prompt)
    if len(groups) < _FEWEST:
        raise UserError(f"file={file}: {len(groups)} prompts with different first turns; expected at least {_FEWEST}")
    count = max(round(config.heldout_fraction * len(groups)), min(_HELDOUT, len(groups) // 2))
    held = {number * len(groups) // count for number in range(count)}
    made: dict[str, dict[str, object]] = {}
    for split, name in FILES.items():
        parts = [part for number, part in enumerate(groups.values()) if (number in held) == (split == "heldout")]
        some = [prompt for part in parts for prompt in part]
        content = "".join(json.dumps(as_record(prompt), ensure_ascii=False) + "\n" for prompt in some).encode()
        write_atomically(folder / name, content)
        made[split] = {"prompts": len(some), "sha256": hashlib.sha256(content).hexdigest()}
    write_json(folder / RECORD_FILE, {"made_of": identity, **made})
    counts = " ".join(f"{split}={about['prompts']}" for split, about in made.items())
    print(f"write_prompts out_dir={folder} {counts}", flush=True)


def _save(made: Sequence[Instruction], path: Path) -> dict[str, object]:
    """Write one split; returns its entry of prompts.json."""
    content = as_lines(made)
    write_atomically(path, content)
    return {
        "prompts": len(made),
        "objects": len({name for one in made for name in one.objects}),
        "categories": dict(sorted(Counter(one.category for one in made).items())),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def _versions(packages: Sequence[str]) -> dict[str, str]:
    """The version of each package, by its import name."""
    distributions = packages_distributions()
    return {name: version(min(distributions[name])) if name in distributions else "unknown" for name in packages}
