"""Configs of the training commands. Light on purpose: a mistake shows before torch is imported."""

import math
import netrc
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from data_prep.settings import DataConfig
from draft_models.errors import UserError, require, require_choice

TOY_REPORT = "toy_target.json"  # written last: a directory that has it holds a finished toy target
WANDB_MODES = ("auto", "online", "offline", "disabled")


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases: `auto` is online when a key is at hand (WANDB_API_KEY or netrc), else offline."""

    mode: str = "auto"
    project: str = "outrider"
    name: str | None = None

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

    steps: int | None = None
    epochs: float | None = None
    batch_rows: int = 64  # rows in one optimizer step, over all processes
    micro_batch_rows: int | None = None  # rows in one forward of one process; null: batch_rows / processes
    optimizer: str = "adamw"
    lr: float = 1e-3
    muon_lr: float = 0.02  # optimizer=muon: the layers' matrices; everything else is AdamW at `lr`
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: float = 0.0  # below 1: share of the steps; from 1: number of steps
    schedule: str = "linear"
    max_grad_norm: float = 1.0  # 0: no clipping
    precision: str = "bf16"  # autocast over float32 masters, or plain fp32
    gradient_checkpointing: bool = False
    log_every: int = 10
    eval_every: int | None = None  # steps; null: at the end only
    save_every: int | None = None  # steps; null: at the end only
    keep_checkpoints: int = 2
    seed: int = 0
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


@dataclass(frozen=True)
class ToyTargetConfig:
    """A small Llama trained from scratch, to learn and to test on.

    Out comes an ordinary Hugging Face directory: weights, config and a byte-level BPE tokenizer.
    """

    data: DataConfig
    fit: FitConfig
    out_dir: str = "runs/toy_target"
    resume: bool = False
    vocabulary: int = 2048
    layers: int = 12
    hidden: int = 256
    intermediate: int = 704
    heads: int = 4
    kv_heads: int = 4
    tied: bool = False
    seq_len: int = 256
    max_positions: int = 2048
    eval_rows: int = 200  # held-out rows of seq_len tokens behind the final bits per byte; 0: all
    sample_tokens: int = 160  # greedy text printed at the end; 0: none

    def __post_init__(self) -> None:
        require(self.vocabulary >= 300, "vocabulary", self.vocabulary, "at least 300: bytes, special tokens, merges")
        for key in ("layers", "hidden", "intermediate", "heads", "kv_heads"):
            require(getattr(self, key) > 0, key, getattr(self, key), "a positive number")
        require(
            self.hidden % (2 * self.heads) == 0,
            "hidden",
            self.hidden,
            f"an even multiple of heads ({self.heads})",
        )
        require(self.heads % self.kv_heads == 0, "kv_heads", self.kv_heads, f"a divisor of heads ({self.heads})")
        require(self.seq_len > 1, "seq_len", self.seq_len, "at least 2 tokens")
        require(
            self.max_positions >= self.seq_len,
            "max_positions",
            self.max_positions,
            f"at least seq_len ({self.seq_len})",
        )
        require(self.eval_rows >= 0, "eval_rows", self.eval_rows, "zero (all) or more")
        require(self.sample_tokens >= 0, "sample_tokens", self.sample_tokens, "zero or more")

    def deciding(self) -> dict[str, Any]:
        """The options that decide the resulting weights; a resumed run must agree on these."""
        free = {"out_dir", "resume", "eval_rows", "sample_tokens"}
        values = {key: value for key, value in asdict(self).items() if key not in free}
        del values["data"]["cache_dir"]
        return values | {"fit": self.fit.deciding()}


@dataclass(frozen=True)
class EesdConfig:
    """EESD: train an early-exit drafter on the first layers of `target`."""

    target: str  # model directory or Hub name; only the layers needed are read
    data: DataConfig
    fit: FitConfig
    revision: str | None = None
    exit_layer: int | None = None  # N, the target layers under the exit layer; null: 8 % of them
    train_head: bool = True  # false: share the target's head, the thing to do with a large vocabulary
    objective: str = "cross_entropy"  # the paper's, on the text's tokens; kl: from the whole target, run as well
    frozen_dtype: str = "bfloat16"
    seq_len: int = 2048
    eval_rows: int = 64  # held-out rows behind eval_top1
    eval_batch_rows: int = 4
    decode_prompts: int = 0  # held-out prompts to decode with the whole target for eval_tau; 0 never loads it
    decode_tokens: int = 64
    out_dir: str = "runs/eesd"
    resume: bool = False

    def __post_init__(self) -> None:
        require(bool(self.target), "target", self.target, "a model directory or Hub name")
        require(
            self.exit_layer is None or self.exit_layer >= 1,
            "exit_layer",
            self.exit_layer,
            "null or at least 1",
        )
        require_choice("objective", self.objective, ("cross_entropy", "kl"))
        require_choice("frozen_dtype", self.frozen_dtype, ("bfloat16", "float16", "float32", "float64"))
        require(self.seq_len >= 2, "seq_len", self.seq_len, "at least 2 tokens")
        for key in ("eval_rows", "eval_batch_rows", "decode_tokens"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        fraction = self.data.heldout_fraction
        require(fraction > 0, "data.heldout_fraction", fraction, "more than 0: training is watched on held-out text")
        require(self.decode_prompts >= 0, "decode_prompts", self.decode_prompts, "0 or more")


def _netrc_has_wandb() -> bool:
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return host in netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError):
        return False
