"""How a causal LM is put together: where its parts are, and how it calls its decoder layers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig

# Rotary embeddings that rescale every position once a text is longer than the range they were made for: a cached key
# would then depend on later text. Within that range they are ordinary.
RESCALING_ROPE = ("dynamic", "longrope")
UNLIMITED = 2**31  # positions of a model that says no limit


def context_limit(config: PreTrainedConfig) -> int:
    """The positions that a text may reach: all that the model has, as long as cached keys stay what they are."""
    limit: int = getattr(config, "max_position_embeddings", None) or UNLIMITED
    rope = getattr(config, "rope_parameters", None) or {}
    for table in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if table.get("rope_type") in RESCALING_ROPE:
            limit = min(limit, table.get("original_max_position_embeddings") or limit)
    return limit


def key_heads(config: PreTrainedConfig) -> int:
    """Heads of keys and values in a layer: as many as of queries where the config does not say."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


@dataclass(frozen=True)
class LayerCall:
    """How the model calls one decoder layer.

    keywords: of "mask", "positions", "cache" and "rotary" those it takes, with the layer's own names for them. table:
    which of `Anatomy.tables` its rotary embeddings are from. slides: whether it sees a sliding window only.
    """

    keywords: tuple[tuple[str, str], ...]
    table: int
    slides: bool


@dataclass(frozen=True)
class Table:
    """A rotary table: the module that computes it, and what that takes besides hidden states and positions."""

    module: str
    options: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class LogitRule:
    """What a model makes of its head's logits: x = factor · logits / divisor, then cap · tanh(x / cap) with a cap."""

    factor: float = 1.0
    divisor: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [..., V] as the model gives them."""
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of what this makes of the head's `logits`, by them."""
        linear = self.factor / self.divisor
        return linear if self.cap is None else linear * (1 - torch.tanh(logits * (linear / self.cap)).square())


@dataclass(frozen=True)
class Anatomy:
    """Names of the modules of a causal LM, and how its layers are called, in order.

    positions: learned positions, added to the embedding; input_norm: norms that sum; both None where there are none.
    scale: what the embedding is multiplied by.
    """

    layers: str
    embed: str
    norm: str
    head: str
    calls: tuple[LayerCall, ...]
    tables: tuple[Table, ...] = ()
    positions: str | None = None
    input_norm: str | None = None
    scale: float = 1.0
    logits: LogitRule = LogitRule()

    def prefixes(self, layers: Iterable[int]) -> tuple[str, ...]:
        """What the names of all tensors outside the layers, and of those in `layers`, begin with.

        Also without the name of the part that they are in, as base models are saved.
        """
        parts = [self.head, self.embed, self.norm, self.positions, self.input_norm]
        names = [*filter(None, parts), *(f"{self.layers}.{index}" for index in layers)]
        base = f"{self.layers.partition('.')[0]}."
        bare = [] if base == "model." else [name.removeprefix(base) for name in names if name.startswith(base)]
        return tuple(f"{name}." for name in (*names, *bare))

    def select(self, layers: Sequence[int]) -> "Anatomy":
        """That of a model of the given layers, in that order."""
        return replace(self, calls=tuple(self.calls[index] for index in layers))
