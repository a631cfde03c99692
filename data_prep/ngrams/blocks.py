# mypy: allow-untyped-defs
"""Shards of token ids → their n-grams, a block of bounded size at a time."""

from collections.abc import Iterator

import numpy as np

from data_prep.ngrams.token_shards import Shards, read_shard
from draft_models.ngrams.kernels import mix
from outrider.compiled import kept
from outrider.progress import Stage


def blocks(
    shards: Shards, order: int, bits: int, narrow: bool, capacity: int, stage: Stage
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All n-grams, at most `capacity` at a time.

    (keys uint64, last tokens uint32), unsorted; in the narrow form the token is in the key's low bits and the second
    array is empty.
    """
    keys = np.empty(capacity, np.uint64)
    tokens = np.empty(0 if narrow else capacity, np.uint32)
    filled, tail = 0, np.empty(0, shards.dtype)
    for path, continued in zip(shards.paths, shards.continued, strict=True):
        ids, lengths = read_shard(path, shards.dtype)
        stage.advance(len(ids))
        if continued:  # prepend the tokens that its first n-grams begin with
            ids = np.concatenate([tail, ids])
            lengths[0] += len(tail)
        tail = ids[len(ids) - min(order - 1, int(lengths[-1])) :]
        for part, sizes in _parts(ids, lengths, order, capacity):
            size = int(np.maximum(sizes - order + 1, 0).sum())
            if filled + size > capacity:
                yield keys[:filled], tokens[:filled]
                filled = 0
            _fill(part, sizes, order, bits, narrow, keys[filled : filled + size], tokens[filled : filled + size])
            filled += size
    if filled:
        yield keys[:filled], tokens[:filled]


def _parts(ids: np.ndarray, lengths: np.ndarray, order: int, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Documents, as ids [n] and lengths int64, in parts of at most `most` n-grams; every n-gram is in exactly one part.

    The later part of a split document starts with the order − 1 tokens before the split.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = ends - lengths
    for cut in range(0, len(ids), most):
        start, stop = max(0, cut - order + 1), min(cut + most, len(ids))
        first, last = np.searchsorted(ends, start, "right"), np.searchsorted(begins, stop, "left")
        sizes = np.minimum(ends[first:last], stop) - np.maximum(begins[first:last], start)
        yield ids[start:stop], sizes


@kept
def _fill(ids, lengths, order, bits, narrow, keys, tokens):
    key_bits = (order - 1) * bits
    mask = (np.uint64(1) << np.uint64(key_bits)) - np.uint64(1)
    begin, out = 0, 0
    for length in lengths:
        packed = np.uint64(0)
        for i in range(begin, begin + np.int64(length)):
            token = np.uint64(ids[i])
            if i - begin >= order - 1:
                key = mix(packed, key_bits)
                if narrow:
                    keys[out] = (key << np.uint64(bits)) | token
                else:
                    keys[out], tokens[out] = key, token
                out += 1
            packed = ((packed << np.uint64(bits)) | token) & mask
        begin += np.int64(length)
