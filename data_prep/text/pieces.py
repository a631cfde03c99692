"""Long texts in pieces. Tokenised one by one, they give the tokens of the whole in memory that does not grow with it.

A tokenizer takes a few hundred bytes for every character that it is given at once. So a text of more than `PIECE`
characters is cut. The place is found by trying: a cut will do if the text around it has the same tokens in two parts
as in one. Example: "…the cat | sat…" will do where the two halves give the tokens of "…the cat sat…".

This holds for the whole text if a token depends on at most `_AROUND` characters around it. It does wherever a
tokenizer splits words from each other first. Where no place near the limit will do (a text without spaces or line
ends), the text is cut at the limit all the same. It may then have other tokens there than as a whole.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

PIECE = 2**18  # characters tokenised at once
_AROUND = 256  # characters on either side of a cut by which it is judged
_TRIED = 8  # places of each kind
# A cut is (end of a piece, begin of the next). A space between words may belong to neither: some tokenizers put one in
# front of every text they are given.
_LINE, _SPACE = re.compile(r"(?<=\S)\n(?=\S)"), re.compile(r"(?<=\S) (?=\S)")
_PLACES = ((_LINE, 1, 1), (_SPACE, 0, 0), (_SPACE, 0, 1))

Encode = Callable[[list[str]], Sequence[np.ndarray]]  # texts → arrays [n, columns]: ids without special tokens, places
Item = TypeVar("Item")


def encode_all(texts: Sequence[str], encode: Encode) -> list[np.ndarray]:
    """`encode(texts)`, of never more than `PIECE` characters at once."""
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
    """Where the pieces of `text` begin and end, each at most `PIECE` characters; of a short one, all of it."""
    found, start = [], 0
    while len(text) - start > PIECE:
        stop, after = _cut(text, start, encode)
        found.append((start, stop))
        start = after
    return [*found, (start, len(text))]


def _cut(text: str, start: int, encode: Encode) -> tuple[int, int]:
    """Where the piece that begins at `start` ends, and where the next one begins."""
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
    """`rows` as they are in a text in which theirs begins at `by`, after a space that its first token stands for."""
    moved = np.concatenate([rows[:, :1], rows[:, 1:] + by], axis=1)
    moved[:1, 1:2] -= left_out
    return moved


def batches(
    items: Iterable[Item], size_of: Callable[[Item], int], most: int, count: int | None = None
) -> Iterator[list[Item]]:
    """Consecutive items, in lists of at most `count` of a total size of at most `most`, or of one that is larger."""
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
