"""A trained model as an ordinary Hugging Face directory."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draft_models.draft_vocabulary import save_tokens
from draft_models.targets.narrowed import draft_vocabulary_of
from outrider.errors import UserError
from outrider.saving import save_parts
from train.core import run_dir

_REMEDY = "free space, then resume=true"


def export(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out_dir: Path,
    convert: Callable[[Path], Path] = lambda staged: staged,
) -> None:
    """Write the Hugging Face directory; config.json is moved last, so an incomplete directory does not load.

    convert: makes of it, in a folder there, what is to be written instead. Raises `UserError`.
    """
    staged = run_dir.own_staging(out_dir)
    shutil.rmtree(staged, ignore_errors=True)
    try:
        save_parts(staged, lm, tokenizer, remedy=_REMEDY)
        if (own := draft_vocabulary_of(lm)) is not None:
            save_tokens(staged, own)
        for file in sorted(convert(staged).iterdir(), key=lambda file: file.name == "config.json"):
            os.replace(file, out_dir / file.name)
    except OSError as error:
        raise UserError(f"out_dir={out_dir}: cannot be written ({error}); {_REMEDY}") from None
    finally:
        run_dir.drop_staging(staged)
