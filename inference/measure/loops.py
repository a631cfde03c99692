"""Texts that repeat themselves.

A text loops if it says a cycle of tokens three times or more in a row, in a stretch of at least `LEAST` tokens that
covers half of the text or reaches its end. A greedy target that has fallen into a cycle seldom leaves it: a base model
under a chat template does this. Drafts are right there almost always, so a speed-up of loops says nothing of other
texts.

Only exact repetitions without a gap count. Lines of code, entries of a list and quotations of the prompt repeat words
too, but something differs from one to the next, or they come twice. A share of repeated n-grams would count them.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

TIMES = 3  # repetitions of a cycle: twice is an ordinary quotation
LEAST = 12  # tokens of the stretch: a row of dots, or of digits at the end of a text, is shorter


@lru_cache(maxsize=4096)  # of a greedy evaluation all arms have the same texts
def looped(tokens: tuple[int, ...]) -> int:
    """The number of tokens in the longest stretch of a text that makes it loop; 0 for a text that does not."""
    text, size, longest = np.array(tokens), len(tokens), 0
    for period in range(1, size // TIMES + 1):
        breaks = np.flatnonzero(text[period:] != text[:-period])
        edges = np.concatenate(([-1], breaks, [size - period]))
        lengths, ends = np.diff(edges) - 1 + period, edges[1:] + period  # of stretches of this period
        # what ends one token early is the end of a text whose last token ends it
        counts = (lengths >= max(TIMES * period, LEAST)) & ((2 * lengths >= size) | (ends >= size - 1))
        longest = max(longest, int(lengths[counts].max(initial=0)))
    return longest


def share_of_loops(texts: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """The number of `texts`, how many of them loop, and the share of all their tokens that is in loops."""
    found, total = [looped(text) for text in texts], sum(map(len, texts))
    return {"texts": len(texts), "looping": sum(map(bool, found)), "share": sum(found) / total if total else 0.0}


def loops_text(found: Mapping[str, float]) -> str:
    """What `share_of_loops` found, in words."""
    return f"{found['looping']} of {found['texts']} texts repeat themselves ({found['share']:.0%} of all tokens)"
