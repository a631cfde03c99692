"""New EAGLE-3 heads for training: sizes from the target, random weights except for the logits' matrix."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from draft_models.eagle3.checkpoint import DRAFT_TOKENS, head_shapes
from draft_models.eagle3.model import Eagle3
from draft_models.eagle3.reading import Reading
from draft_models.targets.model_spec import context_limit, key_heads
from draft_models.targets.stack import LayerStack


def new_reading(
    target: PreTrainedConfig,
    *,
    taps: tuple[int, ...],
    version: str,
    draft_vocabulary: int | None,
    intermediate: int | None,
) -> Reading:
    """The reading of a one-layer head with the hidden size of `target`, a config; it shares the target's embedding.

    taps: boundaries, empty for `default_taps`. version: 3, or 3.1, which norms aux hidden states and step outputs.
    draft_vocabulary: number of tokens it has logits for, None for all. intermediate: width of its MLP, None for the
    target's. Raises `UserError` for impossible values.
    """
    heads, width = target.num_attention_heads, target.hidden_size
    newer = version == "3.1"
    return Reading(
        taps=taps or default_taps(target.num_hidden_layers),
        target_hidden=width,
        hidden=width,
        intermediate=intermediate or getattr(target, "intermediate_size", None) or 4 * width,
        layers=1,
        heads=heads,
        key_heads=key_heads(target),
        head_dim=getattr(target, "head_dim", None) or width // heads,
        epsilon=getattr(target, "rms_norm_eps", None) or 1e-5,
        activation="silu",
        vocabulary=target.vocab_size,
        draft_vocabulary=draft_vocabulary or target.vocab_size,
        rope={"rope_type": "default", "rope_theta": _theta(target)},
        max_positions=context_limit(target),
        windows=(None,),
        tap_norms=newer,
        norm_output=newer,
    )


def default_taps(layers: int) -> tuple[int, ...]:
    """A low, a middle and a high boundary: EAGLE's own three, or the nearest ones if the target is too small."""
    chosen = (2, layers // 2, layers - 3) if layers >= 7 else (1, layers // 2, layers - 1)
    return tuple(sorted(set(chosen)))


@torch.no_grad()
def new_head(reading: Reading, stack: LayerStack, tokens: Tensor | None, seed: int) -> Eagle3:
    """The head before training, in float32 on the target's device: a deterministic function of its arguments.

    tokens [k]: the draft vocabulary; None: all. The logits' matrix and norm are initialised from the target: rows of
    its head, and the scale of its last norm. Other matrices preserve the magnitude of their input.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in head_shapes(reading).items():
        made = torch.randn(shape, generator=generator) * shape[-1] ** -0.5 if len(shape) == 2 else torch.ones(shape)
        weights[name] = made.to(stack.device)
    rows = stack.head.weight[: reading.vocabulary] if tokens is None else stack.head.weight[tokens]
    weights["lm_head.weight"] = rows.detach().float().clone()  # a copy: the target keeps its own
    weights["norm.weight"] = _scale_of(stack.norm, reading.hidden, stack)
    if tokens is not None:
        weights[DRAFT_TOKENS] = tokens.to(stack.device)
    return Eagle3.of(reading, weights)


def _scale_of(norm: nn.Module, width: int, stack: LayerStack) -> Tensor:
    """The factor of a norm in each of `width` dimensions, whatever its weight means."""
    signs = torch.ones(width, dtype=stack.dtype, device=stack.device)
    signs[::2] = -1  # mean 0 and mean square 1, so that neither kind of norm rescales it
    found: Tensor = norm(signs) * signs
    return found.float()


def _theta(target: PreTrainedConfig) -> float:
    """The base of the target's rotary embedding if it has a single one; else the usual base."""
    theta = (getattr(target, "rope_parameters", None) or {}).get("rope_theta")
    return float(theta) if isinstance(theta, int | float) else 10000.0
