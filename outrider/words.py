"""Times in words, and suggestions for misspelt names."""

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A suggestion of the word of `known` most similar to `given`; empty if none is similar."""
    close = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def in_words(seconds: float) -> str:
    """A time: "3 min 20 s", or "20 s" below a minute."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
