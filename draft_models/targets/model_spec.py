"""The structure of a causal LM of transformers: the names of its modules, and how it calls its decoder layers.

A rotary table has cos and sin of every position. A model may have several tables, each for some of its layers.
"""

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
    """The parameters of rotations that a text beyond their context would change; layer types may have their own."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [r for r in (rope, *rope.values()) if isinstance(r, dict) and r.get("rope_type") in RESCALING_ROPE]


def key_heads(config: PreTrainedConfig) -> int:
    """The number of key/value heads of a layer; the number of query heads if the config has no entry."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def slots_of(position_count: int) -> int:
    """The slots of a growing cache for `position_count` positions: a power of two ≥ 256, so that copies are rare."""
    return max(256, 1 << (position_count - 1).bit_length())


@dataclass(frozen=True)
class LayerCall:
    """How the model calls one decoder layer."""

    keywords: tuple[tuple[str, str], ...]  # (role, the layer's argument); "mask", "positions", "cache" or "rotary"
    table: int  # the index in `ModelSpec.tables` of its rotary table
    slides: bool  # whether it sees a sliding window only


@dataclass(frozen=True)
class RotaryTable:
    """How a rotary table is computed."""

    module: str  # the name of the module that computes it
    options: tuple[tuple[str, object], ...] = ()  # (name, value) of its arguments besides hidden states and positions


@dataclass(frozen=True)
class LogitRule:
    """A model's transformation of its head's logits: x = factor · logits / divisor, then cap · tanh(x / cap)."""

    factor: float = 1.0
    divisor: float = 1.0
    cap: float | None = None  # None: the logits are x

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
    """The module names of a causal LM, and how its layers are called. None: the model has no such module."""

    layers: str  # such as "model.layers"
    embed: str
    norm: str  # after the last layer
    head: str
    calls: tuple[LayerCall, ...]  # of each layer, in order
    tables: tuple[RotaryTable, ...] = ()
    positions: str | None = None  # learned positions, added to the embedding
    input_norm: str | None = None  # of this sum
    scale: float = 1.0  # factor on the embedding
    logits: LogitRule = LogitRule()

    def prefixes(self, layer_indices: Iterable[int]) -> tuple[str, ...]:
        """The name prefixes of all tensors outside the layers and of those in `layer_indices`. A model may be saved
        without the name of its base, such as "transformer."; `TensorFiles` itself adds "model."."""
        module_names = [self.head, self.embed, self.norm, self.positions, self.input_norm]
        names = [*filter(None, module_names), *(f"{self.layers}.{index}" for index in layer_indices)]
        base = f"{self.layers.partition('.')[0]}."
        bare_names = [] if base == "model." else [name.removeprefix(base) for name in names if name.startswith(base)]
        return tuple(f"{name}." for name in (*names, *bare_names))

    def select(self, layer_indices: Sequence[int]) -> "ModelSpec":
        """The spec of a model that has the layers `layer_indices` of this model, in that order."""
        return replace(self, calls=tuple(self.calls[index] for index in layer_indices))
