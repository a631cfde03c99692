"""`fit`: train a model from an empty directory or a checkpoint to the last step.

The loop itself is in train/core/loop.py. `fit` adds four things: checkpoints that are complete or absent and hold only
trained parameters; a data order that is a pure function of (seed, step); evaluations; one line per logging step.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from torch import nn

from outrider.base.errors import UserError
from outrider.base.files import write_json
from outrider.base.machine import fast_dtype
from outrider.base.processes import join_processes, say
from outrider.base.run_dirs import code_version
from outrider.base.settings import read_as
from outrider.data_prep.text.records import HELDOUT_BY
from outrider.inference.core.rounds import Clock
from outrider.inference.measure.time_limit import TimeLimit
from outrider.train.core import run_dir, sharding
from outrider.train.core.engine import TrainingEngine
from outrider.train.core.loop import run_steps
from outrider.train.core.progress import TrainingLog, cut_log, start_wandb
from outrider.train.core.sharding import load_trained, save_trained
from outrider.train.core.time_budget import StepBudget
from outrider.train.core.training import FitResult, Metrics, Student, TrainRows
from outrider.train.settings.fit import FitConfig

STATE_FILE = "training_state.json"


@dataclass(frozen=True)
class TrainingState:
    """The content of `STATE_FILE` in a checkpoint."""

    step: int  # optimizer steps done
    metrics: dict[str, float] = field(default_factory=dict)  # the last evaluation, by name; empty if there was none
    seconds: float = 0.0  # what the training had taken by then, in all runs, evaluations included
    total: int | None = None  # the steps of the whole run, as estimated then; None: not known


def read_state(checkpoint: Path) -> TrainingState:
    """The state that `checkpoint` holds. Raises `UserError` for a damaged file."""
    remedy = f"remove {checkpoint}: resume=true goes on from the one before"
    return read_as(TrainingState, checkpoint / STATE_FILE, "state of a training", remedy)


def fit(
    student: Student,
    rows: TrainRows,
    config: FitConfig,
    out_dir: Path,
    *,
    identity: Mapping[str, object] = MappingProxyType({}),
    evaluate: Callable[[int], Metrics] | None = None,
    minutes: float | None = None,
    resume: bool = False,
    before_last_save: Callable[[], object] = lambda: None,
    clock: Clock = time.perf_counter,
) -> FitResult:
    """Train `student` in place on `rows`. Every process calls it.

    identity: JSON-able, everything that determines the result besides `config`: data, model, their seeds. A resumed
    run must match it, but may be longer: its learning rates are then those of the longer schedule, from the next step
    on. Every checkpoint records the version of the code that wrote it.
    evaluate: called on every process, every `eval_every` steps and at the end, with the number of steps done, while
    the student is in eval mode, without gradients. The metrics that it returns are logged as eval_<name>.
    minutes: the time limit for the last step; the number of steps is then at most that of `config`. clock: measures
    seconds for it. before_last_save: called by the main process before the last checkpoint.

    Writes checkpoint-<step> directories and log.jsonl to `out_dir`, which the caller must lock. A killed run continued
    with `resume=True` gives bit-identical results to an uninterrupted one, on the same machine with the same number of
    processes.

    Raises `UserError` when the loss is no longer finite, when a batch has no supervised token, and when a checkpoint
    cannot be written.
    """
    if not len(rows):
        raise UserError("data: no rows to train on; check the data set, its split and the length limits")
    state = join_processes()
    max_steps = config.total_steps(len(rows))
    config.require_processes(state.num_processes)  # raises before anything is written
    limits = {"steps": max_steps, "minutes": minutes}  # heldout_by: the rule that chooses held-out records
    run_record = limits | {"rows": len(rows), "fit": config.decisions(), "heldout_by": HELDOUT_BY, **identity}
    checkpoint_dir, is_longer_run = run_dir.open_run(out_dir, run_record, resume)
    run_record["code"] = code_version()
    state.wait_for_everyone()  # no process writes before all have read

    saved_state = TrainingState(0) if checkpoint_dir is None else read_state(checkpoint_dir)
    metrics, resumed_from = saved_state.metrics, saved_state.step
    limit = TimeLimit(minutes, earlier=saved_state.seconds, clock=clock)
    budget = StepBudget(limit, max_steps, start=resumed_from, total=None if is_longer_run else saved_state.total)
    if checkpoint_dir is not None and resumed_from >= budget.total:  # finished before
        load_trained(student, checkpoint_dir)
        return FitResult(resumed_from, resumed_from, saved_state.seconds, metrics, step=resumed_from, metrics=metrics)
    if is_longer_run:
        say(f"resume=true: longer than before; its learning rates go on at step {resumed_from} of {budget.total}")
    if config.gradient_checkpointing:
        student.gradient_checkpointing_enable()
    if state.is_main_process:
        shutil.rmtree(out_dir / run_dir.STAGING, ignore_errors=True)  # left by killed runs
        cut_log(out_dir, resumed_from)

    with _autocast(student, config.precision, state.device):
        engine = TrainingEngine(student, config)
        if checkpoint_dir is not None:
            engine.load(checkpoint_dir)
        run_config = {**run_record, "out_dir": str(out_dir), "processes": state.num_processes}
        start_wandb(engine.accelerator, config.wandb, out_dir, run_config)
        step_range, seconds_left = range(resumed_from, budget.total), limit.left(limit.earlier)
        training_log = TrainingLog(engine.accelerator, out_dir, step_range, evaluate is not None, seconds_left)

        def measure(step: int) -> None:
            nonlocal metrics
            assert evaluate is not None
            student.eval()
            with training_log.time_evaluation(step), torch.no_grad(), sharding.whole_model(student, engine.module):
                metrics = evaluate(step)
            student.train()
            if metrics:
                training_log.log(step, {f"eval_{name}": value for name, value in metrics.items()})

        def save(step: int) -> None:
            new_state = TrainingState(step, metrics, budget.limit.spent(), budget.total)
            if step == budget.total and state.is_main_process:
                before_last_save()
            with training_log.pause_clock():
                _save(engine, run_record, new_state, out_dir, config.keep_checkpoints)

        with training_log:
            step_count = run_steps(engine, rows, config, budget, training_log, evaluate=evaluate and measure, save=save)
        for tracker in engine.accelerator.trackers:  # `end_training` would also destroy the process group
            tracker.finish()
        say(f"training: {budget.ended_by(config, len(rows))}")
    sharding.make_whole(student)
    return FitResult(step_count, resumed_from, budget.limit.spent(), metrics, step=step_count, metrics=metrics)


def _save(engine: TrainingEngine, run: Mapping[str, object], reached: TrainingState, out_dir: Path, keep: int) -> None:
    """Write the checkpoint of `reached`, rename it once complete, and delete all but the newest `keep`.

    Call it on every process. Raises `UserError` if it cannot be written; earlier checkpoints then stay unchanged.
    """
    state = PartialState()
    final_dir, staging_dir = out_dir / f"checkpoint-{reached.step}", out_dir / run_dir.STAGING
    staged_dir = staging_dir / final_dir.name
    if state.is_main_process:
        shutil.rmtree(staging_dir, ignore_errors=True)
    state.wait_for_everyone()
    try:
        save_trained(engine.model, staged_dir, state.is_main_process)
        engine.save(staged_dir)
        state.wait_for_everyone()
        if state.is_main_process:
            write_json(staged_dir / STATE_FILE, asdict(reached))
            write_json(staged_dir / run_dir.RUN_FILE, run)
            run_dir.publish(staged_dir, final_dir, keep)
    except (OSError, SafetensorError, RuntimeError, UserError) as error:
        shutil.rmtree(staging_dir, ignore_errors=True)
        problem = f"the checkpoint of step {reached.step} could not be written ({error})"
        remedy = f"{run_dir.describe_newest(out_dir)}. Free space and continue with resume=true"
        raise UserError(f"out_dir={out_dir}: {problem}; {remedy}") from error
    state.wait_for_everyone()


@contextmanager
def _autocast(model: nn.Module, precision: str, device: torch.device) -> Iterator[None]:
    """Run `model.forward` in bf16 over float32 master weights, under every launcher.

    Accelerate's bf16 setting is not used, since it makes DeepSpeed and FSDP hold the weights in bf16.
    """
    if precision == "bf16" or (precision == "fast" and fast_dtype(device) == torch.bfloat16):
        model.forward = torch.autocast(device.type, dtype=torch.bfloat16)(model.forward)
    try:
        yield
    finally:
        model.__dict__.pop("forward", None)
