"""The memory of a command: weights, caches, and a training's state and activations, computed without reading weights.

`plan=true` prints it. A run that is out of memory prints it too, with the options that lower it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.base.errors import UserError, reason
from outrider.draft_models.targets.int8 import int8_bytes, require_linear
from outrider.draft_models.targets.model_files import empty_layers, empty_model
from outrider.draft_models.targets.model_spec import context_limit
from outrider.draft_models.targets.open_target import pick_device, pick_dtype
from outrider.inference.drafters.plugin import DrafterPlugin
from outrider.inference.engines.graphs.fixed_shapes import WIDTHS
from outrider.inference.loading.cache_budget import position_bytes
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kind import Kind
from outrider.inference.settings.kinds import KINDS

GB = 1e9
_ALLOCATION = re.compile("out of memory|DefaultCPUAllocator|can't allocate memory")  # in torch's errors


@dataclass(frozen=True)
class Held:
    """`size` bytes of a device, for one purpose. less: the option that makes them fewer; "": none does."""

    what: str
    size: int
    less: str = ""


@dataclass(frozen=True)
class Place:
    """The storage of models: `itemsize` bytes per value, texts of up to `positions` tokens."""

    itemsize: int
    positions: int

    @classmethod
    def of(cls, dtype: str, target: PreTrainedConfig, positions: int, device: torch.device) -> "Place":
        """On `device`, with the option `dtype` of a command."""
        return cls(pick_dtype(dtype, target, device).itemsize, positions)

    @property
    def slots(self) -> int:
        """The slots of a cache for fixed-shape passes (see `inference.engines.graphs.cuda_graphs.Arena`)."""
        widest = WIDTHS[-1]
        return -(-(self.positions + widest) // widest) * widest + widest


def weight_bytes(model: PreTrainedConfig | nn.Module, storage: Place) -> int:
    """Bytes of a model's weights; shared ones count once."""
    module = model if isinstance(model, nn.Module) else empty_model(model)
    return storage.itemsize * sum(tensor.numel() for tensor in module.parameters())


def cache_bytes(config: PreTrainedConfig, storage: Place, layers: int | None = None) -> int:
    """Bytes of the keys and values of `layers` layers, by default all."""
    return storage.slots * position_bytes(config, storage.itemsize, layers)


def pass_bytes(config: PreTrainedConfig, storage: Place) -> int:
    """Bytes of the inputs and outputs of fixed-shape passes: hidden states and logits of the widest one."""
    return WIDTHS[-1] * (4 * config.hidden_size + config.vocab_size) * storage.itemsize


def target_memory(target: PreTrainedConfig, storage: Place, layers: int | None = None, int8: str = "") -> list[Held]:
    """The target's weights. layers: the only ones that are read, with embedding and head; int8: whose codes are held,
    named for errors. Raises `UserError` for a model that int8 cannot hold."""
    if int8:
        model = empty_model(target)
        require_linear(model, int8)
        return [Held("target's weights", int8_bytes(model, storage.itemsize))]
    if layers is None:
        return [Held("target's weights", weight_bytes(target, storage), "dtype=fast, or int8 in evaluate-checkpoint")]
    part = weight_bytes(empty_layers(target, range(layers)), storage) if layers else 0
    return [Held(f"target's first {layers} layers, embedding and head", part)]


def drafter_memory(
    kind: Kind, plugin: DrafterPlugin[nn.Module], where: str, target: PreTrainedConfig, storage: Place
) -> list[Held]:
    """The model of `kind` in `where`, and what its sessions hold. Raises `UserError` if it cannot be read."""
    model = plugin.empty_model(where, target)
    if model is None:
        return []
    if isinstance(model, PreTrainedModel):
        caches = cache_bytes(model.config, storage) + pass_bytes(target, storage)
    else:  # a layer like the target's, with its hidden states; and sessions of the target
        caches = cache_bytes(target, storage, layers=1) + 4 * pass_bytes(target, storage)
        caches += cache_bytes(target, storage) if plugin.own_sessions else 0
    return [Held(f"{kind.name}'s weights", weight_bytes(model, storage)), Held(f"{kind.name}'s caches", caches)]


def packed_copies(target: PreTrainedConfig, storage: Place, device: torch.device) -> list[Held]:
    """Of the target's weights, which the runtime lays out on a CPU."""
    copies = ("the same, packed for the runtime", "a copy that is packed, while models are loaded")
    return [Held(copy, weight_bytes(target, storage)) for copy in copies if device.type == "cpu"]


def evaluation_memory(config: EvaluateConfig, target: PreTrainedConfig) -> list[Held]:
    """The memory of each device in an evaluation: both targets and the drafters. Raises `UserError`.

    The runtime stores an int8 model's codes in the fastest layout, which may be floats: this is an upper bound.
    """
    device = planned_device(config.device)
    storage = Place.of(config.dtype, target, context_limit(target), device)
    int8 = f"target={config.target or config.early_exit}" if config.dtype == "int8" else ""
    held = [*target_memory(target, storage, int8=int8), *packed_copies(target, storage, device)]
    held += [Held("caches of plain decoding", cache_bytes(target, storage) + pass_bytes(target, storage))]
    for name, where in config.paths.items():
        held += drafter_memory(KINDS[name], config.plugin(KINDS[name]), where, target, storage)
    return held


def planned_device(name: str = "auto") -> torch.device:
    """The device of a plan: the one that a run would use here, or a named GPU, which may be another machine's."""
    return torch.device(name) if re.fullmatch(r"cuda(:\d+)?", name) else pick_device(name)


def dtype_of(name: str, target: PreTrainedConfig, device: torch.device) -> str:
    """The dtype that the option of that `name` takes on `device`, by its name."""
    return name if name == "int8" else str(pick_dtype(name, target, device)).removeprefix("torch.")


def describe(held: Sequence[Held], device: object, **facts: object) -> str:
    """The plan as text: a line of `facts`, key=value, then a line for each purpose."""
    head = " ".join(["plan", *(f"{name}={value}" for name, value in facts.items())])
    lines = [f"{head} device_gb={sum(part.size for part in held) / GB:.2f} device={device}"]
    return "\n".join([*lines, *(f"  {part.what}: {part.size / GB:.3f} GB" for part in held)])


@contextmanager
def explained(held: Callable[[], Sequence[Held]]) -> Iterator[None]:
    """Context manager: an out-of-memory error becomes a `UserError` that lists what is `held` and what lowers it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not _ALLOCATION.search(str(error)):
            raise
        parts = [f"{p.what} {p.size / GB:.2f} GB{f' (less with {p.less})' * bool(p.less)}" for p in held()]
        raise UserError(f"out of memory ({reason(error)}). A run holds: {'; '.join(parts)}") from error
