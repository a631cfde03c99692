"""Trainings of drafters in this process, by the settings of train/eesd.py and train/finetune_drafter.py."""

import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf import build, register
from conf.options import compose_defaults
from draft_models.checkpoint import META_FILE
from draft_models.small_lm import TRAINING_FILE
from inference.drafters.registry import KINDS as DRAFTERS
from outrider.files import require_writable, write_json
from train.early_exit import train_early_exit
from train.progress import LOG_FILE
from train.settings import EesdConfig, FinetuneConfig
from train.small_lm import finetune_drafter
from train.time_budget import STEPS_FILE

# No step is chosen by an evaluation: a training ends with its minutes.
COMMON = ["fit.epochs=null", "fit.steps=1000000", "fit.eval_every=null", "fit.save_every=null",
          "fit.wandb.mode=disabled", "fit.warmup=0", "fit.schedule=linear", "fit.optimizer=muon", "fit.muon_lr=0.02",
          "fit.lr=4e-3", "fit.batch_rows=8", "seq_len=256", "decode_prompts=16", "decode_tokens=64",
          "resume=true"]  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of drafter: its command in conf/, its settings, what trains it, and the file that is written last."""

    label: str
    command: str
    schema: type[Any]
    train: Callable[[Any], None]
    done: str
    overrides: tuple[str, ...]


KINDS = {
    "eesd": Kind("early exit", "eesd", EesdConfig, train_early_exit, META_FILE, ()),
    "small_lm": Kind(
        "small LM", "finetune_drafter", FinetuneConfig, finetune_drafter, TRAINING_FILE, ("drafter=tiny",)
    ),
}


def train(kind: Kind, out_dir: Path, *overrides: str) -> Any:
    """Train by the command's settings unless that is done already; returns the settings.

    overrides: of those of one name the last one counts.
    """
    register(kind.command, kind.schema)
    given = list({one.partition("=")[0]: one for one in (*COMMON, *kind.overrides, *overrides)}.values())
    config = build(kind.schema, compose_defaults(kind.command, [*given, f"out_dir={out_dir}"]))
    if not (out_dir / kind.done).exists():
        print("+", kind.command, *given, f"out_dir={out_dir}", flush=True)
        kind.train(config)
        gc.collect()  # what trains is part of cycles, and holds the models
    return config


def trained_for(out_dir: Path) -> dict[str, Any]:
    """How many steps a training of so many minutes took, how long those were to take by what was measured at its start,
    and how long they took, evaluations and checkpoints included."""
    known = json.loads((out_dir / STEPS_FILE).read_text())
    maker = DRAFTERS["early_exit" if (out_dir / META_FILE).exists() else "small_lm"].load_maker()
    spent = maker.trained_seconds(str(out_dir))
    planned = known["steps"] * known["seconds_per_step"] / 60
    return {"steps": known["steps"], "minutes": planned, "minutes_spent": spent and spent / 60}


def log_of(out_dir: Path) -> list[dict[str, Any]]:
    """The lines of a training's log."""
    return [json.loads(line) for line in (out_dir / LOG_FILE).read_text().splitlines()]


def require_same(out: Path, asked: Mapping[str, Any], common: Sequence[str] = COMMON) -> None:
    """End with a message where `out` holds drafters that were trained otherwise; else note how they are trained.

    common: options of all trainings that nobody asked for.
    """
    made_for = require_writable(out) / "settings.json"
    asked = {**asked, "common": list(common)}
    if made_for.exists() and json.loads(made_for.read_text()) != asked:
        sys.exit(f"error: {out}: holds drafters of other settings; choose another directory")
    write_json(made_for, asked)
