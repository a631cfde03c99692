"""A training run of so many minutes: the time of a step is measured, and the number of steps fixed from it, once."""

import gc
import itertools
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list
from torch import nn

from outrider.errors import require
from outrider.files import write_json
from outrider.groups import Group
from outrider.processes import join_processes
from outrider.settings import read_as
from outrider.wandb_config import WandbConfig
from train import run_dir
from train.fit import Rows, fit
from train.fit_settings import FitConfig

STEPS_FILE = "steps.json"
WARM_UP, MEASURED = 5, 10  # optimizer steps: the first ones compile, allocate and fill caches


@dataclass(frozen=True)
class _Steps:
    """What `STEPS_FILE` holds."""

    minutes: float
    seconds_per_step: float
    steps: int

    def __post_init__(self) -> None:
        require(self.steps >= 1, "steps", self.steps, "an integer ≥ 1")


class _MeasuredError(Exception):
    """Enough steps were measured: ends `fit` before it would write a checkpoint of them."""


def within_minutes(
    minutes: float | None,
    build: Callable[[], nn.Module],
    rows: Rows,
    config: FitConfig,
    out_dir: Path,
    *,
    resume: bool,
    group: Group | None = None,
) -> FitConfig:
    """`config` with as many steps as `steps_for_minutes` finds; as it is where no minutes are given."""
    if minutes is None:
        return config
    return replace(
        config, steps=steps_for_minutes(minutes, build, rows, config, out_dir, resume=resume, group=group), epochs=None
    )


def steps_for_minutes(
    minutes: float,
    build: Callable[[], nn.Module],
    rows: Rows,
    config: FitConfig,
    out_dir: Path,
    *,
    resume: bool,
    group: Group | None = None,
    clock: Callable[[], float] | None = None,
) -> int:
    """Optimizer steps that take about `minutes` here, at least 1 and at most those `config` asks for.

    Compilation, evaluations and checkpoints come on top. The first call measures the steps of a model that `build`
    makes, which is then thrown away. It leaves the number in `out_dir`. A run that goes on from a checkpoint reads it
    there: schedules remain functions of the step, and a run continued elsewhere ends where it was to end. Before the
    first checkpoint nothing is decided, as the minutes, the model or the batch may be others now.

    group: as for `fit`. clock: seconds; None: real ones, the device's work included. Call it on every process.
    """
    file, process = out_dir / STEPS_FILE, join_processes()
    run_dir.require_free(out_dir, resume)
    if resume and file.exists() and run_dir.checkpoints(out_dir):
        kept: _Steps = read_as(_Steps, file, "number of steps", "remove it, and the steps are measured anew")
        return kept.steps
    if process.is_main_process:
        print(f"minutes={minutes:g} measured_first={WARM_UP + MEASURED} steps", flush=True)
    scratch = out_dir / run_dir.STAGING / "measured"
    seconds = _seconds_per_step(build(), rows, config, scratch, clock or _clock, group)
    steps = max(1, min(config.total_steps(len(rows)), int(60 * minutes / seconds)))
    decided = [steps]
    broadcast_object_list(decided)  # the main process's measurement counts
    if process.is_main_process:
        write_json(file, asdict(_Steps(minutes, seconds, decided[0])))
        print(f"minutes={minutes:g} seconds_per_step={seconds:.4f} steps={decided[0]}", flush=True)
    process.wait_for_everyone()
    return decided[0]


def _seconds_per_step(
    model: nn.Module,
    rows: Rows,
    config: FitConfig,
    scratch: Path,
    clock: Callable[[], float],
    group: Group | None,
) -> float:
    """The median of `MEASURED` steps of `fit` after `WARM_UP` others. It trains `model` and leaves nothing else."""
    times: list[float] = []

    def on_step(step: int) -> None:
        times.append(clock())
        if step == WARM_UP + MEASURED:
            raise _MeasuredError

    probe = replace(
        config,
        steps=WARM_UP + MEASURED + 1,
        epochs=None,
        warmup=0,
        log_every=WARM_UP + MEASURED + 1,
        eval_every=None,
        save_every=None,
        wandb=WandbConfig(mode="disabled"),
    )
    try:
        with suppress(_MeasuredError):
            fit(model, rows, probe, scratch, resume=True, on_step=on_step, group=group)
    finally:
        shutil.rmtree(scratch.parent, ignore_errors=True)
        gc.collect()  # what trains is part of cycles, and holds the model and the optimizer's state
    return statistics.median(after - before for before, after in itertools.pairwise(times[WARM_UP:]))


def _clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
