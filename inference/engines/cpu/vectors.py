# mypy: allow-untyped-defs
"""LLVM vector code of compiled functions: numbers are loaded, multiplied and stored `LANES` at a time.

Functions with a `builder` emit instructions. `Linear` is a linear layer as compiled products read it, and `Outputs`
converts sums to its outputs. Stored bfloat16s are uint16, their bits.
"""

from typing import NamedTuple

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import overload

LANES = 16
PANEL = LANES  # outputs whose weights are stored together, input by input
PARTS = 3  # bfloat16s whose sum is a float32
BYTE, INT, LONG, FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
ZEROS = ir.Constant(FLOATS, [0.0] * LANES)
_FUSED_FLAGS = ("contract",)  # a product and a sum may be one instruction, which rounds once
try:
    FEATURES = llvmlite.binding.get_host_cpu_features()  # beyond LLVM's baseline
except RuntimeError:  # LLVM does not know this processor
    FEATURES = {}


def row_of(builder, array, row):
    """The byte address of a row of a two-dimensional array."""
    row_stride = cgutils.unpack_tuple(builder, array.strides, 2)[0]
    return builder.gep(builder.bitcast(array.data, BYTE.as_pointer()), [builder.mul(row, row_stride)])


def address_at(builder, start, index, number_type):
    """The address of the `index`-th number of an LLVM type, counted from the address `start`."""
    return builder.gep(builder.bitcast(start, number_type.as_pointer()), [index])


def load_floats(builder, start, at, number_type):
    """`LANES` stored numbers of a numba type from the `at`-th on, as floats; pairs of bfloat16 (uint32) unchanged."""
    if number_type in (types.float32, types.uint32):
        scalar, vector_type = (FLOAT, FLOATS) if number_type == types.float32 else (INT, INTS)
        return builder.load(builder.bitcast(address_at(builder, start, at, scalar), vector_type.as_pointer()), align=4)
    bits = number_type.bitwidth
    vector_type = ir.VectorType(ir.IntType(bits), LANES)
    address = builder.bitcast(address_at(builder, start, at, ir.IntType(bits)), vector_type.as_pointer())
    codes = builder.load(address, align=bits // 8)
    if number_type == types.int8:
        return builder.sitofp(builder.sext(codes, INTS), FLOATS)
    if number_type == types.int16:
        return builder.fpext(builder.bitcast(codes, ir.VectorType(ir.HalfType(), LANES)), FLOATS)
    return builder.bitcast(builder.shl(builder.zext(codes, INTS), splat_int(16)), FLOATS)


def split_pairs(builder, pairs):
    """The first and the second numbers of pairs of bfloat16s, as floats."""
    lower, upper = builder.shl(pairs, splat_int(16)), builder.and_(pairs, splat_int(0xFFFF0000))
    return builder.bitcast(lower, FLOATS), builder.bitcast(upper, FLOATS)


def splat(builder, number):
    """A number in all lanes."""
    vector_type = ir.VectorType(number.type, LANES)
    first_lane = builder.insert_element(ir.Constant(vector_type, ir.Undefined), number, INT(0))
    return builder.shuffle_vector(first_lane, first_lane, ir.Constant(INTS, [0] * LANES))


def add_product(builder, total, factor, other_factor):
    """total + factor · other_factor, of floats or of pairs of bfloat16s."""
    if factor.type == FLOATS:
        return builder.fadd(total, builder.fmul(factor, other_factor, flags=_FUSED_FLAGS), flags=_FUSED_FLAGS)
    function_type = ir.FunctionType(FLOATS, [FLOATS, INTS, INTS])
    dot_function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(dot_function, [total, factor, other_factor])


def prefetch_line(builder, address):
    """Prefetch the cache line at an address: to read (0), with locality 2 of 3, as data (1)."""
    function_type = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), INT, INT, INT])
    prefetch = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    builder.call(prefetch, [builder.bitcast(address, BYTE.as_pointer()), INT(0), INT(2), INT(1)])


def nearest_bfloat16(builder, values):
    """The bits of floats, rounded to bfloat16 in their upper halves; the lower halves are arbitrary."""
    bits = builder.bitcast(values, INTS)
    odd = builder.and_(builder.lshr(bits, splat_int(16)), splat_int(1))
    rounded_bits = builder.add(builder.add(bits, splat_int(0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", values, values)
    return builder.select(is_nan, splat_int(0x7FC00000), rounded_bits)


def rounded(builder, values, in_bf16):
    """Floats, rounded to bfloat16 if the LLVM boolean `in_bf16` is true."""
    upper = builder.and_(nearest_bfloat16(builder, values), splat_int(0xFFFF0000))
    return builder.select(in_bf16, builder.bitcast(upper, FLOATS), values)


def store_floats(builder, values, start, index, number_type, in_bf16):
    """Store floats from index `index` on: as bfloat16 (uint16), or as float32, rounded to bfloat16 if `in_bf16`."""
    if number_type == types.uint16:
        upper = builder.lshr(nearest_bfloat16(builder, values), splat_int(16))
        bf16_bits = builder.trunc(upper, ir.VectorType(ir.IntType(16), LANES))
        address = address_at(builder, start, index, ir.IntType(16))
        builder.store(bf16_bits, builder.bitcast(address, bf16_bits.type.as_pointer()), align=2)
        return
    values = rounded(builder, values, in_bf16)
    builder.store(values, builder.bitcast(address_at(builder, start, index, FLOAT), FLOATS.as_pointer()), align=4)


def exponential(builder, x):
    """eˣ of floats to two units in the last place: 2ⁿ · e^(x − n·ln 2). 0 below −87. Constants of Cephes' expf."""
    is_low = builder.fcmp_ordered("<", x, splat_float(-87.0))
    x = builder.select(is_low, splat_float(-87.0), x)
    x = builder.select(builder.fcmp_ordered(">", x, splat_float(88.0)), splat_float(88.0), x)
    floor = cgutils.get_or_insert_function(builder.module, ir.FunctionType(FLOATS, [FLOATS]), "llvm.floor.v16f32")
    n = builder.call(floor, [add_product(builder, splat_float(0.5), x, splat_float(1.44269504))])
    r = add_product(builder, add_product(builder, x, n, splat_float(-0.693359375)), n, splat_float(2.12194440e-4))
    p = splat_float(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = add_product(builder, splat_float(factor), p, r)
    p = add_product(builder, builder.fadd(r, splat_float(1.0)), builder.fmul(p, r), r)
    power = builder.shl(builder.add(builder.fptosi(n, INTS), splat_int(127)), splat_int(23))
    return builder.select(is_low, ZEROS, builder.fmul(p, builder.bitcast(power, FLOATS)))


def loop(builder, count, initial_values, body):
    """Emit a loop: body(index, values) → values for every index < count, at least once, from `initial_values`."""
    before, body_block, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(body_block)
    builder.position_at_end(body_block)
    index = builder.phi(LONG)
    index.add_incoming(LONG(0), before)
    values = [builder.phi(value.type) for value in initial_values]
    next_values = body(index, values)
    end_block = builder.block  # the body may add blocks
    for value, initial, next_value in zip(values, initial_values, next_values, strict=True):
        value.add_incoming(initial, before)
        value.add_incoming(next_value, end_block)
    next_index = builder.add(index, LONG(1))
    index.add_incoming(next_index, end_block)
    builder.cbranch(builder.icmp_signed("<", next_index, count), body_block, after)
    builder.position_at_end(after)
    return next_values


def sums_of_lanes(builder, vectors):
    """A vector of the lane sums of each of 1 or 8 vectors. Lanes i and i + 8 are added first, then i and i + 4, and so
    on. So a sum does not depend on the other vectors."""
    lane_count = LANES
    while lane_count > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True) if len(vectors) > 1 else [(vectors[0], None)]
        vectors = [_add_halves(builder, first, second, lane_count) for first, second in pairs]
        lane_count //= 2
    return vectors[0]


def _add_halves(builder, vector, next_vector, group_lanes):
    """The first half of every `group_lanes` lanes plus the second half, of a vector and an optional second vector."""
    lane_count = vector.type.count
    starts = range(0, lane_count if next_vector is None else 2 * lane_count, group_lanes)
    halves = []
    for half_begin in (0, group_lanes // 2):
        lane_indices = [start + half_begin + lane for start in starts for lane in range(group_lanes // 2)]
        mask = ir.Constant(ir.VectorType(INT, len(lane_indices)), lane_indices)
        halves.append(builder.shuffle_vector(vector, vector if next_vector is None else next_vector, mask))
    return builder.fadd(*halves)


def splat_float(number):
    """A compile-time constant in all lanes."""
    return ir.Constant(FLOATS, [number] * LANES)


def splat_int(number):
    return ir.Constant(INTS, [number] * LANES)


def arrays_of(context, builder, array_types, arguments):
    """The arrays of the numba types `array_types` among an intrinsic's arguments, as LLVM structures."""
    return [context.make_array(t)(context, builder, array) for t, array in zip(array_types, arguments, strict=True)]


class Linear(NamedTuple):
    """A linear layer: weights, panels [outputs / PANEL, inputs, PANEL], flattened; scales, biases float32 [outputs].

    Weights are float32, the bits of bfloat16 (uint16) or of float16 (int16), or int8 codes. Or they are pairs of
    bfloat16s (uint32), those of two inputs, the first one in the lower bits: [outputs / PANEL, inputs / 2, PANEL]. Two
    such pairs of neighbouring outputs (uint64) have the same layout and are for AMX. Products of bfloat16s, by pairs or
    by AMX, treat subnormal numbers as zero.
    Or they are int64 [outputs / PANEL, 2]: of each panel its address, and that of what multiplies it (see `by_codes`).
    """

    weights: np.ndarray
    inputs: int
    scales: np.ndarray
    biases: np.ndarray


def weights_in(weights):
    """The number of weights per stored number of a `Linear`; 0: of codes. In compiled code: see `_weights_of`."""


@overload(weights_in)
def _weights_of(weights):
    pack_size = {types.uint32: 2, types.uint64: 4, types.int64: 0}.get(weights.dtype, 1)
    return lambda weights: pack_size


class Tile(NamedTuple):
    """`rows` rows of x from `row` on times `panels` panels from output `panel` on. If more rows share these panels,
    this tile is the number `turn` of the `turns` tiles that read the panels."""

    row: int
    rows: int
    panel: int
    panels: int
    turn: int
    turns: int


class Outputs(NamedTuple):
    """LLVM values to turn sums into outputs: scales, biases, and `out` of a numba type, rounded if `in_bf16`."""

    scales: object
    biases: object
    out: object
    number_type: object
    in_bf16: object

    @classmethod
    def of(cls, context, builder, array_types, arguments, in_bf16):
        """From the arguments of an intrinsic that are a `Linear` and `out`, of these types."""
        arrays = *cgutils.unpack_tuple(builder, arguments[0])[2:], arguments[1]  # 2 on: scales, biases
        structures = arrays_of(context, builder, (*array_types[0].types[2:], array_types[1]), arrays)
        return cls(*structures, number_type=array_types[1].dtype, in_bf16=in_bf16)

    def biases_and_scales(self, builder, column):
        """(biases, scales) of the panel that begins at output `column`."""
        return tuple(load_floats(builder, array.data, column, types.float32) for array in (self.biases, self.scales))

    def put(self, builder, total, bias_scale, row, column):
        """Scale a vector of sums, add biases, and store it in a row of the outputs. bias_scale: (biases, scales)."""
        value = add_product(builder, bias_scale[0], total, bias_scale[1])
        store_floats(builder, value, row_of(builder, self.out, row), column, self.number_type, self.in_bf16)


def distances_ahead(builder, panel_size, panel_count, turn, turns):
    """For each of `panel_count` panels: how far ahead this turn prefetches, in the unit of `panel_size`; 0 if another
    turn does it. So the next panels are fetched while these are used, and each turn fetches a share of them."""
    panel_turns = [builder.sdiv(builder.mul(turns, LONG(panel)), LONG(panel_count)) for panel in range(panel_count)]
    fetch_flags = [builder.icmp_signed("==", number, turn) for number in panel_turns]
    return [builder.select(fetches, builder.mul(panel_size, LONG(panel_count)), LONG(0)) for fetches in fetch_flags]


def switch_between(builder, cases, case_value, emit_case):
    """Emit a switch that runs emit_case(case) for the one of `cases` that equals `case_value`."""
    end_block = builder.append_basic_block("after")
    switch = builder.switch(case_value, end_block)
    for case in cases:
        block = builder.append_basic_block("case")
        switch.add_case(LONG(case), block)
        builder.position_at_end(block)
        emit_case(case)
        builder.branch(end_block)
    builder.position_at_end(end_block)
