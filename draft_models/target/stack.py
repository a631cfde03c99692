"""A frozen target's layers: loading all or only named ones, running a range of them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from draft_models.target.architectures import anatomy, layer_windows, select_layers
from draft_models.target.attention import ATTENTION, Band, packed_mask
from draft_models.target.model_files import CONFIG_FILE
from draft_models.target.tensor_files import TensorFiles
from outrider.errors import UserError, reason


def backbone(model: PreTrainedModel) -> Any:
    """The module of a supported model that holds its embedding and `layers`."""
    return model.get_submodule(anatomy(model.config).base)


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm after the last layer of a supported model."""
    return backbone(model).get_submodule(anatomy(model.config).norm)


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The causal LM of `config` with parameters on the meta device and real buffers (rope tables).

    Raises `UserError` for a config that no model can be made of.
    """
    try:
        with init_empty_weights(include_buffers=False):
            return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"{config.name_or_path}: its {CONFIG_FILE} describes no model ({reason(error)})") from error


def load_layers(
    files: TensorFiles,
    config: PreTrainedConfig,
    layers: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """The target with only `layers`: layer i of the result holds the weights of target layer `layers[i]`.

    Reads embedding, those layers, final norm and (if untied) head, and nothing else; `files.bytes_read`
    proves it. Frozen, in eval mode, with this toolkit's attention. Raises `UserError` where they do not fit the config.
    """
    model = empty_model(select_layers(config, layers))
    prefix = f"{anatomy(config).base}.layers."
    source_of = {name: _source_name(name, prefix, layers) for name in model.state_dict()}
    if config.tie_word_embeddings or "lm_head.weight" not in files.file_of:
        source_of.pop("lm_head.weight", None)
    stored = files.read(source_of.values(), dtype)
    weights = {name: stored[source].to(device) for name, source in source_of.items()}
    try:
        model.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:  # its second line names the first tensor
        named = " ".join(str(error).split("\n\t")[1:2]) or reason(error)
        raise UserError(f"{files.source}: its weights do not fit its {CONFIG_FILE} ({named})") from None
    if "lm_head.weight" not in weights:
        model.lm_head.weight = model.get_input_embeddings().weight
    model.requires_grad_(False).eval()
    return model.to(device)  # type: ignore[arg-type]  # the rope buffers; its stub is a decorator's


class LayerCache(Protocol):
    """What a layer needs of a cache: take the new keys and values, give back all of them."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]: ...


class LayerStack(nn.Module):
    """The layers of a causal LM, called a range at a time on hidden states.

    Rotary tables are computed once (`reserve`) and indexed. The values are those of computing them in every pass.
    They are kept in `rotary_dtype`, by default the model's, as the model itself would use them. Where positions are
    learned, `embed` adds them, and the rotary tables have no columns.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, model: PreTrainedModel, rotary_dtype: torch.dtype | None = None):
        super().__init__()
        parts = anatomy(model.config)
        base = backbone(model)
        self.embed_tokens = base.embed_tokens
        self.embed_positions = base.get_submodule(parts.positions) if parts.positions else None
        self.layers = base.layers
        self.norm = final_norm(model)
        self.head = model.lm_head
        self.config = model.config
        self.windows = layer_windows(model.config)
        self._rotary_emb = None if parts.positions else base.rotary_emb
        self._rotary_dtype = rotary_dtype or self.dtype
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are."""
        return self.embed_tokens.weight.dtype

    def reserve(self, positions: int) -> None:
        """Make `rotary` ready for positions 0..positions−1."""
        if positions > self.cos.shape[0]:
            like = torch.empty(positions, 0, dtype=self._rotary_dtype, device=self.device)
            self.cos, self.sin = like, like
            if self._rotary_emb is not None:
                every = torch.arange(positions, device=self.device)
                cos, sin = self._rotary_emb(like, position_ids=every[None])
                self.cos, self.sin = cos[0], sin[0]

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The first layer's input [B, Q, d] for tokens at positions [B, Q], unused where they are rotary."""
        hidden = self.embed_tokens(tokens)
        if self.embed_positions is None:
            return hidden
        return hidden + self.embed_positions(None, position_ids=positions)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, Q, head_dim] for positions [B, Q], which must have been reserved."""
        return self.cos[positions], self.sin[positions]

    def run(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        rotary: tuple[Tensor, Tensor],
        masks: Mapping[int | None, Tensor | Band | None],
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Layers start..stop−1 on hidden [B, Q, d]; `masks` by window size (see `layer_windows`)."""
        for index in range(start, stop):
            hidden = self.layers[index](
                hidden,
                attention_mask=masks[self.windows[index]],
                past_key_values=cache,
                position_embeddings=rotary,
            )
        return hidden

    def packed_masks(self, positions: Tensor, documents: Tensor) -> dict[int | None, Tensor | Band | None]:
        """Masks of packed rows for `run`, by window size; positions, documents [B, T] as in `data_prep.text.rows`."""
        if positions.shape[1] > Band.BLOCK:
            return {w: Band.packed(documents, w) for w in set(self.windows)}
        base = packed_mask(documents)
        distance = positions[:, None, :, None] - positions[:, None, None, :]
        return {w: base if w is None else base & (distance < w) for w in set(self.windows)}

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of the hidden states after the last layer."""
        return self.head(self.norm(hidden))


def _source_name(name: str, prefix: str, layers: Sequence[int]) -> str:
    if not name.startswith(prefix):
        return name
    index, _, rest = name[len(prefix) :].partition(".")
    return f"{prefix}{layers[int(index)]}.{rest}"
