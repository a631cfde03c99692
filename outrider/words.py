"""Times in words, misspelt names and names that are gone, and values quoted for command lines."""

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Sequence

_BARE = re.compile(r"(?!\.\d|(?i:null|true|false|nan|inf)$)[A-Za-z_/.][\w/.*-]*", re.ASCII)  # Hydra takes it as it is
_FUSED = "one tree of a drafter and n-grams was not faster than the better of the two (benchmarks/results/fused.md)"
_KEEP = "a memory across prompts was shown to gain in replays of like questions only (benchmarks/results/ngrams.md)"
_DOCS = "write-prompts asks about the standard library only, and quotes up to 900 characters of it"
_HEADS = (
    "EAGLE-3 heads are written for vLLM (dialect speculators) and SGLang (specforge); those of all trainers are read"
)
GONE = {  # names of earlier versions, and why they are gone
    "fused": _FUSED, "join": _FUSED, "keep": _KEEP, "keep_mb": _KEEP,
    "quoted_chars": _DOCS,
    "tensorrt_llm": _HEADS, "modelopt": _HEADS, "eagle": _HEADS,
    "ship-drafters": "it is a script of a clone now, benchmarks/ship_drafters.py",
}  # fmt: skip


def gone(name: object) -> str:
    """Why `name` is no longer an option, a choice or a command; empty if it never was one."""
    return f"; {name} is gone: {GONE[name]}." if isinstance(name, str) and name in GONE else ""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Why `given` is gone, or the word of `known` most similar to it; empty if none is similar."""
    close = difflib.get_close_matches(given, known, n=1)
    return gone(given) or (f"; did you mean {close[0]!r}?" if close else "")


def in_words(seconds: float) -> str:
    """A time: "3 min 20 s", or "20 s" below a minute."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def quoted(text: str) -> str:
    """`text` as the value of an option that a command reads as exactly this text, whatever is in it."""
    if _BARE.fullmatch(text):
        return text
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # otherwise OmegaConf looks for another option there
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    text = re.sub(r"(\\+)\Z", r"\1\1", text)
    return f"'{text}'"


def option(key: str, value: object) -> str:
    """The word of a command line, to be quoted for a shell, that gives `key` this text."""
    return f"{key}={quoted(str(value))}"


def in_shell(word: str) -> str:
    """A word as a shell reads it; one with single quotes in double ones, where that is enough."""
    return f'"{word}"' if "'" in word and not set('"$`\\!\n') & set(word) else shlex.quote(word)


class Shown(str):
    """A name in a page: {name:option} the value of an option in a shell, {name:shell} a word of one, {name:json} a
    literal of JSON or Python, also between single quotes."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        if spec == "json":
            return json.dumps(self, ensure_ascii=False).replace("'", "\\u0027")
        return in_shell(quoted(self)) if spec == "option" else shlex.quote(self) if spec == "shell" else str(self)


def listed(words: Sequence[str], limit: int = 6) -> str:
    """The first few of `words`, and the number of the others."""
    return ", ".join(words[:limit]) + (f" and {len(words) - limit} more" if len(words) > limit else "")
