"""The memory of a command: weights, caches, and a training's state and activations, computed without reading weights.

`plan=true` prints it. A run that is out of memory prints it too, with the options that lower it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.base.errors import UserError, reason
from outrider.draft_models.losses import loss_bytes
from outrider.draft_models.targets.int8 import int8_bytes, require_linear
from outrider.draft_models.targets.model_files import empty_layers, empty_model
from outrider.draft_models.targets.model_spec import context_limit, key_heads
from outrider.draft_models.targets.open_target import pick_device, pick_dtype
from outrider.inference.engines.graphs.fixed_shapes import WIDTHS
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS, DrafterPlugin, Kind

GB = 1e9
FLOAT32 = 4
PROGRAM_BYTES = 600_000_000  # of Python, torch and transformers, in the memory of a CPU
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


def weight_bytes(model: PreTrainedConfig | nn.Module, place: Place) -> int:
    """Bytes of a model's weights; shared ones count once."""
    module = model if isinstance(model, nn.Module) else empty_model(model)
    return place.itemsize * _count(module.parameters())


def cache_bytes(config: PreTrainedConfig, place: Place, layers: int | None = None) -> int:
    """Bytes of the keys and values of `layers` layers, by default all."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    every = config.num_hidden_layers if layers is None else layers
    return 2 * every * key_heads(config) * width * place.slots * place.itemsize


def pass_bytes(config: PreTrainedConfig, place: Place) -> int:
    """Bytes of the inputs and outputs of fixed-shape passes: hidden states and logits of the widest one."""
    return WIDTHS[-1] * (4 * config.hidden_size + config.vocab_size) * place.itemsize


def target_memory(target: PreTrainedConfig, place: Place, layers: int | None = None, int8: str = "") -> list[Held]:
    """The target's weights. layers: the only ones that are read, with embedding and head; int8: whose codes are held,
    named for errors. Raises `UserError` for a model that int8 cannot hold."""
    if int8:
        model = empty_model(target)
        require_linear(model, int8)
        return [Held("target's weights", int8_bytes(model, place.itemsize))]
    if layers is None:
        return [Held("target's weights", weight_bytes(target, place), "dtype=fast, or int8 in evaluate-checkpoint")]
    part = weight_bytes(empty_layers(target, range(layers)), place) if layers else 0
    return [Held(f"target's first {layers} layers, embedding and head", part)]


def drafter_memory(
    kind: Kind, plugin: DrafterPlugin[nn.Module], where: str, target: PreTrainedConfig, place: Place
) -> list[Held]:
    """The model of `kind` in `where`, and what its sessions hold. Raises `UserError` if it cannot be read."""
    model = plugin.empty(where, target)
    if model is None:
        return []
    if isinstance(model, PreTrainedModel):
        caches = cache_bytes(model.config, place) + pass_bytes(target, place)
    else:  # a layer like the target's, with its hidden states; and sessions of the target
        caches = cache_bytes(target, place, layers=1) + 4 * pass_bytes(target, place)
        caches += cache_bytes(target, place) if kind.own_sessions else 0
    return [Held(f"{kind.name}'s weights", weight_bytes(model, place)), Held(f"{kind.name}'s caches", caches)]


def packed_copies(target: PreTrainedConfig, place: Place, device: torch.device) -> list[Held]:
    """Of the target's weights, which the runtime lays out on a CPU."""
    copies = ("the same, packed for the runtime", "a copy that is packed, while models are loaded")
    return [Held(copy, weight_bytes(target, place)) for copy in copies if device.type == "cpu"]


def evaluation_memory(config: EvaluateConfig, target: PreTrainedConfig) -> list[Held]:
    """The memory of each device in an evaluation: both targets and the drafters. Raises `UserError`.

    The runtime stores an int8 model's codes in the fastest layout, which may be floats: this is an upper bound.
    """
    device = planned_device(config.device)
    place = Place.of(config.dtype, target, context_limit(target), device)
    int8 = f"target={config.target or config.early_exit}" if config.dtype == "int8" else ""
    held = [*target_memory(target, place, int8=int8), *packed_copies(target, place, device)]
    held += [Held("caches of plain decoding", cache_bytes(target, place) + pass_bytes(target, place))]
    for name, where in config.places.items():
        held += drafter_memory(KINDS[name], config.plugin(KINDS[name]), where, target, place)
    return held


def training_memory(
    student: nn.Module,
    matrices: Sequence[Tensor],
    *,
    rows: int,
    width: int,
    read: int,
    vocabulary: int,
    muon: bool,
    recomputed: bool,
    device: torch.device,
) -> list[Held]:
    """The memory of training `student` (it may be on meta): its state, and what a step keeps for backward.

    matrices: the trained ones of its layers. rows, width: of a forward, in rows and tokens. read: numbers per token in
    the hidden states that the frozen layers hand over. muon: the matrices have one moment. recomputed: with
    gradient_checkpointing. A student with `steps` runs its layers that many times.
    """
    parameters = list(student.parameters())
    trained = [one for one in parameters if one.requires_grad]
    state = 4 * FLOAT32 * _count(trained) - (FLOAT32 * _count(matrices) if muon else 0)
    inner = {id(one) for one in matrices}
    loose = [one.numel() for one in trained if one.ndim == 2 and id(one) not in inner]
    steps = getattr(student, "steps", 1)
    handed_on = 5 * max((min(one.shape) for one in matrices), default=0)  # a step's output, predictions, keys, values
    # inputs and outputs of its products, and half as much between them: norms, attention, the MLP's own product
    inside = 0 if recomputed else 3 * sum(sum(one.shape) for one in matrices) // 2
    held = [
        Held("frozen weights", sum(one.nbytes for one in parameters if not one.requires_grad), "frozen_dtype=bfloat16"),
        Held("trained: masters, gradients, moments", state, "train_head=false, draft_vocabulary or fit.optimizer=muon"),
        Held(
            f"activations of {rows} rows × {width} tokens",
            rows * width * FLOAT32 * (2 * read + steps * (handed_on + inside)),
            "fit.micro_batch_rows=1, seq_len or fit.gradient_checkpointing=true",
        ),
        Held("logits and the loss, some rows at a time", loss_bytes(vocabulary, vocabulary, device)),
        Held("a matrix's gradient in the loss", FLOAT32 * max(loose, default=0)),
    ]
    return [*held, *([Held("the program", PROGRAM_BYTES)] if device.type == "cpu" else [])]


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def planned_device(name: str = "auto") -> torch.device:
    """The device of a plan: the one that a run would use here, or a named GPU, which may be another machine's."""
    return torch.device(name) if re.fullmatch(r"cuda(:\d+)?", name) else pick_device(name)


def dtype_of(name: str, target: PreTrainedConfig, device: torch.device) -> str:
    """The dtype that the option of that `name` takes on `device`, by its name."""
    return name if name == "int8" else str(pick_dtype(name, target, device)).removeprefix("torch.")


def describe(held: Sequence[Held], device: object, **facts: object) -> str:
    """The plan as text: a line of `facts`, key=value, then a line for each purpose."""
    said = " ".join(["plan", *(f"{name}={value}" for name, value in facts.items())])
    lines = [f"{said} device_gb={sum(one.size for one in held) / GB:.2f} device={device}"]
    return "\n".join([*lines, *(f"  {one.what}: {one.size / GB:.3f} GB" for one in held)])


@contextmanager
def explained(held: Callable[[], Sequence[Held]]) -> Iterator[None]:
    """Context manager: an out-of-memory error becomes a `UserError` that lists what is `held` and what lowers it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not _ALLOCATION.search(str(error)):
            raise
        parts = [f"{one.what} {one.size / GB:.2f} GB{f' (less with {one.less})' * bool(one.less)}" for one in held()]
        raise UserError(f"out of memory ({reason(error)}). A run holds: {'; '.join(parts)}") from error
