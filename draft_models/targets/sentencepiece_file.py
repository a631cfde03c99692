"""A tokenizer in a SentencePiece model file, without a model beside it."""

from pathlib import Path
from typing import TYPE_CHECKING

from draft_models.targets.gguf_file import is_gguf
from outrider.errors import UserError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor


def is_sentencepiece(source: str) -> bool:
    """Whether the tokenizer in `source` is to be one: any file but a GGUF file."""
    return Path(source).is_file() and not is_gguf(Path(source))


def open_sentencepiece(source: str) -> "SentencePieceProcessor":
    """The tokenizer in that file. Raises `UserError`."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.load(source)
    except (OSError, RuntimeError):
        raise UserError(
            f"tokenizer={source}: not a SentencePiece model; expected one, a GGUF file, or the directory or Hub name "
            "of a Hugging Face tokenizer"
        ) from None
    return processor
