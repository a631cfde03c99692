# mypy: allow-untyped-defs
"""Products with quantised weights as a file stores them: codes of 4 to 8 bits, unpacked in registers.

A weight is scale · (code − offset) − minimum, with the scale and the minimum of its group of 16, 32 or 128 inputs. A
group's part of an output's sum is therefore scale · (Σ code · x − offset · Σ x) − minimum · Σ x. With x in float32 the
products are those of the decoded weights, within the rounding of float32.

x in bfloat16 is first rounded to integers of 8 bits (`coded.round_to_bytes`): one instruction then adds four products
of integers, exactly. With integers q and a scale s of every 32 inputs, x is s · q.

`code_panels` lays the weights out: a panel is `PANEL` outputs, and a `PanelBlock` of it has the same block of inputs of
all these outputs. `by_codes` multiplies rows of x by panels: it rounds x or sums it by groups (`_multiply_rows`), and
calls for each run of panels of one kind the compiled function of this kind (`entries.codes_entry`). That function goes
over tiles of a few rows and panels (`multiply_tile`), whose sums stay in registers. A tile goes over the blocks
(`_add_tile`), their groups (`_add_group`), and every eight inputs of a group.

The functions with a `builder` emit LLVM code: their arguments and results are LLVM values, unless a docstring says
otherwise.
"""

from functools import reduce
from itertools import product
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from outrider.draft_models.formats.gguf_codes import CODE_KINDS
from outrider.draft_models.targets.coded import ROUNDED
from outrider.inference.engines.cpu.elementwise import NOTES, SCALE, SCALED_SUM, add_byte_products, round_row
from outrider.inference.engines.cpu.numbers import array_of, kernel, wide
from outrider.inference.engines.cpu.panel_block import (
    LINE,
    WORDS,
    PanelBlock,
    four_codes,
    in_all_words,
    load_vector,
    scale_and_minimum,
    two_codes,
)
from outrider.inference.engines.cpu.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    INT,
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
    switch_between,
)

SUMMED = 16  # inputs whose x are summed beforehand: the smallest group
_TILES = {1: 4, 2: 4, 4: 2, 6: 1, 8: 1}  # rows of a tile → its panels: sums and unpacked codes fit the registers
_MOST_ROWS = max(_TILES)
_MOST_TOGETHER = 64  # rows whose sums, or bytes, a thread's stack holds at a time
_STACK = 2**20  # bytes of the stack for them
_INT8S = np.zeros(1, np.int8)  # an array of this type is made for bytes


class _Tile(NamedTuple):
    """The operands of some rows times some panels: LLVM values, but for `block`, `by_bytes` and `outputs`."""

    block: PanelBlock
    by_bytes: bool  # whether x is integers of 8 bits, see `round_row`
    blocks: object  # their number in a row
    panels: list  # addresses
    columns: list  # the first output of each panel
    rows: list  # numbers
    sources: list  # addresses of rows of x
    sums: list  # addresses of the rows' sums of x, or of their notes
    outputs: list  # the forms in which outputs may be stored
    output_form: object  # index in `outputs` of the form that is asked for
    ahead: object  # bytes from this tile to the codes that are read next


def _sum_of_group(builder, tile, sums, group):
    """Σ x over a group of a row, in all lanes. sums: the address of the row's sums over `SUMMED` inputs, or notes."""
    inputs, apart, begin = (ROUNDED, NOTES, SCALED_SUM) if tile.by_bytes else (SUMMED, 1, 0)
    count = tile.block.code_kind.group_size // inputs
    first_sum = builder.add(builder.mul(group, LONG(count * apart)), LONG(begin))
    indices = [builder.add(first_sum, LONG(apart * index)) for index in range(count)]
    parts = [builder.load(address_at(builder, sums, index, FLOAT), align=4) for index in indices]
    return splat(builder, reduce(builder.fadd, parts))


def _add_group(builder, tile, starts, block_number, group, totals):
    """`totals` with the products of a group of inputs. block_number: its block's; starts: the block's addresses.

    totals: a vector of outputs for each row and panel, row by row.
    """
    code_kind, block = tile.block.code_kind, tile.block
    group_number = builder.add(builder.mul(block_number, LONG(code_kind.block_groups)), group)
    codes_at = builder.add(LONG(block.header), builder.mul(group, LONG(block.group_bytes)))
    sums = []
    if code_kind.has_minimum or not tile.by_bytes:
        sums = [_sum_of_group(builder, tile, row, group_number) for row in tile.sums]
    if tile.by_bytes:
        dots = _dot_bytes(builder, tile, starts, group_number, codes_at)
    else:
        dots = _dot_floats(builder, tile, starts, group_number, codes_at, sums)
    scales = [scale_and_minimum(builder, code_kind, start, group) for start in starts]
    new_totals = []
    for index, (total, dot) in enumerate(zip(totals, dots, strict=True)):
        row, panel = divmod(index, len(starts))
        scale, minimum = scales[panel]
        total = add_product(builder, total, dot, scale)
        new_totals.append(total if minimum is None else add_product(builder, total, sums[row], builder.fneg(minimum)))
    return new_totals


def _dot_floats(builder, tile, starts, group_number, codes_at, sums):
    """Σ (code − offset) · x over a group, for each row and panel. codes_at: offset of the group's codes in a block."""
    code_kind = tile.block.code_kind
    offset, eights = splat_float(-float(code_kind.code_offset)), code_kind.group_size // 8
    dots = [builder.fmul(total, offset) for total in sums for _ in starts]
    return _add_eights(
        builder, tile, starts, (codes_at, LONG(0), builder.mul(group_number, LONG(eights)), eights), dots
    )


def _dot_bytes(builder, tile, starts, group_number, codes_at):
    """`_dot_floats` for bytes: integers are added, and scaled where the scale of x or of the codes changes."""
    code_kind, dots = tile.block.code_kind, [ZEROS] * (len(tile.sums) * len(starts))
    together = min(code_kind.group_size, ROUNDED)
    for part in range(code_kind.group_size // together):
        first_input = builder.add(builder.mul(group_number, LONG(code_kind.group_size)), LONG(part * together))
        notes_at = builder.mul(builder.sdiv(first_input, LONG(ROUNDED)), LONG(NOTES))
        half = builder.sdiv(builder.srem(first_input, LONG(ROUNDED)), LONG(SUMMED))
        integers, factors = [], []
        for notes in tile.sums:
            sums_at = [builder.add(notes_at, builder.add(half, LONG(n))) for n in range(together // SUMMED)]
            parts = [builder.load(address_at(builder, notes, at, INT), align=4) for at in sums_at]
            offset = builder.mul(reduce(builder.add, parts), INT(-code_kind.code_offset))
            integers += [splat(builder, offset)] * len(starts)
            factor = address_at(builder, notes, builder.add(notes_at, LONG(SCALE)), FLOAT)
            factors += [splat(builder, builder.load(factor, align=4))] * len(starts)
        eights = LONG(part * together // 8), builder.sdiv(first_input, LONG(8)), together // 8
        integers = _add_eights(builder, tile, starts, (codes_at, *eights), integers)
        floats = [builder.sitofp(integer, FLOATS) for integer in integers]
        dots = [add_product(builder, *terms) for terms in zip(dots, floats, factors, strict=True)]
    return dots


def _add_eights(builder, tile, starts, eights, dots):
    """`dots` with Σ code · x over some eights of inputs. A line's codes are unpacked once for all rows.

    eights: offset of their group's codes in a block, the first one's number in the group and in a row, their number.
    """
    codes_at, first_eight, first_of_row, count = eights
    code_kind, lines_of_eight = tile.block.code_kind, 2 if tile.block.code_kind.bits == 8 else 1
    upper_bits, lines = code_kind.bits - 4, code_kind.group_size // 8
    upper_at = builder.add(codes_at, LONG(LINE * lines))
    uppers = []
    if code_kind.bits in (5, 6):
        uppers = [load_vector(builder, start, upper_at, WORDS) for start in starts]
        _prefetch_next(builder, tile, starts, [upper_at])
    steps, type_of_x, unpack = (2, INT, four_codes) if tile.by_bytes else (4, FLOAT, two_codes)

    def add_eight(eight, dots):
        number = builder.add(first_eight, eight)
        offset = builder.add(codes_at, builder.mul(number, LONG(LINE * lines_of_eight)))
        offsets = [builder.add(offset, LONG(LINE * line)) for line in range(lines_of_eight)]
        _prefetch_next(builder, tile, starts, offsets)
        words = [[load_vector(builder, start, line, WORDS) for line in offsets] for start in starts]
        by = builder.trunc(builder.mul(number, LONG(4 * upper_bits)), ir.IntType(16))
        line_uppers = [builder.lshr(upper, in_all_words(builder, by)) for upper in uppers] or [None] * len(starts)
        x_begin = builder.mul(builder.add(first_of_row, eight), LONG(2 if tile.by_bytes else 8))
        for step in range(steps):
            by_panel = [unpack(builder, code_kind, *codes, step) for codes in zip(words, line_uppers, strict=True)]
            by_input = [by_panel] if tile.by_bytes else [*zip(*by_panel, strict=True)]
            for index, of_panels in enumerate(by_input):
                at = builder.add(x_begin, LONG(step * len(by_input) + index))
                inputs = [builder.load(address_at(builder, source, at, type_of_x), align=4) for source in tile.sources]
                terms = [(codes, splat(builder, x)) for x in inputs for codes in of_panels]
                add = add_byte_products if tile.by_bytes else add_product
                dots = [add(builder, dot, *term) for dot, term in zip(dots, terms, strict=True)]
        return dots

    return loop(builder, LONG(count), dots, add_eight)


def _prefetch_next(builder, tile, starts, offsets):
    """Prefetch the lines at these offsets in the blocks of the next tile's panels."""
    for start, offset in product(starts, offsets):
        prefetch_line(builder, builder.gep(start, [builder.add(offset, tile.ahead)]))


def _add_tile(builder, tile):
    """Emit code for some rows of a product and the outputs of some panels of one kind.

    A sum's terms are added group by group, in the order of inputs, so it does not depend on other rows or panels.
    """

    def add_block(number, totals):
        begin = builder.mul(number, LONG(tile.block.size))
        starts = [builder.gep(panel, [begin]) for panel in tile.panels]
        _prefetch_next(builder, tile, starts, [LONG(offset) for offset in range(0, tile.block.header, LINE)])
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
                block=block, by_bytes=x.dtype == types.int8, blocks=blocks, rows=rows,
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

    x is float32, or bfloat16 where `HAS_BYTES`. in_bf16: whether `out` is rounded to bfloat16; known to the function.
    """
    together = max(_MOST_ROWS, min(_MOST_TOGETHER, _STACK // (2 * linear.inputs)))
    for row in range(0, rows, together):
        _multiply_rows(linear, x, row, min(together, rows - row), begin, end, out)


def _multiply_rows(linear, x, first_row, rows, begin, end, out):
    """`by_codes` for `rows` rows from row `first_row` on."""


@overload(_multiply_rows)
def _multiply_rows_of(linear, x, first_row, rows, begin, end, out):
    if x.dtype != types.uint16:
        return _multiply_floats.py_func

    def multiply_bytes(linear, x, first_row, rows, begin, end, out):
        inputs, notes_in_row = linear.inputs, NOTES * (linear.inputs // ROUNDED)
        codes_at = _workspace(rows * inputs // 4) - first_row * inputs  # no row before has bytes here
        notes_at = _workspace(rows * notes_in_row) - 4 * first_row * notes_in_row
        for row in range(first_row, first_row + rows):
            round_row(x, row, inputs, codes_at + row * inputs, notes_at + 4 * row * notes_in_row)
        codes = array_of(codes_at, (first_row + rows, inputs), _INT8S)
        notes = array_of(notes_at, (first_row + rows, notes_in_row), linear.scales)
        _multiply_panels(linear, codes, notes, first_row, rows, begin, end, out)

    return multiply_bytes


@kernel
def _multiply_floats(linear, x, first_row, rows, begin, end, out):
    sums_per_row = linear.inputs // SUMMED
    bytes_before = 4 * first_row * sums_per_row  # bytes of the rows before, which have no sums here
    sums = array_of(_workspace(rows * sums_per_row) - bytes_before, (first_row + rows, sums_per_row), linear.scales)
    for row in range(first_row, first_row + rows):
        for index in range(sums_per_row):
            total = np.float32(0.0)
            for i in range(index * SUMMED, (index + 1) * SUMMED):
                total += wide(x[row, i])
            sums[row, index] = total
    _multiply_panels(linear, x, sums, first_row, rows, begin, end, out)


@kernel
def _multiply_panels(linear, x, sums, first_row, rows, begin, end, out):
    panels = linear.weights
    panel = begin // PANEL
    while panel < end // PANEL:
        function, panel_end = panels[2 * panel + 1], panel + 1
        while panel_end < end // PANEL and panels[2 * panel_end + 1] == function:
            panel_end += 1
        _call_function(function, linear, x, sums, out, (first_row, rows, panel, panel_end))
        panel = panel_end
