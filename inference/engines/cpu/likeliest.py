# mypy: allow-untyped-defs
"""Compiled: the argmax of a row of numbers, and the most probable (row, token) pairs of several rows of logits.

`likeliest_children` is one call instead of a softmax and searches. It reads logits twice, `LANES` (16) at a time, the
lanes of a vector: for the maximum of each group of `LANES`, and for the sum of exponentials. Then it searches only
groups whose maximum is large enough to enter the results. The function `make` of an `@intrinsic` emits its LLVM code.
Stored numbers may be bfloat16s; `wide` returns their float32.
"""

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from outrider.inference.engines.cpu.numbers import kernel, wide
from outrider.inference.engines.cpu.vectors import (
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LANES,
    LONG,
    ZEROS,
    arrays_of,
    exponential,
    load_floats,
    loop,
    splat,
    sums_of_lanes,
)


@intrinsic
def _maxima_of_lanes(context, row, best, block):
    """Write each lane's maximum in `row` [≥ LANES] to best float32 [LANES], its first vector's index to block int32
    [LANES]. Returns whether any number is NaN. Numbers after the last whole vector are not read."""

    def make(context, builder, signature, arguments):
        of_row, of_best, of_block = arrays_of(context, builder, signature.args, arguments)
        zero_lanes = ir.Constant(INTS, [0] * LANES)

        def look(index, values):
            lane_maxima, lane_blocks, nan_flags = values
            numbers = load_floats(builder, of_row.data, builder.mul(index, LONG(LANES)), row.dtype)
            larger = builder.fcmp_ordered(">", numbers, lane_maxima)
            indices = splat(builder, builder.trunc(index, ir.IntType(32)))
            nan_flags = builder.or_(nan_flags, builder.sext(builder.fcmp_unordered("uno", numbers, numbers), INTS))
            lane_maxima = builder.select(larger, numbers, lane_maxima)
            return [lane_maxima, builder.select(larger, indices, lane_blocks), nan_flags]

        count = builder.sdiv(cgutils.unpack_tuple(builder, of_row.shape, 1)[0], LONG(LANES))
        first_vector = load_floats(builder, of_row.data, LONG(0), row.dtype)
        final_maxima, final_blocks, nan_lanes = loop(builder, count, [first_vector, zero_lanes, zero_lanes], look)
        builder.store(final_maxima, builder.bitcast(of_best.data, FLOATS.as_pointer()), align=4)
        builder.store(final_blocks, builder.bitcast(of_block.data, INTS.as_pointer()), align=4)
        nan_bits = builder.bitcast(builder.icmp_unsigned("!=", nan_lanes, zero_lanes), ir.IntType(LANES))
        return builder.icmp_unsigned("!=", nan_bits, ir.IntType(LANES)(0))

    return types.boolean(row, best, block), make


@kernel
def first_largest(row, best, block):
    """The first index of the maximum of `row` [≥ LANES], or of a NaN. best, block [LANES]: workspaces."""
    tail_begin = row.shape[0] // LANES * LANES
    has_nan = _maxima_of_lanes(row, best, block)
    index, max_value = np.int64(0), wide(row[0])
    for lane in range(LANES):
        column = np.int64(block[lane]) * LANES + lane
        if best[lane] > max_value or (best[lane] == max_value and column < index):
            index, max_value = column, best[lane]
    for column in range(tail_begin, row.shape[0]):
        number = wide(row[column])
        if number > max_value:
            index, max_value = column, number
        has_nan |= number != number
    if has_nan:
        index = 0
        while wide(row[index]) == wide(row[index]):
            index += 1
    return index


@intrinsic
def _group_maxima(context, row, maxima):
    """maxima[i] = the largest of row[LANES · i:][:LANES], for every whole group; NaN if any of them is NaN."""

    def make(context, builder, signature, arguments):
        of_row, of_maxima = arrays_of(context, builder, signature.args, arguments)
        kind = ir.FunctionType(FLOAT, [FLOATS])
        max_function = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fmaximum.v16f32")

        def look(group, nothing):
            numbers = load_floats(builder, of_row.data, builder.mul(group, LONG(LANES)), row.dtype)
            builder.store(builder.call(max_function, [numbers]), builder.gep(of_maxima.data, [group]))
            return nothing

        loop(builder, builder.sdiv(cgutils.unpack_tuple(builder, of_row.shape, 1)[0], LONG(LANES)), [], look)
        return context.get_dummy_value()

    return types.void(row, maxima), make


@intrinsic
def _sum_of_exponentials(context, row, peak, sharpness):
    """Σ exp((row[i] − peak) · sharpness), float32, over whole groups."""

    def make(context, builder, signature, arguments):
        (of_row,) = arrays_of(context, builder, (row,), arguments[:1])
        peak, sharpness = splat(builder, arguments[1]), splat(builder, arguments[2])

        def grow(group, sums):
            numbers = load_floats(builder, of_row.data, builder.mul(group, LONG(LANES)), row.dtype)
            powers = exponential(builder, builder.fmul(builder.fsub(numbers, peak), sharpness))
            return [builder.fadd(sums[0], powers)]

        group_count = builder.sdiv(cgutils.unpack_tuple(builder, of_row.shape, 1)[0], LONG(LANES))
        total = loop(builder, group_count, [ZEROS], grow)[0]
        return builder.extract_element(sums_of_lanes(builder, [total]), INT(0))

    return types.float32(row, types.float32, types.float32), make


@kernel
def _enter(value, row, column, values, rows, columns):
    """Insert a value that is larger than the last of values [k], which descend. Equal values stay before it."""
    rank = values.shape[0] - 1
    while rank > 0 and values[rank - 1] < value:
        values[rank], rows[rank], columns[rank] = values[rank - 1], rows[rank - 1], columns[rank - 1]
        rank -= 1
    values[rank], rows[rank], columns[rank] = value, row, column


@kernel
def likeliest_children(logits, weights, sharpness, maxima, values, rows, columns):
    """The largest of weights[r] · softmax(sharpness · logits[r])[c] of [n, V], descending, with their r and c.

    values float32, rows, columns int64 [k]: results. If fewer than k are above 0, the rest are 0. Rows with a NaN or an
    infinite maximum are skipped. Of equal values the first counts, by row and then by column.
    maxima float32 [V / LANES]: workspace.
    """
    for rank in range(values.shape[0]):
        values[rank], rows[rank], columns[rank] = np.float32(0.0), 0, 0
    vocabulary = logits.shape[1]
    tail_begin = vocabulary // LANES * LANES
    last_rank = values.shape[0] - 1
    for row_index in range(logits.shape[0]):
        row = logits[row_index]
        _group_maxima(row, maxima)
        peak = wide(row[vocabulary - 1])
        for group in range(tail_begin // LANES):
            peak = peak if maxima[group] <= peak or peak != peak else maxima[group]  # NaN stays NaN
        for column in range(tail_begin, vocabulary):
            peak = peak if wide(row[column]) <= peak or peak != peak else wide(row[column])
        if not abs(peak) < np.float32(np.inf):
            continue
        total = _sum_of_exponentials(row, peak, sharpness)
        for column in range(tail_begin, vocabulary):
            total += math.exp((wide(row[column]) - peak) * sharpness)
        scale = weights[row_index] / total
        for group in range(-(-vocabulary // LANES)):
            group_max = maxima[group] if group < tail_begin // LANES else peak
            if not scale * math.exp((group_max - peak) * sharpness) > values[last_rank]:
                continue
            for column in range(group * LANES, min(vocabulary, (group + 1) * LANES)):
                value = np.float32(scale * math.exp((wide(row[column]) - peak) * sharpness))
                if value > values[last_rank]:
                    _enter(value, row_index, column, values, rows, columns)
