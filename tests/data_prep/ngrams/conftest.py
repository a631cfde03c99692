import pytest
import sentencepiece

from tests.data_prep.ngrams.corpora import sentences


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A SentencePiece model file."""
    prefix = tmp_path_factory.mktemp("model") / "pieces"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(200)), model_prefix=str(prefix), vocab_size=60, model_type="bpe",
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return f"{prefix}.model"
