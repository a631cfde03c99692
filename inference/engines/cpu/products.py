# mypy: allow-untyped-defs
"""Products of few rows and a large weight: each weight is read once, in order."""

from numba import types
from numba.extending import overload

from inference.engines.cpu.by_amx import by_amx
from inference.engines.cpu.by_vectors import by_vectors
from inference.engines.cpu.linear import PANEL
from inference.engines.cpu.numbers import kernel


@kernel
def product(linear, x, rows, first, last, halves, out):
    """Compute out[r, c] for outputs first … last − 1: scale of c · (x[r] · weights of c) + bias of c.

    x [rows, inputs]: float32, or bfloat16 if the weights are pairs. For AMX it is bfloat16, and with [3 · rows, inputs]
    row r is the sum of x[r], x[rows + r] and x[2 · rows + r]. first and last are multiples of `PANEL`. halves: round
    to bfloat16.
    """
    _multiply(linear, x, rows, first, last, halves, out)


def _multiply(linear, x, rows, first, last, halves, out):
    """`product` by the kernel for these weights. In compiled code: see `_way_of`."""


@overload(_multiply)
def _way_of(linear, x, rows, first, last, halves, out):
    way = by_amx if linear.types[0].dtype == types.uint64 else by_vectors
    return lambda linear, x, rows, first, last, halves, out: way(linear, x, rows, first, last, halves, out)


@kernel
def part(outputs, rank, threads):
    """The begin and end of a thread's outputs, in whole panels."""
    panels = outputs // PANEL
    return panels * rank // threads * PANEL, panels * (rank + 1) // threads * PANEL
