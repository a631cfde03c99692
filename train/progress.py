"""What a training run says while it runs: a line per logging step, a progress bar, W&B."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainingArguments

from outrider.errors import UserError
from train.fit_settings import WandbConfig

LOG_FILE = "log.jsonl"


class Report(TrainerCallback):
    """One line per logging step on stdout and in log.jsonl, a progress bar on a terminal, and W&B if asked for."""

    def __init__(self, out_dir: Path, wandb: WandbConfig, run: Mapping[str, Any]) -> None:
        self.out_dir, self.config, self.run = out_dir, wandb, run
        self.bar: tqdm | None = None
        self.wandb: Any = None

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.wandb = start_wandb(self.config, self.out_dir, self.run)
        if sys.stderr.isatty():
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", leave=False)

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.update()

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        values = {key: float(value) for key, value in logs.items() if key != "epoch"}
        line = f"step={state.global_step}/{state.max_steps} " + " ".join(
            f"{key}={FORMATS.get(key, '{:.4f}').format(value)}" for key, value in values.items()
        )
        tqdm.write(line) if self.bar is not None else print(line, flush=True)
        with (self.out_dir / LOG_FILE).open("a") as log:
            log.write(json.dumps({"step": state.global_step, **values}) + "\n")
        if self.wandb is not None:
            self.wandb.log(values, step=state.global_step)

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.wandb is not None:
            self.wandb.finish()


FORMATS = {"lr": "{:.3g}", "tokens_per_s": "{:.0f}", "grad_norm": "{:.3g}", "eta": "{:.0f}s"}


def start_wandb(config: WandbConfig, out_dir: Path, run: Mapping[str, Any]) -> Any:
    """The W&B run to log to, None where it is disabled; `out_dir` keeps its id. Raises `UserError` without wandb."""
    mode = config.resolved_mode()
    if mode == "disabled":
        return None
    try:
        import wandb
    except ImportError:
        raise UserError("wandb.mode: wandb is not installed; pip install wandb, or disabled") from None
    id_file = out_dir / "wandb_run_id"
    known = id_file.read_text().strip() if id_file.exists() else None  # a resumed run continues its curves
    started = wandb.init(
        project=config.project,
        name=config.name,
        mode=mode,  # type: ignore[arg-type]
        dir=str(out_dir),
        config=dict(run),
        id=known,
        resume="allow" if known else None,
    )
    id_file.write_text(started.id)
    return started
