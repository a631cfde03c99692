"""Numbers as people say them, and words that people meant."""

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A question after the one of `known` that is likest to `given`; empty where none is like it."""
    close = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def in_words(seconds: float) -> str:
    """A time: "3 min 20 s", or "20 s" below a minute."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
