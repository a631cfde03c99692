"""What every process would hold to decode: weights, caches, and what passes of fixed shape write. Reads no weights."""

import re
from collections.abc import Mapping
from typing import Protocol

import torch
from transformers import PreTrainedConfig

from draft_models.targets.anatomy import context_limit
from draft_models.targets.empty_models import empty_layers, empty_model
from draft_models.targets.int8 import int8_bytes, require_linear
from draft_models.targets.open_target import pick_device, pick_dtype
from inference.engines.footprint import Place, cache_bytes, count, pass_bytes, weight_bytes
from inference.settings.evaluate import EvaluateConfig
from inference.settings.kinds import KINDS, Kind

GB = 1e9


class Decoding(Protocol):
    """The options that say how models are held."""

    @property
    def dtype(self) -> str: ...


def target_bytes(
    config: EvaluateConfig, target: PreTrainedConfig, place: Place, device: torch.device
) -> dict[str, int]:
    """Of the target's weights, as transformers' arm has them and, on a CPU, as the runtime has them, made of a copy.

    An int8 model's codes are laid out for the runtime as what is fastest, which may be floats: at most so many bytes.
    """
    floats = weight_bytes(target, place)
    held = {"target's weights": floats}
    if config.dtype == "int8":
        model = empty_model(target)
        require_linear(model, f"target={config.target or config.early_exit}")
        held["target's weights"] = int8_bytes(model, place.itemsize)
    if device.type == "cpu":
        held["the same, packed for the runtime"] = floats
        held["a copy that is packed, while models are loaded"] = floats
    return held


def plan_evaluation(config: EvaluateConfig, target: PreTrainedConfig) -> str:
    """What each device holds in an evaluation: a greppable line, then one for each part. Raises `UserError`."""
    device = planned_device(config.device)
    place, dtype = place_of(config, target, context_limit(target), device)
    held = target_bytes(config, target, place, device)
    held["caches of plain decoding"] = cache_bytes(target, place) + pass_bytes(target, place)
    for kind in KINDS.values():
        where = config.where(kind)
        if where is not None:
            held |= config.maker(kind).held(where, target, place)
    return describe(held, place, "int8" if config.dtype == "int8" else name_of(dtype), device)


def plan_capture(
    config: Decoding, kind: Kind, checkpoint: str, target: PreTrainedConfig, positions: int, layers: int | None = None
) -> str:
    """The same of capturing what a calibration head learns from, on texts of up to `positions` tokens.

    checkpoint: where the drafter lies, which is of `kind`. layers: the only ones of the target that are read, with
    embedding and head; 0: nothing of it is; None: all are.
    """
    device = planned_device()
    place, dtype = place_of(config, target, positions, device)
    held = {"target's weights": weight_bytes(target, place)}
    if layers is not None:
        part = count(empty_layers(target, range(layers))) * place.itemsize if layers else 0
        held = {f"target's first {layers} layers, embedding and head": part}
    held |= kind.load_maker().held(checkpoint, target, place)
    return describe(held, place, name_of(dtype), device)


def planned_device(name: str = "auto") -> torch.device:
    """The device that a plan is of: the one that a run would use here, or a GPU of another machine that is named."""
    return torch.device(name) if re.fullmatch(r"cuda(:\d+)?", name) else pick_device(name)


def place_of(
    config: Decoding, target: PreTrainedConfig, positions: int, device: torch.device
) -> tuple[Place, torch.dtype]:
    """How a target is held on `device`, and in which dtype."""
    dtype = pick_dtype(config.dtype, target, device)
    return Place(dtype.itemsize, positions), dtype


def name_of(dtype: torch.dtype) -> str:
    """As the option has it."""
    return str(dtype).removeprefix("torch.")


def describe(held: Mapping[str, int], place: Place, dtype: str, device: torch.device) -> str:
    """The plan as text; dtype: what the weights are, by name."""
    lines = [f"plan positions={place.positions} dtype={dtype} device_gb={sum(held.values()) / GB:.2f} device={device}"]
    return "\n".join([*lines, *(f"  {what}: {size / GB:.3f} GB" for what, size in held.items())])
