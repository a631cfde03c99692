"""trainer_state.json of a checkpoint: what Trainer takes up of it unseen, and the last evaluation."""

from pathlib import Path
from typing import Any, get_type_hints

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from outrider.errors import UserError, reason
from outrider.files import read_json
from outrider.settings import construct
from train import run_dir

_KINDS = {**get_type_hints(TrainerState), "log_history": list[dict[str, Any]], "stateful_callbacks": dict[str, Any]}


def read_trainer_state(checkpoint: Path) -> dict[str, Any]:
    """What Trainer will find in `checkpoint`. Raises `UserError` where it could not go on from that."""
    file, what = checkpoint / TRAINER_STATE_NAME, "state of a training"
    remedy = f"remove {checkpoint}: resume=true goes on from the one before"
    values = read_json(file, what, remedy)
    try:
        TrainerState.load_from_json(str(file))
    except Exception as error:  # it reads by itself, and takes what it finds for its arguments
        raise UserError(f"{file}: damaged {what} ({reason(error)}); {remedy}") from None
    try:
        state: dict[str, Any] = construct(dict[str, Any], values)
        for key, value in state.items():
            if key not in _KINDS:
                raise UserError(f"{key}: unknown")
            construct(_KINDS[key], value, key)
        if state.get("global_step") != run_dir.step_of(checkpoint):
            raise UserError(f"global_step={state.get('global_step')!r}: expected {run_dir.step_of(checkpoint)}")
    except UserError as error:
        raise UserError(f"{file}: damaged {what} ({error}); {remedy}") from None
    return state


def last_metrics(checkpoint: Path) -> dict[str, float]:
    """The last evaluation before `checkpoint`, by name; empty where there was none."""
    history = read_trainer_state(checkpoint).get("log_history", [])
    evaluations = [entry for entry in history if any(key.startswith("eval_") for key in entry)]
    last = evaluations[-1] if evaluations else {}
    metrics = {key.removeprefix("eval_"): value for key, value in last.items() if key.startswith("eval_")}
    if not all(isinstance(value, int | float) for value in metrics.values()):
        raise UserError(f"{checkpoint / TRAINER_STATE_NAME}: damaged evaluation ({metrics}); remove {checkpoint}")
    return metrics
