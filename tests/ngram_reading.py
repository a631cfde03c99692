"""What n-gram tables say of a context, and what was learnt of a text, read entry by entry."""

from collections.abc import Sequence
from functools import singledispatch

import numpy as np

from outrider.draft_models.ngrams.kernels import context_key, find_key
from outrider.draft_models.ngrams.overlay import ContextMap, Overlay, TextIndex, longer_key, slot_of
from outrider.draft_models.ngrams.table import ARRAYS, Level, TrigramTable


def level_bytes(table: TrigramTable) -> int:
    """Bytes of the n-grams' arrays."""
    return sum(getattr(level, name).nbytes for level in table.levels.values() for name in ARRAYS)


def find_context(level: Level, context: Sequence[int]) -> int:
    """Index of a context of order − 1 ids within the vocabulary, or −1."""
    packed = np.asarray(context, np.uint32)
    key = context_key(packed, len(packed), level.order - 1, level.bits)
    return int(find_key(level.buckets, level.shift, level.keys, key))


@singledispatch
def successors(table: TrigramTable, context: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """What follows a context of n − 1 ids, by the level of order n: (tokens [k], probabilities float64 [k]),
    likeliest first; empty if the context is unknown."""
    level = table.levels[len(context) + 1]
    inside = all(0 <= token < table.vocabulary for token in context)
    index = find_context(level, context) if inside else -1
    if index < 0:
        return np.empty(0, level.tokens.dtype), np.empty(0)
    part = slice(int(level.starts[index]), int(level.starts[index + 1]))
    return level.tokens[part], level.counts[part] / level.totals[index]


@successors.register
def _(overlay: Overlay, context: Sequence[int]) -> dict[int, float]:
    """What was raised after a context of order − 1 ids: {token: probability}, likeliest first."""
    if not all(0 <= token < overlay.table.vocabulary for token in context):
        return {}
    key = context_key(np.asarray(context, np.int64), len(context), len(context), overlay.level.bits)
    return _weights(overlay.contexts, np.uint64(key))


@successors.register
def _(index: TextIndex, context: Sequence[int]) -> dict[int, float]:
    """Decayed counts of what followed a context of up to `longest` ids: {token: count}, largest first."""
    key = np.uint64(0)
    for token in reversed(context):
        key = np.uint64(longer_key(key, token))
    return _weights(index.contexts, key)


def _weights(known: ContextMap, key: np.uint64) -> dict[int, float]:
    entry = known.slots["head"][slot_of(known, key)]
    found = {}
    while entry >= 0:
        found[int(known.entries["token"][entry])] = float(known.entries["weight"][entry])
        entry = known.entries["following"][entry]
    return found
