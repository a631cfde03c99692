"""The rows of a decoding round, which are the tokens that its passes compute: positions, ancestors, attention masks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.draft_models.targets.target import Band, Masks
from outrider.inference.core.ops import ancestor_mask
from outrider.inference.core.tree import chain_parents


@dataclass(frozen=True)
class RowLayout:
    """Rows start..stop−1 of a round, as one pass computes them. A negative start includes positions of the text before.

    Bit j of ancestors[i] is set if row j is row i or an ancestor of it: row i sees these rows and every committed
    position. Example: "cat" and "dog" under the root "the" have the ancestors 0b011 and 0b101.
    """

    base: int  # committed positions before row 0
    start: int
    stop: int
    depths: Sequence[int]  # of rows 0..stop−1
    ancestors: Sequence[int]  # ancestor masks of rows 0..stop−1
    is_chain: bool  # every row is the parent of the next, so the mask is causal

    @property
    def span(self) -> slice | None:
        """The positions as a slice if they are consecutive, else None."""
        is_consecutive = self.is_chain or self.stop <= 1
        return slice(self.base + self.start, self.base + self.stop) if is_consecutive else None

    def positions(self, device: torch.device) -> Tensor:
        """Positions [1, stop − start]."""
        if (span := self.span) is not None:
            return torch.arange(span.start, span.stop, device=device)[None]
        return torch.tensor([[self.base + depth for depth in self.depths[self.start : self.stop]]], device=device)

    def masks(self, windows: Sequence[int | None], device: torch.device, dtype: torch.dtype) -> Masks:
        """Additive masks [1, 1, stop − start, base + stop] by window size. None if attention needs no mask: one query,
        or causal attention over an empty cache. A `Band` for a sliding window over a long text from position 0."""
        first_position, key_count = self.base + self.start, self.base + self.stop
        unmasked = self.is_chain and (key_count - first_position == 1 or first_position == 0)
        # A window that holds all keys needs no mask of its own.
        window_used = {window: window if window is not None and window < key_count else None for window in windows}
        masks = {w: None if unmasked and w is None else self._mask(w, device, dtype) for w in {*window_used.values()}}
        return {window: masks[w] for window, w in window_used.items()}

    def _mask(self, window: int | None, device: torch.device, dtype: torch.dtype) -> Tensor | Band:
        first_position, key_count = self.base + self.start, self.base + self.stop
        if self.is_chain and first_position == 0 and window is not None and key_count > Band.BLOCK:
            return Band.sliding(torch.arange(key_count, device=device), window)
        if not self.is_chain and window is None:
            mask = ancestor_mask(self.ancestors[self.start : self.stop], self.base, self.stop, dtype, device)
            if mask is not None:  # None: no engine builds this mask in one step
                return mask
        lowest = torch.finfo(dtype).min
        mask = torch.zeros(key_count - first_position, key_count, dtype=dtype, device=device)
        positions = torch.arange(key_count, device=device)
        if self.is_chain:
            mask.masked_fill_(positions > positions[first_position:, None], lowest)
        else:
            visible = torch.from_numpy(unpack(self.ancestors[self.start : self.stop], self.stop))
            mask[:, self.base :].masked_fill_(~visible.to(device), lowest)
        if window is not None:
            if not self.is_chain:
                positions = torch.cat([positions[: self.base], self.base + torch.tensor(self.depths, device=device)])
            mask.masked_fill_(positions <= positions[first_position:, None] - window, lowest)
        return mask[None, None]


class RoundRows:
    """The growing rows of a round: parents, depths and ancestor masks."""

    def __init__(self, parents: Sequence[int] = ()) -> None:
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.ancestors: list[int] = []  # bits: a round builds several masks, and tensor operations cost more
        self.is_chain = True
        self.add(parents)

    def __len__(self) -> int:
        return len(self.parents)

    def add(self, parents: Sequence[int]) -> None:
        """Add a row under each of `parents` (−1: no parent in this round)."""
        self.is_chain = self.is_chain and tuple(parents) == chain_parents(len(self), len(parents))
        for parent in parents:
            self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
            self.ancestors.append((0 if parent < 0 else self.ancestors[parent]) | 1 << len(self.ancestors))
            self.parents.append(parent)

    def select(self, chosen_rows: Sequence[int]) -> "RoundRows":
        """The rows `chosen_rows` (ascending, with all their ancestors), renumbered as a separate round."""
        index_by_row = {row: index for index, row in enumerate(chosen_rows)}
        return RoundRows([index_by_row.get(self.parents[row], -1) for row in chosen_rows])

    def layout(self, base: int, start: int, stop: int) -> RowLayout:
        """Rows start..stop−1 after `base` committed positions."""
        return RowLayout(base, start, stop, self.depths[:stop], self.ancestors[:stop], self.is_chain)


def unpack(ancestor_bits: Sequence[int], column_count: int) -> np.ndarray:
    """bool [rows, column_count]: bit j of ancestor_bits[i]. Bits from `column_count` on must be 0."""
    row_bytes = -(-column_count // 8)  # rounded up
    packed = np.frombuffer(b"".join(bits.to_bytes(row_bytes, "little") for bits in ancestor_bits), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(ancestor_bits), row_bytes), axis=1, count=column_count, bitorder="little")
    return bits.view(np.bool_)
