"""A tokenizer and its vocabulary, by digests, and the part that a model's embedding has rows for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from outrider.base.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS = "embedding_rows"  # on a tokenizer: the number of ids that its model can read


class UnusableTextError(UserError):
    """A text that a model cannot read. Reading a data set skips it, and counts it under `reason`."""

    def __init__(self, message: str, reason: str = "template") -> None:
        super().__init__(message)
        self.reason = reason


def vocabulary_digest(pieces: Mapping[str, int]) -> str:
    """sha256 over the pieces by id: equal if and only if a table's ids mean the same to a tokenizer.

    pieces: `tokenizer.get_vocab()`; a SentencePiece model and the Hugging Face tokenizer made from it agree.
    """
    items = sorted((index, piece) for piece, index in pieces.items())
    return hashlib.sha256(json.dumps(items).encode()).hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over everything that determines the ids of plain text: vocabulary, merges and rules, special tokens."""
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        backend.pop("truncation", None)  # set by the last call, not a property of the tokenizer
        backend.pop("padding", None)
    else:
        backend = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    parts = [backend, tokenizer.special_tokens_map]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def for_rows(tokenizer: PreTrainedTokenizerBase, rows: int) -> PreTrainedTokenizerBase:
    """`tokenizer`, for a model whose embedding has `rows` rows. No text may contain further tokens.

    Fine-tuning often adds a token, for padding, without a row. Raises `UserError` if one begins or ends every text.
    """
    setattr(tokenizer, _ROWS, rows)
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    require_rows([*tokenizer("a text")["input_ids"], *ends], tokenizer, f"{tokenizer.name_or_path}: any text")
    return tokenizer


def rows_of(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The number of rows of the embedding that `tokenizer` is for; None: not known."""
    return getattr(tokenizer, _ROWS, None)


def require_rows(ids: Sequence[int] | np.ndarray, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raise `UnusableTextError`, naming `where`, for an id without a row in the embedding."""
    rows, largest = rows_of(tokenizer), int(np.max(ids, initial=-1))
    if rows is not None and largest >= rows:
        token = tokenizer.convert_ids_to_tokens(largest)
        said = f"holds the token {token!r} (id {largest}), and the model's embedding has {rows} rows"
        remedy = "leave it out of the text, or give a model whose embedding was resized for it"
        raise UnusableTextError(f"{where} {said}; {remedy}", "token")
