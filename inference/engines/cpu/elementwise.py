# mypy: allow-untyped-defs
"""Elementwise operations on rows between products, `LANES` numbers at a time."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from outrider.inference.engines.cpu.vectors import (
    FLOAT,
    FLOATS,
    INT,
    LANES,
    LONG,
    PARTS,
    ZEROS,
    added,
    arrays_of,
    every,
    every_float,
    exponential,
    loaded,
    loop,
    rounded,
    row_of,
    stored,
    sums_of_lanes,
)


def put_read(builder, values, array, kind, row, at, halves):
    """Store floats into a two-dimensional array that products read, from column `at` of a row on.

    If it holds bfloat16s and numbers are not `halves`, each is stored as a sum of three, in the thirds of the rows.
    """
    if kind.dtype != types.uint16:
        stored(builder, values, row_of(builder, array, row), at, kind.dtype, halves)
        return
    third = builder.sdiv(cgutils.unpack_tuple(builder, array.shape, 2)[0], LONG(PARTS))
    always = ir.Constant(ir.IntType(1), 1)
    stored(builder, values, row_of(builder, array, row), at, kind.dtype, always)
    with builder.if_then(builder.not_(halves)):
        rest = values
        for number in range(1, PARTS):
            rest = builder.fsub(rest, rounded(builder, rest, always))
            line = row_of(builder, array, builder.add(row, builder.mul(third, LONG(number))))
            stored(builder, rest, line, at, kind.dtype, always)


def _whole_of(builder, array, axes):
    """The number of whole vectors in the last axis of an array."""
    return builder.sdiv(cgutils.unpack_tuple(builder, array.shape, axes)[-1], LONG(LANES))


def _only(builder, vector):
    return builder.extract_element(sums_of_lanes(builder, [vector]), INT(0))


@intrinsic
def norm_row(context, x, line, row, weight, eps, halves, out):
    """out[row] = weight · round(x[line] / rms(x[line])). x float32 [R, d], weight [d], out as in `put_read`."""

    def make(context, builder, signature, given):
        of_x, of_weight, of_out = arrays_of(context, builder, (x, weight, out), (given[0], given[3], given[6]))
        row, eps, halves = given[2], given[4], given[5]
        line, count = row_of(builder, of_x, given[1]), _whole_of(builder, of_weight, 1)

        def square(place, sums):
            values = loaded(builder, line, builder.mul(place, LONG(LANES)), types.float32)
            return [added(builder, sums[0], values, values)]

        total = _only(builder, loop(builder, count, [ZEROS], square)[0])
        size = builder.sitofp(builder.mul(count, LONG(LANES)), FLOAT)
        root = cgutils.get_or_insert_function(builder.module, ir.FunctionType(FLOAT, [FLOAT]), "llvm.sqrt.f32")
        rms = builder.call(root, [builder.fadd(builder.fdiv(total, size), eps)])
        scale = every(builder, builder.fdiv(FLOAT(1.0), rms))

        def put(place, nothing):
            at = builder.mul(place, LONG(LANES))
            values = rounded(builder, builder.fmul(loaded(builder, line, at, types.float32), scale), halves)
            values = builder.fmul(values, loaded(builder, of_weight.data, at, types.float32))
            put_read(builder, values, of_out, out, row, at, halves)
            return nothing

        loop(builder, count, [], put)
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64, weight, types.float32, types.boolean, out), make


@intrinsic
def gate_row(context, both, row, inner, begin, end, halves, out):
    """out[row, i] = round(silu(both[row, i])) · both[row, inner + i], begin ≤ i < end, both multiples of `LANES`."""

    def make(context, builder, signature, given):
        of_both, of_out = arrays_of(context, builder, (both, out), (given[0], given[6]))
        row, inner, begin, end, halves = given[1:6]
        line = row_of(builder, of_both, row)

        def put(place, nothing):
            at = builder.add(begin, builder.mul(place, LONG(LANES)))
            gate, up = (loaded(builder, line, one, types.float32) for one in (at, builder.add(at, inner)))
            below = builder.fadd(every_float(1.0), exponential(builder, builder.fneg(gate)))
            active = rounded(builder, builder.fdiv(gate, below), halves)
            put_read(builder, builder.fmul(active, up), of_out, out, row, at, halves)
            return nothing

        loop(builder, builder.sdiv(builder.sub(end, begin), LONG(LANES)), [], put)
        return context.get_dummy_value()

    return types.void(both, *[types.int64] * 4, types.boolean, out), make


@intrinsic
def add_row(context, left, right, row, begin, end, halves):
    """left[row, i] += right[row, i], rounded if `halves`, begin ≤ i < end, both multiples of `LANES`."""

    def make(context, builder, signature, given):
        lines = [row_of(builder, array, given[2]) for array in arrays_of(context, builder, (left, right), given[:2])]
        begin, end, halves = given[3:]

        def put(place, nothing):
            at = builder.add(begin, builder.mul(place, LONG(LANES)))
            total = builder.fadd(*(loaded(builder, line, at, types.float32) for line in lines))
            stored(builder, total, lines[0], at, types.float32, halves)
            return nothing

        loop(builder, builder.sdiv(builder.sub(end, begin), LONG(LANES)), [], put)
        return context.get_dummy_value()

    return types.void(left, right, *[types.int64] * 3, types.boolean), make


@intrinsic
def softmax_row(context, scores, row, size):
    """softmax of scores[row, :size], whole vectors, in place."""

    def make(context, builder, signature, given):
        (of_scores,) = arrays_of(context, builder, (scores,), given[:1])
        line = row_of(builder, of_scores, given[1])
        vectors = builder.sdiv(given[2], LONG(LANES))

        def at_of(place):
            return builder.mul(place, LONG(LANES))

        def put(values, place):
            stored(builder, values, line, at_of(place), types.float32, ir.Constant(ir.IntType(1), 0))

        def peak_of(place, peaks):
            values = loaded(builder, line, at_of(place), types.float32)
            return [builder.select(builder.fcmp_ordered(">", values, peaks[0]), values, peaks[0])]

        lowest = ir.Constant(FLOATS, [-float("inf")] * LANES)
        peaks = loop(builder, vectors, [lowest], peak_of)[0]
        largest = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(FLOAT, [FLOATS]), "llvm.vector.reduce.fmax.v16f32"
        )
        peak = every(builder, builder.call(largest, [peaks]))

        def grow(place, sums):
            values = exponential(builder, builder.fsub(loaded(builder, line, at_of(place), types.float32), peak))
            put(values, place)
            return [builder.fadd(sums[0], values)]

        total = _only(builder, loop(builder, vectors, [ZEROS], grow)[0])
        share = every(builder, builder.fdiv(FLOAT(1.0), total))

        def weigh(place, nothing):
            put(builder.fmul(loaded(builder, line, at_of(place), types.float32), share), place)
            return nothing

        loop(builder, vectors, [], weigh)
        return context.get_dummy_value()

    return types.void(scores, types.int64, types.int64), make


@intrinsic
def put_columns(context, values, line, begin, out, row, column, count, halves):
    """out[row, column + i] = values[line, begin + i], i < count, a multiple of `LANES`; out as in `put_read`."""

    def make(context, builder, signature, given):
        of_values, of_out = arrays_of(context, builder, (values, out), (given[0], given[3]))
        begin = given[2]
        row, column, count, halves = given[4:]
        line = row_of(builder, of_values, given[1])

        def put(place, nothing):
            at = builder.mul(place, LONG(LANES))
            some = loaded(builder, line, builder.add(begin, at), types.float32)
            put_read(builder, some, of_out, out, row, builder.add(column, at), halves)
            return nothing

        loop(builder, builder.sdiv(count, LONG(LANES)), [], put)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(values, whole, whole, out, whole, whole, whole, types.boolean), make
