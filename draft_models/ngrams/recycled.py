# mypy: allow-untyped-defs
"""Recycled logits: what the target said might follow, in every row that it verified, accepted or not.

Of a row the k likeliest tokens and their probabilities are kept, under the row's last token and under its last two. The
idea, of one token, is Token Recycling's (arXiv:2408.08696). A new row replaces the one that was there, and in a table
of fixed size also one of another context that has the same place: what is recent is what pays.
"""

from typing import NamedTuple

import numpy as np

from draft_models.ngrams.kernels import lean
from draft_models.ngrams.overlay import longer_key

_SLOTS = 1 << 15  # 2.5 MB with eight tokens each


class Recycled(NamedTuple):
    """Rows by context, in a hash table of S = 2^b places, or of one where nothing is recycled.

    longest: contexts have 1 to so many tokens. keys: uint64 [S], the context's `longer_key`. seen: int32 [S], the rows
    that this context has had, 0 where the place is free. tokens: int32 [S, k], likeliest first. probs: float32 [S, k].
    """

    longest: int
    keys: np.ndarray
    seen: np.ndarray
    tokens: np.ndarray
    probs: np.ndarray


def new_recycled(longest: int, width: int, slots: int = _SLOTS) -> Recycled:
    """An empty one for rows of `width` tokens; with width 0 nothing is ever found in it."""
    size = slots if width else 1
    tokens, probs = np.zeros((size, max(1, width)), np.int32), np.zeros((size, max(1, width)), np.float32)
    return Recycled(longest if width else 0, np.zeros(size, np.uint64), np.zeros(size, np.int32), tokens, probs)


@lean
def place_of(recycled, key):
    """Where the context `key` is, or would be."""
    return np.int64(key >> np.uint64(40)) & (len(recycled.keys) - 1)


@lean
def recycled_rows(recycled: Recycled, recent: np.ndarray, length: int, places: np.ndarray) -> int:
    """`places` of the contexts of 1, 2, … tokens before what comes next, −1 where unknown; recent[0] is the latest."""
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
    """Keep what the target said after the root, ids[stop − 1], and after the nodes of its draft.

    tokens, parents: int64 [n], the draft. rows: int64 [m], the rows that ran: 0 is the root, 1 + i node i.
    found: float32 [m, 2k] (see `sampling.successors`). A row that is not of finite numbers is passed over.
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
