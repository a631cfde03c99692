"""The structure of a causal LM: the names of its parts, and how it calls its decoder layers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig

# Rotary embeddings that rescale every position once a text exceeds their original range: a cached key would then depend
# on later text. Within that range they are ordinary.
RESCALING_ROPE = ("dynamic", "longrope")
UNLIMITED = 2**31  # positions of a model without a stated limit


def context_limit(config: PreTrainedConfig) -> int:
    """The longest context in positions: the model's limit, or less if longer texts would change cached keys."""
    limit: int = getattr(config.get_text_config(), "max_position_embeddings", None) or UNLIMITED
    return min([limit, *(rope.get("original_max_position_embeddings") or limit for rope in rescaling_ropes(config))])


def rescaling_ropes(config: PreTrainedConfig) -> list[dict[str, int]]:
    """The parameters of rotations that a text beyond their context would change."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [r for r in (rope, *rope.values()) if isinstance(r, dict) and r.get("rope_type") in RESCALING_ROPE]


def key_heads(config: PreTrainedConfig) -> int:
    """The number of key/value heads of a layer; the number of query heads if the config has no entry."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def slots_of(position_count: int) -> int:
    """The slots of a growing cache for so many positions: it doubles, so each position is copied about once."""
    return max(256, 1 << (position_count - 1).bit_length())


@dataclass(frozen=True)
class LayerCall:
    """How the model calls one decoder layer.

    keywords: those of "mask", "positions", "cache" and "rotary" that it takes, with the layer's own names for them, as
    ("mask", "attention_mask"). table: the index in `ModelSpec.tables` of its rotary table. slides: whether it sees a
    sliding window only.
    """

    keywords: tuple[tuple[str, str], ...]
    table: int
    slides: bool


@dataclass(frozen=True)
class RotaryTable:
    """A rotary table: the module that computes it, and its arguments other than hidden states and positions."""

    module: str
    options: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class LogitRule:
    """A model's transformation of its head's logits: x = factor · logits / divisor, then cap · tanh(x / cap) if
    capped."""

    factor: float = 1.0
    divisor: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """The transformed logits [..., V]."""
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Elementwise derivative of the transformed logits w.r.t. the head's `logits`."""
        scale = self.factor / self.divisor
        return scale if self.cap is None else scale * (1 - torch.tanh(logits * (scale / self.cap)).square())


@dataclass(frozen=True)
class ModelSpec:
    """The module names of a causal LM, and how its layers are called, in order.

    positions: learned positions, added to the embedding. input_norm: a norm of this sum. None: the model has none.
    scale: factor on the embedding.
    """

    layers: str
    embed: str
    norm: str
    head: str
    calls: tuple[LayerCall, ...]
    tables: tuple[RotaryTable, ...] = ()
    positions: str | None = None
    input_norm: str | None = None
    scale: float = 1.0
    logits: LogitRule = LogitRule()

    def prefixes(self, layer_indices: Iterable[int]) -> tuple[str, ...]:
        """The name prefixes of all tensors outside the layers and of those in `layer_indices`.

        Also without the name of the base model, as base models are saved.
        """
        module_names = [self.head, self.embed, self.norm, self.positions, self.input_norm]
        names = [*filter(None, module_names), *(f"{self.layers}.{index}" for index in layer_indices)]
        base = f"{self.layers.partition('.')[0]}."
        bare_names = [] if base == "model." else [name.removeprefix(base) for name in names if name.startswith(base)]
        return tuple(f"{name}." for name in (*names, *bare_names))

    def select(self, layer_indices: Sequence[int]) -> "ModelSpec":
        """The same for a model of the given layers, in that order."""
        return replace(self, calls=tuple(self.calls[index] for index in layer_indices))
