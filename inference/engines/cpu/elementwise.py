# mypy: allow-untyped-defs
"""Elementwise operations on rows between products, `LANES` numbers at a time.

Compiled code calls an `intrinsic`, whose `make` emits LLVM code by a `builder`. in_bf16: numbers are rounded to
bfloat16. The type uint16 stands for bfloat16.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from outrider.draft_models.targets.coded import LARGEST_BYTE, LEAST, ROUNDED
from outrider.inference.engines.cpu.vectors import (
    BYTE,
    FEATURES,
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LANES,
    LONG,
    PARTS,
    ZEROS,
    add_product,
    address_at,
    arrays_of,
    exponential,
    load_floats,
    loop,
    rounded,
    row_of,
    splat,
    splat_float,
    splat_int,
    store_floats,
    sums_of_lanes,
)

# Rows rounded to integers of 8 bits, as `coded.round_to_bytes` defines them: bytes of every eight inputs are in the
# order 0, 4, 1, 5, 2, 6, 3, 7, in which a line of codes has them (see `PanelBlock`). Every `ROUNDED` inputs have
# `NOTES` numbers: the sum of the first 16 integers and that of the others, int32; the scale, scale · sum, float32.
HAS_BYTES = bool(FEATURES.get("avx512vnni"))  # an instruction for the sum of four products of bytes
NOTES = 4
SCALE, SCALED_SUM = 2, 3  # after both sums
_ORDER = [8 * eight + index for eight in range(ROUNDED // 8) for index in (0, 4, 1, 5, 2, 6, 3, 7)]


def put_read(builder, values, array, array_type, row, column, in_bf16):
    """Store floats into a two-dimensional array that products read, from column `column` of a row on.

    If it holds bfloat16s and numbers are not `in_bf16`, each is stored as a sum of three, in the thirds of the rows.
    """
    if array_type.dtype != types.uint16:
        store_floats(builder, values, row_of(builder, array, row), column, array_type.dtype, in_bf16)
        return
    third_rows = builder.sdiv(cgutils.unpack_tuple(builder, array.shape, 2)[0], LONG(PARTS))
    always = ir.Constant(ir.IntType(1), 1)
    store_floats(builder, values, row_of(builder, array, row), column, array_type.dtype, always)
    with builder.if_then(builder.not_(in_bf16)):
        remainder = values
        for third_index in range(1, PARTS):
            remainder = builder.fsub(remainder, rounded(builder, remainder, always))
            row_address = row_of(builder, array, builder.add(row, builder.mul(third_rows, LONG(third_index))))
            store_floats(builder, remainder, row_address, column, array_type.dtype, always)


def _only(builder, vector):
    """The sum of a vector's lanes, a float."""
    return builder.extract_element(sums_of_lanes(builder, [vector]), INT(0))


@intrinsic
def norm_row(context, x, line, row, weight, eps, in_bf16, out):
    """out[row] = weight · round(x[line] / rms(x[line])). x float32 [R, d], weight [d], out as in `put_read`."""

    def make(context, builder, signature, arguments):
        arrays, row, eps, in_bf16 = (arguments[0], arguments[3], arguments[6]), arguments[2], arguments[4], arguments[5]
        of_x, of_weight, of_out = arrays_of(context, builder, (x, weight, out), arrays)
        x_row = row_of(builder, of_x, arguments[1])
        block_count = builder.sdiv(cgutils.unpack_tuple(builder, of_weight.shape, 1)[0], LONG(LANES))

        def square(block, sums):
            values = load_floats(builder, x_row, builder.mul(block, LONG(LANES)), types.float32)
            return [add_product(builder, sums[0], values, values)]

        square_sum = _only(builder, loop(builder, block_count, [ZEROS], square)[0])
        size_as_float = builder.sitofp(builder.mul(block_count, LONG(LANES)), FLOAT)
        sqrt = cgutils.get_or_insert_function(builder.module, ir.FunctionType(FLOAT, [FLOAT]), "llvm.sqrt.f32")
        rms = builder.call(sqrt, [builder.fadd(builder.fdiv(square_sum, size_as_float), eps)])
        scale = splat(builder, builder.fdiv(FLOAT(1.0), rms))

        def put(block, nothing):
            at = builder.mul(block, LONG(LANES))
            values = rounded(builder, builder.fmul(load_floats(builder, x_row, at, types.float32), scale), in_bf16)
            values = builder.fmul(values, load_floats(builder, of_weight.data, at, types.float32))
            put_read(builder, values, of_out, out, row, at, in_bf16)
            return nothing

        loop(builder, block_count, [], put)
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64, weight, types.float32, types.boolean, out), make


@intrinsic
def gate_row(context, joined, row, inner, begin, end, in_bf16, out):
    """out[row, i] = round(silu(joined[row, i])) · joined[row, inner + i], begin ≤ i < end, multiples of `LANES`."""

    def make(context, builder, signature, arguments):
        of_joined, of_out = arrays_of(context, builder, (joined, out), (arguments[0], arguments[6]))
        row, inner, begin, end, in_bf16 = arguments[1:6]
        line = row_of(builder, of_joined, row)

        def put(block, nothing):
            at = builder.add(begin, builder.mul(block, LONG(LANES)))
            gate, up = (load_floats(builder, line, offset, types.float32) for offset in (at, builder.add(at, inner)))
            denominator = builder.fadd(splat_float(1.0), exponential(builder, builder.fneg(gate)))
            active = rounded(builder, builder.fdiv(gate, denominator), in_bf16)
            put_read(builder, builder.fmul(active, up), of_out, out, row, at, in_bf16)
            return nothing

        loop(builder, builder.sdiv(builder.sub(end, begin), LONG(LANES)), [], put)
        return context.get_dummy_value()

    return types.void(joined, *[types.int64] * 4, types.boolean, out), make


@intrinsic
def add_row(context, sums, addends, row, begin, end, in_bf16):
    """sums[row, i] += addends[row, i], rounded if `in_bf16`, begin ≤ i < end, both multiples of `LANES`."""

    def make(context, builder, signature, arguments):
        arrays, (row, begin, end, in_bf16) = arguments[:2], arguments[2:]
        row_addresses = [row_of(builder, array, row) for array in arrays_of(context, builder, (sums, addends), arrays)]

        def put(block, nothing):
            at = builder.add(begin, builder.mul(block, LONG(LANES)))
            total = builder.fadd(*(load_floats(builder, line, at, types.float32) for line in row_addresses))
            store_floats(builder, total, row_addresses[0], at, types.float32, in_bf16)
            return nothing

        loop(builder, builder.sdiv(builder.sub(end, begin), LONG(LANES)), [], put)
        return context.get_dummy_value()

    return types.void(sums, addends, *[types.int64] * 3, types.boolean), make


@intrinsic
def softmax_row(context, scores, row, size):
    """softmax of scores[row, :size], whole vectors, in place."""

    def make(context, builder, signature, arguments):
        (of_scores,) = arrays_of(context, builder, (scores,), arguments[:1])
        line = row_of(builder, of_scores, arguments[1])
        vector_count = builder.sdiv(arguments[2], LONG(LANES))

        def at_of(block):
            return builder.mul(block, LONG(LANES))

        def put(values, block):
            store_floats(builder, values, line, at_of(block), types.float32, ir.Constant(ir.IntType(1), 0))

        def peak_of(block, peaks):
            values = load_floats(builder, line, at_of(block), types.float32)
            return [builder.select(builder.fcmp_ordered(">", values, peaks[0]), values, peaks[0])]

        lowest = ir.Constant(FLOATS, [-float("inf")] * LANES)
        lane_peaks = loop(builder, vector_count, [lowest], peak_of)[0]
        max_function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(FLOAT, [FLOATS]), "llvm.vector.reduce.fmax.v16f32"
        )
        peak = splat(builder, builder.call(max_function, [lane_peaks]))

        def grow(block, sums):
            values = exponential(builder, builder.fsub(load_floats(builder, line, at_of(block), types.float32), peak))
            put(values, block)
            return [builder.fadd(sums[0], values)]

        total = _only(builder, loop(builder, vector_count, [ZEROS], grow)[0])
        inverse_total = splat(builder, builder.fdiv(FLOAT(1.0), total))

        def weigh(block, nothing):
            put(builder.fmul(load_floats(builder, line, at_of(block), types.float32), inverse_total), block)
            return nothing

        loop(builder, vector_count, [], weigh)
        return context.get_dummy_value()

    return types.void(scores, types.int64, types.int64), make


@intrinsic
def put_columns(context, values, line, begin, out, row, column, count, in_bf16):
    """out[row, column + i] = values[line, begin + i], i < count, a multiple of `LANES`; out as in `put_read`."""

    def make(context, builder, signature, arguments):
        of_values, of_out = arrays_of(context, builder, (values, out), (arguments[0], arguments[3]))
        begin, (row, column, count, in_bf16) = arguments[2], arguments[4:]
        line = row_of(builder, of_values, arguments[1])

        def put(block, nothing):
            at = builder.mul(block, LONG(LANES))
            numbers = load_floats(builder, line, builder.add(begin, at), types.float32)
            put_read(builder, numbers, of_out, out, row, builder.add(column, at), in_bf16)
            return nothing

        loop(builder, builder.sdiv(count, LONG(LANES)), [], put)
        return context.get_dummy_value()

    index = types.int64
    return types.void(values, index, index, out, index, index, index, types.boolean), make


def add_byte_products(builder, totals, codes, x):
    """Integers [LANES] plus, in each lane, the sum of four products of a code 0 … 255 and an integer of 8 bits."""
    dot_function = _function(builder, "x86.avx512.vpdpbusd.512", INTS, [INTS, INTS, INTS])
    return builder.call(dot_function, [totals, codes, x])


def _function(builder, name, result_type, argument_types):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result_type, argument_types), f"llvm.{name}")


def _nearest_bytes(builder, vectors):
    """(integers [LANES] of each vector, scale) of `ROUNDED` floats. The scale is NaN unless all are finite."""
    # As integers, sizes are in the order of floats; infinity and NaN are the largest.
    magnitudes = [builder.and_(builder.bitcast(vector, INTS), splat_int(0x7FFFFFFF)) for vector in vectors]
    larger = builder.select(builder.icmp_unsigned(">", *magnitudes), *magnitudes)
    max_bits = builder.call(_function(builder, "vector.reduce.umax.v16i32", INT, [INTS]), [larger])
    max_magnitude = builder.bitcast(max_bits, FLOAT)
    is_zero = builder.fcmp_ordered("<", max_magnitude, FLOAT(LEAST))
    factor = builder.select(is_zero, FLOAT(0.0), builder.fdiv(FLOAT(LARGEST_BYTE), max_magnitude))
    round_function = _function(builder, "rint.v16f32", FLOATS, [FLOATS])
    scaled = [builder.call(round_function, [builder.fmul(vector, splat(builder, factor))]) for vector in vectors]
    is_finite = builder.icmp_unsigned("<", max_bits, INT(0x7F800000))
    scale = builder.select(is_finite, builder.fdiv(max_magnitude, FLOAT(LARGEST_BYTE)), FLOAT(float("nan")))
    return [builder.fptosi(vector, INTS) for vector in scaled], scale


@intrinsic
def round_row(context, x, row, inputs, to, notes):
    """Write a row of x, bfloat16, as bytes to the address `to`, and its notes to the address `notes`."""

    def make(context, builder, signature, arguments):
        (of_x,) = arrays_of(context, builder, (x,), arguments[:1])
        line = row_of(builder, of_x, arguments[1])
        first_note = builder.inttoptr(arguments[4], INT.as_pointer())
        sum_function = _function(builder, "vector.reduce.add.v16i32", INT, [INTS])
        order = ir.Constant(ir.VectorType(INT, ROUNDED), _ORDER)

        def round_some(block, nothing):
            begin = builder.mul(block, LONG(ROUNDED))
            vector_starts = [builder.add(begin, LONG(offset)) for offset in range(0, ROUNDED, LANES)]
            integers, scale = _nearest_bytes(builder, [load_floats(builder, line, at, x.dtype) for at in vector_starts])
            in_order = builder.shuffle_vector(*(builder.trunc(v, ir.VectorType(BYTE, LANES)) for v in integers), order)
            byte_pointer = builder.inttoptr(builder.add(arguments[3], begin), in_order.type.as_pointer())
            builder.store(in_order, byte_pointer, align=1)
            half_sums = [builder.call(sum_function, [vector]) for vector in integers]
            scaled_sum = builder.fmul(scale, builder.sitofp(builder.add(*half_sums), FLOAT))
            for index, value in enumerate((*half_sums, scale, scaled_sum)):
                at = builder.add(builder.mul(block, LONG(NOTES)), LONG(index))
                builder.store(value, address_at(builder, first_note, at, value.type), align=4)
            return nothing

        loop(builder, builder.sdiv(arguments[2], LONG(ROUNDED)), [], round_some)
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64, types.int64, types.int64), make
