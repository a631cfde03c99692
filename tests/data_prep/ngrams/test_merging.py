"""Merging and pruning in bounded memory leave what the ways in memory leave, bit for bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.ngrams import merging
from data_prep.ngrams.merging import kept_from, merged
from draft_models.ngrams.table import TrigramTable
from outrider.errors import UserError
from tests.data_prep.ngrams.corpora import require_same_counts
from tests.draft_models.ngrams.in_memory import merge, prune, prune_to

ORDERS, VOCABULARY = (2, 3, 4), 300


def shard(seed: int, documents: int, min_count: int = 1) -> TrigramTable:
    """Of 14 tokens, so that counts are often the same, and of rare ones."""
    random = np.random.default_rng(seed)
    ids = [random.integers(0, random.choice([14, VOCABULARY]), random.integers(0, 60)) for _ in range(documents)]
    return TrigramTable.from_documents(ids, ORDERS, VOCABULARY, "t", min_count, suffixes=True)


SHARDS = [shard(0, 80), shard(1, 50, min_count=2), shard(2, 0), shard(3, 1), shard(4, 60)]


@pytest.mark.parametrize("limits", [(1, None), (3, 2), (10**6, None)])
def test_merged_in_parts_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int | None]
) -> None:
    """However small the parts; shards left out what is rare, are empty, or have counts that saturate."""
    level = SHARDS[0].levels[2]
    counts = np.where(level.counts == level.counts.max(), 2**32 - 3, level.counts).astype(np.uint32)
    full = replace(
        level, counts=counts, totals=np.maximum(level.totals, np.maximum.reduceat(counts, level.starts[:-1]))
    )
    tables = [*SHARDS, replace(SHARDS[0], levels={**SHARDS[0].levels, 2: full})]
    expected = merge(tables)
    assert expected.levels[2].counts.max() == 2**32 - 1
    expected = prune(expected, *limits)
    monkeypatch.setattr(merging, "_PARTITIONS", 4)
    for memory in (1, 200_000, 10**8):
        built = merged(tables, *limits, tmp_path / str(memory), memory)
        require_same_counts(built, expected)
        assert built.facts == expected.facts


def test_parts_are_as_small_as_memory_wants_them() -> None:
    for memory, least in ((10**8, 1), (100_000, 5)):
        levels = [table.levels[4] for table in SHARDS]
        sizes = [len(part.counts) for part in merging.merged_level(levels, VOCABULARY, 1, None, memory)]
        assert len(sizes) >= least
        assert max(sizes) <= memory // merging._ROW_BYTES
        assert sum(sizes) == len(merge(SHARDS).levels[4].counts)


def test_pruned_to_a_size_it_is_the_same(tmp_path: Path) -> None:
    """The threshold that counts of all levels give is the one that pruning step by step comes to."""
    whole = merge(SHARDS)
    for size in np.linspace(1.0, 0.02, 6) * whole.level_bytes / 1e6:
        expected = prune_to(whole, size)
        count = kept_from(whole, size)
        assert count == expected.facts["kept_from"]
        require_same_counts(merged([whole], count, None, tmp_path / str(size), 50_000), expected)
    assert count > 3
    with pytest.raises(UserError, match=r"max_mb=1e-06: expected room"):
        kept_from(whole, 1e-6)
