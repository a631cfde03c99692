"""Instructions about what is documented, in two halves that share no documented object."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from data_prep.python_docs.subjects import Collector, Subject
from data_prep.python_docs.templates import Turns, comparisons, prompts_of
from data_prep.text.sources import Split, is_heldout
from outrider.progress import counted


class Instruction(NamedTuple):
    """What a user says, in one turn or several, and the names of the documented objects that it is about."""

    category: str
    objects: tuple[str, ...]
    turns: Turns

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
    distinct = {made.turns: made for made in _all_instructions(subjects, per_object)}
    return sorted(distinct.values(), key=lambda made: made.id)


def as_lines(instructions: Sequence[Instruction]) -> bytes:
    """JSONL, a record for each: {"id", "category", "objects", "turns"}."""
    rows = ({"id": one.id, **one._asdict()} for one in instructions)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _all_instructions(subjects: Sequence[Subject], per_object: int) -> Iterator[Instruction]:
    for subject in subjects:
        for category, turns in prompts_of(subject, per_object):
            yield Instruction(category, (subject.name,), turns)
    for one, other, turns in comparisons(subjects):
        yield Instruction("compare", (one.name, other.name), turns)
