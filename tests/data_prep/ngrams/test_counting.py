"""Counting out of core, merging and pruning in bounded memory: as in memory, bit for bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outrider.base.errors import UserError
from outrider.data_prep.ngrams import counting
from outrider.data_prep.ngrams.counting import count_order, kept_from, merged, ranges, runs_of
from outrider.data_prep.ngrams.token_shards import Passage, tokenise
from outrider.draft_models.ngrams.kernels import MAX_VOCABULARY
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.targets.encoder import Encoder
from tests.data_prep.ngrams.corpora import require_same_counts
from tests.draft_models.ngrams.in_memory import merge, prune, prune_to


@pytest.mark.parametrize(("vocabulary", "memory"), [(300, 10**4), (300, 10**6), (MAX_VOCABULARY, 10**4)])
@pytest.mark.parametrize("order", [2, 3, 4])
def test_blocks_and_ranges_of_any_size_count_the_same(tmp_path: Path, vocabulary: int, memory: int, order: int) -> None:
    """Order 4 of the largest vocabulary needs 84 bits an n-gram, so it takes the sort for wide ones."""
    rng = np.random.default_rng(order)
    known = rng.choice(vocabulary, 12, replace=False)
    documents = [rng.choice(known, rng.integers(0, 30)) for _ in range(400)]
    texts = [Passage(str(number), ends=False) for number in range(400)]
    encoder = Encoder(lambda batch: [documents[int(text)].tolist() for text in batch], {}, None, "")
    encoder = encoder._replace(pieces={"last": vocabulary - 1})
    (tmp_path / "shards").mkdir()
    shards = tokenise(texts, "", None, encoder, tmp_path / "shards", 1, shard=30)
    assert len(shards.paths) > 30
    runs = runs_of(shards, order, vocabulary, memory, tmp_path / "runs")
    assert len(runs.bounds) == 1 if memory == 10**6 else len(runs.bounds) > 10
    level = count_order(shards, order, vocabulary, tmp_path / "level", memory, 2, 5)
    reference = TrigramTable.from_documents(documents, [order], vocabulary, "", 2, 5)
    assert len(reference.levels[order].keys) > 0
    require_same_counts(replace(reference, levels={order: level}), reference)
    assert not (tmp_path / "level" / "runs").exists()


def test_ranges_are_as_large_as_memory_allows() -> None:
    rows = np.array([3, 3, 3, 9, 0, 1, 1])
    assert [*ranges(rows, 6)] == [(0, 2), (2, 3), (3, 4), (4, 7)]
    assert [*ranges(rows, 1)] == [(i, i + 1) for i in range(4)] + [(4, 6), (6, 7)]


# ------------------------------------------------------------------------------------------------------------ merging


ORDERS, VOCABULARY = (2, 3, 4), 300


def shard(seed: int, documents: int, min_count: int = 1) -> TrigramTable:
    """Of 14 tokens, so that counts are often the same, and of rare ones."""
    random = np.random.default_rng(seed)
    ids = [random.integers(0, random.choice([14, VOCABULARY]), random.integers(0, 60)) for _ in range(documents)]
    return TrigramTable.from_documents(ids, ORDERS, VOCABULARY, "t", min_count, suffixes=True)


SHARDS = [shard(0, 80), shard(1, 50, min_count=2), shard(2, 0), shard(3, 1), shard(4, 60)]


@pytest.mark.parametrize("limits", [(1, None), (3, 2), (10**6, None)])
def test_merged_in_parts_it_is_the_same(tmp_path: Path, limits: tuple[int, int | None]) -> None:
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
    for memory in (1, 200_000, 10**8):
        built = merged(tables, *limits, tmp_path / str(memory), memory)
        require_same_counts(built, expected)
        assert built.facts == expected.facts


def test_parts_are_as_small_as_memory_wants_them() -> None:
    for memory, least in ((10**8, 1), (100_000, 5)):
        levels = [table.levels[4] for table in SHARDS]
        sizes = [len(part.counts) for part in counting.merged_level(levels, VOCABULARY, 1, None, memory)]
        assert len(sizes) >= least
        assert max(sizes) <= memory // counting._ROW_BYTES
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
