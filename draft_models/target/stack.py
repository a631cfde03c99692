"""A frozen target: loading all or only named layers, running a range of its layers."""

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draft_models.target.attention import ATTENTION, Band, packed_mask
from draft_models.target.model_files import CONFIG_FILE, require_description
from draft_models.target.tensor_files import TensorFiles
from outrider.errors import UserError, reason

# These rescale every position by the longest one seen, so a cached key depends on later text.
UNSUPPORTED_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class Anatomy:
    """Where a causal LM keeps its parts: `base` from the model, `norm` and `positions` from there."""

    base: str = "model"
    norm: str = "norm"
    positions: str | None = None  # the table of learned positions; None: positions are rotary

    def prefixes(self, layers: Iterable[int]) -> tuple[str, ...]:
        """What the names of all tensors outside the layers, and of those in `layers`, begin with."""
        parts = ["embed_tokens", self.norm, *([self.positions] if self.positions else [])]
        parts += [f"layers.{index}" for index in layers]
        return ("lm_head.", *(f"{self.base}.{part}." for part in parts))


# Whose layers this toolkit runs itself and is tested on. Others scale or cap in places it does not know of.
ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), Anatomy()),
    "opt": Anatomy("model.decoder", "final_layer_norm", "embed_positions"),
}


def load_config(source: str, revision: str | None = None, *, role: str = "target") -> PreTrainedConfig:
    """The target's config, refused with a `UserError` where the runtime could not be exact.

    role: the option that names the model, where it is not the target.
    """
    config = read_config(source, revision, role=role)
    reason = why_not_by_layers(config)
    if reason is not None:
        raise UserError(f"{role}={source}: {reason}")
    layer_windows(config)
    return config


def read_config(source: str, revision: str | None = None, *, role: str = "target") -> PreTrainedConfig:
    """The config of a causal LM of any architecture. Raises `UserError`, also where cached keys would go stale."""
    path = Path(source)
    local = path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1 or path.parent.is_dir()
    if local and not path.exists():
        raise UserError(f"{role}={source}: no such directory; give a Hugging Face model directory or a Hub name")
    require_description(source, revision, role)
    try:
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception as error:  # whatever the classes of the architectures make of values they do not expect
        where = "" if path.exists() else "no such local directory, and not to be had from the Hub; "
        raise UserError(f"{role}={source}: {where}no usable {CONFIG_FILE} ({reason(error)})") from error
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in UNSUPPORTED_ROPE:
        raise UserError(f"{role}={source}: rope_type={rope!r} rescales positions as text grows; not supported")
    return config


def why_not_by_layers(config: PreTrainedConfig) -> str | None:
    """Why `LayerStack` cannot run a model of `config`, None if it can."""
    if config.model_type not in ARCHITECTURES:
        return f"architecture {config.model_type!r}; supported: {', '.join(ARCHITECTURES)}"
    if config.model_type == "opt":
        if not config.do_layer_norm_before or config._remove_final_layer_norm:
            return "an OPT with layer norms behind its layers (do_layer_norm_before=false), as opt-350m; not supported"
        if config.word_embed_proj_dim != config.hidden_size:
            return (
                f"an OPT with projected embeddings (word_embed_proj_dim={config.word_embed_proj_dim}, "
                f"hidden_size={config.hidden_size}), as opt-350m; not supported"
            )
    return None


def anatomy(config: PreTrainedConfig) -> Anatomy:
    """Where a supported model keeps its parts; `UserError` for others."""
    if config.model_type not in ARCHITECTURES:
        raise UserError(str(why_not_by_layers(config)))
    return ARCHITECTURES[config.model_type]


def backbone(model: PreTrainedModel) -> Any:
    """The module of a supported model that holds its embedding and `layers`."""
    return model.get_submodule(anatomy(model.config).base)


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm after the last layer of a supported model."""
    return backbone(model).get_submodule(anatomy(model.config).norm)


def position_limit(config: PreTrainedConfig) -> int | None:
    """How many positions a model has in a learned table, None where they are rotary and have no end."""
    return None if getattr(config, "rope_parameters", None) else config.max_position_embeddings


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window of each layer in tokens, None where a layer sees everything before it."""
    window = getattr(config, "sliding_window", None)
    if window is not None and window < 1:
        raise UserError(f"{config.model_type}: sliding_window={window}: expected at least 1 token, or null")
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UserError(f"{config.model_type}: layer types {sorted(unknown)} are not supported, only full and sliding")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def select_layers(config: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedConfig:
    """`config` for a model made of the given layers of the target, in that order."""
    chosen = copy.deepcopy(config)
    if getattr(config, "layer_types", None) is not None:
        chosen.layer_types = [config.layer_types[i] for i in layers]
    chosen.num_hidden_layers = len(layers)
    return chosen


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
    stored = files.read(source_of.values())
    weights = {name: stored[source].to(device, dtype) for name, source in source_of.items()}
    try:
        model.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:  # its second line names the first tensor
        named = " ".join(str(error).split("\n\t")[1:2]) or reason(error)
        raise UserError(f"{files.source}: its weights do not fit its {CONFIG_FILE} ({named})") from None
    if "lm_head.weight" not in weights:
        model.lm_head.weight = model.get_input_embeddings().weight
    model.requires_grad_(False).eval()
    return model.to(device)  # type: ignore[arg-type]  # the rope buffers; its stub is a decorator's


def load_tokenizer(source: str, revision: str | None = None, *, role: str = "target") -> PreTrainedTokenizerBase:
    """The target's tokenizer; role: the option that names it. Raises `UserError` where there is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
        tokenizer.decode(tokenizer("a text")["input_ids"])  # some of its settings are looked at only now
    except Exception as error:  # whatever the Hub client or a tokenizer's own files raise
        raise UserError(f"{role}={source}: no usable tokenizer ({reason(error)})") from error
    return tokenizer


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over all that decides how plain text becomes ids: vocabulary, merges and rules, special tokens."""
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        backend.pop("truncation", None)  # left behind by the last call, not a property of the tokenizer
        backend.pop("padding", None)
    else:
        backend = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    parts = [backend, tokenizer.special_tokens_map]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


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


def pick_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the current CUDA device if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.index is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # where streams, events and graphs are made
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device={name}: not usable here ({str(error).splitlines()[0]}); try device=auto") from None
    return device


def pick_dtype(name: str, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """The dtype called `name`; "auto" is float32 on a CPU and the checkpoint's own elsewhere."""
    if name != "auto":
        return getattr(torch, name)
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return torch.float32 if device.type == "cpu" else stored
