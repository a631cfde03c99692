"""The blocks of many positions of one text at once, whatever their layers see, as the doctor runs them."""

import torch
from torch import Tensor

from outrider.draft_models.dflash.model import DFlash


class SharedContext:
    """A cache whose first entry in a layer, the context, is shared by all blocks: [1, heads, T, D], then [A, …]."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]:
        if layer_idx not in self._entries:
            self._entries[layer_idx] = key, value
            return key, value
        context = (entry.expand(len(key), -1, -1, -1) for entry in self._entries[layer_idx])
        keys, values = (torch.cat(pair, 2) for pair in zip(context, (key, value), strict=True))
        return keys, values


def run_blocks(drafter: DFlash, aux: Tensor, anchors: Tensor, tokens: Tensor) -> Tensor:
    """The hidden states [A, block, H] of the blocks that begin at the positions `anchors` [A], after context of their
    own.

    aux [1, T, k · H_t]: of the text. tokens [A]: those at the anchors.
    """
    count, size, cache = aux.shape[1], drafter.reading.block, SharedContext()
    positions = torch.arange(count, device=aux.device)  # [T]
    rows = anchors[:, None] + torch.arange(size, device=aux.device)  # [A, block]
    drafter.reserve(count + size)
    drafter.store_context(drafter.features(aux), drafter.rotary(positions[None]), cache)
    block = torch.cat([tokens[:, None], rows.new_full((len(rows), size - 1), drafter.reading.mask_token)], 1)
    spans = drafter.reading.spans
    masks = {span: _mask(positions, rows, *span) for span in {*spans}}
    return drafter.run(drafter.embed(block), [masks[span] for span in spans], drafter.rotary(rows), cache)


def _mask(positions: Tensor, rows: Tensor, window: int | None, causal: bool) -> Tensor:
    """Which keys a row of a block sees, bool [A, 1, block, T + block]: context positions [T] before the block's first
    row, and rows [A, block]."""
    context = (positions < rows[:, :1]).expand(len(rows), -1)  # [A, T]
    keys = torch.cat([positions.expand(len(rows), -1), rows], 1)[:, None]  # [A, 1, T + block]
    distance = keys - rows[..., None]  # [A, block, T + block]
    visible = torch.cat([context, torch.ones_like(rows, dtype=torch.bool)], 1)[:, None].expand_as(distance)
    if causal:
        visible = visible & (distance <= 0)
    if window is not None:
        visible = visible & (distance.abs() < window)
    return visible[:, None]
