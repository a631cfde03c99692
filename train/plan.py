"""What an EESD training would cost, from the target's config alone: no weight is read."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig

from draft_models.early_exit import exit_layers
from draft_models.target.empty_models import decoder_layers, empty_layers, final_norm
from train.settings import EesdConfig

GB = 1e9
# Of a trained parameter: float32 master, its gradient, and AdamW's two moments.
BYTES_PER_TRAINED = 4 + 4 + 8


@dataclass(frozen=True)
class Part:
    """Parameters of one part of the model, read from the target or trained from a copy of what was read."""

    name: str
    parameters: int
    trained: bool


@dataclass(frozen=True)
class Plan:
    """Sizes in parameters and bytes, work in floating-point operations per token of text.

    flops: of a training step on the drafter; full_flops: of the same step with the whole target in front of it.
    """

    read: int
    read_bytes: int
    parts: tuple[Part, ...]
    device_bytes: dict[str, int]
    flops: int
    full_flops: int

    @property
    def trained(self) -> int:
        return sum(part.parameters for part in self.parts if part.trained)


def make_plan(config: EesdConfig, target: PreTrainedConfig, exit_layer: int) -> Plan:
    """The plan of `config` for a target of this shape.

    Matrices cost 2 operations a parameter and token forward and 4 backward, frozen ones 2. Attention over seq_len
    tokens costs 2 · 2 · seq_len/2 · d a token and layer forward, as keys and values are seen half on average.
    """
    layers = list(exit_layers(target, exit_layer))
    model = empty_layers(target, layers)
    embedding, layer = _count(model.get_input_embeddings()), _count(decoder_layers(model)[-1])
    norm, head = _count(final_norm(model)), _count(model.get_output_embeddings())
    tied = bool(target.tie_word_embeddings)
    frozen_layers = target.num_hidden_layers if config.objective == "kl" else exit_layer
    read_layers = frozen_layers if config.objective == "kl" else len(layers)
    read = embedding + read_layers * layer + norm + (0 if tied else head)
    parts = [
        Part("embedding", embedding, trained=False),
        Part(f"first {frozen_layers} layers", frozen_layers * layer, trained=False),
        Part("exit layer", layer if config.train_layer else 0, trained=True),
        Part("exit norm", norm, trained=True),
    ]
    if config.train_head:
        parts.append(Part("exit head", head, trained=True))
    if not config.train_head or config.objective == "kl":
        parts.append(Part("target's head", 0 if tied else head, trained=False))
    width = torch.finfo(getattr(torch, config.frozen_dtype)).bits // 8
    rows = config.fit.micro_batch_rows or config.fit.batch_rows
    trained = sum(part.parameters for part in parts if part.trained)
    memory = {
        "frozen weights": width * sum(part.parameters for part in parts if not part.trained),
        "trained: masters, gradients, moments": BYTES_PER_TRAINED * trained,
        # between the frozen layers and the exit layer, in float32; its own activations come on top, see the log
        f"hidden states of {rows} rows × {config.seq_len} tokens": 4 * rows * config.seq_len * target.hidden_size,
    }
    attention = 2 * config.seq_len * target.hidden_size
    step = (6 if config.train_head else 4) * head + (3 * (2 * layer + attention) if config.train_layer else 0)
    forward = 2 * layer + attention
    taught = 2 * head if config.objective == "kl" else 0  # the target's own logits
    return Plan(
        read=read,
        read_bytes=read * _stored_bytes(target),
        parts=tuple(parts),
        device_bytes=memory,
        flops=frozen_layers * forward + taught + step,
        full_flops=target.num_hidden_layers * forward + taught + step,
    )


def describe_plan(plan: Plan, exit_layer: int, layers: int) -> str:
    """The plan as text: greppable first line, then a line per part."""
    lines = [
        f"plan exit_layer={exit_layer}/{layers} read_parameters={plan.read} read_gb={plan.read_bytes / GB:.2f} "
        f"trained_parameters={plan.trained} device_gb={sum(plan.device_bytes.values()) / GB:.2f} "
        f"gflops_per_token={plan.flops / GB:.2f} full_target_gflops_per_token={plan.full_flops / GB:.2f}"
    ]
    for part in plan.parts:
        state = "trained" if part.trained else "frozen"
        lines.append(f"  {part.name}: {part.parameters / GB:.3f} B parameters, {state}")
    lines += [f"  memory, {name}: {size / GB:.2f} GB" for name, size in plan.device_bytes.items()]
    lines.append(f"  work against running the whole target: {plan.full_flops / plan.flops:.1f}× less")
    return "\n".join(lines)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _stored_bytes(target: PreTrainedConfig) -> int:
    """Bytes of a parameter in the checkpoint; 2 where the config does not say."""
    return torch.finfo(target.dtype).bits // 8 if isinstance(target.dtype, torch.dtype) else 2
