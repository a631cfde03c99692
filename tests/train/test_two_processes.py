"""Two processes train what one process trains: the loop, and every command with rows to share out.

All in one test, as workers that share the tests of a file out would each train all of it. Commands under a launcher are
started in test_sharding.py.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models import calibration
from outrider.draft_models.early_exit import checkpoint
from outrider.train.calibrate import calibrate
from outrider.train.core.loop import share_of_process, step_rows
from outrider.train.core.sharding import WEIGHTS_FILE
from outrider.train.eagle3 import train_eagle3
from outrider.train.eesd import train_early_exit
from outrider.train.finetune_drafter import finetune_drafter
from outrider.train.settings.drafters import DrafterConfig
from tests.launched import launched
from tests.train import fit_job, jobs
from tests.train.fit_runs import fit_tiny
from tests.train.sharded_job import run_command


@pytest.mark.slow
def test_two_train_what_one_trains(tmp_path: Path, small: Path, corpus: DataConfig) -> None:
    drafted = jobs.save_for_calibration(tmp_path / "drafted")
    target, left = drafted / "target", drafted / "drafter" / calibration.WEIGHTS_FILE
    one = {name: tmp_path / f"{name}-alone" for name in ("fit", "exit", "adapters", "steps", "head")}
    exits = jobs.distilling(target, corpus, one["exit"], fit=jobs.FIT)
    # On-policy steps too: what a row samples depends on the row, not on the process that has it.
    adapters = jobs.finetuning(
        target, corpus, one["adapters"], drafter=DrafterConfig(path=str(small)), on_policy=0.5, lora_rank=2
    )
    steps = jobs.heading(target, corpus, one["steps"])
    head = jobs.calibrating(drafted, one["head"], fit=replace(jobs.CALIBRATING, epochs=None, steps=8))
    fit_tiny(one["fit"], optimizer="adamw")
    train_early_exit(exits)
    finetune_drafter(adapters)
    train_eagle3(steps)
    calibrate(head)
    calibrated = load_file(left)
    left.unlink()
    runs = {"exit": ("eesd", exits), "adapters": ("finetune_drafter", adapters), "steps": ("eagle3", steps)}
    runs |= {"head": ("calibrate", head)}
    commands = [jobs.command(module, config, tmp_path / name) for name, (module, config) in runs.items()]
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    statuses = launched(2, lambda state: do_what_is_said(tmp_path, state.process_index))
    said = "".join(path.read_text() for path in sorted(tmp_path.glob("said-*.txt")))
    assert statuses == [0, 0], said

    assert "processes=2" in said
    assert said.count("step=8/8 loss=") == 2  # rank 0 only, of the loop and of the head
    for entry, reference in zip(jobs.log(tmp_path / "fit"), jobs.log(one["fit"]), strict=True):
        assert entry["loss"] == pytest.approx(reference["loss"], rel=1e-9)
        assert entry["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-9)

    def same(name: str, file: str, rtol: float, atol: float) -> dict[str, Tensor]:
        """What one process made, of which two made the same."""
        made, reference = (load_file(folder / file) for folder in (tmp_path / name, one[name]))
        torch.testing.assert_close(made, reference, rtol=rtol, atol=atol)
        return reference

    same("fit", f"checkpoint-8/{WEIGHTS_FILE}", 1e-9, 1e-12)
    exit_head = same("exit", checkpoint.WEIGHTS_FILE, 1e-4, 1e-5)["head.weight"]
    merged = same("adapters", "model.safetensors", 1e-4, 1e-4)  # Adam makes steps of lr = 3e-3 of tiny gradients too
    eagle3 = same("steps", "model.safetensors", 1e-4, 1e-4)
    # They share out what is to be captured, in the order of the texts, and the rows of a step.
    same("head", next((one["head"] / "captured").iterdir()).relative_to(one["head"]).as_posix(), 1e-4, 1e-4)
    torch.testing.assert_close(load_file(left), calibrated, rtol=1e-3, atol=1e-4)
    # All of them did learn.
    start = load_file(target / "model.safetensors")["lm_head.weight"]
    assert (exit_head - start).abs().max() > 1e-3
    assert any(
        (merged[name] - before).abs().max() > 1e-3 for name, before in load_file(small / "model.safetensors").items()
    )
    assert (eagle3["norm.weight"] - eagle3["midlayer.hidden_norm.weight"]).abs().max() > 1e-3
    assert calibrated["target"].abs().max() > 1e-3


def do_what_is_said(folder: Path, rank: int) -> None:
    """What a process does: the loop, then the commands in the folder. What it says goes into a file."""
    said = (folder / f"said-{rank}.txt").open("w", buffering=1)
    os.dup2(said.fileno(), 1)
    sys.stdout = sys.stderr = said
    fit_job.main(f"{folder}/fit", json.dumps({"micro_batch_rows": 2, "optimizer": "adamw"}), "0")
    for words in json.loads((folder / "commands.json").read_text()):
        run_command(*words)


@pytest.mark.parametrize(("micro", "processes"), [(1, 1), (4, 1), (2, 2), (3, 4)])
def test_processes_share_a_step_out(micro: int, processes: int) -> None:
    """Taken in turn, their micro batches are the step's rows in order: it does not matter how many there are."""
    rows = step_rows(37, 24, 0, 2)
    shares = [share_of_process(rows, micro, process, processes) for process in range(processes)]
    assert {len(share) for share in shares} == {24 // (micro * processes)}
    assert [row for turn in zip(*shares, strict=True) for batch in turn for row in batch] == rows
