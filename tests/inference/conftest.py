"""What whole evaluations of tiny models need (see evaluating.py)."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from outrider.inference.core.target_session import Runtime
from outrider.inference.engines.graphs.cuda_graphs import Graphed
from outrider.inference.settings.evaluate import EvaluateConfig
from tests.inference.evaluate.evaluating import METHODS, evaluate
from tests.tiny import LAYERS, save_exit, save_target


@pytest.fixture(scope="module")
def on_the_cpu() -> Iterator[None]:
    """As without a GPU, for what is forked here has none: CUDA cannot be used again in a fork."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        yield


@pytest.fixture(scope="module")
def runtimes() -> dict[str, Runtime]:
    """How passes run; one for all tests, as its buffers are made to be used again. Small buckets: texts cross them."""
    return {"eager": Runtime(), "graphed": Graphed(16)}


@pytest.fixture(params=["eager", "graphed"])
def runtime(request: pytest.FixtureRequest, runtimes: dict[str, Runtime]) -> Runtime:
    return runtimes[request.param]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and a drafter for it."""
    folder = tmp_path_factory.mktemp("models")
    path = save_target(folder / "target")
    save_exit(folder / "drafter", path, LAYERS - 1, noise=0.05)
    return folder


@pytest.fixture
def config(models: Path, tmp_path: Path) -> Callable[..., EvaluateConfig]:
    def make(name: str, **changes: object) -> EvaluateConfig:
        settings = {"checkpoint": str(models / "drafter"), "methods": METHODS, "max_new_tokens": 10, "device": "cpu",
                    "threads": 1, "out_dir": str(tmp_path / name), "show_prompts": 0}  # fmt: skip
        return EvaluateConfig(**{**settings, **changes})

    return make


@pytest.fixture(scope="module")
def alone(models: Path, tmp_path_factory: pytest.TempPathFactory) -> EvaluateConfig:
    """The evaluation that all others must equal: one process, from beginning to end."""
    out_dir = str(tmp_path_factory.mktemp("alone") / "out")
    made = EvaluateConfig(checkpoint=str(models / "drafter"), methods=METHODS, max_new_tokens=10, device="cpu",
                          threads=1, out_dir=out_dir)  # fmt: skip
    evaluate(made)
    return made
