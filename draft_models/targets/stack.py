"""The two kinds of target: layers that run a range at a time (`LayerStack`), and a model that only runs as a whole.

Test runs decide whether a model is run rightly (`draft_models.targets.proof`), not its name. `RowCache` is the KV cache
of a `WholeModel`, and of a `LayerStack` as a target of `rows`. A row is one token of a pass. In shapes B is the batch,
Q the rows of a text, d the hidden size, V the target's vocabulary and K the vocabulary that a drafter has logits for.
"""

import inspect
from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from outrider.base.errors import UserError
from outrider.draft_models.targets.attention import additive_mask, packed_band
from outrider.draft_models.targets.coded import CodedEmbedding
from outrider.draft_models.targets.model_spec import LayerCall, ModelSpec, context_limit, rescaling_ropes, slots_of
from outrider.draft_models.targets.narrowed import draft_vocabulary_of
from outrider.draft_models.targets.target import LayerCache, Mask, Masks, Rotary, Target


class RowCache(Cache):
    """Keys and values of one sequence, as transformers' models expect them; any subset of rows can be kept."""

    def __init__(self, capacity: int):
        class Layer(_RowLayer):  # transformers creates one for every layer of the model
            def __init__(self) -> None:
                super().__init__(capacity)

        super().__init__(layer_class_to_replicate=Layer)

    def keep(self, prefix_len: int, rows: Sequence[int]) -> None:
        """Keep the first `prefix_len` positions and, after them in this order, prefix_len + r for r in `rows`."""
        for layer in self._row_layers():
            layer.keep(prefix_len, rows)

    def content(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [1, heads, positions, head_dim] of every layer."""
        return [layer.content() for layer in self._row_layers()]

    def _row_layers(self) -> "list[_RowLayer]":
        return [layer for layer in self.layers if isinstance(layer, _RowLayer)]


class _RowLayer(DynamicLayer):
    """A layer of a `RowCache`, in buffers [1, heads, slots, head_dim] that grow by doubling, up to `capacity` slots."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.length = 0
        self._buffers: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new_length = self.length + key_states.shape[2]
        if not self._buffers or new_length > self._buffers[0].shape[2]:
            slots, old_buffers = min(slots_of(new_length), self.capacity), self._buffers
            self._buffers = tuple(t.new_empty((*t.shape[:2], slots, t.shape[3])) for t in (key_states, value_states))
            for buffer, old_buffer in zip(self._buffers, old_buffers, strict=False):
                buffer[:, :, : self.length] = old_buffer[:, :, : self.length]
        for buffer, new_states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.length : new_length] = new_states
        return self._set_length(new_length)

    def get_seq_length(self) -> int:
        return self.length

    def keep(self, prefix_len: int, rows: Sequence[int]) -> None:
        stop = prefix_len + len(rows)
        if self.is_initialized:  # else the cache is empty
            if list(rows) != list(range(len(rows))):
                for buffer in self._buffers:
                    buffer[:, :, prefix_len:stop] = buffer[:, :, torch.tensor(rows, device=buffer.device) + prefix_len]
            self._set_length(stop)

    def content(self) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[:, :, : self.length] for buffer in self._buffers)
        return keys, values

    def _set_length(self, length: int) -> tuple[Tensor, Tensor]:
        """Set the number of positions; returns their keys and values."""
        self.length = length
        self.keys, self.values = keys, values = self.content()
        return keys, values


class AtOnce(Protocol):
    """A faster implementation of a range of layers; `LayerStack.run` tries it first."""

    def run(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        rotary: tuple[Tensor, Tensor] | None,
        mask: Mask,
        cache: LayerCache | None,
    ) -> Tensor | None:
        """Layers start … stop − 1 on hidden [B, Q, d]; None if it does not support such a pass."""


def call_layer(
    layer: nn.Module, call: LayerCall, hidden: Tensor, mask: Mask, rotary: Rotary, cache: LayerCache | None = None
) -> Tensor:
    """A decoder layer on hidden [B, Q, d], called as its model calls it."""
    arguments: dict[str, object] = {"positions": rotary.positions, "mask": mask, "cache": cache}
    if rotary.tables:
        arguments["rotary"] = rotary.tables[call.table]
    out = layer(hidden, **{keyword: arguments[role] for role, keyword in call.keywords})
    return out if isinstance(out, Tensor) else out[0]


def apply_norm_and_head(norm: Any, head: Any, hidden: Tensor) -> Tensor:
    """head(norm(hidden)), in one step if the head (a `PanelLinear`) and the norm (a fused `RMSNorm`) support it."""
    if not (hasattr(head, "after") and hasattr(norm, "divides_by_rms")):
        return head(norm(hidden))
    logits = head.after(norm.weight, norm.eps, hidden)
    return head(norm(hidden)) if logits is None else logits


def module_list(model: PreTrainedModel, name: str) -> nn.ModuleList:
    """The list of modules that `model` has under this name."""
    module = model.get_submodule(name)
    if not isinstance(module, nn.ModuleList):
        raise TypeError(f"{name} of {type(model).__name__} is a {type(module).__name__}: expected a list of modules")
    return module


class LayerStack(nn.Module):
    """The layers of a causal LM, called a range at a time on hidden states: a `Target`, and `RunnableLayers`.

    Rotary tables are computed once (`reserve`) and indexed, with the values that every pass would compute. They are
    kept in `rotary_dtype`, by default the model's, as the model itself uses them. Learned positions are added by
    `embed`. A target may have several tables (gemma3: one for its sliding layers), or none. A drafter may have a draft
    vocabulary (see `DraftVocabulary`); its inputs and outputs are the target's ids all the same.
    """

    def __init__(self, model: PreTrainedModel, parts: ModelSpec, rotary_dtype: torch.dtype | None = None):
        super().__init__()
        self.embed_tokens: Any = model.get_submodule(parts.embed)
        self.embed_positions = model.get_submodule(parts.positions) if parts.positions else None
        self.input_norm = model.get_submodule(parts.input_norm) if parts.input_norm else None
        self.layers = module_list(model, parts.layers)
        self.norm = model.get_submodule(parts.norm)
        self.head: Any = model.get_submodule(parts.head)
        self.config = model.config
        self.spec = parts
        self.draft_vocabulary = draft_vocabulary_of(model)
        self.windows = [model.config.sliding_window if call.slides else None for call in parts.calls]
        self._rotary = [model.get_submodule(table.module) for table in parts.tables]
        self._rotary_dtype = rotary_dtype or self.dtype
        self._reserved = 0
        self.at_once: AtOnce | None = None  # set by `engines.packing`
        for table_index, _ in enumerate(parts.tables):
            self.register_buffer(f"cos{table_index}", torch.empty(0), persistent=False)
            self.register_buffer(f"sin{table_index}", torch.empty(0), persistent=False)

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode: as a part of a module that trains it is frozen, without dropout and router jitter."""
        return super().train(False)

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, or that of hidden states if the weights are codes (integers of a quantisation)."""
        return self._like.dtype

    @property
    def _like(self) -> Tensor:
        """A tensor on the device and in the dtype of this target."""
        embed = self.embed_tokens
        return embed.like if isinstance(embed, CodedEmbedding) else embed.weight

    @property
    def layered(self) -> "LayerStack":
        return self

    @property
    def predicted(self) -> Tensor | None:
        return None if self.draft_vocabulary is None else self.draft_vocabulary.tokens

    @property
    def tables(self) -> tuple[tuple[Tensor, Tensor], ...]:
        return tuple((getattr(self, f"cos{i}"), getattr(self, f"sin{i}")) for i in range(len(self._rotary)))

    def reserve(self, position_count: int) -> None:
        if position_count <= self._reserved:
            return
        self._reserved = position_count
        dummy_hidden = torch.empty(1, position_count, 0, dtype=self._rotary_dtype, device=self.device)
        # Beyond its context a rope would rescale every position. Only padding lies there, and gets the last position.
        max_positions = context_limit(self.config) if rescaling_ropes(self.config) else position_count
        position_ids = torch.arange(position_count, device=self.device).clamp(max=max_positions - 1)[None]
        for table_index, (module, table) in enumerate(zip(self._rotary, self.spec.tables, strict=True)):
            cos, sin = module(dummy_hidden, position_ids=position_ids, **dict(table.options))
            setattr(self, f"cos{table_index}", cos[0])
            setattr(self, f"sin{table_index}", sin[0])

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The first layer's input [B, Q, d] for tokens at positions [B, Q], which only learned positions use."""
        if self.draft_vocabulary is not None:
            tokens = self.draft_vocabulary.to_draft_ids(tokens)
        hidden = self.embed_tokens(tokens)
        if self.spec.scale != 1.0:
            hidden = hidden * self.spec.scale
        if self.embed_positions is not None:
            if type(self.embed_positions) is nn.Embedding:
                hidden = hidden + self.embed_positions(positions)
            else:  # OPT's module would count positions from a mask unless they are given
                hidden = hidden + self.embed_positions(None, position_ids=positions)
        return hidden if self.input_norm is None else self.input_norm(hidden)

    def rotary(self, positions: Tensor) -> Rotary:
        return Rotary(positions, tuple((cos[positions], sin[positions]) for cos, sin in self.tables))

    def run(
        self, hidden: Tensor, start: int, stop: int, rotary: Rotary, masks: Masks, cache: LayerCache | None = None
    ) -> Tensor:
        """Layers start..stop−1 on hidden [B, Q, d]; `masks` by window size (see `windows`)."""
        if self.at_once is not None and stop > start:
            call = self.spec.calls[start]
            output = self.at_once.run(hidden, start, stop, rotary.tables[call.table], masks[self.windows[start]], cache)
            if output is not None:
                return output
        layer_calls = zip(self.layers, self.spec.calls, self.windows, strict=True)  # an index into modules is slow
        for layer, call, window in islice(layer_calls, start, stop):
            hidden = call_layer(layer, call, hidden, masks[window], rotary, cache)
        return hidden

    def run_with_aux(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        rotary: Rotary,
        masks: Masks,
        boundaries: Sequence[int],
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """`run`, and the hidden states [B, Q, d] at the layer boundaries `boundaries`, ascending, from start to stop.

        Boundary b is the input of layer b: 0 the embedding, i the output of layer i − 1, and the number of layers the
        input of the final norm.
        """
        aux_hidden = []
        for boundary in boundaries:
            hidden = self.run(hidden, start, boundary, rotary, masks, cache)
            aux_hidden.append(hidden)
            start = boundary
        return self.run(hidden, start, stop, rotary, masks, cache), aux_hidden

    def packed_masks(self, document_ids: Tensor) -> Masks:
        """Masks of packed rows for `run`, by window size; document_ids [B, T] as in `data_prep.text.rows`."""
        return {window: packed_band(document_ids, window) for window in set(self.windows)}

    def cache(self, capacity: int) -> RowCache:
        return RowCache(capacity)

    def rows(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: RowCache, *, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See `Target.rows`. A text from its beginning needs no mask unless a window cuts it."""
        key_positions = torch.cat([torch.arange(visible.shape[1] - len(tokens), device=tokens.device), positions])
        masks: dict[int | None, Mask] = {}
        for window in set(self.windows):
            visible_in_window = visible if window is None else visible & (key_positions > positions[:, None] - window)
            needs_no_mask = visible.shape[1] == len(tokens) and torch.equal(visible_in_window, visible)
            masks[window] = None if needs_no_mask else additive_mask(visible_in_window, self.dtype)
        self.reserve(int(positions.max()) + 1)
        hidden = self.embed(tokens[None], positions[None])
        hidden = self.run(hidden, 0, len(self.layers), self.rotary(positions[None]), masks, cache)
        return hidden[0], self.logits(hidden[:, -1:] if last_only else hidden)[0]

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., K] from the last layer's hidden states [..., d]; K = V without a draft vocabulary."""
        logits = self.spec.logits(apply_norm_and_head(self.norm, self.head, hidden))
        return logits if self.draft_vocabulary is None else logits[..., : len(self.draft_vocabulary.tokens)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] over the target's vocabulary, from the hidden states [..., d] as above."""
        return self._over_target_vocabulary(self.spec.logits(apply_norm_and_head(self.norm, self.head, hidden)))

    def logits_after_norm(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] over the target's vocabulary, from the output [..., d] of the final norm."""
        return self._over_target_vocabulary(self.spec.logits(self.head(hidden)))

    def _over_target_vocabulary(self, logits: Tensor) -> Tensor:
        return logits if self.draft_vocabulary is None else self.draft_vocabulary.to_target_logits(logits)


class WholeModel(nn.Module):
    """A causal LM of any architecture in transformers, run by its own forward: a `Target` that only runs as a whole."""

    layered = None  # its layers do not run one by one
    predicted = None  # it has logits for its whole vocabulary

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        self.config: PreTrainedConfig = model.config
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def cache(self, capacity: int) -> RowCache:
        return RowCache(capacity)

    def rows(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: RowCache, *, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See `Target.rows`. Hidden states are after the model's final norm if transformers reports them so."""
        out = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=additive_mask(visible, self.dtype),
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=True,
            **({"logits_to_keep": 1} if last_only and self._takes_logits_to_keep else {}),
        )
        return out.hidden_states[-1][0], out.logits[0, -1:] if last_only else out.logits[0]


def require_layers(target: Target) -> LayerStack:
    """`target`, for a drafter that needs its layers. Raises `UserError` if it only runs as a whole."""
    if target.layered is None:
        raise UserError("this drafter needs a target that is run layer by layer; this one runs as a whole only")
    return target.layered
