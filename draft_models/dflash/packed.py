"""The blocks of a training: many blocks of packed texts run at once, each after a context of its own."""

import torch
from torch import Tensor, nn

from outrider.draft_models.heads.joint import KeysValues, attend_jointly
from outrider.draft_models.targets.target import Band


class PackedBlocks:
    """Keys and values of a text's features and of the running blocks, in place of a KV cache.

    rows: of a block. What a layer stores first is the context, and what it stores then are blocks [B, Hk, N · rows, D]
    of N anchors a text, with H heads and Hk key heads of width D. A row of a block sees the context by the mask, and
    all rows of its block.
    """

    def __init__(self, rows: int):
        self.rows = rows
        self._contexts: dict[int, KeysValues] = {}  # by layer

    def update(self, key: Tensor, value: Tensor, layer: int) -> KeysValues:
        """Keep a context, or hand back the entries of blocks."""
        self._contexts.setdefault(layer, (key, value))
        return key, value

    def attend(self, module: nn.Module, query: Tensor, blocks: KeysValues, mask: Band, layer: int) -> Tensor:
        """Attention of rows of blocks: query [B, H, N · rows, D] and their keys and values → [B, N · rows, H, D]."""

        def of_own_block(entries: Tensor) -> Tensor:  # [B, N · rows, Hk, rows, D]
            by_anchor = entries.transpose(1, 2).unflatten(1, (-1, self.rows)).transpose(2, 3)  # [B, N, Hk, rows, D]
            return by_anchor.repeat_interleave(self.rows, dim=1)

        key, value = map(of_own_block, blocks)
        return attend_jointly(module, query, self._contexts[layer], (key, value), mask, query.shape[-1] ** -0.5)


def block_positions(last_positions: Tensor, row_count: int) -> Tensor:
    """Positions [B, N · rows] of the blocks after the positions `last_positions` [B, N]: last + 1 to last + rows."""
    return (last_positions[..., None] + 1 + torch.arange(row_count, device=last_positions.device)).flatten(1)
