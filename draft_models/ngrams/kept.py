"""A `ContextMap` in a file: the most used contexts learnt from texts, kept from one text to the next.

Contexts are stored one after another, each with its successors by falling weight. The map built from a file gives equal
look-ups. A file is not trusted: slots are computed again, and the content is checked.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from draft_models.ngrams.kernels import lean
from draft_models.ngrams.overlay import ContextMap, new_map, slot_of

_ROUNDING = 1e-6  # relative rounding error of an incrementally updated sum
_TYPES = (np.uint64, np.float64, np.int32, np.int32, np.int64, np.int32, np.float64)  # of `Contexts`


class Contexts(NamedTuple):
    """C contexts: keys uint64, sums float64, seen int32, lengths int32 (successors of each); newest int64: the serial
    number of the successor added last. S successors: tokens int32, weights float64."""

    keys: np.ndarray
    sums: np.ndarray
    seen: np.ndarray
    lengths: np.ndarray
    newest: np.ndarray
    tokens: np.ndarray
    weights: np.ndarray

    @property
    def nbytes(self) -> int:
        """Their bytes in a file."""
        return sum(array.nbytes for array in self)


def contexts_of(known: ContextMap) -> Contexts:
    """All contexts of `known`."""
    used = np.flatnonzero(known.slots["head"] >= 0)
    slots, entries = known.slots[used], int(known.used[1])
    found = Contexts(
        slots["key"].copy(), slots["sum"].copy(), slots["seen"].copy(), np.zeros(len(used), np.int32),
        np.zeros(len(used), np.int64), np.zeros(entries, np.int32), np.zeros(entries),
    )  # fmt: skip
    _walk(known, used, found)
    return found


def map_of(contexts: Contexts) -> ContextMap:
    """The map of these contexts, with capacity for twice as many."""
    known = new_map(2 * max(len(contexts.keys), len(contexts.tokens), 1 << 13))
    _link(known, contexts)
    return known


def most_used(contexts: Contexts, limit: float) -> Contexts:
    """The most frequent contexts that fit into `limit` bytes; of equally frequent ones the most recently extended."""
    if contexts.nbytes <= limit:
        return contexts
    successor = contexts.tokens.itemsize + contexts.weights.itemsize
    own = (contexts.nbytes - successor * len(contexts.tokens)) // max(1, len(contexts.keys))
    ranked = np.lexsort((-contexts.newest, -contexts.seen))
    sizes = np.cumsum(own + successor * contexts.lengths[ranked].astype(np.int64))
    return _chosen(contexts, np.sort(ranked[: np.searchsorted(sizes, limit, "right")]))


def fault_of_contexts(contexts: Contexts, vocabulary: int) -> str:
    """The reason why these contexts are invalid, or ""; vocabulary: the upper bound of ids."""
    if len({len(array) for array in contexts[:5]}) > 1 or len(contexts.tokens) != len(contexts.weights):
        return "arrays of different lengths"
    if (contexts.lengths < 1).any() or contexts.lengths.sum(dtype=np.int64) != len(contexts.tokens):
        return "lengths that are not those of its successors"
    if (contexts.tokens < 0).any() or (contexts.tokens >= vocabulary).any():
        return "tokens that are not in the vocabulary"
    numbers = np.isfinite(contexts.weights).all() and np.isfinite(contexts.sums).all()
    if not numbers or (contexts.weights < 0).any() or (contexts.sums <= 0).any() or (contexts.seen < 1).any():
        return "weights and counts that are no positive numbers"
    with np.errstate(over="ignore"):  # a sum of finite numbers may overflow
        totals = np.add.reduceat(contexts.weights, np.cumsum(contexts.lengths, dtype=np.int64) - contexts.lengths)
    if (totals > contexts.sums * (1 + _ROUNDING)).any():  # a share above 1 would index beyond tables
        return "weights that are more than their sum"
    if len(np.unique(contexts.keys)) < len(contexts.keys):
        return "a context that is there twice"
    return ""


def from_arrays(arrays: Mapping[str, np.ndarray]) -> Contexts:
    """Contexts from arrays by name, as in `Contexts._asdict`. Raises `ValueError` for missing or invalid arrays."""
    found = []
    for name, kind in zip(Contexts._fields, _TYPES, strict=True):
        array = arrays.get(name)
        if array is None or array.dtype != kind or array.ndim != 1:
            raise ValueError(f"no {name} of type {np.dtype(kind)}")
        found.append(array)
    return Contexts._make(found)


def _chosen(contexts: Contexts, places: np.ndarray) -> Contexts:
    lengths = contexts.lengths[places]
    begins = (np.cumsum(contexts.lengths, dtype=np.int64) - contexts.lengths)[places]
    ends = np.cumsum(lengths, dtype=np.int64)
    inside = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    successors = np.repeat(begins, lengths) + inside
    own = [array[places] for array in contexts[:5]]
    return Contexts._make([*own, contexts.tokens[successors], contexts.weights[successors]])


@lean
def _walk(known: ContextMap, used: np.ndarray, found: Contexts) -> None:
    at = 0
    for i in range(len(used)):
        entry = known.slots[used[i]].head
        while entry >= 0:
            found.tokens[at], found.weights[at] = known.entries[entry].token, known.entries[entry].weight
            found.newest[i] = max(found.newest[i], np.int64(entry))
            found.lengths[i] += 1
            at, entry = at + 1, known.entries[entry].following


@lean
def _link(known: ContextMap, contexts: Contexts) -> None:
    at = 0
    for i in range(len(contexts.keys)):
        slot = slot_of(known, contexts.keys[i])
        known.slots[slot].key, known.slots[slot].sum = contexts.keys[i], contexts.sums[i]
        known.slots[slot].seen, known.slots[slot].head = contexts.seen[i], np.int32(at)
        for j in range(contexts.lengths[i]):
            known.entries[at].token, known.entries[at].weight = contexts.tokens[at], contexts.weights[at]
            known.entries[at].following = np.int32(at + 1 if j + 1 < contexts.lengths[i] else -1)
            at += 1
    known.used[0], known.used[1] = len(contexts.keys), at
