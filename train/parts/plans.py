"""Memory plans of drafter trainings, from configs alone: no weight is read.

No library computes this: it depends on which layers are loaded, which are trained, and what is loaded for decoding.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from draft_models.eagle3.checkpoint import head_shapes
from draft_models.eagle3.reading import Reading
from draft_models.early_exit.model import EarlyExitStudent, exit_layers
from draft_models.losses import OVERLAPS, loss_bytes
from draft_models.targets.empty_models import empty_layers, empty_model
from draft_models.targets.model_spec import context_limit
from draft_models.targets.open_target import pick_dtype
from inference.engines.footprint import Place, cache_bytes, weight_bytes
from inference.loading.memory_plan import GB, planned_device
from train.core.optimizers import layer_matrices
from train.parts.drafter import frozen_dtype
from train.parts.early_exit import student_on
from train.settings.drafters import EesdConfig
from train.settings.eagle3 import Eagle3Config

# Bytes per trained parameter: float32 master, gradient, and AdamW's two moments; Muon has one moment per matrix.
BYTES_PER_MOMENT = 4
BYTES_PER_TRAINED = 4 + 4 + 2 * BYTES_PER_MOMENT
PROGRAM_BYTES = 600_000_000  # of Python, torch and transformers, in the memory of a CPU


@dataclass(frozen=True)
class Piece:
    """Parameters of one part of the model, loaded from the target or trained from a copy of loaded ones."""

    name: str
    parameters: int
    trained: bool


@dataclass(frozen=True)
class Plan:
    """Sizes in parameters and bytes."""

    read: int
    read_bytes: int
    parts: tuple[Piece, ...]
    device_bytes: dict[str, int]
    device: str

    @property
    def trained(self) -> int:
        return sum(part.parameters for part in self.parts if part.trained)


def make_plan(config: EesdConfig, target: PreTrainedConfig, exit_layer: int) -> Plan:
    """The plan of `config` for a target of this shape, for every process.

    Parameters are counted on the student itself, constructed without weights.
    """
    model = empty_layers(target, range(target.num_hidden_layers) if config.online else exit_layers(target, exit_layer))
    head = model.get_output_embeddings()
    if target.tie_word_embeddings:
        head.weight = model.get_input_embeddings().weight
    read = _stored(model)
    size = config.draft_vocabulary
    tokens = None if size is None else torch.empty(size, dtype=torch.long, device="meta")
    student = student_on(model, config, exit_layer, tokens)
    parts = _parts(student)
    device = planned_device()
    width = frozen_dtype(config.frozen_dtype, device).itemsize
    rows = config.fit.micro_batch_rows or config.fit.batch_rows
    trained = sum(part.parameters for part in parts if part.trained)
    one_moment = _count(layer_matrices(student)) if config.fit.optimizer == "muon" else 0
    memory = {
        "frozen weights": width * sum(part.parameters for part in parts if not part.trained),
        "trained: masters, gradients, moments": BYTES_PER_TRAINED * trained - BYTES_PER_MOMENT * one_moment,
        # between the frozen layers and the exit layer, in float32; the exit's own activations are extra, see the log
        f"hidden states of {rows} rows × {config.seq_len} tokens": 4 * rows * config.seq_len * target.hidden_size,
        **_loss_memory(student.drafter.output_head, target.vocab_size, config.online, device),
    }
    if config.decode_prompts:  # in addition to the student, in the dtype for serving
        dtype = pick_dtype("auto", target, device)
        served = Place(dtype.itemsize, context_limit(target))
        memory["the whole target, to decode with"] = weight_bytes(target, served) + cache_bytes(target, served)
    return Plan(read, read * _stored_bytes(target), parts, memory, str(device))


def _stored(model: nn.Module) -> int:
    """The number of values that are loaded for it; tied tensors count once."""
    return sum(tensor.numel() for tensor in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values())


def _parts(student: EarlyExitStudent) -> tuple[Piece, ...]:
    """The parts of `student`. A matrix that two parts share is counted with the first of them."""
    stack, drafter = student.stack, student.drafter
    before = [stack.embed_tokens, stack.embed_positions, stack.input_norm]
    places: dict[str, tuple[list[nn.Module | None], bool]] = {
        "embedding": (before, False),
        f"first {len(stack.layers)} layers": ([stack.layers], False),
        "exit layer": ([*drafter.layers], True),
        "exit norm": ([drafter.norm], True),
        "exit head": ([drafter.head], True),
        "target's norm": ([getattr(stack, "norm", None)], False),
        "target's head": ([getattr(stack, "head", None)], False),
        "its rows for the draft vocabulary": ([student.head_rows], False),
    }
    parts, seen = [], set[int]()
    for name, (modules, trained) in places.items():
        there = [module for module in modules if module is not None]
        new = {id(p): p for module in there for p in module.parameters() if id(p) not in seen}
        seen |= new.keys()
        if there:
            parts.append(Piece(name, _count(new.values()), trained))
    return tuple(parts)


def describe_plan(plan: Plan, exit_layer: int, layers: int) -> str:
    """The plan as text: greppable first line, then a line per part."""
    lines = [
        f"plan exit_layer={exit_layer}/{layers} read_parameters={plan.read} read_gb={plan.read_bytes / GB:.2f} "
        f"trained_parameters={plan.trained} device_gb={sum(plan.device_bytes.values()) / GB:.2f} "
        f"device={plan.device}"
    ]
    for part in plan.parts:
        state = "trained" if part.trained else "frozen"
        lines.append(f"  {part.name}: {part.parameters / GB:.3f} B parameters, {state}")
    lines += [f"  memory, {name}: {size / GB:.2f} GB" for name, size in plan.device_bytes.items()]
    return "\n".join(lines)


def describe_eagle3_plan(config: Eagle3Config, reading: Reading, target: PreTrainedConfig) -> str:
    """The plan as text: greppable first line, then a line per part of the device memory."""
    model = empty_model(target)
    device = planned_device()
    width = frozen_dtype(config.frozen_dtype, device).itemsize
    whole = _count({id(p): p for p in model.parameters()}.values())
    shapes = head_shapes(reading)
    every, matrix = sum(map(prod, shapes.values())), prod(shapes["lm_head.weight"])
    own = prod(shapes.get("embed_tokens.weight", (0,)))
    trained = every - own - (0 if config.train_head else matrix)
    rows = config.fit.micro_batch_rows or config.fit.batch_rows
    tokens = rows * config.seq_len
    head = nn.Linear(reading.hidden, reading.draft_vocabulary, bias=False, device="meta")
    head.requires_grad_(config.train_head)
    memory = {
        "the target's weights": width * whole,
        "trained: masters, gradients, moments": BYTES_PER_TRAINED * trained + 4 * (every - trained),
        f"activations of {rows} rows × {config.seq_len} tokens × {config.draft_steps} steps": tokens
        * kept_bytes(config, reading),
        **_loss_memory(head, reading.vocabulary, config.objective in OVERLAPS, device),
    }
    lines = [
        f"plan taps={','.join(map(str, reading.taps))} draft_steps={config.draft_steps} trained_parameters={trained} "
        f"frozen_parameters={whole} device_gb={sum(memory.values()) / GB:.2f} "
        f"device={device}"
    ]
    return "\n".join([*lines, *(f"  memory, {name}: {size / GB:.2f} GB" for name, size in memory.items())])


def kept_bytes(config: Eagle3Config, reading: Reading) -> int:
    """The approximate number of bytes per token that all steps keep for the backward pass."""
    width, heads, keys = reading.hidden, reading.heads * reading.head_dim, reading.key_heads * reading.head_dim
    taps = 4 * len(reading.taps) * reading.target_hidden
    handed_on = 3 * 4 * width + 2 * 4 * keys  # a step's output, its predictions with their gradient, keys and values
    inside = (
        0 if config.fit.gradient_checkpointing else 4 * (12 * width + 4 * heads + 4 * keys + 5 * reading.intermediate)
    )
    return 2 * taps + config.draft_steps * (handed_on + inside)


def _loss_memory(head: nn.Linear, vocabulary: int, whole: bool, device: torch.device) -> dict[str, int]:
    """What the loss of `head` takes, and on a CPU the program. whole: it sees the target's p over `vocabulary` too."""
    tokens, size = head.weight.shape[0], 4 * head.weight.numel()
    memory = {"logits and the loss, some rows at a time": loss_bytes(tokens, vocabulary if whole else tokens, device)}
    if head.weight.requires_grad:  # its gradient's sum, and the part of a chunk that is added
        memory["the head's gradient in the loss"] = size
    return memory | ({"the program": PROGRAM_BYTES} if device.type == "cpu" else {})


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _stored_bytes(target: PreTrainedConfig) -> int:
    """Bytes of a parameter in the checkpoint; 2 if the config has no dtype."""
    return torch.finfo(target.dtype).bits // 8 if isinstance(target.dtype, torch.dtype) else 2
