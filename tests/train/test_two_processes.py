"""Two processes train what one process trains: the loop, and every command with rows to share out.

All in one test, as workers that share the tests of a file out would each train all of it. Commands under a launcher are
started in test_sharding.py.
"""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models import calibration
from outrider.draft_models.early_exit import checkpoint
from outrider.train.core.loop import own_share, step_rows
from outrider.train.core.sharding import WEIGHTS_FILE
from outrider.train.recipes.calibration import calibrate
from outrider.train.recipes.eagle3 import train_eagle3
from outrider.train.recipes.early_exit import train_early_exit
from outrider.train.recipes.small_lm import finetune_drafter
from outrider.train.settings.drafters import DrafterConfig
from tests.launched import launched
from tests.train import fit_job
from tests.train.fit_runs import fit_tiny
from tests.train.jobs import (
    CALIBRATING,
    FIT,
    calibrating,
    distilling,
    finetuning,
    heading,
    log,
    options_of,
    save_for_calibration,
)
from tests.train.sharded_job import run_command


@dataclass(frozen=True)
class Runs:
    """The same runs by two processes, in NAME, and by one, in NAME-alone."""

    folder: Path
    said: str  # by the two processes
    head: dict[str, Tensor]  # the calibration that one process left


def train(folder: Path, small: Path, corpus: DataConfig) -> Runs:
    drafted = save_for_calibration(folder / "drafted")
    target = str(drafted / "target")
    exits = distilling(Path(target), corpus, folder / "exit-alone", fit=replace(FIT, steps=6))
    # On-policy steps too: what a row samples depends on the row, not on the process that has it.
    adapters = finetuning(
        Path(target), corpus, folder / "adapters-alone", drafter=DrafterConfig(path=str(small)), on_policy=0.5,
        lora_rank=2,
    )  # fmt: skip
    steps = heading(Path(target), corpus, folder / "steps-alone")
    head = calibrating(drafted, folder / "head-alone", fit=replace(CALIBRATING, epochs=None, steps=8))
    fit_tiny(folder / "fit-alone", optimizer="adamw")
    train_early_exit(exits)
    finetune_drafter(adapters)
    train_eagle3(steps)
    calibrate(head)
    alone = load_file(drafted / "drafter" / calibration.WEIGHTS_FILE)
    (drafted / "drafter" / calibration.WEIGHTS_FILE).unlink()
    modules = {"exit": ("outrider.train.eesd", exits), "adapters": ("outrider.train.finetune_drafter", adapters)}
    modules["steps"] = ("outrider.train.eagle3", steps)
    modules["head"] = ("outrider.train.calibrate", head)
    commands = [
        [module, *options_of(replace(config, out_dir=str(folder / name)))] for name, (module, config) in modules.items()
    ]
    (folder / "commands.json").write_text(json.dumps(commands))
    assert launched(2, lambda state: do_what_is_said(folder, state.process_index)) == [0, 0], said_in(folder)
    return Runs(folder, said_in(folder), alone)


def do_what_is_said(folder: Path, rank: int) -> None:
    """What a process does: the loop, then the commands in the folder. What it says goes into a file."""
    said = (folder / f"said-{rank}.txt").open("w", buffering=1)
    os.dup2(said.fileno(), 1)
    sys.stdout = sys.stderr = said
    fit_job.main(f"{folder}/fit", json.dumps({"micro_batch_rows": 2, "optimizer": "adamw"}), "0")
    for words in json.loads((folder / "commands.json").read_text()):
        run_command(*words)


def said_in(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("said-*.txt")))


@pytest.mark.slow
def test_two_train_what_one_trains(tmp_path: Path, small: Path, corpus: DataConfig) -> None:
    runs = train(tmp_path, small, corpus)
    check_the_loop(runs)
    check_an_early_exit(runs)
    check_adapters(runs, small)
    check_an_eagle3_head(runs)
    check_a_calibration_head(runs)


def check_the_loop(runs: Runs) -> None:
    two, one = (load_file(runs.folder / name / "checkpoint-8" / WEIGHTS_FILE) for name in ("fit", "fit-alone"))
    torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-12)
    assert runs.said.count("step=8/8 loss=") == 2  # rank 0 only, of the loop and of the head
    for entry, reference in zip(log(runs.folder / "fit"), log(runs.folder / "fit-alone"), strict=True):
        assert entry["loss"] == pytest.approx(reference["loss"], rel=1e-9)
        assert entry["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-9)


def check_an_early_exit(runs: Runs) -> None:
    assert "processes=2" in runs.said
    two, one = (load_file(runs.folder / name / checkpoint.WEIGHTS_FILE) for name in ("exit", "exit-alone"))
    start = load_file(runs.folder / "drafted/target/model.safetensors")["lm_head.weight"]
    assert (one["head.weight"] - start).abs().max() > 1e-3  # it did train
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


def check_adapters(runs: Runs, small: Path) -> None:
    two, one, start = (
        load_file(folder / "model.safetensors")
        for folder in (runs.folder / "adapters", runs.folder / "adapters-alone", small)
    )
    assert any((one[name] - start[name]).abs().max() > 1e-3 for name in one)
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)  # Adam makes steps of lr = 3e-3 of tiny gradients too


def check_an_eagle3_head(runs: Runs) -> None:
    two, one = (load_file(runs.folder / name / "model.safetensors") for name in ("steps", "steps-alone"))
    assert (one["norm.weight"] - one["midlayer.hidden_norm.weight"]).abs().max() > 1e-3  # it did train
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)


def check_a_calibration_head(runs: Runs) -> None:
    """They share out what is to be captured, and the rows of a step."""
    together = load_file(runs.folder / "drafted/drafter" / calibration.WEIGHTS_FILE)
    assert runs.head["target"].abs().max() > 1e-3  # it did learn
    torch.testing.assert_close(together, runs.head, rtol=1e-3, atol=1e-4)
    mine, theirs = (load_file(next((runs.folder / name / "captured").iterdir())) for name in ("head-alone", "head"))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)  # in the order of the texts


@pytest.mark.parametrize(("micro", "processes"), [(1, 1), (4, 1), (2, 2), (3, 4)])
def test_processes_share_a_step_out(micro: int, processes: int) -> None:
    """Taken in turn, their micro batches are the step's rows in order: it does not matter how many there are."""
    rows = step_rows(37, 24, 0, 2)
    shares = [own_share(rows, micro, process, processes) for process in range(processes)]
    assert {len(share) for share in shares} == {24 // (micro * processes)}
    assert [row for turn in zip(*shares, strict=True) for batch in turn for row in batch] == rows
