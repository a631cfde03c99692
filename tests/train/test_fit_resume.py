"""A run that was stopped goes on from its last complete checkpoint to the bits that it would have had."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from torch import nn

from outrider.base.files import write_json
from outrider.base.wandb_config import WandbConfig
from outrider.inference.measure.time_limit import TimeLimit
from outrider.train.core import run_dir
from outrider.train.core.engine import TrainingEngine
from outrider.train.core.fit import STATE_FILE, fit, read_state
from outrider.train.core.sharding import WEIGHTS_FILE
from outrider.train.core.time_budget import StepBudget
from outrider.train.core.training import FitResult, Student
from outrider.train.settings.fit import FitConfig
from tests.launched import launched
from tests.refusals import refusal
from tests.train.fit_job import TinyModel, tiny_config
from tests.train.fit_runs import fit_tiny, start_tiny, trained_weights
from tests.train.jobs import interrupted_at, kill_when, log, same


@pytest.mark.slow
def test_sigkill_then_resume_gives_the_same_bits(tmp_path):
    changes = {"steps": 40, "precision": "bf16", "save_every": 5}
    killed = start_tiny(tmp_path / "killed", delay=0.05, **changes)
    kill_when(lambda: run_dir.checkpoints(tmp_path / "killed"), killed, later=0.12)  # in the steps after it
    (newest,) = run_dir.checkpoints(tmp_path / "killed")[-1:]
    assert run_dir.step_of(newest) < 40

    model, result = fit_tiny(tmp_path / "killed", TinyModel(torch.float32), resume=True, **changes)
    assert result.resumed_from == run_dir.step_of(newest)
    straight, _ = fit_tiny(tmp_path / "straight", TinyModel(torch.float32), **changes)
    final = [tmp_path / name / "checkpoint-40" / WEIGHTS_FILE for name in ("killed", "straight")]
    assert final[0].read_bytes() == final[1].read_bytes()
    assert same(trained_weights(model), trained_weights(straight))


def test_a_kill_while_saving_leaves_the_previous_checkpoint(tmp_path):
    interrupted_at(6, lambda: fit_tiny(tmp_path))
    assert (tmp_path / run_dir.STAGING / "checkpoint-6" / WEIGHTS_FILE).exists()
    assert run_dir.checkpoints(tmp_path)[-1].name == "checkpoint-4"
    model, result = fit_tiny(tmp_path, resume=True)
    assert result.resumed_from == 4
    assert same(trained_weights(model), trained_weights(fit_tiny(tmp_path / "straight")[0]))
    assert not (tmp_path / run_dir.STAGING).exists()


def test_the_time_of_all_runs_is_added_up(tmp_path):
    """What a checkpoint says was taken by then counts, and a finished training takes no more."""
    _, whole = fit_tiny(tmp_path)
    final = run_dir.checkpoints(tmp_path)[-1]
    assert 0 < read_state(final).seconds <= whole.seconds
    assert fit_tiny(tmp_path, resume=True)[1].seconds == read_state(final).seconds
    shutil.rmtree(final)
    before = run_dir.checkpoints(tmp_path)[-1]
    write_json(before / STATE_FILE, {"step": run_dir.step_of(before), "seconds": 1000.0})
    assert 1000 < fit_tiny(tmp_path, resume=True)[1].seconds < 1000 + 60


def test_a_finished_run_returns_at_once_with_its_weights(tmp_path):
    found = iter([0.25, 0.5])
    model, first = fit_tiny(tmp_path, evaluate=lambda *_: {"agreement": next(found)}, eval_every=4)
    again, second = fit_tiny(tmp_path, resume=True)
    assert second.resumed_from == second.steps == 8
    assert second.metrics == first.metrics == {"agreement": 0.5}
    torch.testing.assert_close(trained_weights(again), trained_weights(model), rtol=0, atol=0)


def test_an_earlier_run_is_not_overwritten(tmp_path):
    fit_tiny(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    refusal(r"holds an earlier run \(checkpoint-8\); resume=true", fit_tiny, tmp_path, lr=0.5)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


@pytest.mark.parametrize(("changes", "difference"), [
    ({"lr": 0.5}, r"fit\.lr=0\.5 \(was 0\.01\)"),
    ({"seed": 3}, r"fit\.seed=3 \(was 0\)"),
    ({"identity": {"data": {"source": "b"}}}, r'data\.source="b" \(was "a"\)'),
    ({"identity": {"data": {"source": "a", "more": 1}}}, r"data\.more=1 \(was absent\)"),
])  # fmt: skip
def test_resume_with_other_settings_is_refused(tmp_path, changes, difference):
    identity = {"data": {"source": "a"}}
    fit_tiny(tmp_path, identity=identity)
    refusal(difference, fit_tiny, tmp_path, resume=True, **{"identity": identity, **changes})


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_longer_run_goes_on_with_the_longer_schedule(tmp_path, schedule):
    """At a constant rate with the bits of a run that was as long from the beginning. A shorter one is refused."""
    changes = {"schedule": schedule, "warmup": 0, "log_every": 1}
    fit_tiny(tmp_path / "run", steps=4, **changes)
    model, result = fit_tiny(tmp_path / "run", steps=None, epochs=2, resume=True, **changes)
    assert (result.resumed_from, result.steps) == (4, 10)
    config = tiny_config(steps=10, **changes)
    straight, _ = fit_tiny(tmp_path / "straight", steps=10, **changes)
    assert same(trained_weights(model), trained_weights(straight)) == (schedule == "constant")
    rates = [line["lr"] for line in log(tmp_path / "run")]
    assert rates[4:] == pytest.approx([config.lr * config.lr_scale(step, 10) for step in range(4, 10)])
    for wrong, said in (
        ({"steps": 9}, r"steps=9 \(was 10\)"),
        ({"steps": 12, "lr": 0.5}, r"s: fit\.lr=0\.5 \(was 0\.01\);"),
    ):
        refusal(said, fit_tiny, tmp_path / "run", resume=True, **{**changes, **wrong})


def test_resume_may_change_what_does_not_decide_the_result(tmp_path):
    fit_tiny(tmp_path, steps=4)
    os.rename(tmp_path / "checkpoint-4", tmp_path / "gone")
    free = {"micro_batch_rows": 2, "log_every": 1, "eval_every": 3, "save_every": 1, "keep_checkpoints": 3}
    fit_tiny(tmp_path, steps=4, resume=True, **free)
    assert [entry["step"] for entry in log(tmp_path)] == [1, 2, 3, 4]  # the line of the lost step 4 is gone
    assert (tmp_path / "checkpoint-3").exists()
    undecided = {option.name for option in fields(FitConfig) if not option.metadata.get("decides", True)}
    assert undecided == {*free, "gradient_checkpointing", "wandb"}


@pytest.mark.parametrize("name", ["optimizer.bin", "random_states_0.pkl"])
def test_a_damaged_state_names_the_file_and_the_way_on(tmp_path, name):
    fit_tiny(tmp_path, steps=4)
    shutil.rmtree(tmp_path / "checkpoint-4")
    file = tmp_path / "checkpoint-2" / name
    for content in (file.read_bytes()[:-100], b""):
        file.write_bytes(content)
        refusal(rf"{name}: not readable.*; remove .*checkpoint-2", fit_tiny, tmp_path, steps=4, resume=True)


def test_a_checkpoint_of_another_strategy_is_not_taken_for_a_damaged_one(tmp_path):
    fit_tiny(tmp_path, steps=2)
    (tmp_path / "checkpoint-2" / "optimizer.bin").unlink()
    engine = TrainingEngine(TinyModel(), tiny_config())
    for words in (r"no optimizer\.bin there.*", r"cannot be continued here \(.*load_checkpoint.*\)"):
        words += "; continue under the strategy that wrote it"
        assert "remove" not in refusal(words, engine.load, tmp_path / "checkpoint-2")
        engine._deepspeed = True


class _Dropping(TinyModel):
    """Draws from torch's own random numbers."""

    def forward(self, **inputs):
        return {"loss_sum": super().forward(**inputs)["loss_sum"] * (1 + torch.rand(()))}


def test_random_numbers_go_on_where_they_were(tmp_path):
    straight, _ = fit_tiny(tmp_path, _Dropping())
    shutil.rmtree(tmp_path / "checkpoint-8")
    torch.manual_seed(5)
    resumed, result = fit_tiny(tmp_path, _Dropping(), resume=True)
    assert result.resumed_from == 6
    torch.testing.assert_close(trained_weights(resumed), trained_weights(straight), rtol=0, atol=0)


def test_random_numbers_are_the_seeds_whatever_was_drawn_before(tmp_path):
    runs = []
    for before in (1, 2):
        torch.manual_seed(before)
        model, _ = fit_tiny(tmp_path / str(before), _Dropping())
        runs.append(trained_weights(model))
    torch.testing.assert_close(*runs, rtol=0, atol=0)


QUIET = WandbConfig(mode="disabled")
FIT = FitConfig(
    steps=5000, batch_rows=2, precision="fp32", warmup=0.1, lr=1.0, log_every=1, keep_checkpoints=99, wandb=QUIET
)
Pace = Callable[[int, float], float]


def slower(seconds: float, times: float) -> Pace:
    """Steps of `seconds`; from half of the first minute on they take `times` as long."""
    return lambda _, now: seconds * (1 if now < 30 else times)


class Line(Student):
    """Each forward advances its clock by `pace` of the number of the forward and the time."""

    killed_at: int | None = None

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.pace, self.now, self.begun = pace, 0.0, list[float]()

    def begin_step(self, step: int) -> None:
        if step == self.killed_at:
            raise KeyboardInterrupt

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
    model.killed_at = killed_at

    def evaluate(*_: object) -> dict[str, float]:
        model.now += evaluation
        return {"score": 0.0}

    result = fit(
        model, Points(), config, out_dir, evaluate=evaluate, minutes=minutes, resume=resume, clock=lambda: model.now
    )
    return Run(result, model, [line["lr"] for line in log(out_dir) if "lr" in line])


@pytest.mark.parametrize("times", [1, 2, 30, 1000])
@pytest.mark.parametrize("seconds", [0.25, 1, 7, 25, 59, 90])
def test_a_run_ends_in_time_with_its_schedule(tmp_path: Path, seconds: float, times: float) -> None:
    made = timed(tmp_path, slower(seconds, times))
    steps, begun = made.result.steps, made.model.begun
    before, last = begun[-1] - begun[-2] if steps > 1 else seconds, made.model.now - begun[-1]
    assert begun[-1] <= max(0, 60 - before / 2)  # half of a step like the one before fitted
    assert made.model.now > 60 - (0.51 * last if times == 1 else last)  # and the time is used
    assert steps == len(begun) == len(made.rates)  # none was wasted
    if steps > 3 and times == 1:
        assert made.rates[-1] == FIT.lr_scale(steps - 1, steps)
        planned = 60 / seconds
        assert made.rates[2:] == pytest.approx([FIT.lr_scale(step, steps) for step in range(2, steps)], abs=1 / planned)


def test_a_schedule_falls_with_the_time(tmp_path: Path) -> None:
    """Steps take twice as long from the middle on: the rate of each follows the time left, whatever was planned."""
    made = timed(tmp_path, slower(0.25, 2), config=replace(FIT, warmup=0))
    at = [(60 - begun) / 60 for begun in made.model.begun]
    assert made.rates[2:] == pytest.approx(at[2:], abs=0.02)
    assert made.rates[2:] == sorted(made.rates[2:], reverse=True)


@pytest.mark.parametrize("killed_at", [3, 9, 61, 89])
def test_a_resumed_run_has_the_minutes_that_are_left(tmp_path: Path, killed_at: int) -> None:
    config, pace = replace(FIT, save_every=4), slower(0.5, 2)
    whole = timed(tmp_path / "whole", pace, config=config)
    with pytest.raises(KeyboardInterrupt):
        timed(tmp_path / "killed", pace, config=config, killed_at=killed_at)
    at = killed_at // 4 * 4  # where it resumes, with the time of the steps before
    before = whole.model.begun[at]
    rest = timed(tmp_path / "killed", lambda n, now: pace(n, now + before), config=config, resume=True)
    assert rest.result.resumed_from == at
    assert rest.result.steps == pytest.approx(whole.result.steps, abs=1)
    assert rest.result.seconds == before + rest.model.now == pytest.approx(60, abs=1)
    assert len(rest.rates) == rest.result.steps  # the log has each step once
    assert rest.rates[at:] == pytest.approx(whole.rates[at : rest.result.steps], abs=0.05)
    again = timed(tmp_path / "killed", pace, config=config, resume=True)
    assert again.result.resumed_from == again.result.steps
    assert again.result.steps == rest.result.steps


def test_a_run_with_more_minutes_goes_on_with_their_schedule(tmp_path: Path) -> None:
    """Also after its end; fewer minutes are refused, and a few more hold no step."""
    config, pace = replace(FIT, warmup=0), slower(0.5, 1)
    at = timed(tmp_path, pace, config=config).result.steps
    assert timed(tmp_path, pace, 1.001, config, resume=True).result.steps == at
    run = timed(tmp_path, pace, 2, config, resume=True)
    assert (run.result.resumed_from, run.result.steps) == (at, pytest.approx(2 * at, abs=1))
    expected = [config.lr_scale(step, 2 * at) for step in range(at, run.result.steps)]
    assert run.rates[at:] == pytest.approx(expected, abs=0.02)
    refusal(r"minutes=1 \(was 2", timed, tmp_path, pace, 1, config, resume=True)


@pytest.mark.parametrize("minutes", [None, 1000])
def test_with_time_enough_it_is_the_run_without_a_limit(tmp_path: Path, minutes: float | None) -> None:
    config = replace(FIT, steps=None, epochs=9)
    made = timed(tmp_path, lambda *_: 1.0, minutes, config)
    plain = Line(lambda *_: 0.0)
    fit(plain, Points(), config, tmp_path / "plain")
    assert same(trained_weights(made.model), trained_weights(plain))
    assert made.result.steps == config.total_steps(7) == 32


def test_a_first_step_that_compiles_does_not_count_as_the_others(tmp_path: Path) -> None:
    made = timed(tmp_path, lambda n, _: 12.0 if n == 1 else 0.5)
    assert made.result.steps == 97
    assert made.rates[1] < made.rates[2] < made.rates[8] < made.rates[9] > made.rates[40]  # it is warmed up


@pytest.mark.parametrize("evaluation", [1, 5, 20, 200])
def test_evaluations_before_the_last_step_count(tmp_path: Path, evaluation: float) -> None:
    """The last evaluation comes after the last step, so it does not count. No evaluation is made twice, and a step that
    its evaluation makes the last one has a line."""
    made = timed(tmp_path, lambda *_: 0.5, config=replace(FIT, eval_every=20, log_every=500), evaluation=evaluation)
    assert made.model.begun[-1] <= 60
    at = [line["step"] for line in log(tmp_path) if "eval_score" in line]
    assert at == sorted({*range(20, made.result.steps + 1, 20), made.result.steps})
    assert made.result.seconds == made.model.now
    assert made.model.now > 58
    assert [line["step"] for line in log(tmp_path) if "loss" in line] == [1, made.result.steps]


def test_a_step_longer_than_the_time_is_done_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seconds in (55.0, 100.0):
        assert timed(tmp_path / f"{seconds}", lambda *_, seconds=seconds: seconds).model.now == seconds
        said = capsys.readouterr()
        assert all(option in said.err for option in ("minutes=1", "fit.batch_rows", "seq_len"))
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
        budget = StepBudget(TimeLimit(1, clock=lambda: now if state.is_main_process else 0.0), 5000)
        budget.begin()
        done = 0
        while done < budget.total:
            now += 0.5 if done < 60 else 1.0
            done += 1
            budget.update_total(done)
        (tmp_path / f"steps-{state.process_index}").write_text(str(done))

    assert launched(2, work) == [0, 0]
    assert {(tmp_path / f"steps-{rank}").read_text() for rank in range(2)} == {"90"}
