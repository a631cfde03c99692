"""The mask of a long text, which is never made as a whole."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Band:
    """A causal mask that is never made as a whole: query i of row b sees keys first[b, i] to i and no others.

    first: int64 [B or 1, T], ascending. starts: for every block of `BLOCK` queries the first key that any row's see.
    front: so many keys more, ahead of all these, which every query sees.
    """

    BLOCK: ClassVar[int] = 512  # queries whose mask is made at a time; a text that is no longer has its mask made whole
    first: Tensor
    starts: tuple[int, ...]
    front: int = 0

    @classmethod
    def packed(cls, documents: Tensor, window: int | None = None) -> "Band":
        """Of packed rows, as `packed_mask`, where the positions of a document stand side by side. One transfer."""
        places = torch.arange(documents.shape[1], device=documents.device)
        begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        first = torch.where(begins, places, 0).cummax(1).values
        if window is not None:
            first = torch.maximum(first, places - (window - 1))
        return cls(first, tuple(first[:, :: cls.BLOCK].amin(0).tolist()))

    @classmethod
    def sliding(cls, places: Tensor, window: int) -> "Band":
        """Of one text at `places` 0, 1, …, T − 1 [T], where a token sees `window` tokens, itself included."""
        starts = tuple(max(0, begin - window + 1) for begin in range(0, len(places), cls.BLOCK))
        return cls((places - (window - 1)).clamp(min=0)[None], starts)

    def block(self, begin: int, end: int, start: int) -> Tensor:
        """bool [B or 1, 1, end − begin, front + end − start]: what of `part` queries begin … end − 1 see."""
        keys = torch.arange(start, end, device=self.first.device)
        seen = keys >= self.first[:, begin:end, None]
        return F.pad((seen & (keys <= keys[begin - start :, None]))[:, None], (self.front, 0), value=True)

    def part(self, keys: Tensor, start: int, end: int) -> Tensor:
        """Of keys or values [B, Hk, front + T, D] those in front and start … end − 1."""
        own = keys[:, :, self.front + start : self.front + end]
        return own if not self.front else torch.cat([keys[:, :, : self.front], own], 2)
