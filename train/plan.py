"""What an EESD training would hold, from the target's config alone: no weight is read.

No library says it: what a device holds follows from which layers are read, which are trained, and what decodes beside.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from draft_models.early_exit.model import EarlyExitStudent, exit_layers
from draft_models.targets.anatomy import context_limit
from draft_models.targets.empty_models import empty_layers
from draft_models.targets.open_target import fast_dtype, pick_dtype
from inference.engines.footprint import Place, cache_bytes, weight_bytes
from inference.loading.memory_plan import GB, planned_device
from train.optimizers import layer_matrices
from train.settings import EesdConfig

# Of a trained parameter: float32 master, its gradient, and AdamW's two moments; Muon has one of its matrices.
BYTES_PER_MOMENT = 4
BYTES_PER_TRAINED = 4 + 4 + 2 * BYTES_PER_MOMENT


@dataclass(frozen=True)
class Piece:
    """Parameters of one part of the model, read from the target or trained from a copy of what was read."""

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


def frozen_dtype(name: str, device: torch.device) -> torch.dtype:
    """What layers that are not trained run in, by the option of that name."""
    return fast_dtype(device) if name == "fast" else getattr(torch, name)


def make_plan(config: EesdConfig, target: PreTrainedConfig, exit_layer: int) -> Plan:
    """The plan of `config` for a target of this shape, for every process.

    What is held is counted on the student itself, made without weights.
    """
    model = empty_layers(target, range(target.num_hidden_layers) if config.online else exit_layers(target, exit_layer))
    head: Any = model.get_output_embeddings()
    if target.tie_word_embeddings:
        head.weight = model.get_input_embeddings().weight
    read = _stored(model)
    size = config.draft_vocabulary
    tokens = None if size is None else torch.empty(size, dtype=torch.long, device="meta")
    student = EarlyExitStudent(
        model,
        exit_layer,
        draft_tokens=tokens,
        **config.student,
    )
    parts = _parts(student)
    device = planned_device()
    width = frozen_dtype(config.frozen_dtype, device).itemsize
    rows = config.fit.micro_batch_rows or config.fit.batch_rows
    trained = sum(part.parameters for part in parts if part.trained)
    one_moment = _count(layer_matrices(student)) if config.fit.optimizer == "muon" else 0
    memory = {
        "frozen weights": width * sum(part.parameters for part in parts if not part.trained),
        "trained: masters, gradients, moments": BYTES_PER_TRAINED * trained - BYTES_PER_MOMENT * one_moment,
        # between the frozen layers and the exit layer, in float32; its own activations come on top, see the log
        f"hidden states of {rows} rows × {config.seq_len} tokens": 4 * rows * config.seq_len * target.hidden_size,
    }
    if config.decode_prompts:  # beside what is trained, in the dtype that it is served in
        dtype = pick_dtype("auto", target, device)
        served = Place(dtype.itemsize, context_limit(target))
        memory["the whole target, to decode with"] = weight_bytes(target, served) + cache_bytes(target, served)
    return Plan(read, read * _stored_bytes(target), parts, memory, str(device))


def _stored(model: nn.Module) -> int:
    """The values that are read for it, of two names for one tensor once."""
    return sum(tensor.numel() for tensor in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values())


def _parts(student: EarlyExitStudent) -> tuple[Piece, ...]:
    """What `student` holds. A matrix that two parts share is counted with the first of them."""
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


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _stored_bytes(target: PreTrainedConfig) -> int:
    """Bytes of a parameter in the checkpoint; 2 where the config does not say."""
    return torch.finfo(target.dtype).bits // 8 if isinstance(target.dtype, torch.dtype) else 2
