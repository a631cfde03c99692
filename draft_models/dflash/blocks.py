"""The blocks of many positions of one text in one pass, to measure without decoding what a drafter would draft.

A block is a token of the text, at its anchor, followed by masks; its rows stand at the positions from the anchor on.
Shapes: T tokens of the text, A anchors, H the drafter's width, H_t the target's.
"""

import torch
from torch import Tensor

from outrider.draft_models.dflash.model import DFlash


class SharedContext:
    """A cache whose first entry in a layer, the context, is shared by all blocks: [1, heads, T, D], then [A, …]."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]:
        """Keep the context, or return the context with the blocks' entries, which are not kept."""
        if layer_idx not in self._entries:
            self._entries[layer_idx] = key, value
            return key, value
        context_kv = (entry.expand(len(key), -1, -1, -1) for entry in self._entries[layer_idx])
        keys, values = (torch.cat(pair, 2) for pair in zip(context_kv, (key, value), strict=True))
        return keys, values


def run_blocks(drafter: DFlash, aux: Tensor, anchors: Tensor, tokens: Tensor) -> Tensor:
    """The hidden states [A, block, H] of the blocks at the positions `anchors` [A], each after the context before it.

    aux [1, T, k · H_t]: the target's hidden states at k layers, of the text. tokens [A]: those at the anchors.
    """
    context_size, block_size, cache = aux.shape[1], drafter.reading.block, SharedContext()
    positions = torch.arange(context_size, device=aux.device)  # [T]
    rows = anchors[:, None] + torch.arange(block_size, device=aux.device)  # [A, block_size]
    drafter.reserve(context_size + block_size)  # rotary tables
    drafter.store_context(drafter.features(aux), drafter.rotary(positions[None]), cache)
    block_ids = torch.cat([tokens[:, None], rows.new_full((len(rows), block_size - 1), drafter.reading.mask_token)], 1)
    mask_args = drafter.reading.spans  # (window, causal) of each layer; layers with equal ones share a mask
    masks = {args: _mask(positions, rows, *args) for args in {*mask_args}}
    return drafter.run(drafter.embed(block_ids), [masks[args] for args in mask_args], drafter.rotary(rows), cache)


def _mask(positions: Tensor, block_positions: Tensor, window: int | None, causal: bool) -> Tensor:
    """Which keys a row of a block sees, bool [A, 1, block, T + block]: context positions [T] before the block's first
    row, and block_positions [A, block]."""
    context = (positions < block_positions[:, :1]).expand(len(block_positions), -1)  # [A, T]
    key_pos = torch.cat([positions.expand(len(block_positions), -1), block_positions], 1)[:, None]  # [A, 1, T + block]
    distance = key_pos - block_positions[..., None]  # [A, block, T + block]
    visible = torch.cat([context, torch.ones_like(block_positions, dtype=torch.bool)], 1)[:, None].expand_as(distance)
    if causal:
        visible = visible & (distance <= 0)
    if window is not None:
        visible = visible & (distance.abs() < window)
    return visible[:, None]
