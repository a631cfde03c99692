# mypy: allow-untyped-defs
"""Rows of x rounded to integers of 8 bits for products with codes, as `coded.round_to_bytes` defines them.

A row of bytes has the integers of every eight inputs in the order 0, 4, 1, 5, 2, 6, 3, 7: a line of codes holds four
neighbouring bytes of an output in this order (see `PanelBlock`). Of every `ROUNDED` inputs there are `NOTES` numbers of
32 bits besides: the sum of the first 16 integers and that of the others, int32, the scale, and scale · sum, float32.
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
    address_at,
    arrays_of,
    load_floats,
    loop,
    row_of,
    splat,
    splat_int,
)

HAS_BYTES = bool(FEATURES.get("avx512vnni"))  # an instruction for the sum of four products of bytes
NOTES = 4
SUM, SECOND_SUM, SCALE, SCALED_SUM = range(NOTES)
_ORDER = [8 * eight + place for eight in range(ROUNDED // 8) for place in (0, 4, 1, 5, 2, 6, 3, 7)]


def add_byte_products(builder, totals, codes, x):
    """Integers [LANES] plus, in each lane, the sum of four products of a code 0 … 255 and an integer of 8 bits."""
    dots = _function(builder, "x86.avx512.vpdpbusd.512", INTS, [INTS, INTS, INTS])
    return builder.call(dots, [totals, codes, x])


def _function(builder, name, result, arguments):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), f"llvm.{name}")


def _nearest_bytes(builder, vectors):
    """(integers [LANES] of each vector, scale) of `ROUNDED` floats. The scale is NaN unless all are finite."""
    # As integers, sizes are in the order of floats; infinity and NaN are the largest.
    sizes = [builder.and_(builder.bitcast(vector, INTS), splat_int(0x7FFFFFFF)) for vector in vectors]
    larger = builder.select(builder.icmp_unsigned(">", *sizes), *sizes)
    most_bits = builder.call(_function(builder, "vector.reduce.umax.v16i32", INT, [INTS]), [larger])
    most = builder.bitcast(most_bits, FLOAT)
    is_zero = builder.fcmp_ordered("<", most, FLOAT(LEAST))
    factor = builder.select(is_zero, FLOAT(0.0), builder.fdiv(FLOAT(LARGEST_BYTE), most))
    nearest = _function(builder, "rint.v16f32", FLOATS, [FLOATS])
    scaled = [builder.call(nearest, [builder.fmul(vector, splat(builder, factor))]) for vector in vectors]
    is_finite = builder.icmp_unsigned("<", most_bits, INT(0x7F800000))
    scale = builder.select(is_finite, builder.fdiv(most, FLOAT(LARGEST_BYTE)), FLOAT(float("nan")))
    return [builder.fptosi(vector, INTS) for vector in scaled], scale


@intrinsic
def round_row(context, x, row, inputs, to, notes):
    """Write a row of x, bfloat16, as bytes to the address `to`, and its notes to the address `notes`."""

    def make(context, builder, signature, arguments):
        (of_x,) = arrays_of(context, builder, (x,), arguments[:1])
        line = row_of(builder, of_x, arguments[1])
        first_note = builder.inttoptr(arguments[4], INT.as_pointer())
        add_all = _function(builder, "vector.reduce.add.v16i32", INT, [INTS])
        order = ir.Constant(ir.VectorType(INT, ROUNDED), _ORDER)

        def round_some(number, nothing):
            begin = builder.mul(number, LONG(ROUNDED))
            begins = [builder.add(begin, LONG(offset)) for offset in range(0, ROUNDED, LANES)]
            integers, scale = _nearest_bytes(builder, [load_floats(builder, line, at, x.dtype) for at in begins])
            in_order = builder.shuffle_vector(*(builder.trunc(v, ir.VectorType(BYTE, LANES)) for v in integers), order)
            to = builder.inttoptr(builder.add(arguments[3], begin), in_order.type.as_pointer())
            builder.store(in_order, to, align=1)
            sums = [builder.call(add_all, [vector]) for vector in integers]
            scaled_sum = builder.fmul(scale, builder.sitofp(builder.add(*sums), FLOAT))
            for index, value in enumerate((*sums, scale, scaled_sum)):
                at = builder.add(builder.mul(number, LONG(NOTES)), LONG(index))
                builder.store(value, address_at(builder, first_note, at, value.type), align=4)
            return nothing

        loop(builder, builder.sdiv(arguments[2], LONG(ROUNDED)), [], round_some)
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64, types.int64, types.int64), make
