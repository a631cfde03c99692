"""What decoding, drafting, measuring and training may ask of a target: a frozen causal LM.

It proves at load that it gives here what its own forward gives (`draft_models.targets.proof`).
"""

from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from draft_models.targets.band import Band
from outrider.errors import UserError

if TYPE_CHECKING:
    from draft_models.targets.row_cache import RowCache
    from draft_models.targets.stack import LayerStack

Mask = Tensor | Band | None  # additive [1 or B, 1, Q, K]; None: attention needs no mask
Masks = Mapping[int | None, Mask]  # by window size of the layers


class Rotary(NamedTuple):
    """Where rows stand: positions [B, Q], and cos and sin [B, Q, D] at them of every rotary table of the target."""

    positions: Tensor
    tables: tuple[tuple[Tensor, Tensor], ...]

    def to(self, dtype: torch.dtype) -> "Rotary":
        """The tables in `dtype`."""
        return Rotary(self.positions, tuple((cos.to(dtype), sin.to(dtype)) for cos, sin in self.tables))


class LayerCache(Protocol):
    """What a layer needs of a cache: take the new keys and values, give back all of them."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]: ...


class Runnable(Protocol):
    """What runs on a device. layered: itself, where it is a target whose layers can be run a range at a time."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def layered(self) -> "LayerStack | None": ...


class Target(Runnable, Protocol):
    """A frozen causal LM that runs the rows of a tree, as a target or as a small LM that drafts.

    layered: None where it runs as a whole only. predicted: the ids [K], ascending, of the tokens that it has logits of;
    None: all of its vocabulary.
    """

    @property
    def config(self) -> PreTrainedConfig: ...

    @property
    def predicted(self) -> Tensor | None: ...

    def cache(self, capacity: int) -> "RowCache":
        """An empty cache for the rows of one text."""
        ...

    def rows(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: "RowCache", *, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Feed tokens [n] at positions [n] after what `cache` holds; visible bool [n, cached + n].

        Returns the last hidden states [n, d], and next-token logits [n, V], or with `last_only` those of the last row
        alone, [1, V].
        """
        ...


class Layers(Runnable, Protocol):
    """Layers that run on hidden states: a `LayerStack`, or those of a head beside it, which is no target.

    windows: how many positions each layer sees; None: all. tables: cos and sin [P, D] of every rotary table, at the
    positions that are reserved.
    """

    @property
    def layers(self) -> Sized: ...

    @property
    def windows(self) -> Sequence[int | None]: ...

    @property
    def tables(self) -> tuple[tuple[Tensor, Tensor], ...]: ...

    def reserve(self, positions: int) -> None:
        """Make `rotary` ready for positions 0..positions−1."""
        ...

    def rotary(self, positions: Tensor) -> Rotary:
        """What layers are told of rows at positions [B, Q], which must have been reserved."""
        ...


def require_layers(target: Target) -> "LayerStack":
    """`target`, for a drafter that lives on its layers. Raises `UserError` where it runs as a whole only."""
    if target.layered is None:
        raise UserError("this drafter needs a target that is run layer by layer; this one runs as a whole only")
    return target.layered
