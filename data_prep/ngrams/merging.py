"""Merging and pruning of n-gram tables in bounded memory, one range of keys of memory-mapped levels after another.

The result is byte-identical to merging and pruning whole tables in memory.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from outrider.base.errors import require
from outrider.data_prep.ngrams.counting import ranges, write_level
from outrider.draft_models.ngrams.kernels import Grouped, group, merge_all, reaching
from outrider.draft_models.ngrams.suffixes import sort_suffixes
from outrider.draft_models.ngrams.table import Level, TrigramTable, level_bytes, merged_facts

_ROW_BYTES = 150  # memory per n-gram of a range: sorted, merged, grouped
_LARGEST_RANGE = 2**22  # n-grams; larger is not faster
_PARTITIONS = 12  # the key space can be cut at 2^12 keys
_LARGEST = 2**32 - 1  # counts saturate here


def merged(
    tables: Sequence[TrigramTable], min_count: int, max_successors: int | None, folder: Path, memory: int
) -> TrigramTable:
    """The sum of the tables, pruned (see `merged_level`); the arrays of its levels are mapped from files in `folder`.

    Of one table the facts stay. The suffix arrays of several are sorted anew, in memory.
    """
    first, levels = tables[0], {}
    for order in sorted(first.levels):
        parts = merged_level(
            [table.levels[order] for table in tables], first.vocabulary, min_count, max_successors, memory
        )
        levels[order] = write_level(parts, order, first.vocabulary, folder / str(order))
    suffixes = first.suffixes
    if suffixes is not None and len(tables) > 1:
        tokens = [table.suffixes.tokens for table in tables if table.suffixes is not None]
        suffixes = sort_suffixes(np.concatenate(tokens), first.vocabulary)
    facts = first.facts if len(tables) == 1 else merged_facts(tables)
    return replace(first, levels=levels, facts=facts, suffixes=suffixes)


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
    for begin, end in ranges(rows, min(memory // _ROW_BYTES, _LARGEST_RANGE)):
        parts = [_part(level, cut[begin], cut[end]) for level, cut in zip(levels, cuts, strict=True)]
        grams = merge_all([part.grams() for part in parts])
        grouped = Grouped(*group(*grams, min_count, max_successors or vocabulary))
        yield grouped._replace(totals=_totals(parts, grouped.keys))


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


def kept_from(table: TrigramTable, megabytes: float) -> int:
    """The smallest minimum count with which the pruned levels of `table` fit into `megabytes`.

    Raises `UserError` if no n-gram would remain.
    """

    def fits(count: int) -> bool:
        left = {order: reaching(level.starts, level.counts, count) for order, level in table.levels.items()}
        size = sum(level_bytes(order, table.vocabulary, *found) for order, found in left.items())
        return size <= megabytes * 10**6

    largest = max(int(level.counts.max(initial=0)) for level in table.levels.values())
    count = 1 + bisect_left(range(1, largest + 1), True, key=fits)
    require(count <= largest, "max_mb", megabytes, "room for the most frequent n-grams at least")
    return count
