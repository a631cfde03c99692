import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches for a network
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # tiny models; workers share the cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # a keyword is also the name of a folder above
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
