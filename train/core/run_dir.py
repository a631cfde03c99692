"""The protocol of a training run's out_dir: complete checkpoints, and the conditions for using the directory.

A checkpoint is a directory `checkpoint-<step>`. It is renamed to that name after its last byte is written, so every
directory with such a name is complete. A command locks its out_dir while it runs (`outrider.base.run_dirs.only_run`).
This module is light, so that entries can use it before heavy imports.
"""

import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from outrider.base import run_dirs
from outrider.base.files import read_mapping, require_writable
from outrider.base.settings import construct
from outrider.train.settings.fit import CHECKPOINTS

RUN_FILE = "run.json"  # in every checkpoint: the run's identity
STAGING = ".staging"  # incomplete files; never read
_CHECKPOINT = re.compile(r"checkpoint-\d+")


def checkpoints(out_dir: Path) -> list[Path]:
    """The complete checkpoints in `out_dir`, oldest first."""
    paths = out_dir.iterdir() if out_dir.is_dir() else ()
    return sorted((p for p in paths if _CHECKPOINT.fullmatch(p.name) and p.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The number of optimizer steps before `checkpoint`."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def describe_newest(out_dir: Path) -> str:
    """The newest checkpoint to resume from, in words."""
    folders = checkpoints(out_dir)
    return f"{folders[-1].name} is intact" if folders else "there is no checkpoint yet"


def require_free(out_dir: Path, resume: bool) -> None:
    """Create `out_dir`; raise `UserError` if it is not writable, or holds a run and `resume` is off."""
    run_dirs.require_free(require_writable(out_dir), (CHECKPOINTS,), resume)


def open_run(out_dir: Path, identity: Mapping[str, object], resume: bool) -> tuple[Path | None, bool]:
    """Create `out_dir` and return the run's starting point: its newest checkpoint, or None for the beginning; and
    whether the run is longer than before: it may have more minutes, steps or epochs.

    identity: JSON-able, everything that determines the result: configs, data, seeds.

    Raises `UserError` if the directory is not writable, if it holds another run's checkpoints and `resume` is off, and
    if the run to resume has another identity; the message names each difference.
    """
    require_free(out_dir, resume)
    if not (checkpoint_dirs := checkpoints(out_dir)):
        return None, False
    newest_dir = checkpoint_dirs[-1]
    record = read_mapping(newest_dir / RUN_FILE, "record of a run", "remove the checkpoint, or give another out_dir")
    (minutes, steps), (new_minutes, new_steps) = map(_limits, (record, identity))
    is_longer = (minutes, steps) != (new_minutes, new_steps) and minutes <= new_minutes and steps <= new_steps
    if is_longer:  # a longer run may differ in its limits, and in nothing else
        record, identity = map(_without_limits, (record, identity))
    run_dirs.check_identity(record, identity, newest_dir)
    return newest_dir, is_longer


def _limits(record: Mapping[str, object]) -> tuple[float, int]:
    """The most minutes and steps of a run by its identity."""
    return construct(float | None, record.get("minutes")) or math.inf, construct(int, record.get("steps"), "steps")


def _without_limits(run_record: Mapping[str, object]) -> dict[str, object]:
    """A run's identity without its minutes, steps and epochs."""
    fit_settings = construct(dict[str, object], run_record.get("fit", {}), "fit")
    return {**run_record, "minutes": None, "steps": None, "fit": {**fit_settings, "steps": None, "epochs": None}}


def publish(staged_dir: Path, final_dir: Path, n_keep: int) -> None:
    """Rename the complete directory `staged_dir` in `STAGING` to `final_dir`; delete all but the newest `n_keep`."""
    if final_dir.exists():
        _discard(final_dir, staged_dir.parent)
    os.replace(staged_dir, final_dir)
    for old_checkpoint in checkpoints(final_dir.parent)[:-n_keep]:
        _discard(old_checkpoint, staged_dir.parent)
    shutil.rmtree(staged_dir.parent, ignore_errors=True)


def _discard(checkpoint: Path, staging: Path) -> None:
    """Delete a checkpoint; it is renamed first, because a half-deleted one must not look complete."""
    trash_dir = staging / f"old-{checkpoint.name}"
    shutil.rmtree(trash_dir, ignore_errors=True)
    os.replace(checkpoint, trash_dir)
    shutil.rmtree(trash_dir, ignore_errors=True)
