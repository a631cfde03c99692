"""The interface of a target, a frozen causal LM, for decoding, drafting, measuring and training.

`Target` is what runs the rows of a tree. `LayerStack` and `WholeModel` in `stack.py` implement it. `RunnableLayers` is
what engines need of layers that run on hidden states. The other classes are what a pass is given: masks (`Band`,
`TextMasks`, tensors), rotary positions (`Rotary`) and a KV cache (`LayerCache`). A target is checked at load against
its own forward (`draft_models.targets.proof`). In shapes B is the batch, T or Q the tokens of a text, K the keys, H and
G the query and key heads, and D the size of a head.
"""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

if TYPE_CHECKING:
    from outrider.draft_models.targets.stack import LayerStack, RowCache


class QueryBlock(NamedTuple):
    """The queries begin … end − 1 of a row of a batch, and two ranges of keys: no query sees a key outside them.

    The second range is empty if second_key = end, as in a plain `Band`; in a `DraftBand` of a training it has masks.
    Example: after a text of 20 tokens, the queries 24 to 27 are the mask tokens of a draft that begins after token 9.
    They see the text up to there and earlier mask tokens: (24, 28, 0, 10, 24).
    """

    begin: int
    end: int
    first_key: int  # the first range: first_key … key_end − 1
    key_end: int
    second_key: int  # the second range: second_key … end − 1


RowBlocks = tuple[QueryBlock, ...]  # all queries of a row, in order


@dataclass(frozen=True)
class Band:
    """A causal mask that is never materialised as a whole: query i of row b sees keys first_keys[b, i] to i.

    Attention materialises one block of queries after another. Example: the documents "a b c" and "d e" in one row are
    first_keys = [0, 0, 0, 3, 3], and blocks (0, 3, 0, 3, 3) and (3, 5, 3, 5, 5) on a CPU, one (0, 5, 0, 5, 5) on a GPU.
    """

    BLOCK: ClassVar[int] = 512  # queries per materialised block, at most
    first_keys: Tensor  # int64 [B or 1, T], ascending
    blocks: tuple[RowBlocks, ...]  # of each row, or one entry for all rows
    extra_keys: int = 0  # further keys before all these, which all queries see: the layers of an EAGLE-3 head add one

    @classmethod
    def sliding(cls, positions: Tensor, window: int) -> "Band":
        """The mask of one text at `positions` 0, 1, …, T − 1 [T]; a token sees `window` tokens, itself included."""
        first_keys = [max(0, position - window + 1) for position in range(len(positions))]
        return cls((positions - (window - 1)).clamp(min=0)[None], (cls.cut([0, len(positions)], first_keys),))

    @classmethod
    def cut(cls, boundaries: Sequence[int], first_keys: Sequence[int]) -> RowBlocks:
        """The blocks of a row that is cut at `boundaries`, 0, …, T. first_keys: of the row's T queries."""
        blocks = []
        for doc_start, doc_stop in pairwise(boundaries):
            for begin in range(doc_start, doc_stop, cls.BLOCK):
                end = min(begin + cls.BLOCK, doc_stop)
                blocks.append(QueryBlock(begin, end, first_key=first_keys[begin], key_end=end, second_key=end))
        return tuple(blocks)

    def block(self, block: QueryBlock) -> Tensor:
        """The mask of a block, bool [B or 1, 1, queries, extra_keys + keys]; True = attend."""
        key_pos = torch.arange(block.first_key, block.end, device=self.first_keys.device)  # [K]
        query_pos = key_pos[block.begin - block.first_key :, None]  # [Q, 1]
        mask = (key_pos >= self.first_keys[:, block.begin : block.end, None]) & (key_pos <= query_pos)  # [B or 1, Q, K]
        return F.pad(mask[:, None], (self.extra_keys, 0), value=True)


@dataclass(frozen=True)
class TextMasks:
    """The mask of a pass over several texts, one text after another: each row sees keys of its own text only.

    entries: (keys, values) of the running layer. The pass's cache fills the list when the layer updates it: first the
    new keys and values of all rows, which the layer gets back, then the content of each text's cache.
    """

    rows: tuple[int, ...]  # the number of rows of each text
    masks: "tuple[Mask, ...]"  # of each text
    caches: "tuple[LayerCache, ...]"  # of each text
    entries: list[tuple[Tensor, Tensor]]  # [1, G, ΣQ, D], then [1, G, K, D] for each text


Mask = Tensor | Band | TextMasks | None  # additive [1 or B, 1, Q, K]; None: attention needs no mask
Masks = Mapping[int | None, Mask]  # by window size of the layers; None: they see all positions


class Rotary(NamedTuple):
    """Positions of rows [B, Q], and cos and sin [B, Q, D] of every rotary table of the target at these positions."""

    positions: Tensor
    tables: tuple[tuple[Tensor, Tensor], ...]

    def to(self, dtype: torch.dtype) -> "Rotary":
        """These positions and tables, the tables in `dtype`."""
        return Rotary(self.positions, tuple((cos.to(dtype), sin.to(dtype)) for cos, sin in self.tables))

    def first(self, position_count: int) -> "Rotary":
        """The first `position_count` of the Q positions, and their cos and sin."""
        tables = tuple((cos[:, :position_count], sin[:, :position_count]) for cos, sin in self.tables)
        return Rotary(self.positions[:, :position_count], tables)


class LayerCache(Protocol):
    """The cache interface that a layer needs: store the new keys and values, return all of them."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]: ...


class Runnable(Protocol):
    """A model on a device. layered: the model if it is a target whose layers can be run a range at a time, or None."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def layered(self) -> "LayerStack | None": ...


class Target(Runnable, Protocol):
    """A frozen causal LM that runs the rows (tokens) of a draft tree, as a target or as a small LM that drafts."""

    @property
    def config(self) -> PreTrainedConfig: ...

    @property
    def predicted(self) -> Tensor | None:
        """The ids [K], ascending, of the tokens that the model has logits for; None: its whole vocabulary."""

    def cache(self, capacity: int) -> "RowCache":
        """An empty cache for the rows of one text."""

    def rows(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: "RowCache", *, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Feed tokens [n] at positions [n] after the contents of `cache`; visible [row, key]: bool [n, cached + n].

        Returns the last hidden states [n, d], and next-token logits [n, V]; with `last_only` only those of the last
        row, [1, V].
        """


class RunnableLayers(Runnable, Protocol):
    """Layers that run on hidden states: a `LayerStack`, or the layers of a draft head, which is not a target."""

    @property
    def layers(self) -> Sized: ...

    @property
    def windows(self) -> Sequence[int | None]: ...  # how many positions each layer sees; None: all

    @property
    def tables(self) -> tuple[tuple[Tensor, Tensor], ...]: ...  # of each: cos and sin [P, D] at P reserved positions

    def reserve(self, position_count: int) -> None:
        """Prepare `rotary` for positions 0..position_count−1."""

    def rotary(self, positions: Tensor) -> Rotary:
        """The rotary tables at positions [B, Q], which must have been reserved."""
