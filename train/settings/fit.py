"""Config of the training loop; a field by `free` affects no result. Light: a mistake shows before torch is imported."""

import math
import os
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from outrider.base.errors import UserError, require
from outrider.base.settings import DEFAULT, Count, Positive, Seed, Settings, always, free, opt
from outrider.base.wandb_config import WandbConfig

CHECKPOINTS = "checkpoint-*"  # the pattern of their names in out_dir
Beta = Annotated[float, Ge(0), Lt(1)]
NotNegative = Annotated[float, Ge(0)]


@dataclass(frozen=True)
class FitConfig(Settings):
    """The training loop, by `steps` or `epochs`. debug: the value in a rehearsal; step_debug: in a pipeline's."""

    steps: Count | None = opt(None, "optimizer steps, or:", debug=always(2))  # always: also in place of null
    epochs: Positive | None = opt(None, "passes over the rows; one of the two is null", debug=None)
    batch_rows: Count = opt(64, "rows in one optimizer step, over all processes", step_debug=4)
    micro_batch_rows: Count | None = free(None, step_debug=4)
    """rows in one forward of one process; null: batch_rows / processes"""
    optimizer: Literal["adamw", "muon"] = opt("adamw", "muon is for the layers' matrices")
    lr: Positive = opt(1e-3, "the highest learning rate")
    muon_lr: Positive = opt(0.02, "optimizer=muon: the layers' matrices; everything else is AdamW at `lr`")
    betas: tuple[Beta, Beta] = opt((0.9, 0.95), "of AdamW")
    weight_decay: NotNegative = opt(0.0, "of matrices; norms and biases have none")
    warmup: NotNegative = opt(0.0, debug=2)
    """below 1: share of the steps; from 1: a number, at most half of the steps of epochs or minutes"""
    schedule: Literal["linear", "cosine", "constant"] = opt("linear", "of the learning rate after the warm-up")
    max_grad_norm: NotNegative = opt(1.0, "0: no clipping")
    precision: Literal["fast", "bf16", "fp32"] = "fast"
    """autocast over float32 masters, or plain fp32; fast: fp32 on a CPU without instructions for bf16, else bf16"""
    gradient_checkpointing: bool = free(False, "compute activations again instead of keeping them")
    log_every: Count = free(10, "steps between lines of the log", debug=1)
    eval_every: Count | None = free(None, "steps; null: at the end only", debug=always(1))
    save_every: Count | None = free(None, "steps; null: at the end only", debug=always(1))
    keep_checkpoints: Count = free(2, "latest checkpoints that are kept")
    seed: Seed = opt(0, "of the order of rows, and of all that training draws")
    wandb: WandbConfig = free(factory=WandbConfig, debug=DEFAULT)

    def check_fields(self) -> None:  # runs after those of the bases
        expected = f"exactly one of steps and epochs (which is {self.epochs}), the other null"
        self.require("steps", (self.steps is None) != (self.epochs is None), expected)
        micro, rows = self.micro_batch_rows, self.batch_rows
        require(micro is None or micro <= rows, "micro_batch_rows", micro, f"1 to batch_rows ({rows}), or null")
        self.require("warmup", self.steps is None or self.warmup <= self.steps, f"at most steps ({self.steps})")

    def total_steps(self, row_count: int) -> int:
        """Optimizer steps of the whole run over `row_count` rows."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, math.ceil(self.epochs * row_count / self.batch_rows))

    def require_processes(self, process_count: int) -> None:
        """Raise `UserError` for what so many processes, their launcher or this machine's packages cannot do."""
        self.micro_rows(process_count)  # raises `UserError` for rows that do not split evenly
        self.wandb.is_on()  # raises `UserError` for a missing package or key
        is_sharded = any(os.environ.get(f"ACCELERATE_USE_{name}") == "true" for name in ("DEEPSPEED", "FSDP"))
        if self.optimizer == "muon" and is_sharded:
            raise UserError("optimizer=muon: works on whole matrices; use adamw with DeepSpeed and FSDP, or DDP")

    def micro_rows(self, process_count: int) -> int:
        """Rows in one forward of one process; raises `UserError` if `batch_rows` does not split evenly."""
        splits_evenly = self.batch_rows % process_count == 0
        self.require("batch_rows", splits_evenly, f"a multiple of the number of processes ({process_count})")
        rows_of_process = self.batch_rows // process_count
        micro = self.micro_batch_rows or rows_of_process
        if rows_of_process % micro:
            raise UserError(
                f"micro_batch_rows={micro}: must divide batch_rows / processes = {self.batch_rows} / "
                f"{process_count} = {rows_of_process}; null takes all of it"
            )
        return micro

    def lr_scale(self, step: int, total_steps: int) -> float:
        """Factor on every learning rate at `step` (0-based) of `total_steps`: linear warm-up, then the schedule.

        `linear` and `cosine` reach 0 at `total_steps`, so the last step still moves.
        """
        warmup_steps = math.ceil(self.warmup * total_steps) if self.warmup < 1 else int(self.warmup)
        if self.warmup >= 1 and (self.steps is None or total_steps < self.steps):  # epochs or minutes decide the steps
            warmup_steps = min(warmup_steps, total_steps // 2)
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        fraction_left = 1.0 - (step - warmup_steps) / max(1, total_steps - warmup_steps)
        if self.schedule == "constant":
            return 1.0
        return fraction_left if self.schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * fraction_left))
