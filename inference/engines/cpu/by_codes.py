# mypy: allow-untyped-defs
"""Products with quantised weights as a file stores them: codes of 4 to 8 bits, unpacked in registers.

A weight is scale · (code − offset) − minimum, with the scale and the minimum of its group of 16, 32 or 128 inputs. A
group's part of an output's sum is therefore scale · (Σ code · x − offset · Σ x) − minimum · Σ x. Codes are small
integers and exact in bfloat16, so the products are those of the decoded weights, within the rounding of float32.

`code_panels` lays the weights out: a panel is `PANEL` outputs, and a `PanelBlock` of it has the same block of inputs of
all these outputs. `by_codes` multiplies rows of x by panels: it sums x by groups (`_multiply_rows`), and calls for each
run of panels of one kind the compiled function of this kind (`entries.codes_entry`). That function goes over tiles of a
few rows and panels (`multiply_tile`), whose sums stay in registers. A tile goes over the blocks (`_add_tile`), their
groups (`_add_group`), and the lines of a group's codes.

The functions with a `builder` emit LLVM code: their arguments and results are LLVM values, unless a docstring says
otherwise.
"""

from functools import reduce
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from outrider.draft_models.formats.gguf_codes import CODE_KINDS
from outrider.inference.engines.cpu.numbers import array_of, kernel, wide
from outrider.inference.engines.cpu.panel_block import LINE, PanelBlock
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
    add_product,
    address_at,
    arrays_of,
    loop,
    prefetch_line,
    row_of,
    splat,
    splat_float,
    splat_int,
    switch_between,
)

SUMMED = 16  # inputs whose x are summed beforehand: the smallest group
_WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)
_TILES = {1: 4, 2: 4, 4: 2, 8: 1}  # rows of a tile → its panels: sums and unpacked codes fit the registers
_MOST_ROWS = max(_TILES)
_SUMMED_ROWS = 64  # most rows whose sums of x a thread's stack holds at a time
# With a code c below 2⁷ in their lower bits, these are 2⁷ + c and 16 · (2⁷ + c) as bfloat16s.
_UNITS, _SIXTEENS = 0x4300, 0x4500


class _Tile(NamedTuple):
    """The operands of some rows times some panels: LLVM values, but for `block`, `pairs` and `outputs`."""

    block: PanelBlock
    pairs: bool  # whether x is bfloat16: one instruction then multiplies two inputs
    blocks: object  # their number in a row
    panels: list  # addresses
    columns: list  # the first output of each panel
    rows: list  # numbers
    sources: list  # addresses of rows of x
    sums: list  # addresses of the rows' sums of x
    outputs: list  # the forms in which outputs may be stored
    output_form: object  # index in `outputs` of the form that is asked for
    ahead: object  # bytes from this tile to the codes that are read next


def _load_vector(builder, address, offset, vector_type):
    """A vector, `offset` bytes after an address."""
    start = builder.gep(builder.bitcast(address, BYTE.as_pointer()), [offset])
    return builder.load(builder.bitcast(start, vector_type.as_pointer()), align=1)


def _splat_word(number):
    return ir.Constant(_WORDS, [number] * 2 * LANES)


def _in_all_words(builder, number):
    first = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), number, INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(INT, 2 * LANES), [0] * 2 * LANES))


def _shift_right(builder, words, by):
    """Integers shifted right by a number of bits; left by a negative number."""
    if by == 0:
        return words
    shift = builder.lshr if by > 0 else builder.shl
    return shift(words, ir.Constant(words.type, [abs(by)] * words.type.count))


def _pair_codes(builder, code_kind, words, upper, pair):
    """The codes of the `pair`-th two inputs of a line; their bits above `code_kind.bits` are arbitrary."""
    if code_kind.bits == 8:
        return _shift_right(builder, words, 8 * pair)
    low = _shift_right(builder, words, 4 * pair)
    if code_kind.bits == 4:
        return low
    upper = _shift_right(builder, upper, (code_kind.bits - 4) * pair - 4)
    upper_mask = _splat_word(2**code_kind.bits - 16)
    return builder.or_(builder.and_(low, _splat_word(15)), builder.and_(upper, upper_mask))


def _as_bfloat16(builder, words, bits, base):
    """The lower `bits` of words as bfloat16s with the upper bits of `base`, in pairs."""
    codes = builder.or_(builder.and_(words, _splat_word(2**bits - 1)), _splat_word(base))
    return builder.bitcast(codes, INTS)


def _code_factors(builder, tile, words, upper, pair):
    """The factors of x for the `pair`-th two inputs of a line: for each, the vector and the index of x in the line.

    With bfloat16, a code of 8 bits has two factors: 2⁷ + its lower half, and 16 · (2⁷ + its upper half).
    """
    code_kind, words = tile.block.code_kind, _pair_codes(builder, tile.block.code_kind, words, upper, pair)
    if not tile.pairs:
        first = builder.bitcast(words, INTS)
        codes = [
            builder.and_(half, splat_int(2**code_kind.bits - 1)) for half in (first, _shift_right(builder, first, 16))
        ]
        return [(builder.sitofp(code, FLOATS), 2 * pair + index) for index, code in enumerate(codes)]
    if code_kind.bits < 8:
        return [(_as_bfloat16(builder, words, code_kind.bits, _UNITS), pair)]
    parts = (words, _UNITS), (_shift_right(builder, words, 4), _SIXTEENS)
    return [(_as_bfloat16(builder, part, 4, base), pair) for part, base in parts]


def _surplus(code_kind, pairs):
    """How much larger the sum of an input's factors (`_code_factors`) is than code − offset."""
    if not pairs:
        return code_kind.code_offset
    return code_kind.code_offset + 128 + (16 * 128 if code_kind.bits == 8 else 0)


def _scale_and_minimum(builder, code_kind, block, group):
    """(scale, minimum or None) of a group of a panel's block, for each output."""
    factors, begin = [], 2 * PANEL * (1 + code_kind.has_minimum)
    for index in range(1 + code_kind.has_minimum):
        half = _load_vector(builder, block, LONG(2 * PANEL * index), ir.VectorType(ir.HalfType(), LANES))
        factor = builder.fpext(half, FLOATS)
        if code_kind.block_groups > 1:
            offset = builder.add(LONG(begin + index * code_kind.block_groups * PANEL), builder.mul(group, LONG(PANEL)))
            numbers = _load_vector(builder, block, offset, ir.VectorType(BYTE, LANES))
            widened = builder.zext(numbers, INTS) if code_kind.has_minimum else builder.sext(numbers, INTS)
            factor = builder.fmul(factor, builder.sitofp(widened, FLOATS))
        factors.append(factor)
    if code_kind.has_zero_point:
        factors[1] = builder.fmul(*factors)
    return factors[0], factors[1] if code_kind.has_minimum else None


def _sum_of_group(builder, code_kind, sums, group):
    """Σ x over a group of a row, in all lanes. sums: the address of the row's sums over `SUMMED` inputs."""
    count = code_kind.group_size // SUMMED
    first_sum = builder.mul(group, LONG(count))
    indices = [builder.add(first_sum, LONG(index)) for index in range(count)]
    parts = [builder.load(address_at(builder, sums, index, FLOAT), align=4) for index in indices]
    return splat(builder, reduce(builder.fadd, parts))


def _add_group(builder, tile, starts, block_number, group, totals):
    """`totals` with the products of a group of inputs. block_number: its block's; starts: the block's addresses.

    totals: a vector of outputs for each row and panel, row by row.
    """
    code_kind, block = tile.block.code_kind, tile.block
    group_number = builder.add(builder.mul(block_number, LONG(code_kind.block_groups)), group)
    codes_at = builder.add(LONG(block.header), builder.mul(group, LONG(block.group_bytes)))
    sums = [_sum_of_group(builder, code_kind, row, group_number) for row in tile.sums]
    dots = _dot_codes(builder, tile, starts, group_number, codes_at, sums)
    scales = [_scale_and_minimum(builder, code_kind, start, group) for start in starts]
    new_totals = []
    for index, (total, dot) in enumerate(zip(totals, dots, strict=True)):
        row, panel = divmod(index, len(starts))
        scale, minimum = scales[panel]
        total = add_product(builder, total, dot, scale)
        new_totals.append(total if minimum is None else add_product(builder, total, sums[row], builder.fneg(minimum)))
    return new_totals


def _dot_codes(builder, tile, starts, group_number, codes_at, sums):
    """Σ (code − offset) · x over a group, for each row and panel. codes_at: offset of the group's codes in a block.

    The factors of `_code_factors` are larger than code − offset by the surplus, so a sum begins at −surplus · Σ x. A
    line's codes are unpacked once for all rows.
    """
    code_kind = tile.block.code_kind
    surplus = splat_float(-float(_surplus(code_kind, tile.pairs)))
    dots = [builder.fmul(total, surplus) for total in sums for _ in starts]
    type_of_x, numbers_of_pair = (INT, 1) if tile.pairs else (FLOAT, 2)  # how x is read: two bfloat16s as one INT
    pairs = 2 if code_kind.bits == 8 else 4  # of a line
    lines, upper_bits = code_kind.group_size // (2 * pairs), code_kind.bits - 4
    group_begin = builder.mul(group_number, LONG(numbers_of_pair * code_kind.group_size // 2))
    upper_at = builder.add(codes_at, LONG(LINE * lines))
    uppers = [_load_vector(builder, start, upper_at, _WORDS) for start in starts] if code_kind.bits in (5, 6) else []

    def add_line(line, dots):
        offset = builder.add(codes_at, builder.mul(line, LONG(LINE)))
        for start in starts:
            prefetch_line(builder, builder.gep(start, [builder.add(offset, tile.ahead)]))
        words = [_load_vector(builder, start, offset, _WORDS) for start in starts]
        by = builder.trunc(builder.mul(line, LONG(pairs * upper_bits)), ir.IntType(16))
        line_uppers = [builder.lshr(upper, _in_all_words(builder, by)) for upper in uppers] or [None] * len(starts)
        line_begin = builder.add(group_begin, builder.mul(line, LONG(numbers_of_pair * pairs)))
        for pair in range(pairs):
            by_panel = [_code_factors(builder, tile, *codes, pair) for codes in zip(words, line_uppers, strict=True)]
            for factors in zip(*by_panel, strict=True):
                at = builder.add(line_begin, LONG(factors[0][1]))
                inputs = [builder.load(address_at(builder, source, at, type_of_x), align=4) for source in tile.sources]
                terms = [(codes, splat(builder, x)) for x in inputs for codes, _ in factors]
                dots = [add_product(builder, dot, *term) for dot, term in zip(dots, terms, strict=True)]
        return dots

    return loop(builder, LONG(lines), dots, add_line)


def _add_tile(builder, tile):
    """Emit code for some rows of a product and the outputs of some panels of one kind.

    A sum's terms are added group by group, in the order of inputs, so it does not depend on other rows or panels.
    """

    def add_block(number, totals):
        begin = builder.mul(number, LONG(tile.block.size))
        starts = [builder.gep(panel, [begin]) for panel in tile.panels]
        return loop(
            builder, LONG(tile.block.code_kind.block_groups), totals,
            lambda group, totals: _add_group(builder, tile, starts, number, group, totals),
        )  # fmt: skip

    totals = loop(builder, tile.blocks, [ZEROS] * (len(tile.rows) * len(tile.panels)), add_block)
    scaled = [tile.outputs[0].scaled(builder, column) for column in tile.columns]

    def put(form):
        for index, total in enumerate(totals):
            row, panel = divmod(index, len(tile.panels))
            tile.outputs[form].put(builder, total, scaled[panel], tile.rows[row], tile.columns[panel])

    switch_between(builder, range(len(tile.outputs)), tile.output_form, put)


def _least(builder, first, second):
    return builder.select(builder.icmp_signed("<", first, second), first, second)


@intrinsic(prefer_literal=True)
def multiply_tile(context, number, linear, x, sums, outs, tile):
    """Multiply by the smallest of `_TILES` that holds the rows. number: the number of a kind of codes, a literal.

    outs: the outputs as float32, and where sums are rounded to bfloat16, the same memory as bfloat16; else as float32.
    tile: the index in `outs` of the form that is asked for, first row, number of rows, first and last panel.
    """
    code_kind, rounds = [*CODE_KINDS.values()][number.literal_value], outs.types[0] != outs.types[1]
    block = PanelBlock(code_kind)

    def make(context, builder, signature, arguments):
        fields, in_bf16 = cgutils.unpack_tuple(builder, arguments[1]), ir.Constant(ir.IntType(1), rounds)
        addresses, of_x, of_sums = arrays_of(
            context, builder, (linear.types[0], x, sums), (fields[0], arguments[2], arguments[3])
        )
        forms = [*zip(outs.types, cgutils.unpack_tuple(builder, arguments[4]), strict=True)][: 1 + rounds]
        outputs = [Outputs.of(context, builder, (linear, t), (arguments[1], out), in_bf16) for t, out in forms]
        form, first_row, count, first_panel, last_panel = cgutils.unpack_tuple(builder, arguments[5])
        last_row = builder.sub(builder.add(first_row, count), LONG(1))
        blocks = builder.sdiv(fields[1], LONG(code_kind.inputs))

        def address_of(panel):
            entry = address_at(builder, addresses.data, builder.mul(panel, LONG(2)), LONG)
            return builder.inttoptr(builder.load(entry, align=8), BYTE.as_pointer())

        def add(tile_rows):
            tile_panels = _TILES[tile_rows]
            # The last row and the last panel may be computed several times.
            rows = [_least(builder, builder.add(first_row, LONG(row)), last_row) for row in range(tile_rows)]
            panels = [_least(builder, builder.add(first_panel, LONG(n)), last_panel) for n in range(tile_panels)]
            operands = _Tile(
                block=block, pairs=x.dtype == types.uint16, blocks=blocks, rows=rows,
                panels=[address_of(panel) for panel in panels],
                columns=[builder.mul(panel, LONG(PANEL)) for panel in panels],
                sources=[row_of(builder, of_x, row) for row in rows],
                sums=[row_of(builder, of_sums, row) for row in rows],
                outputs=outputs, output_form=form, ahead=builder.mul(blocks, LONG(tile_panels * block.size)),
            )  # fmt: skip
            _add_tile(builder, operands)

        rows = LONG(_MOST_ROWS)
        for fewer in sorted(_TILES, reverse=True)[1:]:
            rows = builder.select(builder.icmp_signed("<=", count, LONG(fewer)), LONG(fewer), rows)
        switch_between(builder, _TILES, rows, add)
        return context.get_dummy_value()

    return types.void(number, linear, x, sums, outs, tile), make


# Indices of the table, int64, that a function for one kind of codes gets: addresses; ..._APART: numbers from one row to
# the next; the index in `outs` of the form of outputs; rows and panels.
PANELS, INPUTS, SCALES, BIASES, X, X_APART, SUMS, OUT, OUT_APART, OUTPUT_FORM, FIRST_ROW, ROWS, FIRST, LAST = range(14)


@kernel
def tile_sizes(rows):
    """The rows and the most panels of a tile of a product of some rows."""
    tile_rows = -(-rows // -(-rows // _MOST_ROWS))
    return tile_rows, 4 if tile_rows <= 2 else 2 if tile_rows <= 4 else 1  # see `_TILES`


@intrinsic
def _call_function(context, address, linear, x, sums, out, part):
    """Call the function at an address with its table. part: the table's last numbers, from `FIRST_ROW` on."""

    def make(context, builder, signature, arguments):
        panels, inputs, *floats = cgutils.unpack_tuple(builder, arguments[1])
        array_types = (linear.types[0], *linear.types[2:], x, sums, out)
        arrays = arrays_of(context, builder, array_types, (panels, *floats, *arguments[2:5]))
        panels, scales, biases, of_x, sums_of, of_out = (builder.ptrtoint(array.data, LONG) for array in arrays)
        x_apart, out_apart = (
            builder.sdiv(cgutils.unpack_tuple(builder, array.strides)[0], LONG(array_type.dtype.bitwidth // 8))
            for array, array_type in ((arrays[3], x), (arrays[5], out))
        )
        form = LONG(int(out.dtype == types.uint16))
        numbers = (panels, inputs, scales, biases, of_x, x_apart, sums_of, of_out, out_apart, form)
        table = cgutils.alloca_once(builder, LONG, size=LAST + 1)
        for index, value in enumerate((*numbers, *cgutils.unpack_tuple(builder, arguments[5]))):
            builder.store(value, builder.gep(table, [LONG(index)]))
        function_type = ir.FunctionType(ir.VoidType(), [LONG]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], function_type), [builder.ptrtoint(table, LONG)])
        return context.get_dummy_value()

    return types.void(types.int64, linear, x, sums, out, part), make


@intrinsic
def _workspace(context, count):
    """The address of memory for `count` float32s, until the function that calls this returns."""

    def make(context, builder, signature, arguments):
        return builder.ptrtoint(builder.alloca(FLOAT, size=arguments[0]), LONG)

    return types.int64(types.int64), make


@kernel
def by_codes(linear, x, rows, begin, end, in_bf16, out):
    """`passes.product` for codes. The weights are int64 [panels, 2], flattened: of a panel its address, and that of the
    function that multiplies panels of its kind: void f(int64 *table), see `entries.codes_entry`.

    x is float32, or bfloat16 where `DOTS`. in_bf16: whether `out` is rounded to bfloat16; known to the function.
    """
    for row in range(0, rows, _SUMMED_ROWS):
        _multiply_rows(linear, x, row, min(_SUMMED_ROWS, rows - row), begin, end, out)


@kernel
def _multiply_rows(linear, x, first_row, rows, begin, end, out):
    """`by_codes` for `rows` rows from row `first_row` on."""
    panels, sums_per_row = linear.weights, linear.inputs // SUMMED
    bytes_before = 4 * first_row * sums_per_row  # bytes of the rows before, which have no sums here
    sums = array_of(_workspace(rows * sums_per_row) - bytes_before, (first_row + rows, sums_per_row), linear.scales)
    for row in range(first_row, first_row + rows):
        for index in range(sums_per_row):
            total = np.float32(0.0)
            for i in range(index * SUMMED, (index + 1) * SUMMED):
                total += wide(x[row, i])
            sums[row, index] = total
    panel = begin // PANEL
    while panel < end // PANEL:
        function, panel_end = panels[2 * panel + 1], panel + 1
        while panel_end < end // PANEL and panels[2 * panel_end + 1] == function:
            panel_end += 1
        _call_function(function, linear, x, sums, out, (first_row, rows, panel, panel_end))
        panel = panel_end
