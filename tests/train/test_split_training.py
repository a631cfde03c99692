"""Training on a target that is split over processes (see split_training_cases.py)."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider.errors import UserError
from outrider.groups import Group
from train.engine import Engine
from train.fit_settings import FitConfig


@pytest.mark.slow
def test_it_leaves_what_one_process_leaves() -> None:
    """In an interpreter of its own: its forks could wait for threads of the tests before them."""
    cases = Path(__file__).with_name("split_training_cases.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "--tb=short", str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


def test_a_frozen_model_that_is_shared_out_already_is_not_split_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deepspeed:
        distributed_type = "DEEPSPEED"

    monkeypatch.setattr("train.engine.Accelerator", lambda **_: Deepspeed())
    with pytest.raises(UserError, match="tensor_parallel=2: the target is split already; use ddp"):
        Engine(torch.nn.Linear(2, 2), FitConfig(steps=1, batch_rows=2, lr=1e-3), Group(0, 1, 0, 2))
