"""Times in words, suggestions for misspelt names, and what became of names that are gone."""

import difflib
from collections.abc import Iterable

_FUSED = "one tree of a drafter and n-grams was not faster than the better of the two (benchmarks/results/fused.md)"
_KEEP = "a memory across prompts was shown to gain in replays of like questions only (benchmarks/results/ngrams.md)"
GONE = {  # names of earlier versions, and why they are gone
    "fused": _FUSED, "join": _FUSED, "keep": _KEEP, "keep_mb": _KEEP,
    "ship-drafters": "it is a script of a clone now, benchmarks/ship_drafters.py",
}  # fmt: skip


def gone(name: object) -> str:
    """Why `name` is no longer an option, a choice or a command; empty if it never was one."""
    return f"; {name} is gone: {GONE[name]}." if isinstance(name, str) and name in GONE else ""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Why `given` is gone, or the word of `known` most similar to it; empty if none is similar."""
    if given in GONE:
        return gone(given)
    close = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def in_words(seconds: float) -> str:
    """A time: "3 min 20 s", or "20 s" below a minute."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
