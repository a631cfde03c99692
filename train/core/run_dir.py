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
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def checkpoints(out_dir: Path) -> list[Path]:
    """The complete checkpoints in `out_dir`, oldest first."""
    paths = out_dir.iterdir() if out_dir.is_dir() else ()
    return sorted((p for p in paths if _CHECKPOINT.fullmatch(p.name) and p.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The number of optimizer steps before `checkpoint`."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


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
    if not (complete := checkpoints(out_dir)):
        return None, False
    newest = complete[-1]
    record = read_mapping(newest / RUN_FILE, "record of a run", "remove the checkpoint, or give another out_dir")
    (minutes, steps), (more_minutes, more_steps) = map(_limits, (record, identity))
    longer = (minutes, steps) != (more_minutes, more_steps) and minutes <= more_minutes and steps <= more_steps
    if longer:
        record, identity = map(_without_limits, (record, identity))
    run_dirs.check_identity(record, identity, newest)
    return newest, longer


def _limits(run: Mapping[str, object]) -> tuple[float, int]:
    """The most minutes and steps of a run by its identity."""
    return construct(float | None, run.get("minutes")) or math.inf, construct(int, run.get("steps"), "steps")


def _without_limits(run: Mapping[str, object]) -> dict[str, object]:
    fit = construct(dict[str, object], run.get("fit", {}), "fit")
    return {**run, "minutes": None, "steps": None, "fit": {**fit, "steps": None, "epochs": None}}


def publish(staged: Path, final: Path, keep: int) -> None:
    """Rename the complete directory `staged` in `STAGING` to `final`; delete all but the newest `keep`."""
    if final.exists():
        _discard(final, staged.parent)
    os.replace(staged, final)
    for old in checkpoints(final.parent)[:-keep]:
        _discard(old, staged.parent)
    shutil.rmtree(staged.parent, ignore_errors=True)


def _discard(checkpoint: Path, staging: Path) -> None:
    """Delete a checkpoint; it is renamed first, because a half-deleted one must not look complete."""
    grave = staging / f"old-{checkpoint.name}"
    shutil.rmtree(grave, ignore_errors=True)
    os.replace(checkpoint, grave)
    shutil.rmtree(grave, ignore_errors=True)
