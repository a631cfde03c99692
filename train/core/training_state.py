"""What a checkpoint says of the training it is from: the steps done and the last evaluation."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outrider.errors import UserError, require
from outrider.files import write_json
from outrider.settings import read_as
from train.core import run_dir

STATE_FILE = "training_state.json"
_WHAT = "state of a training"


@dataclass(frozen=True)
class TrainingState:
    """What `STATE_FILE` holds.

    metrics: the last evaluation, by name; empty where there was none. seconds: what the training had taken by then, of
    all runs, evaluations included.
    """

    step: int
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        numbers = all(isinstance(value, int | float) for value in self.metrics.values())
        require(numbers, "metrics", self.metrics, "numbers by name")


def write_state(checkpoint: Path, reached: TrainingState) -> None:
    """Leave in `checkpoint` what `read_state` reads."""
    write_json(checkpoint / STATE_FILE, asdict(reached))


def read_state(checkpoint: Path) -> TrainingState:
    """What `write_state` has left in `checkpoint`. Raises `UserError` for a damaged file."""
    remedy = f"remove {checkpoint}: resume=true goes on from the one before"
    file = checkpoint / STATE_FILE
    state = read_as(TrainingState, file, _WHAT, remedy)
    if state.step != run_dir.step_of(checkpoint):
        expected = run_dir.step_of(checkpoint)
        raise UserError(f"{file}: damaged {_WHAT} (step={state.step!r}: expected {expected}); {remedy}")
    return state
