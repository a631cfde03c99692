"""Which targets this toolkit can run layer by layer, and what their configs say of them."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from draft_models.target.gguf_config import gguf_config
from draft_models.target.gguf_file import find_gguf, open_gguf
from draft_models.target.model_files import CONFIG_FILE, require_description
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
    gguf = find_gguf(source)
    config = _described(source, revision, role) if gguf is None else gguf_config(open_gguf(gguf))
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in UNSUPPORTED_ROPE:
        raise UserError(f"{role}={source}: rope_type={rope!r} rescales positions as text grows; not supported")
    return config


def _described(source: str, revision: str | None, role: str) -> PreTrainedConfig:
    """What config.json says."""
    path = Path(source)
    local = path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1 or path.parent.is_dir()
    if local and not path.exists():
        raise UserError(f"{role}={source}: no such directory; give a Hugging Face model directory or a Hub name")
    require_description(source, revision, role)
    try:
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception as error:  # whatever the classes of the architectures make of values they do not expect
        where = "" if path.exists() else "no such local directory, and not to be had from the Hub; "
        raise UserError(f"{role}={source}: {where}no usable {CONFIG_FILE} ({reason(error)})") from error


def why_not_by_layers(config: PreTrainedConfig) -> str | None:
    """Why `LayerStack` cannot run a model of `config`, None if it can."""
    if config.model_type not in ARCHITECTURES:
        return f"architecture {config.model_type!r}; supported: {', '.join(ARCHITECTURES)}"
    if (method := quantisation(config)) is not None and not runs_dequantised(config):
        return (
            f"quantised by {method!r} (quantization_config in {CONFIG_FILE}); supported: fp8 with scales by block, and "
            "GGUF files. Give the model it was made from, or a GGUF file of it"
        )
    if config.model_type == "opt":
        if not config.do_layer_norm_before or config._remove_final_layer_norm:
            return "an OPT with layer norms behind its layers (do_layer_norm_before=false), as opt-350m; not supported"
        if config.word_embed_proj_dim != config.hidden_size:
            return (
                f"an OPT with projected embeddings (word_embed_proj_dim={config.word_embed_proj_dim}, "
                f"hidden_size={config.hidden_size}), as opt-350m; not supported"
            )
    return None


def quantisation(config: PreTrainedConfig) -> str | None:
    """How the weights of a checkpoint are quantised, by transformers' name of the method; None where they are not."""
    settings = _quantisation_settings(config)
    if not settings:
        return None
    by_flag = next(
        (f"bitsandbytes ({key})" for key in ("load_in_8bit", "load_in_4bit") if settings.get(key)), "unnamed"
    )
    return str(settings.get("quant_method") or by_flag)


def runs_dequantised(config: PreTrainedConfig) -> bool:
    """Whether the weights are fp8 with a scale for each block: they are multiplied out as they are read."""
    settings = _quantisation_settings(config)
    return settings.get("quant_method") == "fp8" and bool(settings.get("weight_block_size"))


def _quantisation_settings(config: PreTrainedConfig) -> dict[str, Any]:
    settings = getattr(config, "quantization_config", None) or {}
    return dict(settings if isinstance(settings, dict) else settings.to_dict())


def anatomy(config: PreTrainedConfig) -> Anatomy:
    """Where a supported model keeps its parts; `UserError` for others."""
    if config.model_type not in ARCHITECTURES:
        raise UserError(str(why_not_by_layers(config)))
    return ARCHITECTURES[config.model_type]


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
