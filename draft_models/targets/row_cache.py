"""A transformers `Cache` for the rows of one text."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class RowCache(Cache):
    """Keys and values of one sequence, as transformers' models expect them; any subset of rows can be kept."""

    def __init__(self, capacity: int):
        class Layer(_RowLayer):  # transformers creates one for every layer of the model
            def __init__(self) -> None:
                super().__init__(capacity)

        super().__init__(layer_class_to_replicate=Layer)

    def keep(self, base: int, rows: Sequence[int]) -> None:
        """Keep the first `base` positions and, after them in this order, positions base + r for r in `rows`."""
        for layer in self._rows():
            layer.keep(base, rows)

    def content(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [1, heads, positions, head_dim] of every layer."""
        return [layer.content() for layer in self._rows()]

    def _rows(self) -> "list[_RowLayer]":
        return [layer for layer in self.layers if isinstance(layer, _RowLayer)]


class _RowLayer(DynamicLayer):
    """A layer of a `RowCache`, in buffers [1, heads, capacity, head_dim] that are allocated on first use."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        states = (key_states, value_states)
        self._buffers = tuple(t.new_empty((*t.shape[:2], self.capacity, t.shape[3])) for t in states)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stop = self.length + key_states.shape[2]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.length : stop] = new
        return self._show(stop)

    def get_seq_length(self) -> int:
        return self.length

    def keep(self, base: int, rows: Sequence[int]) -> None:
        stop = base + len(rows)
        if self.is_initialized:
            if list(rows) != list(range(len(rows))):
                for buffer in self._buffers:
                    buffer[:, :, base:stop] = buffer[:, :, torch.tensor(rows, device=buffer.device) + base]
            self._show(stop)

    def content(self) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[:, :, : self.length] for buffer in self._buffers)
        return keys, values

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        self.length = length
        self.keys, self.values = keys, values = self.content()
        return keys, values
