"""The digest of a vocabulary."""

import hashlib
import json
from collections.abc import Mapping


def vocabulary_digest(pieces: Mapping[str, int]) -> str:
    """sha256 over the pieces by id: equal if and only if a table's ids mean the same to a tokenizer.

    pieces: `tokenizer.get_vocab()`; a SentencePiece model and the Hugging Face tokenizer made from it agree.
    """
    items = sorted((index, piece) for piece, index in pieces.items())
    return hashlib.sha256(json.dumps(items).encode()).hexdigest()
