"""The training loop: forward, loss, backward, clip, step.

A row is a sequence of tokens with labels. A step takes a batch of rows, in micro batches that the processes share. An
engine wraps model and optimizer; a budget has the number of steps, which a time limit may change after every step.
"""

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


def step_rows(row_count: int, batch_rows: int, seed: int, step: int) -> list[int]:
    """The rows of optimizer step `step` (from 0), `batch_rows` of them.

    Epoch follows epoch without a gap. Step s takes positions [s · batch, (s + 1) · batch) of that sequence.
    """
    positions = range(step * batch_rows, (step + 1) * batch_rows)
    return [epoch_order(row_count, seed, position // row_count)[position % row_count] for position in positions]


def share_of_process(rows: Sequence[int], micro_rows: int, rank: int, world_size: int) -> list[Sequence[int]]:
    """One process's share of a step's `rows`, in micro batches of `micro_rows` rows.

    The processes take micro batches in turn. len(rows) is a multiple of micro · processes. Example: of the rows a to h,
    with micro = 2 and two processes, process 0 has ab and ef, and process 1 has cd and gh.
    """
    return [rows[start : start + micro_rows] for start in range(rank * micro_rows, len(rows), world_size * micro_rows)]


def run_steps(
    engine: TrainingEngine,
    rows: TrainRows,
    config: FitConfig,
    budget: StepBudget,
    training_log: TrainingLog,
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
    micro_batch_count = accelerator.num_processes * accelerator.gradient_accumulation_steps
    engine.module.train()
    budget.begin()
    step = budget.start
    while step < budget.total:
        engine.model.begin_step(step)
        micro_batches = load_share(rows, config, step, accelerator)
        label_count = sum(int((batch["labels"] != IGNORE).sum()) for batch in micro_batches)
        if accelerator.num_processes > 1:  # else it would synchronise the device
            label_count = int(accelerator.reduce(torch.tensor(label_count, device=accelerator.device), "sum"))
        if label_count == 0:
            problem = f"no supervised token in the batch (every label is {IGNORE})"
            remedy = "check the layout, the chat template and the length limits of the data"
            raise UserError(f"step {step + 1}: {problem}; {remedy}")
        engine.set_rates(config.lr_scale(step, budget.total))
        for batch in micro_batches:
            with accelerator.accumulate(engine.module):  # the last micro batch exchanges the gradients
                inputs = {key: value.to(accelerator.device) for key, value in batch.items()}
                loss_sum = engine.module(**inputs)["loss_sum"]
                # Accelerate averages over processes and micro batches. The factor turns the mean into the sum.
                accelerator.backward(loss_sum * micro_batch_count / label_count)
            training_log.add(loss_sum, batch)
        grad_norm = engine.clip()
        if grad_norm is not None and not math.isfinite(grad_norm):
            total_loss, n_labels, _ = training_log.drain()  # sums over all processes, so all call it
            problem = f"loss={total_loss / n_labels:.4g}, grad_norm={grad_norm:.4g} is not finite; stopped there"
            remedy = f"{run_dir.describe_newest(training_log.out_dir)}. Lower lr, raise warmup, or use precision=fp32"
            raise UserError(f"step {step + 1}: {problem}; {remedy}")
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        training_log.advance()

        step += 1
        training_log.total = total_steps = budget.update_total(step)
        logged = step == 1 or is_due(step, config.log_every, total_steps)  # the first loss says early that all is well
        if logged:
            training_log.log_interval(step, engine.rate, grad_norm)
        if evaluate is not None and is_due(step, config.eval_every, total_steps):
            evaluate(step)
            training_log.total = total_steps = budget.update_total(step)
            if step == total_steps and not logged:
                training_log.log_interval(step, engine.rate, grad_norm)
        if is_due(step, config.save_every, total_steps):
            save(step)
    return step


def is_due(step: int, interval: int | None, total_steps: int) -> bool:
    """Whether an action that is due every `interval` steps, and after the last one, is due after `step` steps."""
    return step == total_steps or (interval is not None and step % interval == 0)


def load_share(rows: TrainRows, config: FitConfig, step: int, accelerator: Accelerator) -> list[Batch]:
    """The micro batches of this process in optimizer step `step`, on the CPU."""
    row_indices = step_rows(len(rows), config.batch_rows, config.seed, step)
    micro_rows = config.micro_rows(accelerator.num_processes)
    index_batches = share_of_process(row_indices, micro_rows, accelerator.process_index, accelerator.num_processes)
    return [default_collate([rows[index] for index in indices]) for indices in index_batches]
