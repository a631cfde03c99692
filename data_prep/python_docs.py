"""Chat prompts about documented objects of Python's standard library, in two files that share no object.

train.jsonl    prompts to answer (generate-responses), {"id", "category", "objects", "turns"}
heldout.jsonl  prompts for evaluation, in the same layout
prompts.json   their provenance, their counts, and the SHA-256 of each file; written last
"""

import hashlib
import importlib
import inspect
import itertools
import json
import platform
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, ClassMethodDescriptorType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any, NamedTuple

from outrider.base.errors import UserError
from outrider.base.files import require_writable, write_atomically, write_json
from outrider.base.processes import from_main, join_processes, only_run_of
from outrider.base.run_dirs import finished
from outrider.data_prep.settings import PromptsConfig
from outrider.data_prep.text.prompt_records import Prompt, as_record
from outrider.data_prep.text.prompts import read_prompts
from outrider.data_prep.text.records import turn_key
from outrider.data_prep.text.settings import prompt_file
from outrider.data_prep.text.sources import Split, is_heldout

Json = Mapping[str, Any]
RECORD_FILE = "prompts.json"
FILES: dict[Split, str] = {"train": "train.jsonl", "heldout": "heldout.jsonl"}
_FEWEST, _HELDOUT = 10, 12  # least prompts of a user's file, and least held-out prompts if it has twice as many
_QUOTED = 900  # most characters of documentation in a prompt

# Public modules that only define things when they are imported. A package stands before its modules.
MODULES = """
    builtins abc argparse array ast asyncio base64 bisect calendar cmath codecs collections concurrent.futures
    configparser contextlib contextvars copy csv ctypes dataclasses datetime decimal difflib dis email email.message
    email.parser email.policy email.utils enum fileinput fnmatch fractions ftplib functools gc gettext glob graphlib
    gzip hashlib heapq hmac html html.parser http http.client http.cookiejar http.cookies http.server imaplib importlib
    importlib.abc importlib.metadata importlib.resources inspect io ipaddress itertools json locale logging
    logging.config logging.handlers lzma mailbox math mimetypes mmap multiprocessing multiprocessing.pool
    multiprocessing.shared_memory netrc numbers operator os os.path pathlib pickle pkgutil platform plistlib poplib
    pprint profile pstats queue random re reprlib sched secrets select selectors shelve shlex shutil signal smtplib
    socket socketserver sqlite3 ssl statistics string struct subprocess symtable sys sysconfig tarfile tempfile textwrap
    threading time timeit tokenize tomllib trace traceback tracemalloc types typing unicodedata unittest unittest.mock
    urllib.error urllib.parse urllib.request urllib.robotparser uuid venv warnings wave weakref webbrowser
    wsgiref.handlers wsgiref.headers wsgiref.util xml.dom.minidom xml.etree.ElementTree xml.sax xml.sax.handler
    xml.sax.xmlreader xmlrpc.client xmlrpc.server zipapp zipfile zipimport zlib zoneinfo
"""

# Questions about a documented object, by category. {name}: its name; {text}: its documentation;
# "|" begins the user's next turn. "error" is asked about exceptions only, and the three after it not about them.
TEMPLATES = {
    "explain": (
        "What does {name} do?",
        "Explain {name} in plain words.",
        "When would I use {name}?",
        "I found {name} in some code that I have to maintain. What should I know about it?",
    ),
    "error": (
        "When does Python report {name}?",
        "My program ends with {name}. What are the usual reasons?|Show me a short piece of code that leads to it.",
        "How do I handle {name} properly?|And when is it better not to catch it?",
    ),
    "example": (
        "Write a short example that uses {name}.",
        "Show me how to use {name} in a small program, with comments.",
        "Show an example of {name}, together with the output that it prints.",
    ),
    "test": (
        "Write three pytest tests for code that uses {name}.",
        "Which edge cases of {name} are worth a test? Write one test for each.",
    ),
    "chat": (
        "What does {name} do?|Show me a short example.|Now write a test for that example.",
        "Explain {name} to me.|Can you say that in simpler words?|Which alternatives are there?",
        "Write a small function that uses {name}.|Add type hints and a docstring.|Now write two tests for it.",
    ),
    "rewrite": (
        "Make this description of {name} shorter without losing anything important:\n\n{text}",
        "Rewrite this so that a beginner understands it. It describes {name}.\n\n{text}",
    ),
    "summarise": (
        "Summarise this documentation of {name} in one sentence:\n\n{text}",
        "Summarise what this says about {name} in two or three bullet points:\n\n{text}",
    ),
}
_WORDS = {"rewrite": 14, "summarise": 40}  # least words of a text for a prompt of the category
_CALLED = (
    FunctionType, BuiltinFunctionType, MethodDescriptorType, ClassMethodDescriptorType, classmethod, staticmethod,
)  # fmt: skip
_SIGNATURE = re.compile(r"[\w.]+\(.*\)?(\s*->.*)?$")
# A paragraph of prose: whole sentences without markup, code, private names and references.
_PROSE = re.compile(r"[A-Z`][^\\{}|<>*=#@~]{20,}[.!?]")
_NOT_PROSE = re.compile(
    r"""::|\.\. |--|:\w+:|https?:|\b0x|(?<![\w.`])_|['"]\s+['"]|\b(see|deprecated|internal)\b""", re.I
)


class Subject(NamedTuple):
    """A documented object. name: as people write it, such as json.dumps; text: its documentation, whole paragraphs."""

    name: str
    error: bool
    text: str


def write_prompts(config: PromptsConfig, modules: str = MODULES) -> None:
    """Write both files to `config.out_dir`: the prompts of `config.file`, or without it about objects of `modules`.

    Under a launcher, only the main process writes. Raises `UserError`.
    """
    state = join_processes()
    folder = require_writable(config.out_dir)
    with only_run_of(state, folder, "prompts"):
        from_main(state, lambda: _write(config, modules, folder))


def _write(config: PromptsConfig, modules: str, folder: Path) -> None:
    own = None if config.file is None else prompt_file(config.file, "file")
    made_of = (
        {"python": platform.python_version()} if own is None else {"file": hashlib.sha256(own.read_bytes()).hexdigest()}
    )
    identity = config.deciding() | made_of
    if finished(folder / RECORD_FILE, identity, config.resume, config):
        print(f"{folder}: finished already")
        return
    made: dict[str, dict[str, object]] = {}
    if own is None:
        parted = _documented(config, modules)
    else:
        prompts = own_split(own, config.heldout_fraction)
        parted = {split: [*map(as_record, some)] for split, some in prompts.items()}
    for split, records in parted.items():
        content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
        write_atomically(folder / FILES[split], content)
        categories = dict(sorted(Counter(str(record["category"]) for record in records).items()))
        digest = hashlib.sha256(content).hexdigest()
        made[split] = {"prompts": len(records), "categories": categories, "sha256": digest}
    write_json(folder / RECORD_FILE, {"made_of": identity, **made})
    counts = " ".join(f"{split}={about['prompts']}" for split, about in made.items())
    print(f"write_prompts out_dir={folder} {counts}", flush=True)


def _documented(config: PromptsConfig, modules: str) -> dict[Split, list[Json]]:
    """Prompts about the standard library, ordered by a hash, so that the first ones are a sample of all."""
    records: dict[Split, list[Json]] = {"train": [], "heldout": []}
    for subject in subjects(modules.split()):
        split: Split = "heldout" if is_heldout(subject.name, config.heldout_fraction) else "train"
        records[split] += questions(subject, config.per_object)
    held = {turn_key(record["turns"][0]) for record in records["heldout"]}  # two names may differ in case alone
    records["train"] = [record for record in records["train"] if turn_key(record["turns"][0]) not in held]
    return {split: sorted(some, key=lambda record: str(record["id"])) for split, some in records.items()}


def own_split(path: Path, heldout_fraction: float = PromptsConfig.heldout_fraction) -> dict[Split, list[Prompt]]:
    """The prompts of a user's file, each once, the held-out ones evenly spread. The same first turn is in one split.

    Raises `UserError` for too few.
    """
    groups: dict[str, list[Prompt]] = {}
    for prompt in {prompt.turns: prompt for prompt in read_prompts(str(path))}.values():
        groups.setdefault(turn_key(prompt.turns[0]), []).append(prompt)
    if len(groups) < _FEWEST:
        raise UserError(f"{path}: {len(groups)} prompts with different first turns; expected at least {_FEWEST}")
    count = max(min(round(heldout_fraction * len(groups)), len(groups) - 1), min(_HELDOUT, len(groups) // 2))
    held = {number * len(groups) // count for number in range(count)}
    parted: dict[Split, list[Prompt]] = {"train": [], "heldout": []}
    for number, group in enumerate(groups.values()):
        parted["heldout" if number in held else "train"] += group
    return parted


def questions(subject: Subject, most: int) -> list[Json]:
    """At most `most` prompts about one subject, of different categories, chosen by a hash of its name."""
    words, found = {"name": f"`{subject.name}`", "text": subject.text}, []
    for category, templates in TEMPLATES.items():
        asked = category == "error" if category in ("error", "example", "test", "chat") else None
        if asked in (None, subject.error) and len(subject.text.split()) >= _WORDS.get(category, 0):
            number = _number(f"{category} {subject.name}")
            turns = [turn.format(**words) for turn in templates[number % len(templates)].split("|")]
            key = hashlib.sha256(json.dumps(turns).encode()).hexdigest()[:16]
            found.append((number, {"id": key, "category": category, "objects": [subject.name], "turns": turns}))
    return [record for _, record in sorted(found, key=lambda one: one[0])[:most]]


def _number(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def subjects(modules: Sequence[str]) -> Iterator[Subject]:
    """The documented functions, classes and methods of the modules, without repeated objects and repeated texts."""
    known: dict[int, object] = {}  # by id; held, so that no id is used again
    texts: set[str] = set()
    for name in modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(name)
        for shown, value in _members(module):
            text = _prose(getattr(value, "__func__", value).__doc__)
            if id(value) not in known and text and text not in texts:
                yield Subject(shown, isinstance(value, type) and issubclass(value, BaseException), text)
            texts.add(text)
            known[id(value)] = value


def _members(module: ModuleType) -> Iterator[tuple[str, object]]:
    """The public functions and classes of a module and the classes' own methods, each with its name."""
    listed, prefix = getattr(module, "__all__", None), "" if module.__name__ == "builtins" else f"{module.__name__}."
    for name, value in sorted(vars(module).items()):
        home = str(getattr(value, "__module__", None)).lstrip("_")
        public = name in listed if listed is not None else f"{home}.".startswith(f"{module.__name__}.")
        if name.startswith("_") or not public or not isinstance(value, (type, *_CALLED)):
            continue
        yield f"{prefix}{name}", value
        for inner, method in sorted(vars(value).items()) if isinstance(value, type) else ():
            if not inner.startswith("_") and isinstance(method, _CALLED):
                yield f"{prefix}{name}.{inner}", method


def _prose(docstring: object) -> str:
    """The leading paragraphs of prose, with names in single backticks; "" where there are none."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(docstring if isinstance(docstring, str) else ""))
    lines = itertools.dropwhile(lambda line: not line or _SIGNATURE.match(line), blocks[0].split("\n"))
    plain = [" ".join(block.replace("``", "`").split()) for block in ("\n".join(lines), *blocks[1:])]
    kept = [*itertools.takewhile(_is_prose, [paragraph for paragraph in plain if paragraph])]
    while kept and sum(map(len, kept)) + 2 * len(kept) > _QUOTED:
        kept.pop()
    return "\n\n".join(kept)


def _is_prose(paragraph: str) -> bool:
    balanced = all(paragraph.count(sign) % 2 == 0 for sign in '`"') and paragraph.count("(") == paragraph.count(")")
    return bool(_PROSE.fullmatch(paragraph)) and balanced and not _NOT_PROSE.search(paragraph)
