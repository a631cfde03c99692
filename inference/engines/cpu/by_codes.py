# mypy: allow-untyped-defs
"""Products with quantised weights as a GGUF file stores them: codes of 4 to 8 bits, unpacked in registers.

A weight is scale · code − minimum; scale and minimum are those of its group of 16 or 32 inputs. So the part of a sum
that a group contributes is scale · Σ code · x − minimum · Σ x. Codes are small integers and exact in bfloat16, so the
products are those of the decoded weights, within the rounding of float32.
"""

from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from outrider.draft_models.formats.gguf_codes import KINDS, CodeKind
from outrider.inference.engines.cpu.numbers import array_of, kernel, wide
from outrider.inference.engines.cpu.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LANES,
    LONG,
    PANEL,
    ZEROS,
    Outputs,
    added,
    arrays_of,
    ask_for,
    loop,
    place_in,
    row_of,
    splat,
    splat_float,
    splat_int,
    switch_between,
)

SUMMED = 16  # inputs of a sum of `x`: the smallest group
_WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)
_LINE = 64  # bytes of a plane's vector: an integer of 16 bits for each of two inputs of 16 outputs


@dataclass(frozen=True)
class PanelBlock:
    """A block of a panel of `PANEL` outputs: factors, the groups' scales, their minima, then each group's codes.

    A group's codes are planes of 32 words of 16 bits, one for each of two inputs of each output. A code's lower bits, 4
    of 4 to 6 or all 8, are in the first planes, its upper ones in the next: of the first pair of inputs in the lowest
    bits of the words, of the second pair above them.
    """

    kind: CodeKind

    @property
    def header(self) -> int:
        """Bytes before the codes."""
        numbers = 1 + self.kind.minimum  # of a group
        if self.kind.groups == 1:
            return 2 * PANEL * numbers
        return -(-PANEL * numbers * (2 + self.kind.groups) // _LINE) * _LINE

    @property
    def codes(self) -> int:
        """Bytes of a group's codes."""
        return PANEL * self.kind.group * self.kind.bits // 8

    @property
    def size(self) -> int:
        """Bytes of the block."""
        return self.header + self.kind.groups * self.codes


_TILES = {1: 4, 2: 4, 4: 2, 8: 1}  # rows of a tile → its panels: sums and unpacked codes fit the registers
_MOST_ROWS = max(_TILES)
_SUMMED_ROWS = 64  # most rows whose sums of x a thread's stack holds at a time
# A code c below 2⁷ in the lower bits of these is 2⁷ + c and 16 · (2⁷ + c) as a bfloat16.
_UNITS, _SIXTEENS = 0x4300, 0x4500


class _Sides(NamedTuple):
    """The operands of a tile as LLVM values.

    panels, sources, sums: addresses of panels, of rows of x and of their sums. pairs: whether x is bfloat16, two inputs
    of which are multiplied by one instruction. outputs: the forms in which outputs may be stored; form: the number of
    the one that is asked for. ahead: bytes to what is read after this tile.
    """

    block: PanelBlock
    pairs: bool
    blocks: object
    panels: list
    columns: list
    rows: list
    sources: list
    sums: list
    outputs: list
    form: object
    ahead: object


def _loaded(builder, address, offset, kind):
    """A vector of a kind, `offset` bytes after an address."""
    start = builder.gep(builder.bitcast(address, BYTE.as_pointer()), [offset])
    return builder.load(builder.bitcast(start, kind.as_pointer()), align=1)


def _splat_word(number):
    return ir.Constant(_WORDS, [number] * 2 * LANES)


def _in_all_words(builder, number):
    first = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), number, INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(INT, 2 * LANES), [0] * 2 * LANES))


def _shifted(builder, words, by):
    """Integers shifted right by a number of bits, left if it is negative."""
    if by == 0:
        return words
    shift = builder.lshr if by > 0 else builder.shl
    return shift(words, ir.Constant(words.type, [abs(by)] * words.type.count))


def _pair_codes(builder, kind, words, upper, pair):
    """The codes of the `pair`-th two inputs of a line; their bits above `kind.bits` are arbitrary."""
    if kind.bits == 8:
        return _shifted(builder, words, 8 * pair)
    low = _shifted(builder, words, 4 * pair)
    if kind.bits == 4:
        return low
    upper = _shifted(builder, upper, (kind.bits - 4) * pair - 4)
    upper_mask = _splat_word(2**kind.bits - 16)
    return builder.or_(builder.and_(low, _splat_word(15)), builder.and_(upper, upper_mask))


def _as_bfloat16(builder, words, bits, base):
    """The lower `bits` of words as the bfloat16s that `base` begins, in pairs."""
    codes = builder.or_(builder.and_(words, _splat_word(2**bits - 1)), _splat_word(base))
    return builder.bitcast(codes, INTS)


def _operands(builder, sides, words, upper, pair):
    """The factors of x for the `pair`-th two inputs of a line: (vector, the number of x in the line) of each."""
    kind, words = sides.block.kind, _pair_codes(builder, sides.block.kind, words, upper, pair)
    if not sides.pairs:
        first = builder.bitcast(words, INTS)
        codes = [builder.and_(half, splat_int(2**kind.bits - 1)) for half in (first, _shifted(builder, first, 16))]
        return [(builder.sitofp(code, FLOATS), 2 * pair + index) for index, code in enumerate(codes)]
    if kind.bits < 8:
        return [(_as_bfloat16(builder, words, kind.bits, _UNITS), pair)]
    parts = (words, _UNITS), (_shifted(builder, words, 4), _SIXTEENS)
    return [(_as_bfloat16(builder, part, 4, base), pair) for part, base in parts]


def _surplus(kind, pairs):
    """What the factors of `_operands` are above the code, for each input."""
    if not pairs:
        return kind.offset
    return kind.offset + 128 + (16 * 128 if kind.bits == 8 else 0)


def _scale_and_minimum(builder, kind, block, group):
    """(scale, minimum or None) of a group of a panel's block, for each output."""
    scaled, begin = [], 2 * PANEL * (1 + kind.minimum)
    for index in range(1 + kind.minimum):
        half = _loaded(builder, block, LONG(2 * PANEL * index), ir.VectorType(ir.HalfType(), LANES))
        factor = builder.fpext(half, FLOATS)
        if kind.groups > 1:
            offset = builder.add(LONG(begin + index * kind.groups * PANEL), builder.mul(group, LONG(PANEL)))
            numbers = _loaded(builder, block, offset, ir.VectorType(BYTE, LANES))
            widened = builder.zext(numbers, INTS) if kind.minimum else builder.sext(numbers, INTS)
            factor = builder.fmul(factor, builder.sitofp(widened, FLOATS))
        scaled.append(factor)
    if kind.zero:
        scaled[1] = builder.fmul(*scaled)
    return scaled[0], scaled[1] if kind.minimum else None


def _sum_of_group(builder, kind, sums, group):
    """Σ x over a group of a row, in all lanes. sums: the address of the row's sums over `SUMMED` inputs."""
    count = kind.group // SUMMED
    first = builder.mul(group, LONG(count))
    indices = [builder.add(first, LONG(index)) for index in range(count)]
    parts = [builder.load(place_in(builder, sums, index, FLOAT), align=4) for index in indices]
    return splat(builder, reduce(builder.fadd, parts))


def _add_group(builder, sides, starts, number, group, totals):
    """`totals` with the products of a group of inputs. number: its block's; starts: the addresses of that block.

    A group's codes are unpacked once for all rows.
    """
    kind, block = sides.block.kind, sides.block
    group_number = builder.add(builder.mul(number, LONG(kind.groups)), group)
    first = builder.add(LONG(block.header), builder.mul(group, LONG(block.codes)))
    sums = [_sum_of_group(builder, kind, row, group_number) for row in sides.sums]
    surplus = splat_float(-float(_surplus(kind, sides.pairs)))
    dots = [builder.fmul(total, surplus) for total in sums for _ in starts]
    number_of_x, width = (INT, 1) if sides.pairs else (FLOAT, 2)  # of x for a pair of inputs
    pairs = 2 if kind.bits == 8 else 4  # of a line
    lines, upper_bits = kind.group // (2 * pairs), kind.bits - 4
    begin = builder.mul(group_number, LONG(width * kind.group // 2))
    upper_at = builder.add(first, LONG(_LINE * lines))
    uppers = [_loaded(builder, start, upper_at, _WORDS) for start in starts] if kind.bits in (5, 6) else []

    def add_line(line, dots):
        offset = builder.add(first, builder.mul(line, LONG(_LINE)))
        for start in starts:
            ask_for(builder, builder.gep(start, [builder.add(offset, sides.ahead)]))
        words = [_loaded(builder, start, offset, _WORDS) for start in starts]
        by = builder.trunc(builder.mul(line, LONG(pairs * upper_bits)), ir.IntType(16))
        shifted = [builder.lshr(upper, _in_all_words(builder, by)) for upper in uppers] or [None] * len(starts)
        line_begin = builder.add(begin, builder.mul(line, LONG(width * pairs)))
        for pair in range(pairs):
            of_panels = [_operands(builder, sides, *lines_of, pair) for lines_of in zip(words, shifted, strict=True)]
            for factors in zip(*of_panels, strict=True):
                at = builder.add(line_begin, LONG(factors[0][1]))
                inputs = [builder.load(place_in(builder, row, at, number_of_x), align=4) for row in sides.sources]
                terms = [(factor, splat(builder, x)) for x in inputs for factor, _ in factors]
                dots = [added(builder, dot, *term) for dot, term in zip(dots, terms, strict=True)]
        return dots

    dots = loop(builder, LONG(lines), dots, add_line)
    scales = [_scale_and_minimum(builder, kind, start, group) for start in starts]
    after = []
    for index, (total, dot) in enumerate(zip(totals, dots, strict=True)):
        row, panel = divmod(index, len(starts))
        scale, minimum = scales[panel]
        total = added(builder, total, dot, scale)
        after.append(total if minimum is None else added(builder, total, sums[row], builder.fneg(minimum)))
    return after


def _add_tile(builder, sides):
    """Emit code for some rows of a product and the outputs of some panels of one kind.

    A sum's terms are added group by group, in the order of inputs, so it does not depend on other rows or panels.
    """

    def add_block(number, totals):
        begin = builder.mul(number, LONG(sides.block.size))
        starts = [builder.gep(panel, [begin]) for panel in sides.panels]
        return loop(
            builder, LONG(sides.block.kind.groups), totals,
            lambda group, totals: _add_group(builder, sides, starts, number, group, totals),
        )  # fmt: skip

    totals = loop(builder, sides.blocks, [ZEROS] * (len(sides.rows) * len(sides.panels)), add_block)
    scaled = [sides.outputs[0].scaled(builder, column) for column in sides.columns]

    def put(form):
        for index, total in enumerate(totals):
            row, panel = divmod(index, len(sides.panels))
            sides.outputs[form].put(builder, total, scaled[panel], sides.rows[row], sides.columns[panel])

    switch_between(builder, range(len(sides.outputs)), sides.form, put)


def _least(builder, first, second):
    return builder.select(builder.icmp_signed("<", first, second), first, second)


@intrinsic(prefer_literal=True)
def multiply_tile(context, number, linear, x, sums, outs, tile):
    """The smallest of `_TILES` that holds the rows. number: that of a kind, a literal.

    outs: the outputs as float32, and where sums are rounded to bfloat16, the same memory as bfloat16; else as float32.
    tile: the place in `outs` of the form that is asked for, first row, rows, first and last panel.
    """
    kind, rounds = [*KINDS.values()][number.literal_value], outs.types[0] != outs.types[1]
    block = PanelBlock(kind)

    def make(context, builder, signature, arguments):
        fields, halves = cgutils.unpack_tuple(builder, arguments[1]), ir.Constant(ir.IntType(1), rounds)
        addresses, of_x, of_sums = arrays_of(
            context, builder, (linear.types[0], x, sums), (fields[0], arguments[2], arguments[3])
        )
        forms = [*zip(outs.types, cgutils.unpack_tuple(builder, arguments[4]), strict=True)][: 1 + rounds]
        outputs = [Outputs.of(context, builder, (linear, t), (arguments[1], out), halves) for t, out in forms]
        form, first_row, count, first_panel, last_panel = cgutils.unpack_tuple(builder, arguments[5])
        last_row = builder.sub(builder.add(first_row, count), LONG(1))
        blocks = builder.sdiv(fields[1], LONG(kind.inputs))

        def address_of(panel):
            entry = place_in(builder, addresses.data, builder.mul(panel, LONG(2)), LONG)
            return builder.inttoptr(builder.load(entry, align=8), BYTE.as_pointer())

        def add(tile_rows):
            tile_panels = _TILES[tile_rows]
            # The last row and the last panel may be computed several times.
            rows = [_least(builder, builder.add(first_row, LONG(row)), last_row) for row in range(tile_rows)]
            panels = [_least(builder, builder.add(first_panel, LONG(n)), last_panel) for n in range(tile_panels)]
            sides = _Sides(
                block, x.dtype == types.uint16, blocks, [address_of(panel) for panel in panels],
                [builder.mul(panel, LONG(PANEL)) for panel in panels], rows,
                [row_of(builder, of_x, row) for row in rows], [row_of(builder, of_sums, row) for row in rows],
                outputs, form, builder.mul(blocks, LONG(tile_panels * block.size)),
            )  # fmt: skip
            _add_tile(builder, sides)

        rows = LONG(_MOST_ROWS)
        for fewer in sorted(_TILES, reverse=True)[1:]:
            rows = builder.select(builder.icmp_signed("<=", count, LONG(fewer)), LONG(fewer), rows)
        switch_between(builder, _TILES, rows, add)
        return context.get_dummy_value()

    return types.void(number, linear, x, sums, outs, tile), make


# The table of a function of `by_codes`, int64: addresses; numbers from one row to the next; the place in `outs` of the
# form of outputs; rows and panels.
PANELS, INPUTS, SCALES, BIASES, X, X_APART, SUMS, OUT, OUT_APART, FORM, FIRST_ROW, ROWS, FIRST, LAST = range(14)


@kernel
def tile_sizes(rows):
    """The rows and the most panels of a tile of a product of some rows."""
    tile_rows = -(-rows // -(-rows // _MOST_ROWS))
    return tile_rows, 4 if tile_rows <= 2 else 2 if tile_rows <= 4 else 1  # see `_TILES`


@intrinsic
def _call_function(context, address, linear, x, sums, out, part):
    """Call the function at an address, with a table of all this. part: as the table's last numbers, after the form."""

    def make(context, builder, signature, arguments):
        panels, inputs, *floats = cgutils.unpack_tuple(builder, arguments[1])
        kinds = (linear.types[0], *linear.types[2:], x, sums, out)
        arrays = arrays_of(context, builder, kinds, (panels, *floats, *arguments[2:5]))
        panels, scales, biases, of_x, sums_of, of_out = (builder.ptrtoint(array.data, LONG) for array in arrays)
        x_apart, out_apart = (
            builder.sdiv(cgutils.unpack_tuple(builder, array.strides)[0], LONG(kind.dtype.bitwidth // 8))
            for array, kind in ((arrays[3], x), (arrays[5], out))
        )
        form = LONG(int(out.dtype == types.uint16))
        numbers = (panels, inputs, scales, biases, of_x, x_apart, sums_of, of_out, out_apart, form)
        table = cgutils.alloca_once(builder, LONG, size=LAST + 1)
        for index, value in enumerate((*numbers, *cgutils.unpack_tuple(builder, arguments[5]))):
            builder.store(value, builder.gep(table, [LONG(index)]))
        kind = ir.FunctionType(ir.VoidType(), [LONG]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], kind), [builder.ptrtoint(table, LONG)])
        return context.get_dummy_value()

    return types.void(types.int64, linear, x, sums, out, part), make


@intrinsic
def _workspace(context, count):
    """The address of memory for `count` float32s, until the function that calls this returns."""

    def make(context, builder, signature, arguments):
        return builder.ptrtoint(builder.alloca(FLOAT, size=arguments[0]), LONG)

    return types.int64(types.int64), make


@kernel
def by_codes(linear, x, rows, first, last, halves, out):
    """`passes.product` for codes. The weights are int64 [panels, 2], flattened: of a panel its address, and that of the
    function that multiplies panels of its kind: void f(int64 *table), see `entries.codes_entry`.

    x is float32, or bfloat16 where `DOTS`. halves: whether `out` is rounded to bfloat16; known to the function.
    """
    for row in range(0, rows, _SUMMED_ROWS):
        _multiply_rows(linear, x, row, min(_SUMMED_ROWS, rows - row), first, last, out)


@kernel
def _multiply_rows(linear, x, begin, rows, first, last, out):
    """`by_codes` for `rows` rows from row `begin` on."""
    panels, per_row = linear.weights, linear.inputs // SUMMED
    before = 4 * begin * per_row  # bytes of the rows before, which have no sums here
    sums = array_of(_workspace(rows * per_row) - before, (begin + rows, per_row), linear.scales)
    for row in range(begin, begin + rows):
        for index in range(per_row):
            total = np.float32(0.0)
            for i in range(index * SUMMED, (index + 1) * SUMMED):
                total += wide(x[row, i])
            sums[row, index] = total
    panel = first // PANEL
    while panel < last // PANEL:
        function, end = panels[2 * panel + 1], panel + 1
        while end < last // PANEL and panels[2 * end + 1] == function:
            end += 1
        _call_function(function, linear, x, sums, out, (begin, rows, panel, end))
        panel = end
