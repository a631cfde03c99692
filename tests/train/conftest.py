from pathlib import Path

import pytest

from outrider.data_prep.targets import fetch_target
from outrider.data_prep.text.settings import DataConfig
from tests.conf.test_configs import compose_and_build
from tests.tiny import save_target
from tests.train.jobs import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("models") / "target", kv_heads=2)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another finished model with the target's vocabulary, to start from."""
    return save_target(tmp_path_factory.mktemp("models") / "small", seed=3, num_hidden_layers=2)


@pytest.fixture(scope="module")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("fetched")
    fetch_target(compose_and_build("fetch_target", ["model=tiny", f"out_dir={folder}"]))
    return str(folder)
