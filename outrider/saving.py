"""Saving of what transformers writes: models, tokenizers and configs."""

import os
from pathlib import Path

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.errors import UserError, reason

Part = PreTrainedModel | PreTrainedTokenizerBase | PreTrainedConfig | GenerationConfig


def save_parts(folder: Path, *parts: Part, remedy: str = "free space or choose another place") -> None:
    """Save a model, tokenizer or config of transformers to `folder`; its files then have the usual mode, which those of
    safetensors have not. Raises `UserError` if they cannot be written."""
    try:
        for part in parts:
            part.save_pretrained(folder)
    except Exception as error:  # what is written in Rust has classes of its own for this, or a bare Exception
        if not isinstance(error, OSError) and "os error" not in str(error):
            raise
        raise UserError(f"{folder}: cannot be written ({reason(error)}); {remedy}") from None
    os.umask(umask := os.umask(0o077))  # there is no other way to ask for it
    for file in folder.iterdir():
        file.chmod((0o777 if file.is_dir() else 0o666) & ~umask)
