"""A run with a time limit ends in time at any speed of the machine, wastes no step, and resumes bit for bit."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from torch import nn

from inference.measure.time_limit import TimeLimit
from outrider.wandb_config import WandbConfig
from tests.launched import launched
from tests.tiers import typical_where
from tests.train.fit_runs import trained_weights
from tests.train.jobs import log, same
from train.core.fit import FitResult, fit
from train.core.time_budget import FEW, SHARE, STEPS_FILE, TOO_LATE, StepBudget
from train.settings.fit import FitConfig

QUIET = WandbConfig(mode="disabled")
FIT = FitConfig(
    steps=5000, batch_rows=2, precision="fp32", warmup=0.1, lr=1.0, log_every=1, keep_checkpoints=99, wandb=QUIET
)
Pace = Callable[[int, float], float]


def slower(seconds: float, times: float) -> Pace:
    """Steps of `seconds`; from half of the first minute on they take `times` as long."""
    return lambda _, now: seconds * (1 if now < 30 else times)


class Line(nn.Module):
    """Each forward advances its clock by `pace` of the number of the forward and the time."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.pace, self.now, self.begun = pace, 0.0, list[float]()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.begun.append(self.now)
        self.now += self.pace(len(self.begun), self.now)
        return {"loss_sum": (x @ self.weight).square().sum() + 0 * labels.sum()}


class Points:
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4, 3), float(index)), "labels": torch.zeros(4, dtype=torch.long)}


@dataclass(frozen=True)
class Run:
    result: FitResult
    model: Line
    rates: list[float]  # of every step
    decided: list[list[int]]


def timed(
    out_dir: Path,
    pace: Pace,
    minutes: float | None = 1,
    config: FitConfig = FIT,
    *,
    resume: bool = False,
    killed_at: int | None = None,
    evaluation: float = 0.0,
) -> Run:
    """A run of `fit` with a clock that only steps and evaluations advance; an evaluation takes `evaluation` seconds."""
    model = Line(pace)

    def on_step(step: int) -> None:
        if step == killed_at:
            raise KeyboardInterrupt

    def evaluate(*_: object) -> dict[str, float]:
        model.now += evaluation
        return {"score": 0.0}

    options = {"resume": resume, "on_step": on_step, "evaluate": evaluate, "minutes": minutes}
    result = fit(model, Points(), config, out_dir, clock=lambda: model.now, **options)
    rates = [line["lr"] for line in log(out_dir) if "lr" in line]
    file = out_dir / STEPS_FILE
    return Run(result, model, rates, json.loads(file.read_text())["decided"] if file.exists() else [])


@pytest.mark.parametrize("times", [1, 2, 30, 1000])
@pytest.mark.parametrize("seconds", [0.25, 1, 7, 25, 59, 90])
def test_a_run_ends_in_time_with_its_schedule(tmp_path: Path, seconds: float, times: float) -> None:
    made = timed(tmp_path, slower(seconds, times))
    steps, last = made.result.steps, made.model.now - made.model.begun[-1]
    assert made.model.now <= 1.1 * 60 + last
    assert made.model.begun[-1] <= (1 + TOO_LATE) * 60
    assert steps == len(made.model.begun) == len(made.rates)  # none was wasted
    assert made.model.now > 60 - 2 * last  # and the time is used
    assert sorted(total for _, total in made.decided)[::-1] == [total for _, total in made.decided]
    assert made.decided[-1][1] == steps
    first = made.decided[0][0]
    assert first <= FEW
    assert first <= 2 or made.model.begun[first - 1] <= SHARE * 60
    held = [next((total for done, total in made.decided[::-1] if done <= step), 5000) for step in range(steps)]
    assert made.rates == [FIT.lr_scale(step, total) for step, total in enumerate(held)]
    if steps > 1 and last <= 0.1 * 60:  # else this step may have ended it
        assert made.rates[-1] == FIT.lr_scale(steps - 1, steps)


@pytest.mark.parametrize("killed_at", typical_where({3, 11, 61}.__contains__, [3, 9, 11, 40, 61, 90]))
def test_a_resumed_run_decides_the_same(tmp_path: Path, killed_at: int) -> None:
    """Killed before and after the first decision, before and after the machine becomes slow."""
    config, pace = replace(FIT, save_every=4), slower(0.5, 2)
    whole = timed(tmp_path / "whole", pace, config=config)
    with pytest.raises(KeyboardInterrupt):
        timed(tmp_path / "killed", pace, config=config, killed_at=killed_at)
    at = killed_at // 4 * 4  # where it resumes, with the time of the steps before
    before = whole.model.begun[at]
    rest = timed(tmp_path / "killed", lambda n, now: pace(n, now + before), config=config, resume=True)
    assert (rest.result.resumed_from, rest.result.steps) == (at, whole.result.steps)
    assert rest.decided == whole.decided
    assert rest.rates == whole.rates  # also: the log has each step once
    assert same(trained_weights(rest.model), trained_weights(whole.model))


def test_what_was_decided_after_the_checkpoint_holds_though_the_machine_is_another(tmp_path: Path) -> None:
    config = replace(FIT, save_every=50)
    with pytest.raises(KeyboardInterrupt):
        timed(tmp_path, slower(0.5, 2), config=config, killed_at=90)
    known = json.loads((tmp_path / STEPS_FILE).read_text())["decided"]
    assert known[-1][0] > 50
    made = timed(tmp_path, lambda *_: 0.75, config=config, resume=True)
    assert made.decided[: len(known)] == known
    assert made.result.steps == made.decided[-1][1] <= known[-1][1]
    again = timed(tmp_path, lambda *_: 0.75, config=config, resume=True)
    assert again.result.was_finished
    assert again.result.steps == made.result.steps


def test_of_a_run_without_a_checkpoint_nothing_is_kept(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        timed(tmp_path, lambda *_: 0.5, killed_at=30)
    made = timed(tmp_path, lambda *_: 0.5, 2, resume=True)
    assert (made.result.steps, len(made.rates)) == (240, 240)


@pytest.mark.parametrize("minutes", [None, 1000])
def test_with_time_enough_it_is_the_run_without_a_limit(tmp_path: Path, minutes: float | None) -> None:
    config = replace(FIT, steps=None, epochs=9)
    made = timed(tmp_path, lambda *_: 1.0, minutes, config)
    plain = Line(lambda *_: 0.0)
    fit(plain, Points(), config, tmp_path / "plain")
    assert same(trained_weights(made.model), trained_weights(plain))
    assert made.result.steps == config.total_steps(7) == 32
    assert bool(made.decided) == (minutes is not None)


def test_steps_that_compile_or_stumble_do_not_count_as_the_others(tmp_path: Path) -> None:
    made = timed(tmp_path / "compiled", lambda n, _: 12.0 if n == 1 else 0.5)
    assert made.result.steps == 97
    made = timed(tmp_path / "stumbled", lambda n, _: 3.0 if n == 6 else 0.5)
    assert made.result.steps == 115


@pytest.mark.parametrize("evaluation", [1, 5, 20, 200])
def test_evaluations_before_the_last_step_count(tmp_path: Path, evaluation: float) -> None:
    """The last evaluation comes after the last step, so it does not count. No evaluation is made twice."""
    made = timed(tmp_path, lambda *_: 0.5, config=replace(FIT, eval_every=20), evaluation=evaluation)
    assert made.model.begun[-1] <= (1 + TOO_LATE) * 60
    at = [line["step"] for line in log(tmp_path) if "eval_score" in line]
    assert at == sorted({*range(20, made.result.steps + 1, 20), made.result.steps})
    assert made.result.seconds == made.model.now
    spent = made.model.now - evaluation  # the last evaluation
    assert 50 < spent < 70 or evaluation == 20 * len(at) - 20 or evaluation == 200


def test_a_step_that_its_evaluation_makes_the_last_has_a_line(tmp_path: Path) -> None:
    """The evaluation uses up the time; before it, more steps were planned."""
    config = replace(FIT, log_every=500, eval_every=20)
    made = timed(tmp_path, lambda *_: 0.5, config=config, evaluation=200)
    assert made.result.steps == 20
    assert [line["step"] for line in log(tmp_path) if "loss" in line] == [1, 20]


def test_a_step_longer_than_the_time_is_done_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert timed(tmp_path / "nearly", lambda *_: 55.0).model.now == 55
    assert "minutes=1" in capsys.readouterr().err
    assert timed(tmp_path, lambda *_: 100.0).result.steps == 1
    said = capsys.readouterr()
    assert "minutes=1" in said.err
    for option in ("fit.batch_rows", "seq_len"):
        assert option in said.err
    assert "step=1/1 loss=" in said.out


@pytest.mark.parametrize("steps", [1, 3, 11])
def test_the_last_step_has_a_line_however_few_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    for minutes, name in ((None, "known"), (steps / 60, "timed")):
        config = replace(FIT, steps=steps if minutes is None else 5000, log_every=500, eval_every=1)
        assert timed(tmp_path / name, lambda *_: 1.0, minutes, config).result.steps == steps
        assert f"step={steps}/{steps} loss=" in capsys.readouterr().out
        assert [line["step"] for line in log(tmp_path / name) if "loss" in line][-1] == steps


def test_the_main_processes_clock_decides_for_all(tmp_path: Path) -> None:
    """The clock of the other process never advances."""

    def work(state: PartialState) -> None:
        now = 0.0
        limit = TimeLimit(1, clock=lambda: now if state.is_main_process else 0.0)
        budget = StepBudget(limit, 5000, tmp_path, 0)
        budget.begin()
        done = 0
        while done < budget.total(done):
            began = budget.spent()
            now += 0.5 if done < 60 else 1.0
            done += 1
            budget.add_step(began)
            budget.decide(done)
        (tmp_path / f"steps-{state.process_index}").write_text(str(done))

    assert launched(2, work) == [0, 0]
    first, second = (int((tmp_path / f"steps-{rank}").read_text()) for rank in range(2))
    assert first == second
    assert 90 <= first <= 95
