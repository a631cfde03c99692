"""A causal LM of any architecture in transformers, run by its own forward over the rows of a draft tree.

Whether it can be is found out by trying (`proof.prove_rows`), not by its name.
"""

import inspect
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer


class RowCache(Cache):
    """Keys and values of one sequence, as transformers' models expect them, of which any rows may be kept."""

    def __init__(self, capacity: int):
        super().__init__(layer_class_to_replicate=partial(_RowLayer, capacity))  # type: ignore[arg-type]  # is called

    def keep(self, base: int, rows: Sequence[int]) -> None:
        """Keep the first `base` positions and, after them in this order, positions base + r for r in `rows`."""
        for layer in self.layers:
            assert isinstance(layer, _RowLayer)
            layer.keep(base, rows)


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

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        self.length = length
        keys, values = (buffer[:, :, :length] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values


class PlainLM(nn.Module):
    """`model` with the little that drafting needs of it: rows at given positions that see given rows."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        self.config: PreTrainedConfig = model.config
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are."""
        return self.model.dtype

    def rows(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: RowCache, *, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Feed tokens [n] at positions [n] after what `cache` holds; visible bool [n, cached + n].

        Returns the last hidden states [n, d], after the model's final norm where transformers reports them so, and
        next-token logits [n, V]. With `last_only` the logits are those of the last row, [1, V].
        """
        mask = torch.zeros(visible.shape, dtype=self.model.dtype, device=self.device)
        mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)
        out = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=mask[None, None],
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=True,
            **({"logits_to_keep": 1} if last_only and self._keeps_logits else {}),
        )
        return out.hidden_states[-1][0], out.logits[0, -1:] if last_only else out.logits[0]
