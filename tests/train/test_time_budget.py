"""A run of so many minutes: the number of steps is what the measured seconds say, once and for all."""

import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from outrider.errors import UserError
from outrider.groups import Group
from outrider.wandb_config import WandbConfig
from train import time_budget
from train.fit_settings import FitConfig
from train.time_budget import MEASURED, WARM_UP, steps_for_minutes

FIT = FitConfig(steps=1000, batch_rows=2, precision="fp32", warmup=0.1, wandb=WandbConfig(mode="disabled"))


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss_sum": (x @ self.weight).square().sum() + 0 * labels.sum()}


class Points:
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4, 3), float(index)), "labels": torch.zeros(4, dtype=torch.long)}


def ticking(*seconds: float):
    """A clock that says 0, then that much more at each call; the last again and again."""
    now, left = 0.0, [0.0, *seconds]

    def clock() -> float:
        nonlocal now
        now += left.pop(0) if len(left) > 1 else left[0]
        return now

    return clock


def count(
    out_dir: Path, minutes: float, clock=None, *, resume: bool = False, config: FitConfig = FIT, build=Line
) -> int:
    return steps_for_minutes(minutes, build, Points(), config, out_dir, resume=resume, clock=clock)


@pytest.mark.slow
def test_the_count_is_what_the_seconds_say_warm_up_left_out(tmp_path):
    slow_start = ticking(*[60.0] * WARM_UP, 0.5)
    assert count(tmp_path, 2, slow_start) == 240
    assert json.loads((tmp_path / "steps.json").read_text()) == {"minutes": 2, "seconds_per_step": 0.5, "steps": 240}
    assert [path.name for path in tmp_path.iterdir()] == ["steps.json"]


@pytest.mark.slow
def test_the_median_counts(tmp_path):
    hiccups = [0.5] * (MEASURED // 2 + 1) + [30.0] * (MEASURED - MEASURED // 2 - 1)
    assert count(tmp_path, 1, ticking(*[1.0] * WARM_UP, *hiccups)) == 120


@pytest.mark.parametrize(("minutes", "seconds", "steps"), [(1e-3, 5.0, 1), (60, 0.1, 1000), (1, 0.7, 85)])
@pytest.mark.slow
def test_at_least_one_and_at_most_what_the_config_says(tmp_path, minutes, seconds, steps):
    assert count(tmp_path, minutes, ticking(seconds)) == steps


@pytest.mark.slow
def test_epochs_are_a_limit_too(tmp_path):
    assert count(tmp_path, 60, ticking(0.1), config=FitConfig(epochs=4, batch_rows=2)) == 14


@pytest.mark.slow
def test_a_resumed_run_keeps_the_number_and_measures_nothing(tmp_path):
    first = count(tmp_path, 2, ticking(0.5))
    assert count(tmp_path, 2, ticking(1.0)) == first // 2  # not resumed: measured again
    assert count(tmp_path, 1, ticking(0.5), resume=True) == first // 2  # nothing is trained yet: other minutes count
    assert count(tmp_path, 2, ticking(0.5), resume=True) == first
    (tmp_path / "checkpoint-3").mkdir()
    assert count(tmp_path, 2, ticking(50.0), resume=True, build=None) == first
    fresh = tmp_path / "fresh"
    assert count(fresh, 2, ticking(0.5), resume=True) == first  # killed before it had measured


def test_a_run_that_is_not_to_be_resumed_is_not_measured_over(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(UserError, match="holds an earlier run"):
        count(tmp_path, 2, ticking(0.5), build=None)


def test_the_processes_that_hold_a_model_together_measure_together(tmp_path, monkeypatch):
    seen, group = [], Group(0, 1, 0, 2)

    def steps(*_, on_step, group, **__):
        seen.append(group)
        for step in range(WARM_UP + MEASURED + 1):
            on_step(step)

    monkeypatch.setattr(time_budget, "fit", steps)
    assert steps_for_minutes(1, Line, Points(), FIT, tmp_path, resume=False, group=group, clock=ticking(0.5)) == 120
    assert seen == [group]


@pytest.mark.slow
def test_the_real_clock(tmp_path):
    class Slow(Line):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            time.sleep(0.05)
            return super().forward(x, labels)

    assert count(tmp_path, 0.1, build=Slow) <= 120
