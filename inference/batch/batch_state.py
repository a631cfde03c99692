"""The state of a padded batch of prompts in its target: the KV cache of fed tokens, and the next tokens' logits.

A step feeds one token of each prompt. A slot is an index of the cache. A step of a small model is about 1,500 kernels
of microseconds each, which a GPU runs three to five times as fast as the CPU launches them. So on a GPU a step is a
CUDA graph over static buffers. Elsewhere the cache grows by a token a step.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.base.errors import UserError
from outrider.draft_models.targets.attention import grouped_attention
from outrider.draft_models.targets.model_spec import context_limit
from outrider.inference.engines.graphs.fixed_shapes import GraphPool, can_capture

_SPARE_SLOTS = 256  # most cache slots that are added at a time; masked slots cost compute too
_GROUPED = "outrider_grouped"  # transformers' name of `_attention`
_FEW_ROWS = 32  # a step with this many rows takes about as long as with one


class Forward:
    """`model`'s forward with a cache; computes only the last position's logits if the model supports it. Raises
    `UserError` for a model that keeps its state elsewhere than in `past_key_values`."""

    def __init__(self, model: PreTrainedModel):
        parameters = inspect.signature(model.forward).parameters
        if "past_key_values" not in parameters:  # it would accept the cache, ignore it, and continue without context
            raise UserError(
                f"target: {type(model).__name__} keeps its state elsewhere than in past_key_values, so it cannot be "
                "decoded here; use another target, or a serving engine"
            )
        self.model = model
        self.last_position = context_limit(model.config) - 1  # a finished row waits there for the others
        self.takes_positions = "position_ids" in parameters
        self._options = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in parameters else {})

    def __call__(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """The logits [B, V], float32 on the model's device, after the last of ids [B, n], which `cache` then holds."""
        position_arg = {"position_ids": positions} if self.takes_positions else {}
        out = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, **position_arg, **self._options)
        return out.logits[:, -1].to(ids.device).float()


def begin_batch(forward: Forward, ids: Tensor, mask: Tensor, budget: int) -> "tuple[GrowingBatch | FixedBatch, Tensor]":
    """Feed left-padded prompts, ids and mask [B, n], which are then continued by up to `budget` tokens. Returns the
    batch and the logits [B, V] after the prompts."""
    cache = DynamicCache(config=forward.model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = forward(ids, mask, positions, cache)
    if can_be_fixed(forward, cache):
        return FixedBatch(forward, cache, mask, positions[:, -1:], min(budget, _SPARE_SLOTS)), logits
    return GrowingBatch(forward, cache, mask, positions[:, -1:]), logits


def can_be_fixed(forward: Forward, cache: DynamicCache) -> bool:
    """Whether a step can be a CUDA graph: on one GPU, with layers that keep all keys and accept any mask."""
    model = forward.model
    return (
        can_capture(model.device)
        and forward.takes_positions
        and len({parameter.device for parameter in model.parameters()}) == 1
        and model.config._attn_implementation == "sdpa"  # in place of which a step uses `_attention`
        and all(type(layer) is DynamicLayer for layer in cache.layers)
    )


class GrowingBatch:
    """Prompts that are continued together, each a row, by any model on any device; each token copies the cache."""

    def __init__(self, forward: Forward, cache: DynamicCache, mask: Tensor, positions: Tensor):
        self._forward, self._cache, self._mask, self._positions = forward, cache, mask, positions

    def feed(self, tokens: Tensor) -> Tensor:
        """The logits [B, V] after one more token of each row, tokens [B]. They are valid until the next call."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        self._positions = (self._positions + 1).clamp(max=self._forward.last_position)
        return self._forward(tokens[:, None], self._mask, self._positions, self._cache)

    def should_shrink(self, row_count: int, open_count: int) -> bool:
        """Whether to drop the finished rows, all but `open_count` of `row_count`. To drop rows copies the cache."""
        return open_count <= 0.75 * row_count

    def keep(self, indices: Tensor) -> None:
        """Continue with these rows only."""
        # Hybrid caches have no other method to select rows.
        self._cache.reorder_cache(indices)  # type: ignore[arg-type]  # asks for torch's legacy class
        self._mask, self._positions = self._mask[indices], self._positions[indices]


class FixedBatch:
    """As `GrowingBatch`, but steps over buffers with spare slots replay a graph, captured again if the buffers change.

    A model that cannot be captured runs without a graph, with a warning. A step writes one slot, so it may be repeated.
    """

    def __init__(self, forward: Forward, cache: DynamicCache, mask: Tensor, positions: Tensor, spare_slots: int):
        self._forward, self._cache, self._spare_slots = forward, cache, spare_slots
        self._length = mask.shape[1]  # tokens in the cache
        self._mask = mask[:, None, None].bool()  # [B, 1, 1, slots]
        self._positions = positions.clone()
        self._tokens = torch.zeros_like(positions)
        self._slot = positions.new_zeros(1)
        self._pool: GraphPool | None = GraphPool() if can_capture(mask.device) else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._layers = [_SlotLayer(layer.keys, layer.values, self._slot) for layer in cache.layers]  # type: ignore
        cache.layers = [*self._layers]
        self._add_slots()

    def feed(self, tokens: Tensor) -> Tensor:
        if self._length == self._mask.shape[-1]:
            self._add_slots()
        self._mask[..., self._length] = True
        self._slot.fill_(self._length)
        self._positions.add_(1).clamp_(max=self._forward.last_position)
        self._tokens.copy_(tokens[:, None])
        self._length += 1
        if self._graph is None:
            self._graph = self._capture()
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()
        return self._logits

    def should_shrink(self, row_count: int, open_count: int) -> bool:
        """See `GrowingBatch.should_shrink`; shrinking needs a new graph, which costs as much as about twenty steps."""
        return open_count <= row_count / 2 and row_count > _FEW_ROWS

    def keep(self, indices: Tensor) -> None:
        for layer in self._layers:
            layer.keys, layer.values = layer.keys[indices], layer.values[indices]
        self._mask, self._positions, self._tokens = self._mask[indices], self._positions[indices], self._tokens[indices]
        self._graph = None

    def _add_slots(self) -> None:
        """Add slots, filled with zeros: a masked value is multiplied by 0, and 0 · NaN is NaN."""
        for layer in self._layers:
            layer.keys, layer.values = (
                torch.nn.functional.pad(states[:, :, : self._length], (0, 0, 0, self._spare_slots))
                for states in (layer.keys, layer.values)
            )
        self._mask = torch.nn.functional.pad(self._mask[..., : self._length], (0, self._spare_slots))
        self._graph = None

    def _step(self) -> None:
        config = self._forward.model.config
        old_attention, config._attn_implementation = config._attn_implementation, _GROUPED
        try:
            self._logits = self._forward(self._tokens, self._mask, self._positions, self._cache)
        finally:
            config._attn_implementation = old_attention

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        if self._pool is None:
            return None
        self._logits = torch.empty(0)  # returns its memory to the pool, for the next graph
        graph = self._pool.try_capture(self._step)
        self._pool = None if graph is None else self._pool
        return graph


class _SlotLayer(DynamicLayer):
    """Keys and values of one layer in buffers [B, heads, slots, d]; each row's next token is written to `slot` [1]."""

    def __init__(self, keys: Tensor, values: Tensor, slot: Tensor):
        super().__init__()
        self.keys: Tensor
        self.values: Tensor
        self.keys, self.values, self.slot, self.is_initialized = keys, values, slot, True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write one token's keys and values [B, heads, 1, d]; returns the whole buffers."""
        self.keys.index_copy_(2, self.slot, key_states)
        self.values.index_copy_(2, self.slot, value_states)
        return self.keys, self.values


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """`grouped_attention`, which does not copy keys per head of a group: that would dominate a step on long texts. A
    position bias, which it does not support, is left to transformers' own function."""
    attend = grouped_attention if options.get("position_bias") is None else ALL_ATTENTION_FUNCTIONS["sdpa"]
    output, _ = attend(module, query, key, value, attention_mask, **options)
    return output.contiguous(), None


AttentionInterface.register(_GROUPED, _attention)
