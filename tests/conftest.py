import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches for a network
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from pathlib import Path

import pytest
import torch

from draft_models.tiny_models import save_tiny_models
from tests.tiers import COLLECTED, beyond_two_cases


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and what can draft for it (see `save_tiny_models`); not to be written to."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_models(folder, "llama")
    return folder


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # tiny models; workers share the cores


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in beyond_two_cases(items):
        item.add_marker(pytest.mark.slow)
    config.stash[COLLECTED] = [(str(item.path), {mark.name for mark in item.iter_markers()}) for item in items]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # a keyword is also the name of a folder above
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
