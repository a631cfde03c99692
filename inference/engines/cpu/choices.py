"""The choice of tokens from logits, and masks of draft trees, on a CPU: each function is one compiled call.

A call gets a table of addresses and numbers, whose indices `entries` defines, and bytes of weights, here 0: it runs in
one thread. A result None: unsupported inputs.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from outrider.inference.engines.cpu import entries
from outrider.inference.engines.cpu.layout import STORED, Make, call
from outrider.inference.engines.cpu.vectors import LANES

MANY = 2**12  # fewest numbers in a row for which the maximum is found here
MOST_COLUMNS = 62  # most columns of this round: bits of an int64


def row_maxima(scores: Tensor) -> tuple[Tensor, Tensor] | None:
    """The largest of each row of scores [n, V], and its first column; or NaN and its column."""
    if not _has_many(scores):
        return None
    values = scores.new_empty(len(scores))
    return values, _columns_of_largest(scores, values)


def likeliest(logits: Tensor) -> Tensor | None:
    """The column [n] of the largest logit of each row [n, V]; −1 if it is not finite."""
    return _columns_of_largest(logits) if _has_many(logits) else None


def _has_many(scores: Tensor) -> bool:
    is_supported = scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.bfloat16)
    return is_supported and scores.shape[-1] >= MANY and not scores.requires_grad


def _columns_of_largest(scores: Tensor, maxima: Tensor | None = None) -> Tensor:
    """The first column of each row's largest number, which goes to `maxima`; without these −1 if it is not finite."""
    scores = scores.contiguous()
    columns, work = scores.new_empty(len(scores), dtype=torch.int64), torch.empty(2 * LANES)
    table = [0] * entries.TABLE
    table[entries.X], table[entries.OUT], table[entries.WORK] = scores.data_ptr(), columns.data_ptr(), work.data_ptr()
    table[entries.VALUES] = 0 if maxima is None else maxima.data_ptr()
    table[entries.ROWS], table[entries.INPUTS] = scores.shape
    call(_entry_of(entries.maxima_entry, scores.dtype), table, 0)
    return columns


def likeliest_children(
    logits: Tensor, row_weights: Sequence[float], count: int, sharpness: float = 1.0
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The `count` largest of row_weights [n] · softmax(sharpness · logits [n, V]): [count] values, rows, columns."""
    rows, size = logits.shape
    is_supported = logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.bfloat16)
    if not is_supported or size < LANES or logits.requires_grad:
        return None
    logits, count = logits.contiguous(), min(count, rows * size)
    values, indices, work = torch.empty(count), torch.empty(2, count, dtype=torch.int64), torch.empty(size // LANES)
    numbers = torch.tensor([*row_weights, sharpness])
    table = [0] * entries.TABLE
    table[entries.X], table[entries.VALUES], table[entries.OUT], table[entries.WORK], table[entries.WEIGHTS] = (
        tensor.data_ptr() for tensor in (logits, values, indices, work, numbers)
    )
    table[entries.EPS] = table[entries.WEIGHTS] + rows * numbers.itemsize  # the address of `sharpness`
    table[entries.ROWS], table[entries.INPUTS], table[entries.OUTPUTS] = rows, size, count
    call(_entry_of(entries.children_entry, logits.dtype), table, 0)
    return values, indices[0], indices[1]


def ancestor_mask(ancestor_bits: Sequence[int], past: int, columns: int, dtype: torch.dtype) -> Tensor | None:
    """The additive mask [1, 1, n, past + columns]: row i sees `past` columns, then those set in ancestor_bits[i]."""
    if columns > MOST_COLUMNS or dtype not in (torch.float32, torch.bfloat16):
        return None
    bits, mask = torch.tensor(ancestor_bits), torch.empty(1, 1, len(ancestor_bits), past + columns, dtype=dtype)
    table = [0] * entries.TABLE
    table[entries.X], table[entries.OUT] = bits.data_ptr(), mask.data_ptr()
    table[entries.ROWS], table[entries.PAST], table[entries.OUTPUTS] = len(ancestor_bits), past, columns
    call(_entry_of(entries.mask_entry, dtype), table, 0)
    return mask


@cache
def _entry_of(make: Make, dtype: torch.dtype) -> int:
    """The address of one of `entries` for a dtype."""
    address = make(STORED[dtype]).address
    assert address is not None
    return address
