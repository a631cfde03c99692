"""`Encoder`: the tokenizer of a target in any format, or of a SentencePiece file, for reading text without torch."""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from outrider.base.errors import UserError
from outrider.draft_models.formats.gguf_file import is_gguf
from outrider.draft_models.targets.vocabulary import tokenizer_digest

_EXPECTED = "a SentencePiece .model file, a GGUF file, or the directory or Hub name of a Hugging Face tokenizer"


class Encoder(NamedTuple):
    """A tokenizer, with its special ids if it has them."""

    encode: Callable[[list[str]], Sequence[Sequence[int]]]  # texts → ids without special tokens
    pieces: dict[str, int]  # token → id
    eos: int | None
    digest: str  # of everything that determines the ids
    bos: int | None = None
    rows: int | None = None  # of the model's embedding, if there is a model with fewer rows than the tokenizer has ids

    @property
    def vocabulary(self) -> int:
        """The number of ids: the highest one + 1."""
        return max(self.pieces.values(), default=-1) + 1


def open_encoder(source: str, revision: str | None = None) -> Encoder:
    """Open a SentencePiece model file, or the tokenizer of a target in any format. Raises `UserError`."""
    if os.path.isfile(source) and not is_gguf(Path(source)):
        return _open_sentencepiece(source)
    from outrider.draft_models.targets import open_target  # imports torch, not needed for a file

    try:
        tokenizer = open_target.load_tokenizer(source, revision, role="tokenizer")
    except UserError as error:
        raise UserError(f"{error}; expected {_EXPECTED}") from None

    def encode(texts: list[str]) -> list[list[int]]:
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        return tokenizer(texts, **options)["input_ids"]

    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    encoder = Encoder(encode, tokenizer.get_vocab(), eos, tokenizer_digest(tokenizer), bos)
    # A file is GGUF here, which has no config.json.
    row_count = None if os.path.isfile(source) else open_target.embedding_rows_in(source, revision)
    return encoder if row_count is None or row_count >= encoder.vocabulary else encoder._replace(rows=row_count)


def _open_sentencepiece(source: str) -> Encoder:
    """The tokenizer in the SentencePiece file `source`. Raises `UserError`."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.load(source)
    except (OSError, RuntimeError):
        raise UserError(f"tokenizer={source}: not a SentencePiece model; expected {_EXPECTED}") from None

    def encode(texts: list[str]) -> list[list[int]]:
        return processor.encode(texts, out_type=int, num_threads=1)

    id_by_piece = {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}
    eos, bos = (special_id if special_id >= 0 else None for special_id in (processor.eos_id(), processor.bos_id()))
    return Encoder(encode, id_by_piece, eos, hashlib.sha256(Path(source).read_bytes()).hexdigest(), bos)
