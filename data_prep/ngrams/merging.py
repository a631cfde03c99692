"""Merging and pruning of n-gram tables in bounded memory, one range of keys of memory-mapped levels after another.

The result is byte-identical to merging and pruning whole tables in memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from draft_models.ngrams.kernels import Grams, Grouped, group, merge_grams
from draft_models.ngrams.table import Level, TrigramTable
from draft_models.ngrams.table_files import level_bytes
from outrider.errors import require

_ROW_BYTES = 150  # memory per n-gram of a range: sorted, merged, grouped
_LARGEST_RANGE = 2**22  # n-grams; larger is not faster
_PARTITIONS = 12  # the key space can be cut at 2^12 keys
_CHUNK = 2**20  # values processed at once
_LARGEST = 2**32 - 1  # counts saturate here


def merged_level(
    levels: Sequence[Level], vocabulary: int, min_count: int, max_successors: int | None, memory: int
) -> Iterator[Grouped]:
    """The contexts of all `levels` of one order, by ascending keys, in parts; counts and totals are summed.

    Dropped are n-grams with fewer than `min_count` occurrences over all levels, and all but the `max_successors` most
    frequent ones of a context; they still count in its total. memory: bytes for a part; a part has at least a 4096th of
    the n-grams, and all n-grams of a context.
    """
    bits = min(_PARTITIONS, levels[0].key_bits)
    edges = np.arange(2**bits, dtype=np.uint64) << np.uint64(levels[0].key_bits - bits)
    cuts = [np.r_[np.searchsorted(level.keys, edges), len(level.keys)] for level in levels]
    rows = sum(np.diff(level.starts[cut].astype(np.int64)) for level, cut in zip(levels, cuts, strict=True))
    for begin, end in _ranges(rows, min(memory // _ROW_BYTES, _LARGEST_RANGE)):
        parts = [_part(level, cut[begin], cut[end]) for level, cut in zip(levels, cuts, strict=True)]
        grams = [part.grams() for part in parts]
        while len(grams) > 1:
            pairs = [grams[i : i + 2] for i in range(0, len(grams), 2)]
            grams = [Grams(*merge_grams(*pair)) if len(pair) == 2 else pair[0] for pair in pairs]
        grouped = Grouped(*group(*grams[0], min_count, max_successors or vocabulary))
        yield grouped._replace(totals=_totals(parts, grouped.keys))


def kept_from(table: TrigramTable, megabytes: float) -> int:
    """The smallest minimum count with which the pruned levels of `table` fit into `megabytes`.

    Raises `UserError` if no n-gram would remain.
    """
    contexts = {order: _tally(_most(level)) for order, level in table.levels.items()}
    successors = {order: _tally(_chunks(level.counts)) for order, level in table.levels.items()}
    count = 1
    while True:
        left = {order: (contexts[order].reaching(count), successors[order].reaching(count)) for order in contexts}
        require(
            any(found > 0 for found, _ in left.values()),
            "max_mb",
            megabytes,
            "room for the most frequent n-grams at least",
        )
        if sum(level_bytes(order, table.vocabulary, *found) for order, found in left.items()) <= megabytes * 10**6:
            return count
        count = 1 + min(tally.least(count) for tally in successors.values() if tally.reaching(count))


# ----------------------------------------------------------------------------------------------------------- parts


def _ranges(rows: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Groups of adjacent partitions, of `rows` rows each, with at most `most` rows per group or one partition."""
    begin, ends = 0, np.cumsum(rows)
    while begin < len(rows):
        before = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + most, "right")))
        yield begin, end
        begin = end


def _part(level: Level, begin: int, end: int) -> Level:
    """Contexts `begin` to `end` of a level, without buckets."""
    starts = level.starts[begin : end + 1].astype(np.int64)
    inside = slice(starts[0], starts[-1])
    arrays = {"keys": level.keys[begin:end], "totals": level.totals[begin:end], "starts": starts - starts[0]}
    return replace(level, **arrays, tokens=level.tokens[inside], counts=level.counts[inside])


def _totals(parts: Sequence[Level], keys: np.ndarray) -> np.ndarray:
    """The totals of these contexts, summed over `parts`."""
    sums = np.zeros(len(keys), np.uint64)
    for part in parts:
        place = np.minimum(np.searchsorted(keys, part.keys), max(0, len(keys) - 1))
        kept = keys[place] == part.keys if len(keys) else np.zeros(len(part.keys), bool)
        sums[place[kept]] += part.totals[kept]
    return np.minimum(sums, _LARGEST).astype(np.uint32)


# --------------------------------------------------------------------------------------------------------- tallies


class _Tally(NamedTuple):
    """Distinct values, ascending, and for each the number of values that are at least as large."""

    values: np.ndarray
    reached: np.ndarray

    def reaching(self, value: int) -> int:
        at = np.searchsorted(self.values, value)
        return int(self.reached[at]) if at < len(self.values) else 0

    def least(self, value: int) -> int:
        """The smallest distinct value that is at least `value`."""
        return int(self.values[np.searchsorted(self.values, value)])


def _tally(chunks: Iterable[np.ndarray]) -> _Tally:
    values, numbers = np.empty(0, np.uint32), np.empty(0, np.int64)
    for chunk in chunks:
        found, counts = np.unique(chunk, return_counts=True)
        joined, place = np.unique(np.concatenate([values, found]), return_inverse=True)
        numbers = np.concatenate([numbers, counts])
        values, sums = joined, np.zeros(len(joined), np.int64)
        np.add.at(sums, place, numbers)
        numbers = sums
    return _Tally(values, np.cumsum(numbers[::-1])[::-1])


def _chunks(values: np.ndarray) -> Iterator[np.ndarray]:
    for begin in range(0, len(values), _CHUNK):
        yield values[begin : begin + _CHUNK]


def _most(level: Level) -> Iterator[np.ndarray]:
    """The count of each context's most frequent successor, which is its first."""
    for starts in _chunks(level.starts[:-1]):
        yield level.counts[starts]
