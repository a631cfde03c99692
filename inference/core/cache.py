"""Preallocated keys and values of consecutive layers, for one sequence."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class KVCache:
    """Keys and values of layers `layers` in one buffer [layers, 2, heads, capacity, head_dim], allocated on first use.

    Layers of another shape than the first one have buffers of their own.

    Speaks the part of transformers' `Cache` protocol that attention modules use (`update`). `length` counts
    the positions that are in; a pass writes its positions behind them, then `advance` makes them count. Inside
    `at` a pass writes to the slots it is given instead, and sees a fixed number of them. clean: for such passes,
    which see slots behind the text and mask them; there all is zero between rounds. fixed: those slots [q], and how
    many positions are seen, while such a pass runs.
    """

    def __init__(self, layers: range, capacity: int, *, clean: bool = False):
        self.layers = layers
        self.capacity = capacity
        self.clean = clean
        self.length = 0
        self._buffer: Tensor | None = None
        self._views: dict[int, tuple[Tensor, Tensor]] = {}  # of each layer, [1, heads, capacity, head_dim]
        self._odd: list[Tensor] = []  # of layers of another shape, [1, heads, capacity, head_dim]
        self.fixed: tuple[Tensor, int] | None = None

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write key, value [1, heads, q, head_dim] behind `length`; returns views of all length + q positions."""
        keys, values = self.views(key, value, layer_idx)
        if self.fixed is not None:
            slots, seen = self.fixed
            keys.index_copy_(2, slots, key)
            values.index_copy_(2, slots, value)
            return keys[:, :, :seen], values[:, :, :seen]
        stop = self.length + key.shape[2]
        keys[:, :, self.length : stop] = key
        values[:, :, self.length : stop] = value
        return keys[:, :, :stop], values[:, :, :stop]

    def views(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, heads, capacity, head_dim] of a layer, for one that writes by itself where `fixed` says.

        key, value: as for `update`, but only their shapes count.
        """
        return self._views.get(layer_idx) or self._allocate(key, value, layer_idx)

    def whole(self, heads: int, head_dim: int, like: Tensor) -> Tensor | None:
        """The one buffer of all layers, for a pass that writes to it by itself; None where it has not all of them.

        like: of the dtype and device of keys and values.
        """
        if len(self._views) < len(self.layers):
            shape = like.new_empty(1, heads, 0, head_dim)
            for layer in self.layers:
                self.views(shape, shape, layer)
        fits = self._buffer is not None and self._buffer.shape[2::2] == (heads, head_dim) and not self._odd
        return self._buffer if fits else None

    def _allocate(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Room for a layer: for all in one buffer, where its keys and values are of the shape that the first one's are.

        Zeros, as what a mask hides must still be a number.
        """
        shape = (key.shape[1], self.capacity, key.shape[3])
        if self._buffer is None:
            self._buffer = key.new_zeros((len(self.layers), 2, *shape))
        if key.shape == value.shape and shape == self._buffer.shape[2:]:
            both = self._buffer[layer_idx - self.layers.start]
            self._views[layer_idx] = (both[0, None], both[1, None])
        else:
            room = ((1, t.shape[1], self.capacity, t.shape[3]) for t in (key, value))
            self._views[layer_idx] = (key.new_zeros(next(room)), value.new_zeros(next(room)))
            self._odd += self._views[layer_idx]
        return self._views[layer_idx]

    def _all(self) -> list[Tensor]:
        """Every buffer [..., capacity, head_dim]."""
        return [] if self._buffer is None else [self._buffer, *self._odd]

    @contextmanager
    def at(self, slots: Tensor, seen: int) -> Iterator[None]:
        """For the pass inside: `update` writes to `slots` [q] and returns views of the first `seen` positions."""
        self.fixed = slots, seen
        try:
            yield
        finally:
            self.fixed = None

    def advance(self, count: int) -> None:
        """Count the `count` positions that the last pass wrote."""
        self.length += count

    def keep(self, base: int, rows: Sequence[int]) -> None:
        """Keep the first `base` positions and, behind them in this order, positions base + r for r in `rows`.

        `rows` ascends, so a row only ever moves towards the front; those that are in place stay untouched.
        """
        settled = next((place for place, row in enumerate(rows) if row != place), len(rows))
        if settled < len(rows) and self._buffer is not None:
            chosen = torch.tensor(rows[settled:], device=self._buffer.device) + base
            for buffer in self._all():
                buffer[..., base + settled : base + len(rows), :] = buffer.index_select(-2, chosen)
        stop = base + len(rows)
        if self.clean and stop < self.length:
            for buffer in self._all():
                buffer[..., stop : self.length, :].zero_()
        self.length = stop

    def clear(self) -> None:
        """Hold nothing, and no trace of what was held."""
        self.length = 0
        for buffer in self._all():
            buffer.zero_()

    def content(self, positions: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Views of the first `positions` of every layer, (keys, values); None: of those that are in."""
        stop = self.length if positions is None else positions
        return [(keys[:, :, :stop], values[:, :, :stop]) for _, (keys, values) in sorted(self._views.items())]
