"""What a training run says while it runs: a line per logging step, a progress bar, W&B."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from draft_models.losses import IGNORE
from outrider.wandb_config import ID_FILE, WandbConfig

LOG_FILE = "log.jsonl"
FORMATS = {"lr": "{:.3g}", "tokens_per_s": "{:.0f}", "grad_norm": "{:.3g}", "eta": "{:.0f}s"}


class Report:
    """The numbers of the steps `steps`, of all processes together, on the main one's screen, in log.jsonl and W&B.

    Every process has one and calls all of it. Its clock starts when it is made. copies: how many processes
    count the same rows.
    """

    def __init__(self, accelerator: Accelerator, out_dir: Path, steps: range, copies: int = 1) -> None:
        self._copies = copies
        self.accelerator, self.out_dir, self.steps = accelerator, out_dir, steps
        self._sums: list[Tensor] = []  # [summed loss, supervised tokens, tokens] of this process since the last line
        self._start = self._interval_start = time.perf_counter()
        shown = accelerator.is_main_process and sys.stderr.isatty()
        self._bar = tqdm(total=steps.stop, initial=steps.start, unit="step", leave=False) if shown else None

    def add(self, summed: Tensor, labels: Tensor) -> None:
        """Count a micro batch: its summed loss (scalar) and its labels [B, T], on the CPU."""
        counts = [int((labels != IGNORE).sum()), labels.numel()]
        counted = torch.tensor(counts, dtype=torch.float64, device=summed.device)
        self._sums.append(torch.cat([summed.detach().double().reshape(1), counted]))

    def advance(self) -> None:
        """A step is done."""
        if self._bar is not None:
            self._bar.update()

    def drain(self) -> tuple[float, float, float]:
        """Sums of [loss, supervised tokens, tokens] over all rows since the last call."""
        own = torch.stack(self._sums).sum(0) / self._copies
        self._sums.clear()
        return tuple(self.accelerator.reduce(own, "sum").tolist())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count as time of the steps around it."""
        began = time.perf_counter()
        yield
        self._interval_start += time.perf_counter() - began

    def log_interval(self, done: int, rate: float, norm: float | None) -> None:
        """The line of the steps since the last one; `done` steps are done. rate: the learning rate, of the last."""
        summed, supervised, tokens = self.drain()
        now = time.perf_counter()
        interval, self._interval_start = now - self._interval_start, now
        per_step = (now - self._start) / (done - self.steps.start)
        values = {"loss": summed / supervised, "lr": rate, "tokens_per_s": tokens / interval}
        values |= {} if norm is None else {"grad_norm": norm}
        self.log(done, {**values, "eta": per_step * (self.steps.stop - done)})

    def log(self, done: int, values: Mapping[str, float]) -> None:
        """One line of named numbers, after `done` steps."""
        if not self.accelerator.is_main_process:
            return
        values = {key: float(value) for key, value in values.items()}
        shown = " ".join(f"{key}={FORMATS.get(key, '{:.4f}').format(value)}" for key, value in values.items())
        line = f"step={done}/{self.steps.stop} {shown}"
        tqdm.write(line) if self._bar is not None else print(line, flush=True)
        with (self.out_dir / LOG_FILE).open("a") as log:
            log.write(json.dumps({"step": done, **values}) + "\n")
        self.accelerator.log(values, step=done)

    def close(self) -> None:
        """The run is over."""
        if self._bar is not None:
            self._bar.close()
        for tracker in self.accelerator.trackers:  # `end_training` would end the processes' group as well
            tracker.finish()


def tracker_of(config: WandbConfig) -> str | None:
    """What an `Accelerator` is to log with; None where W&B is disabled. Raises `UserError` without wandb otherwise."""
    return "wandb" if config.is_on() else None


def start_wandb(accelerator: Accelerator, config: WandbConfig, out_dir: Path, run: Mapping[str, Any]) -> None:
    """Begin the W&B run of an accelerator that logs with `tracker_of(config)`; `out_dir` keeps its id.

    run: JSON-able, what W&B shows as the run's config. Does nothing where W&B is disabled.
    """
    if not accelerator.log_with:
        return
    options = config.init_options(out_dir)
    accelerator.init_trackers(config.project, config=dict(run), init_kwargs={"wandb": options})
    if accelerator.is_main_process:
        (out_dir / ID_FILE).write_text(accelerator.get_tracker("wandb", unwrap=True).id)
