"""Config of the training loop; light, so that a mistake shows before torch is imported."""

import math
import netrc
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from outrider.errors import UserError, require, require_choice

WANDB_MODES = ("auto", "online", "offline", "disabled")


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases: `auto` is online when a key is at hand (WANDB_API_KEY or netrc), else offline."""

    mode: str = "auto"  # auto | online | offline | disabled
    project: str = "outrider"  # the W&B project
    name: str | None = None  # of the run there; null: W&B makes one up

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, WANDB_MODES)
        require(bool(self.project), "project", self.project, "a project name")

    def resolved_mode(self) -> str:
        """`online`, `offline` or `disabled`; the environment's WANDB_MODE decides for `auto` when set."""
        if self.mode != "auto":
            return self.mode
        if os.environ.get("WANDB_MODE") in WANDB_MODES[1:]:
            return os.environ["WANDB_MODE"]
        return "online" if os.environ.get("WANDB_API_KEY") or _netrc_has_wandb() else "offline"


@dataclass(frozen=True)
class FitConfig:
    """The training loop. Exactly one of `steps` (optimizer steps) and `epochs` is given."""

    steps: int | None = None  # optimizer steps, or:
    epochs: float | None = None  # passes over the rows; one of the two is null
    batch_rows: int = 64  # rows in one optimizer step, over all processes
    micro_batch_rows: int | None = None  # rows in one forward of one process; null: batch_rows / processes
    optimizer: str = "adamw"  # adamw | muon
    lr: float = 1e-3  # the highest learning rate
    muon_lr: float = 0.02  # optimizer=muon: the layers' matrices; everything else is AdamW at `lr`
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    weight_decay: float = 0.0  # of matrices; norms and biases have none
    warmup: float = 0.0  # below 1: share of the steps; from 1: number of steps
    schedule: str = "linear"  # linear | cosine | constant, after the warm-up
    max_grad_norm: float = 1.0  # 0: no clipping
    precision: str = "bf16"  # autocast over float32 masters, or plain fp32
    gradient_checkpointing: bool = False  # compute activations again instead of keeping them
    log_every: int = 10  # steps between lines of the log
    eval_every: int | None = None  # steps; null: at the end only
    save_every: int | None = None  # steps; null: at the end only
    keep_checkpoints: int = 2  # so many of the latest ones stay
    seed: int = 0  # of the order of rows, and of all that training draws
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def __post_init__(self) -> None:
        require(
            (self.steps is None) != (self.epochs is None),
            "steps",
            self.steps,
            f"exactly one of steps and epochs (which is {self.epochs}), the other null",
        )
        require(self.steps is None or self.steps > 0, "steps", self.steps, "a positive number of steps")
        require(
            self.epochs is None or (math.isfinite(self.epochs) and self.epochs > 0),
            "epochs",
            self.epochs,
            "a positive number of passes over the rows",
        )
        require(self.batch_rows > 0, "batch_rows", self.batch_rows, "at least one row")
        require(
            self.micro_batch_rows is None or 0 < self.micro_batch_rows <= self.batch_rows,
            "micro_batch_rows",
            self.micro_batch_rows,
            f"1 to batch_rows ({self.batch_rows}), or null",
        )
        require_choice("optimizer", self.optimizer, ("adamw", "muon"))
        require_choice("schedule", self.schedule, ("linear", "cosine", "constant"))
        require_choice("precision", self.precision, ("bf16", "fp32"))
        for key in ("lr", "muon_lr"):
            rate = getattr(self, key)
            require(math.isfinite(rate) and rate > 0, key, rate, "a positive learning rate")
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "betas",
            self.betas,
            "two numbers in [0, 1)",
        )
        for key in ("weight_decay", "warmup", "max_grad_norm"):
            value = getattr(self, key)
            require(math.isfinite(value) and value >= 0, key, value, "zero or more")
        require(
            self.steps is None or self.warmup <= self.steps,
            "warmup",
            self.warmup,
            f"at most steps ({self.steps})",
        )
        require(self.log_every > 0, "log_every", self.log_every, "a positive number of steps")
        for key in ("eval_every", "save_every"):
            every = getattr(self, key)
            require(every is None or every > 0, key, every, "a positive number of steps, or null")
        require(self.keep_checkpoints > 0, "keep_checkpoints", self.keep_checkpoints, "at least one")
        require(0 <= self.seed < 2**31, "seed", self.seed, "0 to 2^31 - 1")

    def total_steps(self, rows: int) -> int:
        """Optimizer steps of the whole run over `rows` rows."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, math.ceil(self.epochs * rows / self.batch_rows))

    def micro_rows(self, processes: int) -> int:
        """Rows in one forward of one process; raises `UserError` if `batch_rows` does not split evenly."""
        require(
            self.batch_rows % processes == 0,
            "batch_rows",
            self.batch_rows,
            f"a multiple of the number of processes ({processes})",
        )
        share = self.batch_rows // processes
        micro = self.micro_batch_rows or share
        if share % micro:
            raise UserError(
                f"micro_batch_rows={micro}: must divide batch_rows / processes = {self.batch_rows} / "
                f"{processes} = {share}; null takes all of it"
            )
        return micro

    def lr_scale(self, step: int, total: int) -> float:
        """Factor on every learning rate at `step` (0-based) of `total`: linear warm-up, then the schedule.

        `linear` and `cosine` reach 0 at `total`, so the last step still moves.
        """
        warmup = math.ceil(self.warmup * total) if self.warmup < 1 else int(self.warmup)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        left = 1.0 - (step - warmup) / max(1, total - warmup)
        if self.schedule == "constant":
            return 1.0
        return left if self.schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * left))

    def deciding(self) -> dict[str, Any]:
        """The options that decide the resulting weights; a resumed run must agree on these."""
        free = {"micro_batch_rows", "gradient_checkpointing", "log_every", "eval_every", "save_every"}
        free |= {"keep_checkpoints", "wandb"}
        return {key: value for key, value in asdict(self).items() if key not in free}


def _netrc_has_wandb() -> bool:
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return host in netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError):
        return False
