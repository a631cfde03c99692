# mypy: allow-untyped-defs
"""Recycled logits: the target's top-k continuations at every row that it verified, accepted or not.

A row's k most likely tokens and their probabilities are stored under the contexts of its last token and its last two.
Token Recycling (arXiv:2408.08696) does so for one token. A new row replaces the one stored under its context, or under
a context in the same slot of this fixed-size table: recent rows predict best.
"""

from typing import NamedTuple

import numpy as np

from draft_models.ngrams.kernels import lean
from draft_models.ngrams.overlay import longer_key

_SLOTS = 1 << 15  # 2.5 MB with eight tokens each


class Recycled(NamedTuple):
    """Top-k rows by context, in a hash table of S = 2^b slots, or of one slot if nothing is recycled.

    longest: maximum tokens of a context. keys: uint64 [S], the context's `longer_key`. seen: int32 [S], how many rows
    were stored for this context, 0 for a free slot. tokens: int32 [S, k], most likely first. probs: float32 [S, k].
    """

    longest: int
    keys: np.ndarray
    seen: np.ndarray
    tokens: np.ndarray
    probs: np.ndarray


def new_recycled(longest: int, width: int, slots: int = _SLOTS) -> Recycled:
    """An empty table of rows of `width` tokens; with width 0 look-ups never find anything."""
    size = slots if width else 1
    tokens, probs = np.zeros((size, max(1, width)), np.int32), np.zeros((size, max(1, width)), np.float32)
    return Recycled(longest if width else 0, np.zeros(size, np.uint64), np.zeros(size, np.int32), tokens, probs)


@lean
def place_of(recycled, key):
    """The slot of the context `key`."""
    return np.int64(key >> np.uint64(40)) & (len(recycled.keys) - 1)


@lean
def recycled_rows(recycled: Recycled, recent: np.ndarray, length: int, places: np.ndarray) -> int:
    """Write the slots of the last 1, 2, … tokens to `places`, −1: unknown; returns their number. recent[0]: latest."""
    size, key = 0, np.uint64(0)
    while size < min(recycled.longest, length):
        key = longer_key(key, recent[size])
        place = place_of(recycled, key)
        known = recycled.seen[place] > 0 and recycled.keys[place] == key
        places[size] = place if known else -1
        size += 1
    return size


@lean
def recycle(recycled, ids, stop, tokens, parents, rows, found):
    """Store the target's top-k after the root, ids[stop − 1], and after the nodes of its draft.

    tokens, parents: int64 [n], the draft. rows: int64 [m], the rows that ran: 0 is the root, 1 + i node i.
    found: float32 [m, 2k] (see `sampling.top_tokens`). A row with non-finite numbers is skipped.
    """
    width = found.shape[1] // 2
    kept = min(width, recycled.tokens.shape[1])
    for i in range(len(rows)):
        if not found[i, width] > 0:
            continue
        node, place, key = rows[i] - 1, stop - 1, np.uint64(0)
        for _ in range(recycled.longest):
            if node < 0 and place < 0:
                break
            if node >= 0:
                key, node = longer_key(key, tokens[node]), parents[node]
            else:
                key, place = longer_key(key, ids[place]), place - 1
            slot = place_of(recycled, key)
            recycled.seen[slot] = recycled.seen[slot] + 1 if recycled.keys[slot] == key else 1
            recycled.keys[slot] = key
            for j in range(kept):
                recycled.tokens[slot, j], recycled.probs[slot, j] = np.int32(found[i, j]), found[i, width + j]
            for j in range(kept, recycled.tokens.shape[1]):
                recycled.probs[slot, j] = 0.0
