# mypy: allow-untyped-defs
"""Quantised weights as ggml and packed integers store them: their kinds, and their decoding.

A code is the small integer that stands for a weight. A stored row is a sequence of blocks. A block of `block_groups` ·
`group_size` weights has float16 factors, the groups' scales (if there are several groups), and the codes. `unpack`
knows their order. Example: a block of Q4_0 has 32 weights in 18 bytes, a float16 factor d and 16 bytes. Byte i has the
code of weight i in its lower 4 bits and the code of weight 16 + i in its upper 4 bits. A code c is the weight
d · (c − 8). ggml's blocks are those of ggml-common.h and dequantize_row_… in ggml-quants.c.
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

from outrider.base.compiled import compile_function

LONGEST, MOST_GROUPS = 256, 16  # inputs and groups of the largest block
CODES_OF_A_THREAD = 2**16  # for fewer codes another thread does not pay


class CodeKind(NamedTuple):
    """How blocks of a kind of quantised weights are stored.

    A weight is scale · (code − code_offset) − minimum. Scale and minimum belong to its group. A block of one group
    has them as float16 factors. In a block of several groups a group's scale is an integer of 6 or 8 bits times the
    block's first factor, and the group's minimum is an integer times the block's second factor.
    """

    bits: int  # of a code
    group_size: int  # inputs of a group
    block_groups: int
    has_minimum: bool  # else it is 0
    code_offset: int
    block_bytes: int  # in a file
    has_zero_point: bool = False  # the second factor is a zero point z: the minimum is scale · z

    @property
    def inputs(self) -> int:
        """The weights of a block."""
        return self.group_size * self.block_groups


CODE_KINDS = {  # bits, group_size, block_groups, has_minimum, code_offset, block_bytes
    "Q4_0": CodeKind(4, 32, 1, False, 8, 18),
    "Q5_0": CodeKind(5, 32, 1, False, 16, 22),
    "Q8_0": CodeKind(8, 32, 1, False, 128, 34),
    "Q4_K": CodeKind(4, 32, 8, True, 0, 144),
    "Q5_K": CodeKind(5, 32, 8, True, 0, 176),
    "Q6_K": CodeKind(6, 16, 16, False, 32, 210),
    # Not ggml's: a float16 scale, a float16 zero, and codes in order, of 4 bits the first half in the lower bits.
    "int4": CodeKind(4, 32, 1, True, 0, 20, has_zero_point=True),
    "int4 by 128": CodeKind(4, 128, 1, True, 0, 68, has_zero_point=True),
    "int8": CodeKind(8, 32, 1, True, 0, 36, has_zero_point=True),
}
KIND_NUMBERS = {name: number for number, name in enumerate(CODE_KINDS)}  # compiled code takes numbers for names
_Q4_0, _Q5_0, _Q8_0, _Q4_K, _Q5_K, _Q6_K, _INT4, _INT4_BY_128, _INT8 = range(len(CODE_KINDS))

# Counting references to slices, as numba does by default, would take most of the time.
compile_uncounted = partial(compile_function, counts_references=False)


@compile_uncounted
def _scale_and_minimum(packed, group):
    """The 6-bit scale and minimum of a group in the 12 bytes of a block of Q4_K or Q5_K."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    low_bits, high_bits = packed[group + 4], packed[group - 4] >> 6
    return (low_bits & 15) | (high_bits << 4), (low_bits >> 4) | ((packed[group] >> 6) << 4)


# Masks of the lowest 4, 2 and 1 bits of each byte of a number of eight bytes.
_FOUR, _TWO, _ONE = (np.uint64(byte_mask * 0x0101010101010101) for byte_mask in (15, 3, 1))


@compile_uncounted
def _split_nibbles(packed, codes):
    """Write the lower 4 bits of each byte of `packed` to `codes`, then the upper 4 bits; both have 8 bytes a number."""
    word_count = len(packed)
    for index in range(word_count):
        codes[index], codes[word_count + index] = packed[index] & _FOUR, (packed[index] >> np.uint64(4)) & _FOUR


@compile_uncounted
def unpack(kind_number, block, codes, scales, minima):
    """Read a stored `block` of a kind: codes ≥ 0 [inputs], and of its groups integer scales and minima.

    Returns the byte offsets of the block's two factors: (of the scales, of the minima or −1).
    """
    code_words = codes.view(np.uint64)  # eight codes each
    if kind_number in (_INT4, _INT4_BY_128):
        _split_nibbles(block[4:].view(np.uint64), code_words)
        return 0, 2
    if kind_number == _INT8:
        for i in range(32):
            codes[i] = block[4 + i]
        return 0, 2
    if kind_number == _Q8_0:
        for i in range(32):
            codes[i] = block[2 + i] ^ 128  # of a signed number, plus 128
        return 0, -1
    if kind_number in (_Q4_0, _Q5_0):
        code_start = 2 if kind_number == _Q4_0 else 6
        _split_nibbles(block[code_start : code_start + 16].view(np.uint64), code_words)
        if kind_number == _Q5_0:
            for i in range(32):
                codes[i] |= ((block[2 + i // 8] >> (i % 8)) & 1) << 4
        return 0, -1
    if kind_number == _Q6_K:
        _unpack_q6_k(block, code_words, scales)
        return 208, -1
    _unpack_q4_k_or_q5_k(kind_number, block, code_words, scales, minima)
    return 0, 2


@compile_uncounted
def _unpack_q6_k(block, code_words, scales):
    """Codes and scales of a block of Q6_K: 128 bytes of lower 4 bits, 64 bytes of upper 2 bits, 16 signed scales."""
    low_words, high_words = block[:128].view(np.uint64), block[128:192].view(np.uint64)
    for half in range(2):
        for quarter in range(4):
            low_shift, high_shift = np.uint64(4 * (quarter // 2)), np.uint64(2 * quarter)
            for index in range(4):
                upper_bits = (high_words[4 * half + index] >> high_shift) & _TWO
                lower_bits = (low_words[8 * half + 4 * (quarter % 2) + index] >> low_shift) & _FOUR
                code_words[16 * half + 4 * quarter + index] = lower_bits | (upper_bits << np.uint64(4))
    for group in range(16):
        scales[group] = block[192 + group]


@compile_uncounted
def _unpack_q4_k_or_q5_k(kind_number, block, code_words, scales, minima):
    """Codes, scales and minima of a block of Q4_K or Q5_K. Q5_K also has 32 bytes of fifth bits, one bit a group."""
    code_at = 16 if kind_number == _Q4_K else 48
    for group in range(8):
        if group % 2 == 0:
            begin = code_at + 16 * group  # of the codes of two groups
            _split_nibbles(block[begin : begin + 32].view(np.uint64), code_words[4 * group :])
        scales[group], minima[group] = _scale_and_minimum(block[4:16], group)
    if kind_number == _Q5_K:
        fifth_bits = block[16:48].view(np.uint64)
        for group in range(8):
            for index in range(4):
                code_words[4 * group + index] |= ((fifth_bits[index] >> np.uint64(group)) & _ONE) << np.uint64(4)


@compile_function
def _float16(low, high):
    """The float32 of a float16's two bytes."""
    bits = np.uint32(low) | (np.uint32(high) << np.uint32(8))
    sign, exponent, mantissa = (bits & 0x8000) << 16, (bits >> 10) & 31, bits & 1023
    value = np.float32(mantissa) * np.float32(2.0**-24)
    if exponent > 0:
        exponent32 = np.uint32(255 if exponent == 31 else exponent + 112)  # 31: infinity or NaN; 112 = 127 − 15
        value = np.uint32(exponent32 << 23 | mantissa << 13).view(np.float32)
    return -value if sign else value


@compile_function
def _decode_rows(kind_number, code_kind, blocks, out):
    """Decode rows of blocks [rows, blocks, bytes] to out float32 [rows, inputs]."""
    codes = np.zeros(LONGEST, np.uint8)
    scales, minima = np.zeros(MOST_GROUPS, np.uint8), np.zeros(MOST_GROUPS, np.uint8)
    block_inputs, code_offset = code_kind.group_size * code_kind.block_groups, np.float32(code_kind.code_offset)
    for row in range(blocks.shape[0]):
        for block_number in range(blocks.shape[1]):
            block = blocks[row, block_number]
            scale_at, minimum_at = unpack(kind_number, block, codes, scales, minima)
            scale_factor = _float16(block[scale_at], block[scale_at + 1])
            minimum_factor = _float16(block[minimum_at], block[minimum_at + 1]) if minimum_at >= 0 else np.float32(0.0)
            for group in range(code_kind.block_groups):
                scale, minimum = scale_factor, minimum_factor
                if code_kind.block_groups > 1:
                    scale *= np.float32(scales[group] if minimum_at >= 0 else np.int8(scales[group]))
                    minimum *= np.float32(minima[group])
                if code_kind.has_zero_point:
                    minimum *= scale
                weights = out[row, block_number * block_inputs + group * code_kind.group_size :]
                for i in range(code_kind.group_size):
                    weights[i] = scale * (np.float32(codes[group * code_kind.group_size + i]) - code_offset) - minimum


class CodedRows:
    """Rows of a weight as they are stored, `raw` uint8 [rows, bytes], in blocks of the kind `CODE_KINDS[kind_name]`.

    packed: the same rows in the layout of an engine, which sets it; every layer that has these rows shares it.
    """

    def __init__(self, kind_name: str, raw: NDArray[np.uint8]):
        self.kind_name, self.raw = kind_name, torch.from_numpy(raw)
        self.packed: Tensor | None = None
        self._mapping = getattr(raw, "_mmap", None)  # numpy's mapping of the file; None: `raw` is a copy in memory

    def release_pages(self) -> None:
        """Free the memory of the file's pages, where the system can; a later use reads them again."""
        if self._mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def __len__(self) -> int:
        return len(self.raw)

    def __deepcopy__(self, memo: object) -> "CodedRows":
        return self  # nobody changes the rows

    @property
    def inputs(self) -> int:
        """Weights of a row."""
        return self.raw.shape[1] // CODE_KINDS[self.kind_name].block_bytes * CODE_KINDS[self.kind_name].inputs

    def decode(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Rows begin … end − 1 in float32 [rows, inputs]."""
        return decode_rows(self.kind_name, self.raw[begin:end])

    def decode_at(self, row_numbers: Tensor) -> Tensor:
        """The rows with these numbers, in float32 [rows, inputs]."""
        return decode_rows(self.kind_name, self.raw[row_numbers])


def decode_rows(kind_name: str, raw: Tensor) -> Tensor:
    """The weights float32 [rows, in] of stored rows, uint8 [rows, bytes]; ggml's kinds: bits as by the gguf package."""
    kind, number = CODE_KINDS[kind_name], KIND_NUMBERS[kind_name]
    blocks = raw.view(len(raw), -1, kind.block_bytes)
    weights = torch.empty(len(raw), blocks.shape[1] * kind.inputs)
    stored, out = blocks.numpy(), weights.numpy()
    in_threads(lambda begin, end: _decode_rows(number, kind, stored[begin:end], out[begin:end]), len(raw), out.shape[1])
    return weights


def in_threads(work: Callable[[int, int], None], row_count: int, codes_per_row: int) -> None:
    """Call work(begin, end) for parts of range(row_count), in up to as many threads as PyTorch uses."""
    thread_count = max(1, min(torch.get_num_threads(), row_count * codes_per_row // CODES_OF_A_THREAD))
    row_bounds = [row_count * thread_index // thread_count for thread_index in range(thread_count + 1)]
    if thread_count == 1:
        work(0, row_count)
    else:
        for future in [_pool(thread_count).submit(work, *row_range) for row_range in pairwise(row_bounds)]:
            future.result()


_pool = lru_cache(1)(ThreadPoolExecutor)  # starting threads takes as long as decoding some rows
if hasattr(os, "register_at_fork"):  # a forked process has none of the pool's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
