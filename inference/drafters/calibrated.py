"""A drafter with its calibration head, which some stop rules use."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

import torch

from draft_models.calibration.checkpoint import META_FILE, load_calibration
from draft_models.calibration.head import CalibrationHead
from draft_models.targets.open_target import OpenTarget
from inference.settings.kinds import KINDS, DrafterPlugin
from inference.settings.method import MethodConfig

Model = TypeVar("Model")


@dataclass(frozen=True)
class Calibrated(Generic[Model]):
    """A drafter of any kind with hidden states, and its calibration head; None: no method uses one."""

    drafter: Model
    head: CalibrationHead | None = None


def bare(model: Model | Calibrated[Model]) -> Model:
    """The drafter without its head, if `model` is `Calibrated`."""
    return model.drafter if isinstance(model, Calibrated) else model


def head_of(model: object) -> CalibrationHead | None:
    """The head of `model`, if it is `Calibrated`."""
    return model.head if isinstance(model, Calibrated) else None


def head_asked(
    source: str, plugin: DrafterPlugin, where: str, target: OpenTarget, methods: Mapping[str, MethodConfig],
    device: torch.device | str, **widths: int,
) -> CalibrationHead | None:  # fmt: skip
    """The head of the drafter in `where`, read by `plugin`; None if no method with that `source` uses one.

    widths: as in `load_calibration`, which also documents the errors.
    """
    if not any(method.source == source and method.stop.needs_head for method in methods.values()):
        return None
    made_for, folder = asdict(target.fingerprint), KINDS[source].calibration or ""
    return load_calibration(where, plugin.digest(where), device, made_for, folder=folder, **widths)


def head_identity(source: str, where: str | None) -> str | None:
    """A short hash of the metadata of the calibration head of the drafter in `where`; None without a head."""
    folder = None if where is None else KINDS[source].head_folder(where)
    described = None if folder is None else folder / META_FILE
    if described is None or not described.is_file():
        return None
    return hashlib.sha256(described.read_bytes()).hexdigest()[:16]
