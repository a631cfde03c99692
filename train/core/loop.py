"""The training loop: forward, loss, backward, clip, step; the rest of the package supports it."""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from torch.utils.data import default_collate

from outrider.base.errors import UserError
from outrider.base.streams import Streams
from outrider.draft_models.losses import IGNORE
from outrider.train.core import run_dir
from outrider.train.core.engine import TrainingEngine
from outrider.train.core.progress import TrainingLog
from outrider.train.core.time_budget import StepBudget
from outrider.train.core.training import Batch, TrainRows
from outrider.train.settings.fit import FitConfig


@functools.lru_cache(maxsize=2)  # a step may take rows of two epochs
def epoch_order(count: int, seed: int, epoch: int) -> Sequence[int]:
    """The order of `count` rows in one epoch: a pure function of its arguments."""
    return tuple(Streams(seed).arrays("row order", epoch).permutation(count).tolist())


def step_rows(count: int, batch: int, seed: int, step: int) -> list[int]:
    """The rows of optimizer step `step` (from 0), `batch` of them.

    Epoch follows epoch without a gap. Step s takes positions [s · batch, (s + 1) · batch) of that sequence.
    """
    positions = range(step * batch, (step + 1) * batch)
    return [epoch_order(count, seed, position // count)[position % count] for position in positions]


def share_of_process(rows: Sequence[int], micro: int, process: int, processes: int) -> list[Sequence[int]]:
    """One process's share of a step's `rows`, in micro batches of `micro` rows.

    The processes take micro batches in turn. len(rows) is a multiple of micro · processes. Example: of the rows a to h,
    with micro = 2 and two processes, process 0 has ab and ef, and process 1 has cd and gh.
    """
    return [rows[start : start + micro] for start in range(process * micro, len(rows), processes * micro)]


def run_steps(
    engine: TrainingEngine,
    rows: TrainRows,
    config: FitConfig,
    budget: StepBudget,
    report: TrainingLog,
    *,
    evaluate: Callable[[int], None] | None,
    save: Callable[[int], None],
) -> int:
    """Do the remaining optimizer steps of `budget` and return the total number of steps; call it on every process.

    evaluate and save are called with the number of steps done.
    Raises `UserError`, on all processes at the same step, for a batch without a supervised token and for a gradient
    that is not finite.
    """
    accelerator = engine.accelerator
    micro_batches = accelerator.num_processes * accelerator.gradient_accumulation_steps
    engine.module.train()
    budget.begin()
    step = budget.start
    while step < budget.total:
        engine.model.begin_step(step)
        batches = load_share(rows, config, step, accelerator)
        supervised = sum(int((batch["labels"] != IGNORE).sum()) for batch in batches)
        if accelerator.num_processes > 1:  # else it would synchronise the device
            supervised = int(accelerator.reduce(torch.tensor(supervised, device=accelerator.device), "sum"))
        if supervised == 0:
            raise UserError(
                f"step {step + 1}: no supervised token in the batch (every label is {IGNORE}); check the layout, "
                "the chat template and the length limits of the data"
            )
        engine.set_rates(config.lr_scale(step, budget.total))
        for batch in batches:
            with accelerator.accumulate(engine.module):  # the last micro batch exchanges the gradients
                inputs = {key: value.to(accelerator.device) for key, value in batch.items()}
                loss_sum = engine.module(**inputs)["loss_sum"]
                # Accelerate averages over processes and micro batches. The factor turns the mean into the sum.
                accelerator.backward(loss_sum * micro_batches / supervised)
            report.add(loss_sum, batch)
        norm = engine.clip()
        if norm is not None and not math.isfinite(norm):
            total_loss, tokens, _ = report.drain()  # sums over all processes, so all call it
            raise UserError(
                f"step {step + 1}: loss={total_loss / tokens:.4g}, grad_norm={norm:.4g} is not finite; stopped "
                f"there; {run_dir.describe_newest(report.out_dir)}. Lower lr, raise warmup, or use precision=fp32"
            )
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        report.advance()

        step += 1
        report.total = total = budget.decide(step)
        logged = step == 1 or is_due(step, config.log_every, total)  # the first loss says early that all is well
        if logged:
            report.log_interval(step, engine.rate, norm)
        if evaluate is not None and is_due(step, config.eval_every, total):
            evaluate(step)
            report.total = total = budget.decide(step)
            if step == total and not logged:
                report.log_interval(step, engine.rate, norm)
        if is_due(step, config.save_every, total):
            save(step)
    return step


def is_due(step: int, interval: int | None, total: int) -> bool:
    """Whether an action that is due every `interval` steps, and after the last one, is due after `step` steps."""
    return step == total or (interval is not None and step % interval == 0)


def load_share(rows: TrainRows, config: FitConfig, step: int, accelerator: Accelerator) -> list[Batch]:
    """The micro batches of this process in optimizer step `step`, on the CPU."""
    chosen = step_rows(len(rows), config.batch_rows, config.seed, step)
    micro = config.micro_rows(accelerator.num_processes)
    shares = share_of_process(chosen, micro, accelerator.process_index, accelerator.num_processes)
    return [default_collate([rows[index] for index in share]) for share in shares]
