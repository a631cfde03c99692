"""A KV cache of consecutive layers for one sequence, which grows with it."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from outrider.draft_models.targets.model_spec import slots_of


class KVCache:
    """Keys and values of layers `layers` in one buffer [layers, 2, heads, slots, head_dim].

    The buffer grows with the text, by doubling, up to `capacity` slots. Layers whose shape differs from the first
    layer's have separate buffers. `length` is the number of valid positions. A pass writes its q positions after them.
    The session of the text, which runs the passes, then makes these valid. Inside `at` a pass writes to fixed slots,
    and sees a fixed number of positions. clean: slots after the text are zero between rounds, since passes inside `at`
    read them (masked); there are `capacity` slots from the start, as CUDA graphs keep their addresses.
    """

    def __init__(self, layers: range, capacity: int, *, clean: bool = False):
        self.layers, self.capacity, self.clean, self.length = layers, capacity, clean, 0
        self.slots = capacity if clean else 0
        self._buffer: Tensor | None = None
        self._views: dict[int, tuple[Tensor, Tensor]] = {}  # of each layer, [1, heads, slots, head_dim]
        self._separate: list[Tensor] = []  # of layers of another shape, [1, heads, slots, head_dim]
        self.fixed: tuple[Tensor, int] | None = None  # inside `at`: the slots [q], and the number of visible positions

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write key, value [1, heads, q, head_dim] after `length`; returns views of all length + q positions."""
        keys, values = self.views(key, value, layer_idx)
        if self.fixed is not None:
            slots, visible_count = self.fixed
            keys.index_copy_(2, slots, key)
            values.index_copy_(2, slots, value)
            return keys[:, :, :visible_count], values[:, :, :visible_count]
        new_length = self.length + key.shape[2]
        keys[:, :, self.length : new_length], values[:, :, self.length : new_length] = key, value
        return keys[:, :, :new_length], values[:, :, :new_length]

    def views(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, heads, slots, head_dim] of a layer, with slots for this pass: for kernels that write to
        the `fixed` slots. key, value: as for `update`; only their shapes matter."""
        if self.length + key.shape[2] > self.slots and not self.clean:
            self._grow(self.length + key.shape[2])
        return self._views.get(layer_idx) or self._allocate(key, value, layer_idx)

    def buffer(self, rows: int, heads: int, head_dim: int, like: Tensor) -> Tensor | None:
        """The buffer of all layers, for kernels that write `rows` positions; None if layers have separate buffers, or
        if its axes 2 and 4 are not `heads` and `head_dim`.

        like: a tensor with the dtype and device of keys and values.
        """
        if len(self._views) < len(self.layers) or self.length + rows > self.slots:
            dummy_states = like.new_empty(()).expand(1, heads, rows, head_dim)
            for layer in self.layers:
                self.views(dummy_states, dummy_states, layer)
        fits = self._buffer is not None and self._buffer.shape[2::2] == (heads, head_dim) and not self._separate
        return self._buffer if fits else None

    def _grow(self, position_count: int) -> None:
        """Move every layer to buffers with slots for so many positions."""
        if position_count > self.capacity:  # compiled kernels would write beyond the buffer
            raise ValueError(f"{position_count} positions in a cache of {self.capacity}")
        grown_cache = copy.copy(self)
        grown_cache.slots = min(slots_of(position_count), self.capacity)
        grown_cache._buffer, grown_cache._views, grown_cache._separate = None, {}, []
        for layer, states in self._views.items():
            for buffer, state in zip(grown_cache._allocate(*states, layer), states, strict=True):
                buffer[:, :, : state.shape[2]] = state
        vars(self).update(vars(grown_cache))  # only now: if memory runs out, the pass may be repeated with fewer texts

    def _allocate(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Allocate a layer: in the common buffer if its keys and values have the first layer's shape. Buffers begin
        with zeros, as masked values must be finite."""
        key_shape, value_shape = ((1, t.shape[1], self.slots, t.shape[3]) for t in (key, value))
        if self._buffer is None:
            self._buffer = key.new_zeros((len(self.layers), 2, *key_shape[1:]))
        if key_shape == value_shape and key_shape[1:] == self._buffer.shape[2:]:
            layer_buffer = self._buffer[layer_idx - self.layers.start]
            self._views[layer_idx] = (layer_buffer[0, None], layer_buffer[1, None])
        else:
            self._views[layer_idx] = (key.new_zeros(key_shape), value.new_zeros(value_shape))
            self._separate += self._views[layer_idx]
        return self._views[layer_idx]

    def _all(self) -> list[Tensor]:
        """Every buffer [..., slots, head_dim]."""
        return [] if self._buffer is None else [self._buffer, *self._separate]

    @contextmanager
    def at(self, slots: Tensor, key_count: int) -> Iterator[None]:
        """Inside the context, `update` writes to `slots` [q] and returns views of the first `key_count` positions."""
        self.fixed = slots, key_count
        try:
            yield
        finally:
            self.fixed = None

    def keep(self, base: int, rows: Sequence[int]) -> None:
        """Keep the first `base` positions and, after them in this order, positions base + r for r in `rows`.

        `rows` ascends, so rows only move towards the front; the first `unmoved` ones are not copied. Example: with base
        10 and rows [0, 2, 5], position 10 stays, 12 and 15 move to 11 and 12, and `length` becomes 13.
        """
        unmoved = next((index for index, row in enumerate(rows) if row != index), len(rows))
        if unmoved < len(rows) and self._buffer is not None:
            moved_slots = torch.tensor(rows[unmoved:], device=self._buffer.device) + base
            for buffer in self._all():
                buffer[..., base + unmoved : base + len(rows), :] = buffer.index_select(-2, moved_slots)
        new_length = base + len(rows)
        if self.clean and new_length < self.length:
            for buffer in self._all():
                buffer[..., new_length : self.length, :].zero_()
        self.length = new_length

    def clear(self) -> None:
        """Empty the cache and zero its buffers."""
        self.length = 0
        for buffer in self._all():
            buffer.zero_()

    def content(self, position_count: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Views (keys, values) of the first `position_count` of every layer; None: of all valid positions."""
        length = self.length if position_count is None else position_count
        return [(keys[:, :, :length], values[:, :, :length]) for _, (keys, values) in sorted(self._views.items())]
