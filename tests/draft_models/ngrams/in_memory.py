"""Tables added up and pruned in memory, all at once: what the ways in bounded memory are held to."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outrider.base.errors import require
from outrider.draft_models.ngrams.kernels import Grams, Grouped, group, merge_grams
from outrider.draft_models.ngrams.suffixes import sort_suffixes
from outrider.draft_models.ngrams.table import Level, TrigramTable, make_level, merged_facts


def merge(tables: Sequence[TrigramTable]) -> TrigramTable:
    """One table of all counts added up, in memory. What the tables left out as rare stays out, so it equals a table
    of the joined corpora where they were built with min_count 1 and all successors.
    """
    vocabulary = tables[0].vocabulary
    levels = {order: _merge_levels([table.levels[order] for table in tables], vocabulary) for order in tables[0].levels}
    kept = [table.suffixes.tokens for table in tables if table.suffixes is not None]
    suffixes = sort_suffixes(np.concatenate(kept), vocabulary) if kept else None
    return TrigramTable(vocabulary, tables[0].tokenizer, levels, merged_facts(tables), suffixes)


def prune(table: TrigramTable, min_count: int, max_successors: int | None = None) -> TrigramTable:
    """What `table` has of n-grams that occurred `min_count` times, of a context the `max_successors` most frequent.

    It equals a table that was built so, if this one was built with less of both left out. Suffixes stay.
    """
    levels = {}
    for order, level in table.levels.items():
        grouped = Grouped(*group(*level.grams(), min_count, max_successors or table.vocabulary))
        totals = level.totals[np.searchsorted(level.keys, grouped.keys)]  # what is left out counts too
        levels[order] = make_level(order, table.vocabulary, grouped._replace(totals=totals))
    return replace(table, levels=levels)


def prune_to(table: TrigramTable, megabytes: float) -> TrigramTable:
    """`table` without its rarest n-grams: of as many occurrences as the smallest number with which its levels fit.

    facts["kept_from"] says which. Raises `UserError` where nothing would be left.
    """
    count = 1
    pruned = table
    while pruned.level_bytes > megabytes * 10**6:
        rarest = min(int(level.counts.min()) for level in pruned.levels.values() if len(level.counts))
        count = rarest + 1
        pruned = prune(pruned, count)
        left = any(len(level.keys) for level in pruned.levels.values())
        require(left, "max_mb", megabytes, "room for the most frequent n-grams at least")
    return replace(pruned, facts={**table.facts, "max_mb": megabytes, "kept_from": count})


def _merge_levels(levels: Sequence[Level], vocabulary: int) -> Level:
    grams = levels[0].grams()
    keys, totals = levels[0].keys, levels[0].totals.astype(np.uint64)
    for level in levels[1:]:
        grams = Grams(*merge_grams(grams, level.grams()))
        joined = np.union1d(keys, level.keys)
        sums = np.zeros(len(joined), np.uint64)
        sums[np.searchsorted(joined, keys)] += totals
        sums[np.searchsorted(joined, level.keys)] += level.totals
        keys, totals = joined, sums
    grouped = Grouped(*group(*grams, 1, vocabulary))
    totals = np.minimum(totals, 2**32 - 1).astype(np.uint32)  # what was left out counts too
    return make_level(levels[0].order, vocabulary, grouped._replace(totals=totals))
