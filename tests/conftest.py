import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches for a network
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start, too: the workers share the cores

from pathlib import Path

import hypothesis
import pytest

from tests.tiers import COLLECTED, as_many, beyond_one_case, choose_tier

# torch is imported where it is used: what hands the tests out to workers reads this file and runs none of them.


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: a fifth of a worker's time it waits for processes that its tests start."""
    return (os.cpu_count() or 1) + 1


def pytest_configure(config: pytest.Config) -> None:
    choose_tier(config.option.markexpr)
    hypothesis.settings.register_profile("tier", max_examples=as_many(100))
    hypothesis.settings.load_profile("tier")


def pytest_collection_finish() -> None:
    """What was imported stays until the end, so no collection of garbage need look through it again.

    What tests leave is little, and collected after more allocations than usual.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(scope="session", autouse=True)
def conversions(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests convert, and the processes that they start, goes where no user's models are."""
    os.environ["OUTRIDER_CACHE"] = str(tmp_path_factory.mktemp("conversions"))


@pytest.fixture(scope="session", autouse=True)
def one_config_store() -> None:
    """Hydra copies what is registered whenever it composes: of all commands that takes as long as the rest."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.__deepcopy__ = lambda self, _: self  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and what can draft for it (see `save_tiny_models`); not to be written to."""
    from outrider.draft_models.tiny.models import save_tiny_models

    folder = tmp_path_factory.mktemp("models")
    save_tiny_models(folder)
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local server is asked again at once, without a proxy or a key."""
    monkeypatch.setattr("outrider.inference.batch.client.PAUSE", 0.001)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Each test begins with one thread, whatever the one before it left.

    The models are tiny, and a fork would wait for ever for the other threads, which it has not.
    """
    import torch

    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    for item in beyond_one_case(items):
        item.add_marker(pytest.mark.slow)
    config.stash[COLLECTED] = [(str(item.path), {mark.name for mark in item.iter_markers()}) for item in items]
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":  # `make test-kernels`
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # a keyword is also the name of a folder above
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
