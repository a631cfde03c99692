"""A run that was stopped goes on from its last complete checkpoint to the bits that it would have had."""

import os
import shutil
from dataclasses import fields

import pytest
import torch

from outrider.base.files import write_json
from outrider.base.settings import decides
from outrider.train.core import run_dir
from outrider.train.core.fit import STATE_FILE, read_state
from outrider.train.core.sharding import WEIGHTS_FILE
from outrider.train.settings.fit import FitConfig
from tests.refusals import refusal
from tests.train.fit_job import TinyModel
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
    with pytest.raises(KeyboardInterrupt):
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


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"lr": 0.5}, r"fit\.lr=0\.5 \(was 0\.01\)"),
        ({"seed": 3}, r"fit\.seed=3 \(was 0\)"),
        ({"identity": {"data": {"source": "b"}}}, r'data\.source="b" \(was "a"\)'),
        ({"identity": {"data": {"source": "a", "more": 1}}}, r"data\.more=1 \(was absent\)"),
    ],
)
def test_resume_with_other_settings_is_refused(tmp_path, changes, difference):
    identity = {"data": {"source": "a"}}
    fit_tiny(tmp_path, identity=identity)
    refusal(difference, fit_tiny, tmp_path, resume=True, **{"identity": identity, **changes})


def test_resume_may_change_what_does_not_decide_the_result(tmp_path):
    fit_tiny(tmp_path, steps=4)
    os.rename(tmp_path / "checkpoint-4", tmp_path / "gone")
    free = {"micro_batch_rows": 2, "log_every": 1, "eval_every": 3, "save_every": 1, "keep_checkpoints": 3}
    fit_tiny(tmp_path, steps=4, resume=True, **free)
    assert [entry["step"] for entry in log(tmp_path)] == [1, 2, 3, 4]  # the line of the lost step 4 is gone
    assert (tmp_path / "checkpoint-3").exists()
    assert {one.name for one in fields(FitConfig) if not decides(one)} == {*free, "gradient_checkpointing", "wandb"}


@pytest.mark.parametrize("name", ["optimizer.bin", "random_states_0.pkl"])
def test_a_damaged_state_names_the_file_and_the_way_on(tmp_path, name):
    fit_tiny(tmp_path, steps=4)
    shutil.rmtree(tmp_path / "checkpoint-4")
    file = tmp_path / "checkpoint-2" / name
    for content in (file.read_bytes()[:-100], b""):
        file.write_bytes(content)
        refusal(rf"{name}: not readable.*; remove .*checkpoint-2", fit_tiny, tmp_path, steps=4, resume=True)


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
