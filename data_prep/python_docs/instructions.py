"""Instructions about documented objects, in two splits that share no object."""

import difflib
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from data_prep.python_docs.subjects import Collector, Subject
from data_prep.text.sources import Split, is_heldout
from outrider.progress import counted

# What a person might ask about something documented: by category, and by the kinds of subject that are asked about in
# these ways. `{name}` is what it is called, `{kind}` what it is, `{text}` its documentation; "|" begins the user's next
# turn.
TEMPLATES: dict[str, dict[str, tuple[str, ...]]] = {
    "explain": {
        "function method": (
            "What does {name} do?",
            "Explain {name} in plain words.",
            "When would I use {name}?",
            "What is {name} for? Answer in two or three sentences.",
            "Explain what {name} does to someone who has just started with Python.",
            "I found {name} in some code that I have to maintain. What does it do?",
            "What should I know before I use {name}?",
        ),
        "class attribute": (
            "What is the {kind} {name} for?",
            "Explain the {kind} {name} in plain words.",
            "When would I use the {kind} {name}?",
            "Explain the {kind} {name} in one or two sentences.",
            "I came across the {kind} {name}. What should I know about it?",
        ),
        "topic": (
            "Explain this topic of the Python language reference in plain words: {name}.",
            "I am learning Python. What should I know about this topic: {name}?",
            "Give me a short introduction to this part of the Python language, with an example: {name}.",
        ),
    },
    "example": {
        "function method class": (
            "Write a short example that uses {name}.",
            "Show me how to use {name} in a small program, with comments.",
            "Give two examples of {name}: a simple one and a realistic one.",
            "Write a small Python script in which {name} is useful.",
            "Show an example of {name}, together with the output that it prints.",
        )
    },
    "test": {
        "function method": (
            "Write three pytest tests for {name}.",
            "How would you test code that calls {name}? Show the tests with pytest.",
            "Write a test that shows what {name} does with unusual input.",
            "Which edge cases of {name} are worth a test? Write one test for each.",
        )
    },
    "error": {
        "error": (
            "When does Python report {name}?",
            "My program ends with {name}. What are the usual reasons?",
            "How do I handle {name} properly?",
            "Give an example of code that leads to {name}, and show how to deal with it.",
        )
    },
    "rewrite": {
        "function method class attribute error topic": (
            "Make this description of {name} shorter without losing anything important:\n\n{text}",
            "Rewrite this description of {name} in one short sentence:\n\n{text}",
            "Rewrite this so that a beginner understands it. It describes {name}.\n\n{text}",
        )
    },
    "summarise": {
        "function method class attribute error topic": (
            "Summarise this documentation of {name} in one sentence:\n\n{text}",
            "Summarise what this says about {name} in two or three bullet points:\n\n{text}",
            "Read this text about {name} and tell me the most important thing in it.\n\n{text}",
        )
    },
    "chat": {
        "function method": (
            "What does {name} do?|Show me a short example.|Now write a test for that example.",
            "How do I use {name}?|What are common mistakes with it?",
            "Explain {name} to me.|Can you say that in simpler words?|Which alternatives are there?",
            "Write a small function that uses {name}.|Add type hints and a docstring.|Now write two tests for it.",
        ),
        "class attribute": (
            "What is the {kind} {name} for?|Show me how to use it.|What are common mistakes with it?",
            "Explain the {kind} {name} to me.|Can you say that in simpler words?",
            "When would I use the {kind} {name}?|Show me an example.|Explain it line by line.",
        ),
        "error": (
            "My program ends with {name}. What does that mean?|Show me a short piece of code that leads to it.",
            "What is {name}?|How do I catch it?|And when is it better not to catch it?",
        ),
        "topic": (
            "Explain this topic of the Python language to me: {name}.|Show me an example.|What do people get wrong?",
            "Teach me about this part of the Python language: {name}.|Give me a small exercise.|Now show the solution.",
        ),
    },
}
WORDS = {"rewrite": 14, "summarise": 40}  # of a text, from which on that can be asked
COMPARE = (
    "What is the difference between {a} and {b}?",
    "When should I use {a}, and when {b}?",
    "Compare {a} with {b}, and show a short example of each.",
    "Can I use {a} in the place of {b}? Explain why, or why not.",
)


ALIKE = 0.6  # minimum similarity, by difflib, of two names that are compared


class Instruction(NamedTuple):
    """A user's turns, one or several, and the names of the documented objects that they are about."""

    category: str
    objects: tuple[str, ...]
    turns: tuple[str, ...]

    @property
    def id(self) -> str:
        """A hash of the turns."""
        return hashlib.sha256(json.dumps(self.turns).encode()).hexdigest()[:16]


def read_subjects(modules: Sequence[str], collector: Collector) -> list[Subject]:
    """The topics of the language, and the documented objects of the modules."""
    found = list(collector.topics())
    for name in counted(modules, "reading", "modules"):
        found += collector.module(name)
    return found


def halves(subjects: Sequence[Subject], heldout_fraction: float) -> dict[Split, list[Subject]]:
    """The subjects for training and those for evaluation, split by a hash of the name."""
    found: dict[Split, list[Subject]] = {"train": [], "heldout": []}
    for subject in subjects:
        found["heldout" if is_heldout(subject.name, heldout_fraction) else "train"].append(subject)
    return found


def make_instructions(subjects: Sequence[Subject], per_object: int) -> list[Instruction]:
    """Distinct instructions: at most `per_object` about each single subject, and comparisons of two subjects.

    They are ordered by id, which mixes modules and categories, so that the first ones are a sample of all.
    """
    alone = itertools.chain.from_iterable(_about(subject, per_object) for subject in subjects)
    distinct = {made.turns: made for made in (*alone, *_comparisons(subjects))}
    return sorted(distinct.values(), key=lambda made: made.id)


def as_lines(instructions: Sequence[Instruction]) -> bytes:
    """JSONL with one record per instruction: {"id", "category", "objects", "turns"}."""
    rows = ({"id": one.id, **one._asdict()} for one in instructions)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _about(subject: Subject, most: int) -> list[Instruction]:
    """At most `most` instructions about one subject, each of another category, chosen by a hash."""
    words = {"name": subject.shown, "kind": subject.kind, "text": subject.text}
    found = []
    for category, by_kind in TEMPLATES.items():
        templates = next((by_kind[kinds] for kinds in by_kind if subject.kind in kinds.split()), ())
        if templates and len(subject.text.split()) >= WORDS.get(category, 0):
            turns = _pick(templates, f"{category} {subject.name}").split("|")
            found.append(Instruction(category, (subject.name,), tuple(turn.format(**words) for turn in turns)))
    return sorted(found, key=lambda made: _number(f"{made.category} {subject.name}"))[:most]


def _comparisons(subjects: Sequence[Subject]) -> Iterator[Instruction]:
    """Comparisons of two similarly named subjects of one kind and home. Each subject is first in at most one."""
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
    """One of the choices, selected by a hash of `key`."""
    return choices[_number(key) % len(choices)]


def _number(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
