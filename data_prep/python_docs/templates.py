"""What a person might ask about something documented: templates of several kinds, filled for a subject."""

import difflib
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence

from data_prep.python_docs.docstrings import sentences
from data_prep.python_docs.subjects import Subject

Turns = tuple[str, ...]  # what the user says, in turn
_ALIKE = 0.6  # of two names, by difflib, that are worth comparing
_REWRITTEN, _SUMMARISED = 14, 40  # words of a text from which on that can be asked
_STEPS = 3  # sentences of a text with steps in it
# Where a function computes something that one could write oneself.
_COMPUTING = {
    "bisect builtins calendar collections colorsys difflib fnmatch functools heapq html itertools math operator random",
    "shlex statistics string textwrap urllib.parse numpy networkx str list dict set tuple bytes int",
}
_WRITABLE = {name for names in _COMPUTING for name in names.split()}
_BUILTIN_VALUES = {
    "str": "text",
    "bytes": "data",
    "list": "items",
    "tuple": "items",
    "dict": "mapping",
    "set": "members",
    "int": "number",
    "float": "number",
}


def pick(choices: Sequence[str], key: str) -> str:
    """One of the choices, decided by a hash of `key`."""
    return choices[_number(key) % len(choices)]


def prompts_of(subject: Subject, most: int) -> Iterator[tuple[str, Turns]]:
    """(category, turns) of at most `most` prompts of a subject, each of another category, chosen by a hash."""
    possible = [(category, make(subject)) for category, make in CATEGORIES.items()]
    found = [(category, turns) for category, turns in possible if turns]
    found.sort(key=lambda made: _number(f"{made[0]} {subject.name}"))
    yield from found[:most]


def comparisons(subjects: Sequence[Subject]) -> Iterator[tuple[Subject, Subject, Turns]]:
    """Pairs with names alike, of one kind and home, and the question how they differ. Each subject is first in one."""
    groups: dict[tuple[str, str], list[Subject]] = {}
    for subject in subjects:
        if subject.kind != "topic":
            groups.setdefault((subject.home, subject.kind), []).append(subject)
    for group in groups.values():
        ordered = sorted(group, key=lambda subject: subject.name)
        for one, other in itertools.pairwise(ordered):
            if difflib.SequenceMatcher(None, one.leaf, other.leaf).ratio() >= _ALIKE:
                names = {"a": f"`{one.name}`", "b": f"`{other.name}`"}
                yield one, other, (pick(_COMPARE, one.name).format(**names),)


# ---------------------------------------------------------------------------------------------- one turn

_COMPARE = (
    "What is the difference between {a} and {b}?",
    "When should I use {a}, and when {b}?",
    "Compare {a} with {b}, and show a short example of each.",
    "Can I use {a} in the place of {b}? Explain why, or why not.",
    "I keep mixing up {a} and {b}. How can I remember which is which?",
)
_EXPLAIN = {
    "function": (
        "What does {name} do?",
        "Explain {name} in plain words.",
        "When would I use {name}?",
        "What is {name} for? Answer in two or three sentences.",
        "Explain what {name} does to someone who has just started with Python.",
        "I found {name} in some code that I have to maintain. What does it do?",
        "What should I know before I use {name}?",
    ),
    "class": (
        "What is the class {name} for?",
        "Explain the class {name} in plain words.",
        "When is {name} the right class to use?",
        "What is {name}, and what problem does it solve?",
        "Explain the class {name} to someone who has just started with Python.",
        "I came across the class {name}. What should I know about it?",
    ),
    "attribute": (
        "What does the attribute {name} tell me?",
        "What is the attribute {name} for?",
        "When would I look at the attribute {name}?",
        "Explain the attribute {name} in one or two sentences.",
    ),
    "topic": (
        "Explain this topic of the Python language reference in plain words: {title}.",
        "I am learning Python. What should I know about this topic: {title}?",
        "Give me a short introduction to this part of the Python language, with an example: {title}.",
    ),
}
_EXAMPLE = (
    "Write a short example that uses {name}.",
    "Show me how to use {name} in a small program, with comments.",
    "Give two examples of {name}: a simple one and a realistic one.",
    "Write a small Python script in which {name} is useful.",
    "Show an example of {name}, together with the output that it prints.",
)
_TEST = (
    "Write three pytest tests for {name}.",
    "How would you test code that calls {name}? Show the tests with pytest.",
    "Write a `unittest.TestCase` that checks {name} in a normal case and in an edge case.",
    "Write a test that shows what {name} does with unusual input.",
    "Which edge cases of {name} are worth a test? Write one test for each.",
)
_ERROR = (
    "When is {name} raised?",
    "My program stops with {name}. What are the usual reasons?",
    "How do I handle {name} properly?",
    "Give an example of code that raises {name}, and show how to catch it.",
    "Should I catch {name}, or let my program stop? Explain your answer.",
)
_WARNING = (
    "When do I get the warning {name}, and what should I do about it?",
    "How can I turn {name} into an error while my tests run?",
    "What does the warning {name} mean?",
    "Show how to ignore {name} in one part of a program only.",
)
_PARAMETERS = (
    "What do the parameters `{a}` and `{b}` of {name} mean?",
    "How do I choose `{a}` and `{b}` when I call {name}?",
    "Explain the parameters `{a}` and `{b}` of {name}, with an example of each.",
)
_OPTIONAL = (
    "What happens if I leave out `{a}` when I call {name}?",
    "When would I give {name} another value for `{a}` than {default}?",
    "What does the parameter `{a}` of {name} change? Its default is {default}.",
)
_FIND = (
    'Which {noun} of `{home}` fits this description? "{summary}"',
    'I am looking for the {noun} of `{home}` that does this: "{summary}" What is its name, and how do I use it?',
)
_WRITE = (
    'Write your own version of {name} in plain Python, without calling it. Its documentation says: "{summary}"',
    "Without using {name}, write a function that gives the same results. Explain how it works.",
)
_REWRITE = (
    "Make this description of {name} shorter without losing anything important:\n\n{text}",
    "Rewrite this description of {name} in one short sentence:\n\n{text}",
    "Rewrite this so that a beginner understands it. It describes {name}.\n\n{text}",
    "Say the same about {name} in fewer words:\n\n{text}",
)
_SUMMARISE = (
    "Summarise this documentation of {name} in one sentence:\n\n{text}",
    "Summarise what this says about {name} in two or three bullet points:\n\n{text}",
    "Here is what the documentation says about {name}. What are the main points?\n\n{text}",
    "Read this text about {name} and tell me the most important thing in it.\n\n{text}",
)
_IN_STEPS = (
    "Turn this description of {name} into a numbered list of steps:\n\n{text}",
    "Write what this text says about {name} as short steps, one on a line:\n\n{text}",
)
_CALL_STEPS = (
    "{object}Explain step by step what happens when I call `{call}`.",
    "{object}What does `{call}` do? Go through it step by step.",
)
_FIX_MISSING = (
    "{object}I call `{call}`, and Python raises a TypeError. What is wrong with the call?",
    "{object}The call `{call}` raises a TypeError. Correct it, and explain what was missing.",
)
_FIX_NAME = (
    "{object}Why does the call `{call}` raise a TypeError? Show the correct call.",
    "{object}There is a mistake in the arguments of the call `{call}`. Find it, and write the call correctly.",
)


def explain(subject: Subject) -> Turns:
    """What it is; of an error that is another category."""
    if subject.kind == "error":
        return ()
    kind = "function" if subject.kind == "method" else subject.kind
    return _filled(_EXPLAIN[kind], "explain", subject)


def example(subject: Subject) -> Turns:
    """A program that uses it."""
    return _filled(_EXAMPLE, "example", subject) if subject.kind in ("function", "method", "class") else ()


def test(subject: Subject) -> Turns:
    """Tests of it."""
    return _filled(_TEST, "test", subject) if subject.kind in ("function", "method") else ()


def error(subject: Subject) -> Turns:
    """When it is raised, and what to do then."""
    if subject.kind != "error":
        return ()
    return _filled(_WARNING if _is_warning(subject) else _ERROR, "error", subject)


def parameters(subject: Subject) -> Turns:
    """What its parameters mean."""
    telling = [parameter for parameter in subject.parameters or () if len(parameter.name) > 2]
    optional = [parameter for parameter in telling if parameter.default is not None]
    if len(telling) >= 2 and not (optional and _number(subject.name) % 2):
        start = _number(f"parameters {subject.name}") % (len(telling) - 1)
        return _filled(_PARAMETERS, "parameters", subject, a=telling[start].name, b=telling[start + 1].name)
    if optional:
        one = optional[_number(f"parameters {subject.name}") % len(optional)]
        return _filled(_OPTIONAL, "parameters", subject, a=one.name, default=f"`{one.default}`")
    return ()


def find(subject: Subject) -> Turns:
    """Its name, from what it does."""
    told = subject.leaf.lower() in subject.summary.lower()
    if told or subject.kind not in ("function", "method", "class") or len(subject.summary.split()) < 6:
        return ()
    return _filled(_FIND, "find", subject, noun=subject.kind, home=subject.home, summary=subject.summary)


def write(subject: Subject) -> Turns:
    """The same function, written anew."""
    if subject.kind not in ("function", "method") or subject.home not in _WRITABLE or "eturn" not in subject.summary:
        return ()
    return _filled(_WRITE, "write", subject, summary=subject.summary)


def rewrite(subject: Subject) -> Turns:
    """Its description in other words."""
    long_enough = len(subject.text.split()) >= _REWRITTEN
    return _filled(_REWRITE, "rewrite", subject, text=subject.text) if long_enough else ()


def summarise(subject: Subject) -> Turns:
    """The point of its description."""
    long_enough = len(subject.text.split()) >= _SUMMARISED
    return _filled(_SUMMARISE, "summarise", subject, text=subject.text) if long_enough else ()


def steps(subject: Subject) -> Turns:
    """What it does, step by step."""
    if subject.kind not in ("function", "method"):
        return ()
    if len(sentences(subject.text)) >= _STEPS:
        return _filled(_IN_STEPS, "steps", subject, text=subject.text)
    required = _required(subject)
    return _filled(_CALL_STEPS, "steps", subject, **_call(subject, required)) if required else ()


def fix(subject: Subject) -> Turns:
    """A call with an argument missing, or with one whose name is misspelt."""
    required = _required(subject)
    if required is None:
        return ()
    for parameter in subject.parameters or ():
        wrong = _misspelt(parameter.name)
        names = {other.name for other in subject.parameters or ()}
        if wrong and wrong not in names and parameter.by_name and parameter.default is not None:
            call = _call(subject, [*required, f"{wrong}={parameter.default}"])
            return _filled(_FIX_NAME, "fix", subject, **call)
    return _filled(_FIX_MISSING, "fix", subject, **_call(subject, required[:-1])) if required else ()


# --------------------------------------------------------------------------------------------- conversations

_TALKS = {
    "function": (
        ("What does {name} do?", "Show me a short example.", "Now write a test for that example."),
        ("How do I use {name}?", "What are common mistakes with it?"),
        ("Explain {name} to me.", "Can you say that in simpler words?", "Which alternatives are there?"),
        ("Write a small function that uses {name}.", "Add type hints and a docstring.", "Now write two tests for it."),
        ("Write a short example with {name}.", "Explain it line by line."),
        ("Is {name} the right tool for me? What is it for?", "And when should I not use it?"),
    ),
    "class": (
        ("What is the class {name} for?", "Show me how to create one and use it.", "What are common mistakes with it?"),
        ("Write a short program that uses the class {name}.", "Explain it line by line."),
        ("Explain the class {name} to me.", "Can you say that in simpler words?"),
        ("When would I use the class {name}?", "Show me an example.", "Now add error handling to the example."),
    ),
    "error": (
        ("My program stops with {name}. What does that mean?", "Show me a short piece of code that raises it."),
        ("What is {name}?", "How do I catch it?", "And when is it better not to catch it?"),
        ("Write a function that may raise {name}.", "Now write a test that checks that it is raised."),
    ),
    "attribute": (
        ("What does the attribute {name} hold?", "Show me a short example in which I need it."),
        ("What is the attribute {name} for?", "Can I set it as well?"),
    ),
    "topic": (
        (
            "Explain this topic of the Python language reference: {title}.",
            "Show me an example.",
            "What do people get wrong?",
        ),
        (
            "Teach me about this part of the Python language: {title}.",
            "Give me a small exercise.",
            "Now show the solution.",
        ),
    ),
}
_TEXT_TALKS = (
    ("Summarise this text about {name}:\n\n{text}", "Make it shorter.", "Now explain it to a ten-year-old."),
    ("Here is a text about {name}:\n\n{text}\n\nWhat does it say, in one sentence?", "Give me an example of that."),
)


def chat(subject: Subject) -> Turns:
    """A conversation of two or three turns."""
    kind = "function" if subject.kind == "method" else subject.kind
    number = _number(f"chat {subject.name}")
    talks = _TEXT_TALKS if len(subject.text.split()) >= _SUMMARISED and number % 2 else _TALKS[kind]
    talk = talks[number // 2 % len(talks)]
    return tuple(turn.format(**_words(subject), text=subject.text) for turn in talk)


CATEGORIES: dict[str, Callable[[Subject], Turns]] = {
    make.__name__: make
    for make in (explain, example, test, error, parameters, find, write, rewrite, summarise, steps, fix, chat)
}


# --------------------------------------------------------------------------------------------------- words


def _filled(templates: Sequence[str], category: str, subject: Subject, **values: str) -> Turns:
    template = pick(templates, f"{category} {subject.name}")
    return (template.format(**_words(subject), **values),)


def _words(subject: Subject) -> dict[str, str]:
    title = subject.name
    return {"name": title if subject.kind == "topic" else f"`{title}`", "title": title}


def _is_warning(subject: Subject) -> bool:
    return subject.leaf.endswith("Warning") or subject.summary.startswith("Warning")


def _required(subject: Subject) -> list[str] | None:
    """The arguments that a call needs, each as a variable of its parameter's name; None where they are not known."""
    if subject.parameters is None:
        return None
    needed = [parameter for parameter in subject.parameters if parameter.required]
    return [parameter.name if parameter.by_place else f"{parameter.name}={parameter.name}" for parameter in needed]


def _call(subject: Subject, arguments: Sequence[str]) -> dict[str, str]:
    """call: as it is written, a method's on an object; object: a sentence that says what that is."""
    called, said = subject.name, ""
    if subject.on_object:
        owner = subject.home.rpartition(".")[2]
        variable = _BUILTIN_VALUES.get(subject.home) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", owner).lower()
        called, said = f"{variable}.{subject.leaf}", f"I have an object `{variable}` of the class `{subject.home}`. "
    return {"call": f"{called}({', '.join(arguments)})", "object": said}


def _misspelt(name: str) -> str:
    """The name with two letters in its middle swapped; "" where that is not another word."""
    middle = len(name) // 2
    swapped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    plain = len(name) >= 5 and name[middle - 1 : middle + 1].isalpha() and swapped != name
    return swapped if plain else ""


def _number(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
