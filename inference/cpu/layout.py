"""How a linear layer's weights lie for `inference.cpu`, what multiplies them, and how compiled functions are called."""

import ctypes
import statistics
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draft_models.target.int8 import Int8Linear
from inference.cpu import entries
from inference.cpu.products import DOTS, PANEL, TILE
from inference.cpu.team import call_in_team, most_threads, team

SHARE = 2**15  # bytes of weights for each thread that are worth sharing them out
STORED = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16, torch.int8: np.int8}
_TABLE = ctypes.c_int64 * entries.TABLE
_TRIED = (16 * PANEL, 512)  # outputs and inputs of a product that is timed: its weights stay in a near cache
_REPEATS = 20


class Layout(NamedTuple):
    """Of weights, and of what is computed with them.

    stored: their dtype; together: how many inputs of an output lie side by side, 2 where they are bfloat16s; read: the
    dtype of what they are multiplied by; kept: that of results.
    """

    stored: torch.dtype
    together: int
    read: torch.dtype
    kept: torch.dtype

    @classmethod
    def of(cls, linears: Sequence[Any], kept: torch.dtype) -> "Layout":
        """The one for some layers, on this processor."""
        stored = fewest_bytes(linears)
        pairs = stored == torch.bfloat16 and all(linear.in_features % 2 == 0 for linear in linears)
        as_they_are = pairs and kept == torch.bfloat16 and dots_pay()
        return cls(stored, 2 if pairs else 1, torch.bfloat16 if as_they_are else torch.float32, kept)

    def entry(self, make: Any) -> int:
        """The address of one of `entries` for it."""
        return _address(make, np.uint32 if self.together == 2 else STORED[self.stored], self.read, self.kept)

    def panels(self, linear: Any) -> Tensor:
        """A layer's weights as they lie."""
        weight = linear.codes if isinstance(linear, Int8Linear) else linear.weight.detach().to(self.stored)
        return in_panels(weight, self.together)


def fewest_bytes(linears: Sequence[Any]) -> torch.dtype:
    """The smallest dtype that keeps the weights of layers of a kind exactly.

    Where a weight was a bfloat16 once, it is one here.
    """
    if isinstance(linears[0], Int8Linear):
        return torch.int8
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(linear.weight.to(dtype).to(linear.weight.dtype), linear.weight) for linear in linears):
            return dtype
    return torch.float32


def in_panels(weight: Tensor, together: int = 1) -> Tensor:
    """A weight [out, in] in the order in which the kernels read it: panels [out / PANEL, in, PANEL], in one axis.

    together: how many inputs of an output lie side by side, [out / PANEL, in / together, PANEL, together].
    """
    return weight.view(-1, PANEL, weight.shape[1] // together, together).transpose(1, 2).flatten()


def out_of_panels(panels: Tensor, outputs: int, together: int) -> Tensor:
    """The weight [outputs, in] that `in_panels` was given."""
    in_order = panels.view(outputs // PANEL, -1, PANEL, together).transpose(1, 2)
    return in_order.reshape(outputs, -1)


@cache
def _address(make: Any, stored: Any, read: torch.dtype, kept: torch.dtype) -> int:
    address: int = make(stored, STORED[read], STORED[kept]).address
    return address


def call(entry: int, table: list[int], size: int) -> None:
    """Call an entry with a table, in all threads where the reading of `size` bytes of weights is worth it."""
    # Never in some of them: OpenMP ends the others then, and starts them anew for the next operation of PyTorch.
    threads = most_threads()
    if size < SHARE * threads:
        threads = 1
    if threads > 1:
        table[entries.THREAD], table[entries.THREADS] = team().thread, team().threads
    given = _TABLE(*table)
    call_in_team(entry, ctypes.addressof(given), threads)


@cache
def dots_pay() -> bool:
    """Whether this processor multiplies bfloat16s faster in pairs than as floats, here and now.

    There are processors that have an instruction for that and take as long for it as for four products of floats.
    """
    return DOTS and _seconds_of_product(torch.bfloat16) < _seconds_of_product(torch.float32)


def _seconds_of_product(read: torch.dtype) -> float:
    """What one thread takes for a product of some rows with weights that are near."""
    outputs, inputs = _TRIED
    weights = torch.ones(outputs, inputs, dtype=torch.bfloat16)
    x, out = torch.ones(TILE, inputs, dtype=read), torch.empty(TILE, outputs, dtype=torch.bfloat16)
    floats = torch.ones(outputs)
    entry = Layout(torch.bfloat16, 2, read, torch.bfloat16).entry(entries.product_entry)
    table = [0] * entries.TABLE
    table[entries.WEIGHTS], table[entries.SCALES], table[entries.BIASES], table[entries.X], table[entries.OUT] = (
        tensor.data_ptr() for tensor in (weights, floats, floats, x, out)
    )
    table[entries.ROWS], table[entries.INPUTS], table[entries.OUTPUTS] = TILE, inputs, outputs
    seconds = []
    for _ in range(1 + _REPEATS):
        started = time.perf_counter()
        call(entry, table, 0)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])
