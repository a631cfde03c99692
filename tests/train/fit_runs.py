"""Runs of `fit` on the tiny model, here and in processes of their own."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from outrider.train.core.fit import fit
from outrider.train.core.sharding import trained_parameters
from outrider.train.core.training import FitResult, Student
from tests.forked import Fork
from tests.train.fit_job import TinyModel, tiny_config, tiny_rows
from tests.train.jobs import ROOT


def fit_tiny(
    out_dir: Path,
    model: Student | None = None,
    *,
    resume: bool = False,
    evaluate: Callable[[nn.Module, int], dict[str, float]] | None = None,
    identity: Mapping[str, Any] | None = None,
    **changes: Any,
) -> tuple[nn.Module, FitResult]:
    """`fit` of a new `TinyModel`, or of `model`; `changes` are to `tiny_config`."""
    model, config = model or TinyModel(), tiny_config(**changes)
    measure = None if evaluate is None else partial(evaluate, model)
    return model, fit(model, tiny_rows(), config, out_dir, identity=identity or {}, evaluate=measure, resume=resume)


def start_tiny(out_dir: Path, *, delay: float = 0.0, **changes: Any) -> Fork:
    """The same in a process of its own; delay: seconds that a forward takes longer."""
    return Fork([ROOT / "tests/train/fit_job.py", out_dir, json.dumps(changes), delay])


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters that are trained, by name."""
    return {name: p.detach().clone() for name, p in trained_parameters(model).items()}
