"""A model and its GGUF file, for the tests of this folder."""

from pathlib import Path

import pytest

from tests.gguf_files import TEMPLATE, save_plain_target, write_gguf


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama's directory, not to be changed."""
    return save_plain_target(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def written(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a GGUF file in F32, not to be changed."""
    return write_gguf(llama, tmp_path_factory.mktemp("gguf") / "model.gguf", template=TEMPLATE)
