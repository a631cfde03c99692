"""Documented objects: functions, classes, methods, attributes and errors of modules, and Python's language topics."""

import functools
import importlib
import re
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from data_prep.python_docs.docstrings import first_prose, first_sentence, plain, prose, quoted

Kind = Literal["function", "class", "error", "method", "attribute", "topic"]
_SHORTEST = 4  # minimum words of an informative first sentence
_LONGEST = 220  # maximum characters of a first sentence
_EMPTY = re.compile(  # beginnings of sentences that are uninformative by themselves
    r"See |(?:An? )?[Aa]lias|Same as|Refer to|In-?place|Initialize self|Helper for|Returns? self|Create and return a"
    r"|Equivalent|Implements?\b|Not implemented|Unsupported|Private|Pickle support|Like |As |Dummy|Override|This "
    r"|Default (?:object )?(?:implementation|formatter)|Convenience|Wrapper (?:around|for)|Similar to|Works like"
    r"|Calls?\b|`torch|Out-of-place|Deprecated|Abstract|Base class|Mix-?in|Stub|It |Its |Also |Ditto|Ignored?|No-op"
)
_DESCRIPTORS = (
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.FunctionType,
    classmethod,
    staticmethod,
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_ATTRIBUTES = (property, types.GetSetDescriptorType, types.MemberDescriptorType)


@dataclass(frozen=True)
class Subject:
    """A documented object.

    name: as people write it, like json.dumps, str.join. home: the module or class that contains it. text: its
    documentation, in whole sentences.
    """

    name: str
    kind: Kind
    home: str
    text: str

    @property
    def leaf(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def shown(self) -> str:
        """The name as written in a prompt."""
        return self.name if self.kind == "topic" else f"`{self.name}`"


class Collector:
    """Collects subjects; each object, and each text, is used only where it is found first."""

    def __init__(self, quoted_chars: int):
        self.quoted_chars = quoted_chars
        self.skipped: dict[str, str] = {}  # modules that could not be imported, and why
        self._objects: dict[int, object] = {}  # by id; references are held, so that no id is reused
        self._said: set[str] = set()  # names, texts, and first sentences with their homes

    def module(self, name: str) -> Iterator[Subject]:
        """The subjects of one module; empty for a module that cannot be imported."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name)
        except Exception as error:  # a broken package may raise anything
            self.skipped[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            return
        for leaf in sorted(_public(module), key=lambda leaf: (len(leaf), leaf)):  # the shortest name comes first
            value = vars(module)[leaf]
            if not (isinstance(value, (type, *_FUNCTIONS)) or _is_callable_value(value)) or self._known(value):
                continue
            home = _shortest_home(name, leaf, value)
            shown = leaf if home == "builtins" else f"{home}.{leaf}"
            if isinstance(value, type):
                yield from self._of_class(value, shown, home)
            else:
                yield from self._subject(value, shown, "function", home)

    def topics(self) -> Iterator[Subject]:
        """The topics of the language reference, as `help()` shows them."""
        import pydoc_data.topics

        for name in sorted(pydoc_data.topics.topics):
            title, _, body = pydoc_data.topics.topics[name].strip().partition("\n")
            body = body.partition("\n")[2]  # without the line under the title
            yield from self._made(plain(title), "topic", "Python", first_prose(body))

    def _of_class(self, cls: type, name: str, home: str) -> Iterator[Subject]:
        kind: Kind = "error" if issubclass(cls, BaseException) else "class"
        yield from self._subject(cls, name, kind, home)
        for leaf, value in sorted(vars(cls).items()):
            if not leaf.startswith("_") and not self._known(value):
                if isinstance(value, _DESCRIPTORS):
                    yield from self._subject(value, f"{name}.{leaf}", "method", name)
                elif isinstance(value, _ATTRIBUTES):
                    yield from self._subject(value, f"{name}.{leaf}", "attribute", name)

    def _known(self, value: object) -> bool:
        known = id(value) in self._objects
        self._objects[id(value)] = value
        return known

    def _subject(self, value: object, name: str, kind: Kind, home: str) -> Iterator[Subject]:
        docstring = (value.__func__ if isinstance(value, classmethod | staticmethod) else value).__doc__
        if isinstance(docstring, str):
            yield from self._made(name, kind, home, prose(docstring))

    def _made(self, name: str, kind: Kind, home: str, paragraphs: list[str]) -> Iterator[Subject]:
        summary = first_sentence(paragraphs)
        if len(summary.split()) < _SHORTEST or len(summary) > _LONGEST or _EMPTY.match(summary):
            return
        text = quoted(paragraphs, self.quoted_chars)
        said = {name, text, f"{home}: {summary}"}
        if text and not said & self._said:
            self._said |= said
            yield Subject(name, kind, home, text)


def _public(module: types.ModuleType) -> list[str]:
    """The public names of a module: its `__all__`, else the names defined in it or in its submodules."""
    listed = getattr(module, "__all__", None)

    def own(value: object) -> bool:
        home = getattr(value, "__module__", None)
        return isinstance(home, str) and f"{home.lstrip('_')}.".startswith(f"{module.__name__}.")

    names = (name for name in vars(module) if not name.startswith("_"))
    return [name for name in names if (name in listed if listed is not None else own(vars(module)[name]))]


def _shortest_home(module: str, leaf: str, value: object) -> str:
    """The package itself if it also has the object: json.JSONDecoder, not json.decoder.JSONDecoder."""
    root = module.partition(".")[0]
    return root if leaf in _names_of(root) and getattr(importlib.import_module(root), leaf) is value else module


@functools.cache
def _names_of(package: str) -> frozenset[str]:
    """All names of a package, including those that it imports on demand."""
    return frozenset(dir(importlib.import_module(package)))


def _is_callable_value(value: object) -> bool:
    """Whether it is an instance that is called like a function and has its own docstring, like numpy.add."""
    return (
        callable(value)
        and isinstance(getattr(value, "__name__", None), str)
        and not isinstance(value, type)
        and (value.__doc__ != type(value).__doc__)
    )
