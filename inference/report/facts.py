"""A report's facts: the identity of its run; its drafters' vocabularies, training times, and whether their training
text contains the prompts.

Contamination, prompts that occur in a drafter's training text, makes its figures unrepresentative.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from outrider.base.errors import UserError, reason, require
from outrider.base.files import digest_of
from outrider.base.machine import describe_machine
from outrider.base.run_dirs import code_version
from outrider.base.settings import construct
from outrider.data_prep.text.prompts import Prompt
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import read_records
from outrider.inference.doctor.scores import table
from outrider.inference.loading.target_setup import TargetSetup
from outrider.inference.measure.results import PromptResult
from outrider.inference.measure.statistics import coverage
from outrider.inference.report.tables import Report
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import EARLY_EXIT, KINDS

RUN = 8  # consecutive words; a run this long rarely occurs twice by chance
CHARACTERS = 8_000_000  # limit on the training text searched, for a search of seconds

Run = tuple[str, ...]


def run_settings(config: EvaluateConfig, setup: TargetSetup, prompts: Sequence[Prompt]) -> dict[str, object]:
    """The identity of an evaluation: options, digests of inputs, device, and code version, since results of two
    versions must not be mixed."""
    rows = [[p.id, p.category, p.turns, p.chat, *([p.system] if p.system else [])] for p in prompts]
    fingerprint = asdict(setup.target.fingerprint).items()
    drafters: dict[str, object] = {}
    for kind in KINDS.values():
        drafters |= kind.load_plugin().identity(config.where(kind))
    return {
        **config.deciding(),
        "target": {key: value for key, value in fingerprint if key not in ("target", "revision")},
        **drafters,
        "versions": {"code": code_version(), "torch": torch.__version__, "transformers": transformers.__version__},
        "end_tokens": sorted(setup.eos),
        "generation_config": setup.inherited.fields,
        "prompts": digest_of(rows)[:16],
        "dtype": f"int8 {setup.floats}" if setup.int8 else setup.floats,
        "device": f"{setup.device.type} ({describe_machine(str(setup.device))['device']})",
    }


def heldout_fraction(config: EvaluateConfig) -> float:
    """The held-out share of `python_stdlib`: that of the checkpoint's training, if it was trained on that."""
    default = DataConfig.heldout_fraction
    if config.early_exit is None or config.held is None:
        return default
    data: Any = EARLY_EXIT.load_plugin().training_record(config.early_exit).data or {}
    try:
        sources = {part.get("source") for part in (data, *data.get("mix", {}).values())}
        fraction = data["heldout_fraction"] if "python_stdlib" in sources else default
        require(0 <= fraction < 1, "training.data.heldout_fraction", fraction, "at least 0 and less than 1")
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"checkpoint={config.checkpoint}: does not say what data it was trained on ({reason(error)}); restore it"
        ) from None
    return fraction


def draft_vocabularies(config: EvaluateConfig, results: Sequence[PromptResult]) -> dict[str, dict[str, Any]]:
    """For each kind of drafter with a draft vocabulary: its size, and its coverage of the target's own text, overall
    and by category."""
    vocabularies = {}
    for name, where in config.paths.items():
        tokens = config.plugin(KINDS[name]).draft_vocabulary(where)
        if tokens is not None:
            shares = coverage(tokens, ((result.category, result.answer) for result in results))
            vocabularies[name] = {"tokens": len(tokens), "coverage": shares}
    return vocabularies


def trained_seconds(config: EvaluateConfig) -> dict[str, float]:
    """Seconds of training by kind of drafter, where recorded."""
    return {
        name: training.seconds for name, training in config.training_records().items() if training.seconds is not None
    }


def digests(settings: Report) -> dict[str, str]:
    """Digests of the target and the drafters, from the settings that identify a run (see `run_settings`)."""
    target = settings["target"]
    parts = {"target": target["weights"], "tokenizer": target["tokenizer"], "chat template": target["chat_template"]}
    for kind in KINDS.values():
        parts |= {f"{kind.name} {name}": settings[name] for name in kind.load_plugin().identity(None)}
    parts = {name: part for name, part in parts.items() if part is not None}
    return {name: part if isinstance(part, str) else digest_of(part)[:16] for name, part in parts.items()}


def doctor_lines(report: Report) -> list[str]:
    """The doctor's tables, for a monospaced font."""
    return [line for kind, findings in report.get("doctor", {}).items() for line in table(kind, findings)]


def overlaps(config: EvaluateConfig, prompts: Sequence[Prompt]) -> dict[str, dict[str, Any]]:
    """By kind of drafter, the overlap of prompts and training text, or `why` it is unknown."""
    by_kind: dict[str, dict[str, Any]] = {}
    read: dict[str, dict[str, Any]] = {}
    for name, training in config.training_records().items():
        key = json.dumps(training.data, sort_keys=True)  # drafters of the same target often share their training text
        read[key] = read.get(key) or overlap(training.data, prompts)
        by_kind[name] = read[key]
    return by_kind


def origin_of(config: EvaluateConfig, prompts: Sequence[Prompt]) -> str:
    """What the prompts are to drafters that learned from a text, as a sentence; "" where that is not known."""
    categories, path = {prompt.category for prompt in prompts}, Path(str(config.prompts))
    learned = str([training.data for training in config.training_records().values()])
    is_heldout = path.name == "heldout.jsonl" and path.with_name("prompts.json").exists()
    is_heldout |= categories == {"python_stdlib"} and "python_stdlib" in learned
    what = "held out from those that drafters learn from" if is_heldout else ""
    what = "written by the target itself" if categories == {"own"} else what
    kind = f"The prompts are {what}, of the kind that drafters are trained on, and gain more than fresh ones"
    return f"{kind} (docs/results.md)." if what and config.paths else ""


def overlap(data: Mapping[str, Any] | None, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The overlap of `prompts` with the training text that the settings `data` name, as it exists now.

    runs, runs_seen: distinct runs of `RUN` words in the prompts, and how many of them occur in the text. prompts_seen:
    prompts with at least one such run. characters: the length of the text searched; whole: whether that was all of it.
    Nothing is downloaded. If the text is not on this machine, `why` says so.
    """
    if data is None:
        return {"why": "there is no record of what it learned from"}
    try:
        config: DataConfig = construct(DataConfig, data)
        sources = {config.source} if config.source != "mix" else {part.source for _, _, part in config.parts()}
        if "hub" in sources:
            return {"why": "its training text lies on the Hub, and nothing is fetched for this"}
        run_sets = [{run for turn in prompt.turns for run in runs(turn)} for prompt in prompts]
        seen, characters, complete = _seen(set().union(*run_sets), config)
    except UserError as error:
        return {"why": f"its training text cannot be read here ({error})"}
    return {
        "prompts": len(prompts),
        "prompts_seen": sum(not seen.isdisjoint(run_set) for run_set in run_sets),
        "runs": len(set().union(*run_sets)),
        "runs_seen": len(seen),
        "characters": characters,
        "whole": complete,
    }


def runs(text: str) -> list[Run]:
    """All runs of `RUN` words, separated by whitespace, in a text."""
    words = text.split()
    return list(zip(*(words[start:] for start in range(RUN)), strict=False))


def _seen(prompt_runs: set[Run], config: DataConfig) -> tuple[set[Run], int, bool]:
    seen: set[Run] = set()
    characters = 0
    for record in read_records(config, "train"):
        texts = [record["text"]] if "text" in record else [message["content"] for message in record["messages"]]
        for text in texts:
            seen |= prompt_runs.intersection(runs(text))
            characters += len(text)
        if characters >= CHARACTERS:
            return seen, characters, False
    return seen, characters, True


def overlap_sentence(kind: str, counts: Mapping[str, Any]) -> str:
    """The overlap as a sentence."""
    if "why" in counts:
        return f"{kind}: has it seen the prompts? Not known: {counts['why']}. Restore that text, or take newer prompts."
    read = "all of its training text" if counts["whole"] else f"the first {counts['characters'] / 1e6:.0f} M characters"
    share = counts["runs_seen"] / counts["runs"] if counts["runs"] else 0.0
    return (
        f"{kind}: {counts['prompts_seen']} of {counts['prompts']} prompts share a run of {RUN} words with {read}, "
        f"{share:.1%} of all their runs."
    )
