"""Preallocated keys and values of consecutive layers, for one sequence."""

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """Keys and values of layers `layers`, one buffer [1, heads, capacity, head_dim] each, allocated on first use.

    Speaks the part of transformers' `Cache` protocol that attention modules use (`update`). `length` counts
    the positions that are in; a pass writes its positions behind them, then `advance` makes them count.
    """

    def __init__(self, layers: range, capacity: int):
        self.layers = layers
        self.capacity = capacity
        self.length = 0
        self._keys: list[Tensor | None] = [None] * len(layers)
        self._values: list[Tensor | None] = [None] * len(layers)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write key, value [1, heads, q, head_dim] behind `length`; returns views of all length + q positions."""
        slot = layer_idx - self.layers.start
        if self._keys[slot] is None:
            self._keys[slot] = key.new_empty((*key.shape[:2], self.capacity, key.shape[3]))
            self._values[slot] = value.new_empty((*value.shape[:2], self.capacity, value.shape[3]))
        keys, values = self._keys[slot], self._values[slot]
        stop = self.length + key.shape[2]
        keys[:, :, self.length : stop] = key  # type: ignore[index]
        values[:, :, self.length : stop] = value  # type: ignore[index]
        return keys[:, :, :stop], values[:, :, :stop]  # type: ignore[index]

    def advance(self, count: int) -> None:
        """Count the `count` positions that the last pass wrote."""
        self.length += count

    def keep(self, base: int, rows: Sequence[int]) -> None:
        """Keep the first `base` positions and, behind them in this order, positions base + r for r in `rows`.

        `rows` ascends, so a row only ever moves towards the front; a chain's prefix moves nothing.
        """
        if list(rows) != list(range(len(rows))):
            for buffer in (*self._keys, *self._values):
                if buffer is not None:
                    chosen = torch.tensor(rows, device=buffer.device) + base
                    buffer[:, :, base : base + len(rows)] = buffer[:, :, chosen]
        self.length = base + len(rows)

    def content(self) -> list[tuple[Tensor, Tensor]]:
        """Views of the filled part of every layer, (keys, values)."""
        return [
            (keys[:, :, : self.length], values[:, :, : self.length])
            for keys, values in zip(self._keys, self._values, strict=True)
            if keys is not None and values is not None
        ]
