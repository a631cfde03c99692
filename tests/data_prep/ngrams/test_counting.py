"""Counting out of core, against counting in memory."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.ngrams import token_shards
from data_prep.ngrams.counting import count_order, ranges, runs_of
from data_prep.ngrams.token_shards import Passage, tokenise
from draft_models.ngrams.kernels import MAX_VOCABULARY
from draft_models.ngrams.table import TrigramTable
from draft_models.targets.encoder import Encoder
from tests.data_prep.ngrams.corpora import require_same_counts


@pytest.mark.parametrize(("vocabulary", "memory"), [(300, 10**4), (300, 10**6), (MAX_VOCABULARY, 10**4)])
@pytest.mark.parametrize("order", [2, 3, 4])
def test_blocks_and_ranges_of_any_size_count_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocabulary: int, memory: int, order: int
) -> None:
    """Order 4 of the largest vocabulary needs 84 bits an n-gram, so it takes the sort for wide ones."""
    rng = np.random.default_rng(order)
    known = rng.choice(vocabulary, 12, replace=False)
    documents = [rng.choice(known, rng.integers(0, 30)) for _ in range(400)]
    texts = [Passage(str(number), ends=False) for number in range(400)]
    encoder = Encoder(lambda batch: [documents[int(text)].tolist() for text in batch], {}, None, "")
    encoder = encoder._replace(pieces={"last": vocabulary - 1})
    (tmp_path / "shards").mkdir()
    monkeypatch.setattr(token_shards, "SHARD_CHARACTERS", 30)
    shards = tokenise(texts, "", None, encoder, tmp_path / "shards", 1)
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
