"""Configs of targets, and the check whether this toolkit can run a target layer by layer."""

import os
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from data_prep.formats.door import as_described
from data_prep.formats.torch_files import CONFIG_FILE, MOST_LAYERS
from draft_models.targets.empty_models import model_spec
from draft_models.targets.model_spec import context_limit
from draft_models.targets.narrowed import is_narrowed
from draft_models.targets.settings import MODEL
from draft_models.targets.tensor_files import find_file, require_no_adapter
from outrider.errors import UserError, reason
from outrider.files import is_local, read_mapping

SHORTEST_CONTEXT = 8  # positions: the texts that check a target at load have a few tokens


def load_config(source: str, revision: str | None = None, *, role: str = "target") -> PreTrainedConfig:
    """The target's config. Raises `UserError` if the runtime could not be exact with it.

    role: the option that names the model, if it is not the target.
    """
    config = read_config(source, revision, role=role)
    reason = why_not_by_layers(config)
    if reason is not None:
        raise UserError(f"{role}={source}: {reason}")
    if any(call.slides for call in model_spec(config).calls) and config.sliding_window < 1:
        raise UserError(f"{role}={source}: sliding_window={config.sliding_window}: expected at least 1 token, or null")
    return config


NARROW = ("small_lm", "drafter.path")  # options that accept a drafter with a draft vocabulary


def read_config(source: str, revision: str | None = None, *, role: str = "target") -> PreTrainedConfig:
    """The config of a causal LM of any architecture. Raises `UserError`."""
    config = _described(source, revision, role)
    if role not in NARROW and is_narrowed(config):
        raise UserError(
            f"{role}={source}: a drafter over some of its target's tokens (draft_vocabulary in {CONFIG_FILE}), which "
            "only drafts; give it as small_lm, and here a model of all tokens"
        )
    limit = context_limit(config)
    if limit < SHORTEST_CONTEXT:
        expected = f"expected at least {SHORTEST_CONTEXT}"
        raise UserError(f"{role}={source}: room for {limit} positions (max_position_embeddings); {expected}")
    return config


def _described(source: str, revision: str | None, role: str) -> PreTrainedConfig:
    """The config in config.json."""
    path = Path(source)
    if is_local(source) and not os.path.exists(source):
        raise UserError(f"{role}={source}: no such directory or file; give {MODEL}")
    require_description(source, revision, role)
    require_no_adapter(source, revision, role)
    place, revision = as_described(source, revision)
    try:
        config = AutoConfig.from_pretrained(place, revision=revision, trust_remote_code=False)
    except Exception as error:  # any error of an architecture's config class for unexpected values
        where = "" if path.exists() else "no such local directory, and not to be had from the Hub; "
        raise UserError(f"{role}={source}: {where}no usable {CONFIG_FILE} ({reason(error)})") from error
    config.name_or_path = source
    return config


def require_description(source: str, revision: str | None, role: str) -> None:
    """Raise `UserError` for a config.json that is damaged, or that would make a model of absurd size."""
    file = find_file(source, CONFIG_FILE, revision)
    if file is None:
        return  # transformers says why
    described = read_mapping(file, "description of a model", "fetch the model again")
    layers = described.get("num_hidden_layers", 1)
    # A config makes lists of this length before anything else of it is looked at.
    if not isinstance(layers, int) or not 1 <= layers <= MOST_LAYERS:
        raise UserError(
            f"{role}={source}: no usable {CONFIG_FILE} (num_hidden_layers={layers!r}: expected 1 to {MOST_LAYERS})"
        )


def why_not_by_layers(config: PreTrainedConfig) -> str | None:
    """The reason why `LayerStack` cannot run a model of `config`; None if it can."""
    if (method := quantisation(config)) is not None:
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
    try:
        model_spec(config)
    except UserError as error:
        return str(error)
    return None


def quantisation(config: PreTrainedConfig) -> str | None:
    """The quantisation method of a checkpoint's weights, by its name in transformers; None if not quantised."""
    found = getattr(config, "quantization_config", None) or {}
    settings = found if isinstance(found, dict) else found.to_dict()
    if not settings:
        return None
    by_flag = next(
        (f"bitsandbytes ({key})" for key in ("load_in_8bit", "load_in_4bit") if settings.get(key)), "unnamed"
    )
    return str(settings.get("quant_method") or by_flag)


def position_limit(config: PreTrainedConfig) -> int | None:
    """The number of learned positions of a model; None if its positions are rotary and unlimited."""
    return None if getattr(config, "rope_parameters", None) else config.max_position_embeddings
