# mypy: allow-untyped-defs
"""Quantised weights as ggml and packed integers store them: their kinds, and their decoding.

ggml's blocks are those of ggml-common.h and dequantize_row_… in ggml-quants.c.
"""

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.base.compiled import kept

LONGEST, MOST_GROUPS = 256, 16  # inputs and groups of the largest block
CODES_OF_A_THREAD = 2**16  # codes for which another thread does not pay


class CodeKind(NamedTuple):
    """How blocks of a kind of quantised weights are stored.

    A weight is scale · code − minimum, both those of its group. bits: of a code. group: inputs of a group. groups: of a
    block. If there are several, a group's scale is an integer of 6 or 8 bits times the block's factor, a float16; else
    it is that factor. minimum: whether a group has one, stored like its scale. offset: what is added to a code before
    it is stored. stored: bytes of a block in a file. zero: a minimum is the scale times the number in its place.
    """

    bits: int
    group: int
    groups: int
    minimum: bool
    offset: int
    stored: int
    zero: bool = False

    @property
    def inputs(self) -> int:
        return self.group * self.groups


KINDS = {
    "Q4_0": CodeKind(4, 32, 1, False, 8, 18),
    "Q5_0": CodeKind(5, 32, 1, False, 16, 22),
    "Q8_0": CodeKind(8, 32, 1, False, 128, 34),
    "Q4_K": CodeKind(4, 32, 8, True, 0, 144),
    "Q5_K": CodeKind(5, 32, 8, True, 0, 176),
    "Q6_K": CodeKind(6, 16, 16, False, 32, 210),
    # Not ggml's: a float16 scale, a float16 zero, and codes in order, of 4 bits the first half in the lower bits.
    "int4": CodeKind(4, 32, 1, True, 0, 20, zero=True),
    "int4 by 128": CodeKind(4, 128, 1, True, 0, 68, zero=True),
    "int8": CodeKind(8, 32, 1, True, 0, 36, zero=True),
}
NUMBERS = {name: number for number, name in enumerate(KINDS)}
_Q4_0, _Q5_0, _Q8_0, _Q4_K, _Q5_K, _Q6_K, _INT4, _INT4_BY_128, _INT8 = range(len(KINDS))


compile_uncounted = partial(kept, counted=False)  # counting references to slices would take most of the time


@compile_uncounted
def _scale_and_minimum(packed, group):
    """The 6-bit scale and minimum of a group in the 12 bytes of a block of Q4_K or Q5_K."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    low, high = packed[group + 4], packed[group - 4] >> 6
    return (low & 15) | (high << 4), (low >> 4) | ((packed[group] >> 6) << 4)


_FOUR, _TWO, _ONE = (np.uint64(bits * 0x0101010101010101) for bits in (15, 3, 1))  # of each of eight bytes


@compile_uncounted
def _split_nibbles(packed, codes):
    """The lower 4 bits of `packed`, eight bytes a number, then the upper ones."""
    count = len(packed)
    for index in range(count):
        codes[index], codes[count + index] = packed[index] & _FOUR, (packed[index] >> np.uint64(4)) & _FOUR


@compile_uncounted
def unpack(number, raw, codes, scales, minima):
    """Read a stored block of a kind: codes ≥ 0 [inputs], and of its groups integer scales and minima.

    Returns where its factors are, in bytes: (factor, factor of the minima or −1).
    """
    eights = codes.view(np.uint64)  # eight codes each
    if number == _INT4:
        _split_nibbles(raw[4:20].view(np.uint64), eights)
        return 0, 2
    if number == _INT4_BY_128:
        _split_nibbles(raw[4:68].view(np.uint64), eights)
        return 0, 2
    if number == _INT8:
        for i in range(32):
            codes[i] = raw[4 + i]
        return 0, 2
    if number in (_Q4_0, _Q5_0):
        at = 2 if number == _Q4_0 else 6
        _split_nibbles(raw[at : at + 16].view(np.uint64), eights)
        if number == _Q5_0:
            for i in range(32):
                codes[i] |= ((raw[2 + i // 8] >> (i % 8)) & 1) << 4
        return 0, -1
    if number == _Q8_0:
        for i in range(32):
            codes[i] = raw[2 + i] ^ 128  # of a signed number, plus 128
        return 0, -1
    if number == _Q6_K:
        low, high = raw[:128].view(np.uint64), raw[128:192].view(np.uint64)
        for half in range(2):
            for quarter in range(4):
                low_by, high_by = np.uint64(4 * (quarter // 2)), np.uint64(2 * quarter)
                for index in range(4):
                    upper = (high[4 * half + index] >> high_by) & _TWO
                    lower = (low[8 * half + 4 * (quarter % 2) + index] >> low_by) & _FOUR
                    eights[16 * half + 4 * quarter + index] = lower | (upper << np.uint64(4))
        for group in range(16):
            scales[group] = raw[192 + group]
        return 208, -1
    at = 16 if number == _Q4_K else 48
    for group in range(8):
        if group % 2 == 0:
            _split_nibbles(raw[at + 16 * group : at + 16 * group + 32].view(np.uint64), eights[4 * group :])
        scales[group], minima[group] = _scale_and_minimum(raw[4:16], group)
    if number == _Q5_K:
        upper = raw[16:48].view(np.uint64)
        for group in range(8):
            for index in range(4):
                eights[4 * group + index] |= ((upper[index] >> np.uint64(group)) & _ONE) << np.uint64(4)
    return 0, 2


@kept
def _float16(low, high):
    """The float32 of a float16's two bytes."""
    bits = np.uint32(low) | (np.uint32(high) << np.uint32(8))
    sign, exponent, mantissa = (bits & 0x8000) << 16, (bits >> 10) & 31, bits & 1023
    value = np.float32(mantissa) * np.float32(2.0**-24)
    if exponent > 0:
        widened = np.uint32(255 if exponent == 31 else exponent + 112)  # infinite, or no number
        value = np.uint32(widened << 23 | mantissa << 13).view(np.float32)
    return -value if sign else value


@kept
def _decode_rows(number, kind, raw, out):
    """Decode rows of blocks [rows, blocks, bytes] to out float32 [rows, inputs]."""
    codes = np.zeros(LONGEST, np.uint8)
    scales, minima = np.zeros(MOST_GROUPS, np.uint8), np.zeros(MOST_GROUPS, np.uint8)
    inputs, offset = kind.group * kind.groups, np.float32(kind.offset)
    for row in range(raw.shape[0]):
        for block in range(raw.shape[1]):
            stored = raw[row, block]
            first, second = unpack(number, stored, codes, scales, minima)
            factor = _float16(stored[first], stored[first + 1])
            least = _float16(stored[second], stored[second + 1]) if second >= 0 else np.float32(0.0)
            for group in range(kind.groups):
                scale, minimum = factor, least
                if kind.groups > 1:
                    scale *= np.float32(scales[group] if second >= 0 else np.int8(scales[group]))
                    minimum *= np.float32(minima[group])
                if kind.zero:
                    minimum *= scale
                weights = out[row, block * inputs + group * kind.group :]
                for i in range(kind.group):
                    weights[i] = scale * (np.float32(codes[group * kind.group + i]) - offset) - minimum


class CodedRows:
    """Rows of a weight, uint8 [rows, bytes], in blocks of the kind with this name.

    packed: the same rows in the layout of an engine, which every layer that has these rows shares.
    """

    def __init__(self, kind: str, raw: NDArray[np.uint8]):
        self.kind, self.raw = kind, torch.from_numpy(raw)
        self.packed: Tensor | None = None
        self._mapping = getattr(raw, "_mmap", None)  # of a file, if these are its bytes and no copy

    def forget(self) -> None:
        """Free the memory of the file's pages, where the system can: they are read again when they are used."""
        if self._mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def __len__(self) -> int:
        return len(self.raw)

    def __deepcopy__(self, memo: object) -> "CodedRows":
        return self  # nobody changes them

    @property
    def inputs(self) -> int:
        return self.raw.shape[1] // KINDS[self.kind].stored * KINDS[self.kind].inputs

    def decoded(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Rows begin … end − 1 in float32 [rows, inputs], ggml's bit for bit as the gguf package decodes them."""
        return decode_rows(self.kind, self.raw[begin:end])

    def picked(self, rows: Tensor) -> Tensor:
        """The rows with these numbers, in float32 [rows, inputs]."""
        return decode_rows(self.kind, self.raw[rows])


def decode_rows(name: str, raw: Tensor) -> Tensor:
    """The weights float32 [rows, in] of stored rows, uint8 [rows, bytes], of the kind with this name.

    ggml's have the bits that the gguf package gives them.
    """
    kind, number = KINDS[name], NUMBERS[name]
    blocks = raw.view(len(raw), -1, kind.stored)
    weights = torch.empty(len(raw), blocks.shape[1] * kind.inputs)
    stored, out = blocks.numpy(), weights.numpy()
    in_threads(lambda begin, end: _decode_rows(number, kind, stored[begin:end], out[begin:end]), len(raw), out.shape[1])
    return weights


def in_threads(work: Callable[[int, int], None], count: int, codes: int) -> None:
    """work(begin, end) over parts of range(count), of so many codes each, in up to as many threads as PyTorch uses."""
    threads = max(1, min(torch.get_num_threads(), count * codes // CODES_OF_A_THREAD))
    edges = [count * part // threads for part in range(threads + 1)]
    if threads == 1:
        work(0, count)
    else:
        for job in [_pool(threads).submit(work, *pair) for pair in pairwise(edges)]:
            job.result()


_pool = lru_cache(1)(ThreadPoolExecutor)  # starting threads takes as long as decoding some rows
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
