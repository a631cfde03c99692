"""Splitting long texts into pieces whose tokens are those of the whole text, in bounded memory.

A tokenizer takes a few hundred bytes per input character, so a text of more than `PIECE` characters is cut. Candidate
cuts are tested: a cut is valid if tokenising the text around it in two parts gives the same tokens as in one. Example:
"…the cat | sat…" is valid if the two halves give the tokens of "…the cat sat…".

Then the whole text has the same tokens, provided that a token depends on at most `_AROUND` characters around it, as in
every tokenizer that splits words first. If no cut near the limit is valid (a text without spaces or line ends), the
text is cut at the limit, and its tokens there may differ.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

PIECE = 2**18  # characters tokenised at once
_AROUND = 256  # characters on either side of a cut that are tokenised to test it
_TRIED = 8  # candidate cuts of each kind
# A cut is (end of a piece, begin of the next). A space between words may belong to neither piece, because some
# tokenizers prepend one to every text.
_LINE, _SPACE = re.compile(r"(?<=\S)\n(?=\S)"), re.compile(r"(?<=\S) (?=\S)")
_PLACES = ((_LINE, 1, 1), (_SPACE, 0, 0), (_SPACE, 0, 1))

Encode = Callable[[list[str]], Sequence[np.ndarray]]  # texts → arrays [n, columns]: ids without special tokens, offsets
Item = TypeVar("Item")


def encode_all(texts: Sequence[str], encode: Encode) -> list[np.ndarray]:
    """`encode(texts)` in calls of at most `PIECE` characters."""
    cuts = [(number, start, stop) for number, text in enumerate(texts) for start, stop in spans(text, encode)]
    parts: list[list[np.ndarray]] = [[] for _ in texts]
    ended = [0] * len(texts)
    for batch in batches(cuts, lambda cut: cut[2] - cut[1], PIECE):
        encoded = encode([texts[number][start:stop] for number, start, stop in batch])
        for (number, start, stop), rows in zip(batch, encoded, strict=True):
            parts[number].append(_moved(rows, start, start - ended[number]))
            ended[number] = stop
    return [own[0] if len(own) == 1 else np.concatenate(own) for own in parts]


def spans(text: str, encode: Encode) -> list[tuple[int, int]]:
    """(begin, end) of the pieces of `text`, each of at most `PIECE` characters; a short text is one piece."""
    found, start = [], 0
    while len(text) - start > PIECE:
        stop, after = _cut(text, start, encode)
        found.append((start, stop))
        start = after
    return [*found, (start, len(text))]


def _cut(text: str, start: int, encode: Encode) -> tuple[int, int]:
    """(end of the piece that begins at `start`, begin of the next piece)."""
    limit = start + PIECE
    first = limit - PIECE // 4
    for pattern, end, begin in _PLACES:
        places = [first + match.start() for match in pattern.finditer(text[first:limit])]
        for place in reversed(places[-_TRIED:]):
            if _keeps_tokens(text, start, place + end, place + begin, encode):
                return place + end, place + begin
    return limit, limit


def _keeps_tokens(text: str, start: int, stop: int, after: int, encode: Encode) -> bool:
    begin, end = max(start, stop - _AROUND), after + _AROUND
    whole, left, right = encode([text[begin:end], text[begin:stop], text[after:end]])
    return np.array_equal(whole, np.concatenate([left, _moved(right, after - begin, after - stop)]))


def _moved(rows: np.ndarray, by: int, left_out: int) -> np.ndarray:
    """The rows of the piece from `by` on, with offsets into the whole text; `left_out` belongs to its first token."""
    moved = np.concatenate([rows[:, :1], rows[:, 1:] + by], axis=1)
    moved[:1, 1:2] -= left_out
    return moved


def batches(
    items: Iterable[Item], size_of: Callable[[Item], int], most: int, count: int | None = None
) -> Iterator[list[Item]]:
    """Lists of up to `count` consecutive items with total size at most `most`; a larger item is a list by itself."""
    batch: list[Item] = []
    size = 0
    for item in items:
        own = size_of(item)
        if batch and (size + own > most or len(batch) == count):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += own
    if batch:
        yield batch
