"""Models, tokenizers and configs saved so that transformers' versions 4 and 5 read them."""

import os
from contextlib import suppress
from pathlib import Path

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.base.errors import UserError, reason
from outrider.base.files import REMEDY, read_mapping, write_json


def save_parts(
    folder: Path,
    *parts: PreTrainedModel | PreTrainedTokenizerBase | PreTrainedConfig | GenerationConfig,
    remedy: str = REMEDY,
) -> None:
    """Save a model, tokenizer or config of transformers to `folder`, for its versions 4 and 5. Files get the modes of
    the user's umask. Raises `UserError`, which advises `remedy`, if they cannot be written."""
    try:
        for component in parts:
            component.save_pretrained(folder)
    except Exception as error:  # libraries in Rust raise their own classes, or a bare Exception
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        raise UserError(f"{folder}: cannot be written ({reason(error)}); {remedy}") from None
    for_older_readers(folder)
    os.umask(umask := os.umask(0o077))  # the umask can only be read by setting it; safetensors ignores the umask
    for file in folder.iterdir():
        file.chmod((0o777 if file.is_dir() else 0o666) & ~umask)


def for_older_readers(folder: Path) -> None:
    """Add to a model's descriptions in `folder` what transformers 4 reads, and version 5 writes otherwise."""
    for name, convert in ("config.json", with_older_rope), ("tokenizer_config.json", _with_older_names):
        with suppress(UserError):  # missing, or damaged: a later read says so
            write_json(folder / name, convert(read_mapping(folder / name, "description", "save the model again")))


def with_older_rope(config: dict[str, object]) -> dict[str, object]:
    """`config` with its `rope_parameters` in the keys of transformers 4 too; version 5 reads either.

    Example: {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}} gets "rope_theta": 10000.0 beside
    `rope_parameters`. In version 4, layers with a window have a base of their own (Gemma 3).
    """
    config = {key: with_older_rope(value) if isinstance(value, dict) else value for key, value in config.items()}
    rope, arch = config.get("rope_parameters"), str(config.get("model_type"))
    has_layer_types = isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values())
    if not isinstance(rope, dict) or (has_layer_types and not arch.startswith(("gemma3", "olmo3"))):
        return config  # without a rope, or of an architecture that version 4 does not have
    base, part = ("rotary_emb_base", "rotary_pct") if arch == "gpt_neox" else ("rope_theta", "partial_rotary_factor")
    full_rope = dict(rope.get("full_attention") or rope)
    old_fields = {base: full_rope.pop("rope_theta", None), part: full_rope.pop("partial_rotary_factor", None)}
    if arch.startswith("gemma3"):
        old_fields["rope_local_base_freq"] = (rope.get("sliding_attention") or {}).get("rope_theta")
    old_fields["rope_scaling"] = None if full_rope.get("rope_type", "default") == "default" else full_rope
    return {**{key: value for key, value in old_fields.items() if value is not None}, **config}


def _with_older_names(config: dict[str, object]) -> dict[str, object]:
    """A tokenizer's `config` with the names of transformers 4 for its class and its further special tokens."""
    if config.get("tokenizer_class") == "TokenizersBackend":
        config = {**config, "tokenizer_class": "PreTrainedTokenizerFast"}
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    return config
