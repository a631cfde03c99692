import pytest

from tests.data_prep.ngrams.corpora import train_pieces


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A SentencePiece model file."""
    return train_pieces(tmp_path_factory.mktemp("model") / "pieces")
