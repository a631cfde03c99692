"""The block-causal mask of a long text, which is never materialised as a whole."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Band:
    """A causal mask that is never materialised as a whole: query i of row b sees exactly keys first[b, i] to i.

    first: int64 [B or 1, T], ascending. starts: for every block of `BLOCK` queries, the first key seen in any row.
    front: the number of further keys before all these, which every query sees.
    """

    BLOCK: ClassVar[int] = 512  # queries per materialised block; texts up to this length have an ordinary mask
    first: Tensor
    starts: tuple[int, ...]
    front: int = 0

    @classmethod
    def packed(cls, documents: Tensor, window: int | None = None) -> "Band":
        """The mask of packed rows, as `packed_mask`; documents must be contiguous. One transfer from the device."""
        places = torch.arange(documents.shape[1], device=documents.device)
        begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        first = torch.where(begins, places, 0).cummax(1).values
        if window is not None:
            first = torch.maximum(first, places - (window - 1))
        return cls(first, tuple(first[:, :: cls.BLOCK].amin(0).tolist()))

    @classmethod
    def sliding(cls, places: Tensor, window: int) -> "Band":
        """The mask of one text at `places` 0, 1, …, T − 1 [T]; a token sees `window` tokens, itself included."""
        starts = tuple(max(0, begin - window + 1) for begin in range(0, len(places), cls.BLOCK))
        return cls((places - (window - 1)).clamp(min=0)[None], starts)

    def block(self, begin: int, end: int, start: int) -> Tensor:
        """bool [B or 1, 1, end − begin, front + end − start]: mask of queries begin … end − 1 over `part`'s keys."""
        keys = torch.arange(start, end, device=self.first.device)
        seen = keys >= self.first[:, begin:end, None]
        return F.pad((seen & (keys <= keys[begin - start :, None]))[:, None], (self.front, 0), value=True)

    def part(self, keys: Tensor, start: int, end: int) -> Tensor:
        """The keys or values, of [B, Hk, front + T, D], in the front and at start … end − 1."""
        own = keys[:, :, self.front + start : self.front + end]
        return own if not self.front else torch.cat([keys[:, :, : self.front], own], 2)
