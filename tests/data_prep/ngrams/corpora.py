"""What tests of building tables share: a corpus of few words, and what makes two tables the same."""

from pathlib import Path

import numpy as np
import sentencepiece

from outrider.draft_models.ngrams.table import TrigramTable

WORDS = ["def", "add", "first", "second", "return", "hello", "there", "how", "are", "you", "the", "it", "is", "on"]


def sentences(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 40))) for _ in range(count)]


def train_pieces(prefix: Path) -> str:
    """A SentencePiece model file of these words."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(200)), model_prefix=str(prefix), vocab_size=60, model_type="bpe",
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return f"{prefix}.model"


def require_same_counts(built: TrigramTable, reference: TrigramTable) -> None:
    assert list(built.levels) == list(reference.levels)
    for order, level in reference.levels.items():
        for name in ("buckets", "keys", "starts", "totals", "tokens", "counts"):
            array, other = getattr(level, name), getattr(built.levels[order], name)
            assert array.dtype == other.dtype
            np.testing.assert_array_equal(array, other, name)
    assert (built.suffixes is None) == (reference.suffixes is None)
    for array, other in zip(built.suffixes or (), reference.suffixes or (), strict=True):
        assert array.dtype == other.dtype
        np.testing.assert_array_equal(array, other)
