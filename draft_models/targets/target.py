"""The interface of a target, a frozen causal LM, for decoding, drafting, measuring and training.

At load it is checked against its own forward (`draft_models.targets.proof`).
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
    """Positions of rows [B, Q], and cos and sin [B, Q, D] of every rotary table of the target at these positions."""

    positions: Tensor
    tables: tuple[tuple[Tensor, Tensor], ...]

    def to(self, dtype: torch.dtype) -> "Rotary":
        """The tables in `dtype`."""
        return Rotary(self.positions, tuple((cos.to(dtype), sin.to(dtype)) for cos, sin in self.tables))


class LayerCache(Protocol):
    """The cache interface that a layer needs: store the new keys and values, return all of them."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]: ...


class Runnable(Protocol):
    """A model on a device. layered: itself, if it is a target whose layers can be run a range at a time."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def layered(self) -> "LayerStack | None": ...


class Target(Runnable, Protocol):
    """A frozen causal LM that runs the rows of a tree, as a target or as a small LM that drafts.

    layered: None if it only runs as a whole. predicted: the ids [K], ascending, of the tokens that it has logits for;
    None: its whole vocabulary.
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
        """Feed tokens [n] at positions [n] after the contents of `cache`; visible bool [n, cached + n].

        Returns the last hidden states [n, d], and next-token logits [n, V], or with `last_only` only those of the last
        row, [1, V].
        """
        ...


class Layers(Runnable, Protocol):
    """Layers that run on hidden states: a `LayerStack`, or those of a draft head, which is not a target.

    windows: how many positions each layer sees; None: all. tables: cos and sin [P, D] of every rotary table, at the
    reserved positions.
    """

    @property
    def layers(self) -> Sized: ...

    @property
    def windows(self) -> Sequence[int | None]: ...

    @property
    def tables(self) -> tuple[tuple[Tensor, Tensor], ...]: ...

    def reserve(self, positions: int) -> None:
        """Prepare `rotary` for positions 0..positions−1."""
        ...

    def rotary(self, positions: Tensor) -> Rotary:
        """The rotary tables at positions [B, Q], which must have been reserved."""
        ...


def require_layers(target: Target) -> "LayerStack":
    """`target`, for a drafter that needs its layers. Raises `UserError` if it only runs as a whole."""
    if target.layered is None:
        raise UserError("this drafter needs a target that is run layer by layer; this one runs as a whole only")
    return target.layered
