"""The memory that each process would need to decode: weights, caches, fixed-shape buffers. Reads no weights."""

import re
from collections.abc import Mapping
from typing import Protocol

import torch
from transformers import PreTrainedConfig

from draft_models.targets.empty_models import empty_layers, empty_model
from draft_models.targets.int8 import int8_bytes, require_linear
from draft_models.targets.model_spec import context_limit
from draft_models.targets.open_target import pick_device, pick_dtype
from inference.engines.footprint import Place, cache_bytes, count, pass_bytes, weight_bytes
from inference.settings.evaluate import EvaluateConfig
from inference.settings.kinds import KINDS, Kind

GB = 1e9


class Decoding(Protocol):
    """The options that determine how models are held in memory."""

    @property
    def dtype(self) -> str: ...


def target_bytes(
    config: EvaluateConfig, target: PreTrainedConfig, place: Place, device: torch.device
) -> dict[str, int]:
    """Bytes of the target's weights, by purpose: transformers' arm and, on a CPU, the runtime's packed copy.

    The runtime stores an int8 model's codes in the fastest layout, which may be floats: this is an upper bound.
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
    """The memory of each device in an evaluation: a greppable line, then one per part. Raises `UserError`."""
    device = planned_device(config.device)
    place, dtype = place_of(config, target, context_limit(target), device)
    held = evaluation_bytes(config, target)
    return describe(held, place, "int8" if config.dtype == "int8" else name_of(dtype), device)


def evaluation_bytes(config: EvaluateConfig, target: PreTrainedConfig) -> dict[str, int]:
    """Bytes of each device in an evaluation, by purpose. Raises `UserError`."""
    device = planned_device(config.device)
    place, _ = place_of(config, target, context_limit(target), device)
    held = target_bytes(config, target, place, device)
    held["caches of plain decoding"] = cache_bytes(target, place) + pass_bytes(target, place)
    for kind in KINDS.values():
        where = config.where(kind)
        if where is not None:
            held |= config.plugin(kind).held(where, target, place)
    return held


def plan_capture(
    config: Decoding, kind: Kind, checkpoint: str, target: PreTrainedConfig, positions: int, layers: int | None = None
) -> str:
    """The same for capturing a calibration head's training data, on texts of up to `positions` tokens.

    checkpoint: where the drafter lies, which is of `kind`. layers: the only ones of the target that are read, with
    embedding and head; 0: nothing of it is; None: all are.
    """
    device = planned_device()
    place, dtype = place_of(config, target, positions, device)
    held = {"target's weights": weight_bytes(target, place)}
    if layers is not None:
        part = count(empty_layers(target, range(layers))) * place.itemsize if layers else 0
        held = {f"target's first {layers} layers, embedding and head": part}
    held |= kind.load_plugin().held(checkpoint, target, place)
    return describe(held, place, name_of(dtype), device)


def planned_device(name: str = "auto") -> torch.device:
    """The device of a plan: the one that a run would use here, or a named GPU, which may be another machine's."""
    return torch.device(name) if re.fullmatch(r"cuda(:\d+)?", name) else pick_device(name)


def place_of(
    config: Decoding, target: PreTrainedConfig, positions: int, device: torch.device
) -> tuple[Place, torch.dtype]:
    """The `Place` and the dtype of a target on `device`."""
    dtype = pick_dtype(config.dtype, target, device)
    return Place(dtype.itemsize, positions), dtype


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype as in the option `dtype`."""
    return str(dtype).removeprefix("torch.")


def describe(held: Mapping[str, int], place: Place, dtype: str, device: torch.device) -> str:
    """The plan as text; dtype: the name of the weights' dtype."""
    lines = [f"plan positions={place.positions} dtype={dtype} device_gb={sum(held.values()) / GB:.2f} device={device}"]
    return "\n".join([*lines, *(f"  {what}: {size / GB:.3f} GB" for what, size in held.items())])
