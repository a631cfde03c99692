"""Instructions about what is documented, in two halves that share no documented object."""

import difflib
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from data_prep.python_docs.subjects import Collector, Subject
from data_prep.python_docs.templates import COMPARE, TEMPLATES, WORDS
from data_prep.text.sources import Split, is_heldout
from outrider.progress import counted

ALIKE = 0.6  # of two names, by difflib, that are worth comparing


class Instruction(NamedTuple):
    """What a user says, in one turn or several, and the names of the documented objects that it is about."""

    category: str
    objects: tuple[str, ...]
    turns: tuple[str, ...]

    @property
    def id(self) -> str:
        """A hash of what is said."""
        return hashlib.sha256(json.dumps(self.turns).encode()).hexdigest()[:16]


def read_subjects(modules: Sequence[str], collector: Collector) -> list[Subject]:
    """The language's own topics, and what the modules document."""
    found = list(collector.topics())
    for name in counted(modules, "reading", "modules"):
        found += collector.module(name)
    return found


def halves(subjects: Sequence[Subject], heldout_fraction: float) -> dict[Split, list[Subject]]:
    """The subjects to train on, and those to evaluate on: a hash of the name decides."""
    found: dict[Split, list[Subject]] = {"train": [], "heldout": []}
    for subject in subjects:
        found["heldout" if is_heldout(subject.name, heldout_fraction) else "train"].append(subject)
    return found


def make_instructions(subjects: Sequence[Subject], per_object: int) -> list[Instruction]:
    """Distinct instructions: at most `per_object` about each subject alone, and comparisons of two of the subjects.

    They are in the order of their ids, which mixes modules and categories: the first of them are a sample of all.
    """
    alone = itertools.chain.from_iterable(_about(subject, per_object) for subject in subjects)
    distinct = {made.turns: made for made in (*alone, *_comparisons(subjects))}
    return sorted(distinct.values(), key=lambda made: made.id)


def as_lines(instructions: Sequence[Instruction]) -> bytes:
    """JSONL, a record for each: {"id", "category", "objects", "turns"}."""
    rows = ({"id": one.id, **one._asdict()} for one in instructions)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _about(subject: Subject, most: int) -> list[Instruction]:
    """At most `most` about one subject, each of another category, chosen by a hash."""
    words = {"name": subject.shown, "kind": subject.kind, "text": subject.text}
    found = []
    for category, by_kind in TEMPLATES.items():
        templates = next((by_kind[kinds] for kinds in by_kind if subject.kind in kinds.split()), ())
        if templates and len(subject.text.split()) >= WORDS.get(category, 0):
            turns = _pick(templates, f"{category} {subject.name}").split("|")
            found.append(Instruction(category, (subject.name,), tuple(turn.format(**words) for turn in turns)))
    return sorted(found, key=lambda made: _number(f"{made.category} {subject.name}"))[:most]


def _comparisons(subjects: Sequence[Subject]) -> Iterator[Instruction]:
    """How two with names alike differ, of one kind and home. Each subject is the first in one, at most."""
    groups: dict[tuple[str, str], list[Subject]] = {}
    for subject in subjects:
        if subject.kind != "topic":
            groups.setdefault((subject.home, subject.kind), []).append(subject)
    for group in groups.values():
        for one, other in itertools.pairwise(sorted(group, key=lambda subject: subject.name)):
            if difflib.SequenceMatcher(None, one.leaf, other.leaf).ratio() >= ALIKE:
                turn = _pick(COMPARE, one.name).format(a=one.shown, b=other.shown)
                yield Instruction("compare", (one.name, other.name), (turn,))


def _pick(choices: Sequence[str], key: str) -> str:
    """One of the choices, decided by a hash of `key`."""
    return choices[_number(key) % len(choices)]


def _number(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
