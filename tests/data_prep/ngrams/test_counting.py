"""Counting out of core, against counting in memory."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.ngrams import counting, token_shards
from data_prep.ngrams.counting import count_order
from data_prep.ngrams.token_shards import Passage, tokenise
from draft_models.ngrams.table import TrigramTable
from draft_models.ngrams.table_files import MAX_VOCABULARY, publish
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
    for folder in ("shards", "table", "runs"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(token_shards, "SHARD_CHARACTERS", 30)
    shards = tokenise(texts, "", None, encoder, tmp_path / "shards", 1)
    assert len(shards.paths) > 30
    calls: Counter[str] = Counter()

    def count_calls(name: str) -> None:
        real = getattr(counting, name)

        def counted(*arguments: Any) -> Any:
            calls[name] += 1
            return real(*arguments)

        monkeypatch.setattr(counting, name, counted)

    count_calls("_aggregate")  # once for each block
    count_calls("group")  # once for each range
    described = {order: count_order(shards, order, vocabulary, tmp_path, memory, 2, 5)}
    assert all(calls[name] == 1 if memory == 10**6 else calls[name] > 10 for name in ("_aggregate", "group"))
    publish(tmp_path / "table", tmp_path / "done", vocabulary, "", described, {"tokens": 0, "documents": 0})
    reference = TrigramTable.from_documents(documents, [order], vocabulary, "", 2, 5)
    assert len(reference.levels[order].keys) > 0
    require_same_counts(TrigramTable.open(tmp_path / "done"), reference)
    assert not list((tmp_path / "runs").iterdir())
