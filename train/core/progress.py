"""The output of a training run: a line per logging step, progress, W&B."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from outrider.base.errors import UserError, reason
from outrider.base.files import write_atomically
from outrider.base.progress import Stage
from outrider.base.wandb_config import ID_FILE, WandbConfig
from outrider.draft_models.losses import IGNORE

LOG_FILE = "log.jsonl"
# By metric, how the printed line writes the value; other metrics have four decimals.
FORMATS = {"lr": "{:.3g}", "tokens_per_s": "{:.0f}", "grad_norm": "{:.3g}", "eta": "{:.0f}s"}


class TrainingLog(Stage):
    """The stage "training" of the progress bar, and the metrics of its optimizer steps `steps` over all processes.

    The main process prints the metrics and sends them to log.jsonl and W&B. Every process has a log and calls every
    method. evaluates: an evaluation follows the last step. max_seconds: of the steps. `total`, `after` (seconds
    from the last step to the end) and `seconds_left` are those of `Stage`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        out_dir: Path,
        steps: range,
        evaluates: bool = False,
        max_seconds: float = math.inf,
    ) -> None:
        super().__init__("training", steps.stop, "steps", done_before=steps.start, max_seconds=max_seconds)
        self.accelerator, self.out_dir, self._evaluates = accelerator, out_dir, evaluates
        self._sums: list[Tensor] = []  # [summed loss, supervised tokens, tokens] of this process since the last line
        self._interval_start = time.perf_counter()

    def add(self, loss_sum: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Count a micro batch, which is on the CPU: its `loss_sum` (scalar), its labels, and its tokens but padding."""
        labels = batch["labels"]
        token_count = (batch["documents"] >= 0).sum() if "documents" in batch else labels.numel()
        counts = loss_sum.new_tensor([int((labels != IGNORE).sum()), int(token_count)], dtype=torch.float64)
        self._sums.append(torch.cat([loss_sum.detach().double().reshape(1), counts]))

    def drain(self) -> tuple[float, float, float]:
        """Sums of (loss, supervised tokens, tokens) over the micro batches of all processes since the last call."""
        sums = torch.stack(self._sums).sum(0)
        self._sums.clear()
        return tuple(self.accelerator.reduce(sums, "sum").tolist())

    @contextmanager
    def pause_clock(self) -> Iterator[None]:
        """Exclude the time spent inside from the time of the steps around it."""
        began = time.perf_counter()
        yield
        self._interval_start += time.perf_counter() - began

    @contextmanager
    def time_evaluation(self, step: int) -> Iterator[None]:
        """`pause_clock`, for the evaluation after `step` steps; the last one is expected to take the same time."""
        began = time.perf_counter()
        with self.pause_clock(), Stage(f"evaluating after step {step}"):
            yield
        self.after = time.perf_counter() - began  # seconds that follow the last step, for the time left

    def log_interval(self, step: int, lr: float, grad_norm: float | None) -> None:
        """Log the steps since the previous line, after `step` steps. lr: the learning rate of the last step."""
        loss_sum, label_count, token_count = self.drain()
        end_time = time.perf_counter()
        interval_seconds, self._interval_start = end_time - self._interval_start, end_time
        metrics = {"loss": loss_sum / label_count, "lr": lr, "tokens_per_s": token_count / interval_seconds}
        metrics |= {} if grad_norm is None else {"grad_norm": grad_norm}
        suffix = "+evaluation" if self._evaluates and not self.after else ""  # of unknown length, not part of eta
        self.log(step, {**metrics, "eta": self.seconds_left or 0.0}, suffix)

    def log(self, step: int, metrics: Mapping[str, float], suffix: str = "") -> None:
        """Log one line of named numbers, after `step` steps. suffix: printed after the last number."""
        if not self.accelerator.is_main_process:
            return
        metrics = {key: float(value) for key, value in metrics.items()}
        metrics_text = " ".join(f"{key}={FORMATS.get(key, '{:.4f}').format(value)}" for key, value in metrics.items())
        print(f"step={step}/{self.total} {metrics_text}{suffix}", flush=True)
        with (self.out_dir / LOG_FILE).open("a", encoding="utf-8") as log_file:
            log_file.write(json.dumps({"step": step, **metrics}) + "\n")
        self.accelerator.log(metrics, step=step)


def cut_log(out_dir: Path, step: int) -> None:
    """Remove the lines of log.jsonl that a killed run wrote after step `step`; they will be written again."""
    log_path = out_dir / LOG_FILE
    lines = log_path.read_bytes().splitlines(keepends=True) if log_path.exists() else []
    earlier_lines = [line for line in lines if _step_of(line) <= step]
    if len(earlier_lines) < len(lines):
        write_atomically(log_path, b"".join(earlier_lines))


def _step_of(line: bytes) -> float:
    """The step of a line of log.jsonl; infinity for an incomplete line."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf


def start_wandb(accelerator: Accelerator, config: WandbConfig, out_dir: Path, run: Mapping[str, object]) -> None:
    """Start the W&B run of an accelerator that logs there; its id is stored in `out_dir`.

    run: JSON-able, the run's config in W&B. Does nothing if W&B is disabled.
    """
    if not accelerator.log_with:
        return
    import wandb

    try:
        accelerator.init_trackers(config.project, config=dict(run), init_kwargs={"wandb": config.init_options(out_dir)})
    except wandb.Error as error:
        raise UserError(f"wandb.mode: {reason(error)}; wandb login, or fit.wandb.mode=offline") from None
    if accelerator.is_main_process:
        (out_dir / ID_FILE).write_text(accelerator.get_tracker("wandb", unwrap=True).id, "utf-8")
