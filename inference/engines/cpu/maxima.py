# mypy: allow-untyped-defs
"""Compiled maximum of many numbers: PyTorch compares them one by one."""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from inference.engines.cpu.numbers import kernel, wide
from inference.engines.cpu.vectors import FLOATS, INTS, LANES, LONG, arrays_of, every, loaded, loop


@intrinsic
def _maxima_of_lanes(context, row, best, block):
    """Of numbers [≥ LANES]: best float32 [LANES], the maximum of each lane, and block int32 [LANES], its first vector.

    Returns whether any of the numbers is NaN. Numbers after the last whole vector are not read.
    """

    def make(context, builder, signature, given):
        of_row, of_best, of_block = arrays_of(context, builder, signature.args, given)
        none = ir.Constant(INTS, [0] * LANES)

        def look(place, values):
            best, block, odd = values
            numbers = loaded(builder, of_row.data, builder.mul(place, LONG(LANES)), row.dtype)
            larger = builder.fcmp_ordered(">", numbers, best)
            here = every(builder, builder.trunc(place, ir.IntType(32)))
            odd = builder.or_(odd, builder.sext(builder.fcmp_unordered("uno", numbers, numbers), INTS))
            return [builder.select(larger, numbers, best), builder.select(larger, here, block), odd]

        count = builder.sdiv(cgutils.unpack_tuple(builder, of_row.shape, 1)[0], LONG(LANES))
        first = loaded(builder, of_row.data, LONG(0), row.dtype)
        best, block, odd = loop(builder, count, [first, none, none], look)
        builder.store(best, builder.bitcast(of_best.data, FLOATS.as_pointer()), align=4)
        builder.store(block, builder.bitcast(of_block.data, INTS.as_pointer()), align=4)
        bits = builder.bitcast(builder.icmp_unsigned("!=", odd, none), ir.IntType(LANES))
        return builder.icmp_unsigned("!=", bits, ir.IntType(LANES)(0))

    return types.boolean(row, best, block), make


@kernel
def first_largest(row, best, block):
    """The first index of the maximum of `row` [≥ LANES], or of a NaN. best, block [LANES]: workspaces."""
    whole = row.shape[0] // LANES * LANES
    odd = _maxima_of_lanes(row, best, block)
    place, value = np.int64(0), wide(row[0])
    for lane in range(LANES):
        found = np.int64(block[lane]) * LANES + lane
        if best[lane] > value or (best[lane] == value and found < place):
            place, value = found, best[lane]
    for other in range(whole, row.shape[0]):
        number = wide(row[other])
        if number > value:
            place, value = other, number
        odd |= number != number
    if odd:
        place = 0
        while wide(row[place]) == wide(row[place]):
            place += 1
    return place
