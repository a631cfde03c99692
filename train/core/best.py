"""The best weights of a training: those of the evaluation with the highest τ, which are not always the last ones."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from outrider.errors import UserError, reason
from outrider.files import parse_json, require_writable, write_atomically
from outrider.run_dirs import changes
from outrider.settings import Settings, construct
from train.core.trained_weights import WEIGHTS_FILE, trained_parameters

BEST_FOLDER = "best"


class Best:
    """The trained weights with the highest τ so far, in one file that is the old one or all of the new.

    They count for this very `run` only. A killed run finds them again. Evaluations are a function of the step, so those
    that a resumed run repeats change nothing.
    """

    def __init__(self, folder: Path, run: Mapping[str, object], config: Settings | None = None):
        """config: the settings that `run` is made of, for options newer than the weights (see `changes`)."""
        self.file, self.identity, self.config = folder / WEIGHTS_FILE, run, config
        self.run = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()

    def offer(self, student: nn.Module, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the student's weights if they are better. Raises `UserError` where they cannot be written."""
        before = self._described()
        if before is not None and before[1]["tau"] >= metrics["tau"]:
            return
        weights = {name: p.detach().cpu().contiguous() for name, p in trained_parameters(student).items()}
        described = {"run": self.run, "identity": json.dumps(self.identity)}
        described |= {"step": str(step), "metrics": json.dumps(dict(metrics))}
        require_writable(self.file.parent)
        write_atomically(self.file, save(weights, metadata=described))

    def restore(self, student: nn.Module) -> tuple[int, dict[str, float]]:
        """Put the best weights back; returns their step and metrics. Raises `UserError` where they are gone."""
        described = self._described()
        if described is None:
            raise UserError(f"{self.file}: the run's best weights are missing; train again in another out_dir")
        with torch.no_grad(), safe_open(self.file, framework="pt") as stored:
            for name, parameter in trained_parameters(student).items():
                parameter.copy_(stored.get_tensor(name))
        return described

    def _described(self) -> tuple[int, dict[str, float]] | None:
        try:
            with safe_open(self.file, framework="pt") as stored:
                described = stored.metadata() or {}
        except (OSError, SafetensorError):
            return None
        try:
            if not self._is_of_this_run(described):
                return None
            step, metrics = int(described["step"]), construct(dict[str, float], parse_json(described["metrics"]))
            return step, {**metrics, "tau": metrics["tau"]}
        except (KeyError, ValueError, UserError) as error:
            raise UserError(f"{self.file}: damaged ({reason(error)}); remove it and train again") from None

    def _is_of_this_run(self, described: Mapping[str, str]) -> bool:
        if described.get("run") == self.run:
            return True
        before = parse_json(described.get("identity", "null"))
        return isinstance(before, dict) and not changes(before, self.identity, self.config)
