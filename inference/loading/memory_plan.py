"""The memory of a command: weights, caches, and a training's state and activations, computed without reading weights.

`plan=true` prints it. A run that is out of memory prints it too, with the options that lower it. Fixed-shape passes,
which a CUDA graph can replay, have buffers of the largest shape. Coded weights stay quantised, as their file has them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.base.errors import UserError, reason
from outrider.base.limits import usable_memory
from outrider.draft_models.formats.convert import find_original
from outrider.draft_models.targets.fingerprint import require_text_alone
from outrider.draft_models.targets.int8 import int8_bytes, require_linear
from outrider.draft_models.targets.model_files import empty_layers, empty_model
from outrider.draft_models.targets.model_spec import UNLIMITED, context_limit, key_heads
from outrider.draft_models.targets.open_target import OpenTarget, pick_device, pick_dtype
from outrider.draft_models.targets.stack import LayerStack, WholeModel
from outrider.draft_models.targets.target import Target
from outrider.inference.core.batch import CacheBudget
from outrider.inference.engines.graphs.fixed_shapes import WIDTHS
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kind import Kind
from outrider.inference.settings.kinds import KINDS

if TYPE_CHECKING:
    from outrider.inference.drafters.plugin import DrafterPlugin

GB = 1e9
_ALLOCATION = re.compile("out of memory|DefaultCPUAllocator|can't allocate memory")  # in torch's errors


@dataclass(frozen=True)
class Memory:
    """`size` bytes of a device, for one purpose. lowered_by: the option that makes them fewer; "": none does."""

    purpose: str
    size: int
    lowered_by: str = ""


@dataclass(frozen=True)
class Storage:
    """How models are stored: `itemsize` bytes per value, texts of up to `positions` tokens."""

    itemsize: int
    positions: int

    @classmethod
    def of(cls, dtype: str, target_config: PreTrainedConfig, n_positions: int, device: torch.device) -> "Storage":
        """The storage on `device` by the value `dtype` of a command's option dtype=."""
        return cls(pick_dtype(dtype, target_config, device).itemsize, n_positions)

    @property
    def slots(self) -> int:
        """The slots of a cache for fixed-shape passes: for positions, a draft and padding (as `cuda_graphs.Arena`)."""
        max_width = WIDTHS[-1]
        return -(-(self.positions + max_width) // max_width) * max_width + max_width


def weight_bytes(model: PreTrainedConfig | nn.Module, storage: Storage) -> int:
    """Bytes of a model's weights; shared ones count once. Raises `UserError` for a model with other parts than text."""
    if isinstance(model, PreTrainedConfig):
        require_text_alone(model)
    module = model if isinstance(model, nn.Module) else empty_model(model)
    return storage.itemsize * sum(tensor.numel() for tensor in module.parameters())


def cache_bytes(config: PreTrainedConfig, storage: Storage, layers: int | None = None) -> int:
    """Bytes of the keys and values of `layers` layers, by default all."""
    return storage.slots * position_bytes(config, storage.itemsize, layers)


def pass_bytes(config: PreTrainedConfig, storage: Storage) -> int:
    """Bytes of the inputs and outputs of fixed-shape passes: hidden states and logits of the widest one."""
    return WIDTHS[-1] * (4 * config.hidden_size + config.vocab_size) * storage.itemsize


def target_memory(
    target_config: PreTrainedConfig, storage: Storage, layer_count: int | None = None, int8: str = ""
) -> list[Memory]:
    """The target's weights. layer_count: only so many first layers are read, with embedding and head; None: all.

    int8: the model's name in errors, if int8 codes hold it, else "". Raises `UserError` for a model that they cannot.
    """
    if int8:
        require_linear(model := empty_model(target_config), int8)
        return [Memory("target's weights", int8_bytes(model, storage.itemsize))]
    if layer_count is None:
        remedy = "dtype=fast, or int8 in evaluate-checkpoint"
        return [Memory("target's weights", weight_bytes(target_config, storage), remedy)]
    size = weight_bytes(empty_layers(target_config, range(layer_count)), storage) if layer_count else 0
    return [Memory(f"target's first {layer_count} layers, embedding and head", size)]


def drafter_memory(
    kind: Kind, plugin: "DrafterPlugin[nn.Module]", path: str, target_config: PreTrainedConfig, storage: Storage
) -> list[Memory]:
    """The drafter of `kind` at `path`, and the caches of its sessions. Raises `UserError` if it cannot be read."""
    model = plugin.empty_model(path, target_config)
    if model is None:
        return []
    if isinstance(model, PreTrainedModel):
        kv_bytes = cache_bytes(model.config, storage) + pass_bytes(target_config, storage)
    else:  # layers like the target's, which read its hidden states
        layers = getattr(model, "layers", (model,))
        kv_bytes = cache_bytes(target_config, storage, len(layers)) + 4 * pass_bytes(target_config, storage)
        # Sessions that split the target at another layer than plain decoding's have separate caches.
        kv_bytes += cache_bytes(target_config, storage) if plugin.own_sessions else 0
    return [Memory(f"{kind.name}'s weights", weight_bytes(model, storage)), Memory(f"{kind.name}'s caches", kv_bytes)]


def stored_bytes(target: OpenTarget, device: torch.device) -> int:
    """Bytes of the files of a target whose weights the device multiplies as they are stored; 0: it decodes them."""
    original = find_original(target.source, target.revision, weights=False)
    if device.type != "cpu" or original is None or not original.coded:
        return 0
    return sum(path.stat().st_size for path in original.files.values() if path.suffix not in (".json", ".jinja"))


def decoding_memory(target: OpenTarget, storage: Storage, device: torch.device, int8: str = "") -> list[Memory]:
    """The target's weights, and the copies that the runtime lays out on a CPU. int8: as in `target_memory`."""
    if stored := stored_bytes(target, device):  # of 1.1 GB (Q4_K_M) the peak was 3.6 GB, Python and torch included
        return [Memory("target's weights as they are stored, for the runtime and for transformers", 3 * stored)]
    purposes = ("the same, packed for the runtime", "a copy that is packed, while models are loaded")
    size = weight_bytes(target.config, storage)
    copies = [Memory(purpose, size) for purpose in purposes if device.type == "cpu"]
    return [*target_memory(target.config, storage, int8=int8), *copies]


def evaluation_memory(config: EvaluateConfig, target: OpenTarget, max_positions: int | None = None) -> list[Memory]:
    """The memory of each device in an evaluation: the target, its copies, the drafters. Raises `UserError`. The runtime
    stores an int8 model's codes in the fastest layout, which may be floats: this is an upper bound. max_positions: of
    the longest text; None: the target's context."""
    device, hf_config = planned_device(config.device), target.config
    storage = Storage.of(config.dtype, hf_config, min(context_limit(hf_config), max_positions or UNLIMITED), device)
    int8_label = f"target={config.target or config.early_exit}" if config.dtype == "int8" else ""
    parts = decoding_memory(target, storage, device, int8_label)
    parts.append(Memory("caches of plain decoding", cache_bytes(hf_config, storage) + pass_bytes(hf_config, storage)))
    for kind, drafter_path in config.paths.items():
        parts += drafter_memory(KINDS[kind], config.plugin(KINDS[kind]), drafter_path, hf_config, storage)
    return parts


def evaluation_plan(config: EvaluateConfig, target: OpenTarget) -> "Plan":
    """What plan=true says of an evaluation with this target. Raises `UserError`."""
    device = planned_device(config.device)
    facts = {"positions": context_limit(target.config), "dtype": dtype_name(config.dtype, target.config, device)}
    return Plan(evaluation_memory(config, target), facts, device)


def planned_device(device_name: str = "auto") -> torch.device:
    """The device of a plan: the one that a run would use here, or a named GPU, which may be another machine's."""
    return torch.device(device_name) if re.fullmatch(r"cuda(:\d+)?", device_name) else pick_device(device_name)


def dtype_name(option: str, target_config: PreTrainedConfig, device: torch.device) -> str:
    """The name of the dtype that the value `option` of dtype= takes on `device`."""
    return option if option == "int8" else str(pick_dtype(option, target_config, device)).removeprefix("torch.")


@dataclass(frozen=True)
class Plan:
    """The memory of each device in a command, computed without weights; as text a line of `facts`, then of parts."""

    parts: Sequence[Memory]
    facts: Mapping[str, object]
    device: object = field(default_factory=planned_device)  # of a run here, unless the command names another one

    def __str__(self) -> str:
        first_line = " ".join(["plan", *(f"{name}={value}" for name, value in self.facts.items())])
        lines = [f"{first_line} device_gb={sum(part.size for part in self.parts) / GB:.2f} device={self.device}"]
        return "\n".join([*lines, *(f"  {part.purpose}: {part.size / GB:.3f} GB" for part in self.parts)])


@contextmanager
def explain_out_of_memory(plan: Callable[[], Sequence[Memory]]) -> Iterator[None]:
    """Context manager: an out-of-memory error becomes a `UserError` that lists what `plan` holds and what lowers it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not _ALLOCATION.search(str(error)):
            raise
        descriptions = []
        for memory in plan():
            remedy = f" (less with {memory.lowered_by})" if memory.lowered_by else ""
            descriptions.append(f"{memory.purpose} {memory.size / GB:.2f} GB{remedy}")
        raise UserError(f"out of memory ({reason(error)}). A run holds: {'; '.join(descriptions)}") from error


def budget_of(target: Target, drafters: Mapping[str, object], max_bytes: int | None) -> CacheBudget:
    """The budget for KV caches of texts decoded together: `max_bytes`; None: half of the memory that is free now."""
    itemsize = target.dtype.itemsize
    token_bytes = position_bytes(target.config, itemsize)
    for model in (getattr(model, "drafter", model) for model in drafters.values()):  # without a calibration head
        if isinstance(model, LayerStack | WholeModel):
            token_bytes += position_bytes(model.config, itemsize)
        elif isinstance(model, nn.Module) and isinstance(layers := getattr(model, "layers", None), Sized):
            token_bytes += position_bytes(target.config, itemsize, len(layers))
    return CacheBudget(token_bytes, free_bytes(target.device) // 2 if max_bytes is None else max_bytes)


def position_bytes(config: PreTrainedConfig, itemsize: int, layer_count: int | None = None) -> int:
    """Bytes of the keys and values of one position in `layer_count` layers, by default all."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    n_cached_layers = config.num_hidden_layers if layer_count is None else layer_count
    return 2 * n_cached_layers * key_heads(config) * head_dim * itemsize


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that are free now."""
    return int(torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else usable_memory())
