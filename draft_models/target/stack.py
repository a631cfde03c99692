"""A frozen target's layers: loading all or only named ones, running a range of them."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from draft_models.draft_vocabulary import own_tokens_of
from draft_models.target.anatomy import LayerCall, context_limit
from draft_models.target.attention import ATTENTION, Band, packed_mask
from draft_models.target.empty_models import anatomy_of, empty_layers
from draft_models.target.model_files import CONFIG_FILE
from draft_models.target.stored_tensors import Part
from draft_models.target.tensor_files import TensorFiles
from draft_models.target.tensor_parallel import group_of, own_layer, split_kind, split_model, whole_name
from outrider.errors import UserError, reason
from outrider.groups import ALONE, Group
from outrider.settings import listed

OLD_HEAD = "embed_out.weight"  # of GPT-NeoX's checkpoints, which transformers calls like all others now


def load_layers(
    files: TensorFiles,
    config: PreTrainedConfig,
    layers: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    group: Group = ALONE,
    vocabulary: bool = True,
) -> PreTrainedModel:
    """The target with only `layers`: layer i of the result holds the weights of target layer `layers[i]`.

    Reads embedding, those layers, final norm and (if untied) head, and nothing else; `files.bytes_read`
    proves it. Frozen, in eval mode, with this toolkit's attention. Raises `UserError` where they do not fit the config.

    group: processes that share the model out; this one reads its part of it only. vocabulary: embedding and head too.
    """
    model = empty_layers(config, layers)
    parts = anatomy_of(model)
    cuts = split_model(model, group, vocabulary=vocabulary) if group.size > 1 else {}
    head = f"{parts.head}.weight"
    prefix = f"{parts.layers}."
    source_of = {name: _source_name(whole_name(name), prefix, layers) for name in model.state_dict()}
    if head not in files.file_of and OLD_HEAD in files.file_of:
        source_of = {name: OLD_HEAD if source == head else source for name, source in source_of.items()}
    outside = {name for name in files.file_of if _layer_of(name, parts.layers) is None}
    missing = set(source_of.values()) - set(files.file_of)
    alone = missing == {head} and outside <= set(source_of.values())  # saved without it: it is the embedding
    if config.tie_word_embeddings or alone:
        source_of = {name: source for name, source in source_of.items() if source != head}
    if missing - {head} or (missing and head in source_of.values()):
        make = partial(split_kind, model, cuts, group=group, vocabulary=vocabulary) if cuts else None
        return _load_converted(files, model, layers, dtype, make).to(device)  # type: ignore[arg-type]
    wanted = {source: cuts[whole_name(name)] for name, source in source_of.items() if whole_name(name) in cuts}
    stored = files.read(source_of.values(), dtype, wanted, device)
    weights = {name: stored[source] for name, source in source_of.items()}
    try:
        model.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:  # its second line names the first tensor
        named = " ".join(str(error).split("\n\t")[1:2]) or reason(error)
        raise UserError(f"{files.source}: its weights do not fit its {CONFIG_FILE} ({named})") from None
    if not {head, OLD_HEAD} & set(source_of.values()):
        own_layer(model.get_submodule(parts.head)).weight = own_layer(model.get_submodule(parts.embed)).weight
    model.requires_grad_(False).eval()
    return model.to(device)  # type: ignore[arg-type]  # the rope buffers; its stub is a decorator's


def _load_converted(
    files: TensorFiles,
    model: PreTrainedModel,
    layers: Sequence[int],
    dtype: torch.dtype,
    make_split: Callable[[Iterable[str]], tuple[type[PreTrainedModel], dict[str, Part]]] | None,
) -> PreTrainedModel:
    """`model` with weights that are stored under other names, or in other pieces: transformers puts them together.

    Experts of a mixture are stored one by one, and run as one; the names of old checkpoints lack a prefix.
    """
    parts, kind = anatomy_of(model), type(model)
    source_of = {}
    for source in files.file_of:
        found = _layer_of(source, parts.layers)
        if found is None:
            source_of[source] = source
        elif int(found["index"]) in layers:
            index = list(layers).index(int(found["index"]))
            source_of[f"{source[: found.start('index')]}{index}{source[found.end('index') :]}"] = source
    cuts: dict[str, Part] = {}
    if make_split is not None:
        kind, cuts = make_split(source_of)
    stored = files.read(source_of.values(), dtype, {source_of[name]: cut for name, cut in cuts.items()})
    names = {whole_name(name): name for name in model.state_dict()}
    weights = {names.get(name, name): stored[source] for name, source in source_of.items()}
    with quiet():
        converted: Any = kind.from_pretrained(
            None, config=model.config, state_dict=weights, dtype=dtype, attn_implementation=ATTENTION,
            output_loading_info=True, trust_remote_code=False,
        )  # fmt: skip
    loaded, info = converted
    for trouble in ("missing_keys", "mismatched_keys"):
        if info.get(trouble):
            raise UserError(
                f"{files.source}: its weights do not fit its {CONFIG_FILE} ({trouble.replace('_', ' ')}: "
                f"{listed(sorted(map(str, info[trouble])))})"
            )
    loaded.anatomy = parts
    return loaded.requires_grad_(False).eval()


@contextmanager
def quiet() -> Iterator[None]:
    """transformers says nothing inside: neither progress nor warnings."""
    before, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if bar:
            transformers_logging.enable_progress_bar()


class LayerCache(Protocol):
    """What a layer needs of a cache: take the new keys and values, give back all of them."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]: ...


class AtOnce(Protocol):
    """A faster way through a range of layers, which `LayerStack.run` asks first."""

    def run(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        rotary: tuple[Tensor, Tensor] | None,
        mask: "Tensor | Band | None",
        cache: LayerCache | None,
    ) -> Tensor | None:
        """Layers start … stop − 1 on hidden [B, Q, d]; None where it does not run such a pass."""


class Rotary(NamedTuple):
    """Where rows stand: positions [B, Q], and cos and sin [B, Q, D] at them of every rotary table of the target."""

    positions: Tensor
    tables: tuple[tuple[Tensor, Tensor], ...]

    def to(self, dtype: torch.dtype) -> "Rotary":
        """The tables in `dtype`."""
        return Rotary(self.positions, tuple((cos.to(dtype), sin.to(dtype)) for cos, sin in self.tables))


def call_layer(
    layer: nn.Module,
    call: LayerCall,
    hidden: Tensor,
    mask: Tensor | Band | None,
    rotary: Rotary,
    cache: LayerCache | None = None,
) -> Tensor:
    """A decoder layer on hidden [B, Q, d], called as its model calls it."""
    given: dict[str, Any] = {}
    for ours, theirs in call.keywords:
        if ours == "rotary":
            given[theirs] = rotary.tables[call.table]
        elif ours == "positions":
            given[theirs] = rotary.positions
        else:
            given[theirs] = mask if ours == "mask" else cache
    out = layer(hidden, **given)
    return out if isinstance(out, Tensor) else out[0]


def normed_product(norm: Any, head: Any, hidden: Tensor) -> Tensor:
    """head(norm(hidden)); in one step where the head can do that `after` a norm of this kind, and does."""
    if not (hasattr(head, "after") and hasattr(norm, "divides_by_rms")):
        return head(norm(hidden))
    done = head.after(norm.weight, norm.eps, hidden)
    return head(norm(hidden)) if done is None else done


class LayerStack(nn.Module):
    """The layers of a causal LM, called a range at a time on hidden states.

    Rotary tables are computed once (`reserve`) and indexed. The values are those of computing them in every pass.
    They are kept in `rotary_dtype`, by default the model's, as the model itself would use them. Where positions are
    learned, `embed` adds them. A target may have several tables (gemma3: one for its sliding layers), or none.
    A drafter may be made of some of the target's tokens (see `OwnTokens`): what comes in and goes out are the target's.
    """

    def __init__(self, model: PreTrainedModel, rotary_dtype: torch.dtype | None = None):
        super().__init__()
        parts = anatomy_of(model)
        self.embed_tokens: Any = model.get_submodule(parts.embed)
        self.embed_positions = model.get_submodule(parts.positions) if parts.positions else None
        self.input_norm = model.get_submodule(parts.input_norm) if parts.input_norm else None
        self.layers: Any = model.get_submodule(parts.layers)
        self.norm = model.get_submodule(parts.norm)
        self.head: Any = model.get_submodule(parts.head)
        self.config = model.config
        self.anatomy = parts
        self.group = group_of(model)
        self.own_tokens = own_tokens_of(model)
        self.windows = [model.config.sliding_window if call.slides else None for call in parts.calls]
        self._rotary = [model.get_submodule(table.module) for table in parts.tables]
        self._rotary_dtype = rotary_dtype or self.dtype
        self._reserved = 0
        self.at_once: AtOnce | None = None
        for number, _ in enumerate(parts.tables):
            self.register_buffer(f"cos{number}", torch.empty(0), persistent=False)
            self.register_buffer(f"sin{number}", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are."""
        return self.embed_tokens.weight.dtype

    @property
    def tables(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """cos and sin [P, D] of every rotary table, at the positions that are reserved."""
        return tuple((getattr(self, f"cos{i}"), getattr(self, f"sin{i}")) for i in range(len(self._rotary)))

    def reserve(self, positions: int) -> None:
        """Make `rotary` ready for positions 0..positions−1."""
        if positions <= self._reserved:
            return
        self._reserved = positions
        like = torch.empty(1, positions, 0, dtype=self._rotary_dtype, device=self.device)
        # No text goes beyond the limit, only the places of padding do.
        every = torch.arange(positions, device=self.device).clamp(max=context_limit(self.config) - 1)[None]
        for number, (module, table) in enumerate(zip(self._rotary, self.anatomy.tables, strict=True)):
            cos, sin = module(like, position_ids=every, **dict(table.options))
            setattr(self, f"cos{number}", cos[0])
            setattr(self, f"sin{number}", sin[0])

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The first layer's input [B, Q, d] for tokens at positions [B, Q], unused where they are rotary."""
        if self.own_tokens is not None:
            tokens = self.own_tokens.inward(tokens)
        hidden = self.embed_tokens(tokens)
        if self.anatomy.scale != 1.0:
            hidden = hidden * self.anatomy.scale
        if self.embed_positions is not None:
            if type(self.embed_positions) is nn.Embedding:
                hidden = hidden + self.embed_positions(positions)
            else:  # OPT's would count positions from a mask, but for those it is given
                hidden = hidden + self.embed_positions(None, position_ids=positions)
        return hidden if self.input_norm is None else self.input_norm(hidden)

    def rotary(self, positions: Tensor) -> Rotary:
        """What layers are told of rows at positions [B, Q], which must have been reserved."""
        return Rotary(positions, tuple((cos[positions], sin[positions]) for cos, sin in self.tables))

    def run(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        rotary: Rotary,
        masks: Mapping[int | None, Tensor | Band | None],
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Layers start..stop−1 on hidden [B, Q, d]; `masks` by window size (see `windows`)."""
        if self.at_once is not None and stop > start:
            call = self.anatomy.calls[start]
            done = self.at_once.run(hidden, start, stop, rotary.tables[call.table], masks[self.windows[start]], cache)
            if done is not None:
                return done
        every = zip(self.layers, self.anatomy.calls, self.windows, strict=True)  # an index into modules is slow
        for layer, call, window in islice(every, start, stop):
            hidden = call_layer(layer, call, hidden, masks[window], rotary, cache)
        return hidden

    def run_tapped(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        rotary: Rotary,
        masks: Mapping[int | None, Tensor | Band | None],
        taps: Sequence[int],
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """`run`, and the hidden states [B, Q, d] at the boundaries `taps`, ascending, all from start to stop.

        Boundary b is what layer b is given: 0 the embedding, i the output of layer i − 1, as many as there are layers
        what the final norm is given.
        """
        tapped = []
        for boundary in taps:
            hidden = self.run(hidden, start, boundary, rotary, masks, cache)
            tapped.append(hidden)
            start = boundary
        return self.run(hidden, start, stop, rotary, masks, cache), tapped

    def packed_masks(self, positions: Tensor, documents: Tensor) -> dict[int | None, Tensor | Band | None]:
        """Masks of packed rows for `run`, by window size; positions, documents [B, T] as in `data_prep.text.rows`."""
        if positions.shape[1] > Band.BLOCK:
            return {w: Band.packed(documents, w) for w in set(self.windows)}
        base = packed_mask(documents)
        distance = positions[:, None, :, None] - positions[:, None, None, :]
        return {w: base if w is None else base & (distance < w) for w in set(self.windows)}

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., K] of its `own_tokens` alone, of the hidden states after the last layer.

        K = V where it is made of all tokens.
        """
        logits = self.anatomy.logits(normed_product(self.norm, self.head, hidden))
        return logits if self.own_tokens is None else logits[..., : len(self.own_tokens.tokens)]

    def logits(self, hidden: Tensor) -> Tensor:
        """The same over the target's vocabulary [..., V]."""
        return self._outward(self.anatomy.logits(normed_product(self.norm, self.head, hidden)))

    def logits_after_norm(self, hidden: Tensor) -> Tensor:
        """The same from what its norm gave."""
        return self._outward(self.anatomy.logits(self.head(hidden)))

    def _outward(self, logits: Tensor) -> Tensor:
        return logits if self.own_tokens is None else self.own_tokens.outward(logits)


def _layer_of(name: str, layers: str) -> "re.Match[str] | None":
    """Where in the `name` of a tensor the index of its layer stands; None outside of `layers`."""
    return re.search(rf"(^|\.){layers.rpartition('.')[2]}\.(?P<index>\d+)\.", name)


def _source_name(name: str, prefix: str, layers: Sequence[int]) -> str:
    if not name.startswith(prefix):
        return name
    index, _, rest = name[len(prefix) :].partition(".")
    return f"{prefix}{layers[int(index)]}.{rest}"
