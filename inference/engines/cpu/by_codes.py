# mypy: allow-untyped-defs
"""Products with quantised weights as a file stores them: codes of 4 to 8 bits, unpacked in registers.

A weight is scale · (code − offset) − minimum, with the scale and the minimum of its group of 16, 32 or 128 inputs. A
group's part of an output's sum is therefore scale · (Σ code · x − offset · Σ x) − minimum · Σ x. With x in float32 the
products are those of the decoded weights, within the rounding of float32.

x in bfloat16 is first rounded to integers of 8 bits (`coded.round_to_bytes`): one instruction then adds four products
of integers, exactly. With integers q and a scale s of every 32 inputs, x is s · q. The `NOTES` of 32 inputs are Σ q of
16 and Σ q of the other 16, int32, then s and s · Σ q, float32.

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


def _sum_of_group(builder, tile, sums_address, group):
    """Σ x over a group of a row, in all lanes. sums_address: of the row's sums over `SUMMED` inputs, or notes."""
    inputs_per_sum, sum_stride, sum_offset = (ROUNDED, NOTES, SCALED_SUM) if tile.by_bytes else (SUMMED, 1, 0)
    sum_count = tile.block.code_kind.group_size // inputs_per_sum  # > 0: kinds with minima have groups of 32 or more
    first_sum = builder.add(builder.mul(group, LONG(sum_count * sum_stride)), LONG(sum_offset))
    indices = [builder.add(first_sum, LONG(sum_stride * index)) for index in range(sum_count)]
    partial_sums = [builder.load(address_at(builder, sums_address, index, FLOAT), align=4) for index in indices]
    return splat(builder, reduce(builder.fadd, partial_sums))


def _add_group(builder, tile, block_starts, block_number, group, totals):
    """`totals` with the products of a group of inputs. block_number: its block's; block_starts: the block's addresses.

    totals: a vector of outputs for each row and panel, row by row.
    """
    code_kind, block = tile.block.code_kind, tile.block
    group_number = builder.add(builder.mul(block_number, LONG(code_kind.block_groups)), group)
    codes_offset = builder.add(LONG(block.header), builder.mul(group, LONG(block.group_bytes)))
    sums = []
    if code_kind.has_minimum or not tile.by_bytes:
        sums = [_sum_of_group(builder, tile, row, group_number) for row in tile.sums]
    if tile.by_bytes:
        dots = _dot_bytes(builder, tile, block_starts, group_number, codes_offset)
    else:
        dots = _dot_floats(builder, tile, block_starts, group_number, codes_offset, sums)
    scales_and_minima = [scale_and_minimum(builder, code_kind, start, group) for start in block_starts]
    new_totals = []
    for index, (total, dot) in enumerate(zip(totals, dots, strict=True)):
        row, panel = divmod(index, len(block_starts))
        scale, minimum = scales_and_minima[panel]
        total = add_product(builder, total, dot, scale)
        new_totals.append(total if minimum is None else add_product(builder, total, sums[row], builder.fneg(minimum)))
    return new_totals


def _dot_floats(builder, tile, block_starts, group_number, codes_offset, sums):
    """Σ (code − offset) · x over a group, for each row and panel. codes_offset: of the group's codes in a block."""
    code_kind = tile.block.code_kind
    offset, eights = splat_float(-float(code_kind.code_offset)), code_kind.group_size // 8
    dots = [builder.fmul(total, offset) for total in sums for _ in block_starts]
    return _add_eights(
        builder, tile, block_starts, (codes_offset, LONG(0), builder.mul(group_number, LONG(eights)), eights), dots
    )


def _dot_bytes(builder, tile, block_starts, group_number, codes_offset):
    """`_dot_floats` for bytes: integers are added, and scaled where the scale of x or of the codes changes."""
    code_kind, dots = tile.block.code_kind, [ZEROS] * (len(tile.sums) * len(block_starts))
    part_inputs = min(code_kind.group_size, ROUNDED)
    for part in range(code_kind.group_size // part_inputs):
        first_input = builder.add(builder.mul(group_number, LONG(code_kind.group_size)), LONG(part * part_inputs))
        notes_at = builder.mul(builder.sdiv(first_input, LONG(ROUNDED)), LONG(NOTES))
        half = builder.sdiv(builder.srem(first_input, LONG(ROUNDED)), LONG(SUMMED))
        int_dots, x_scales = [], []
        for notes_address in tile.sums:
            sum_indices = [builder.add(notes_at, builder.add(half, LONG(n))) for n in range(part_inputs // SUMMED)]
            half_sums = [builder.load(address_at(builder, notes_address, at, INT), align=4) for at in sum_indices]
            offset_sum = builder.mul(reduce(builder.add, half_sums), INT(-code_kind.code_offset))
            int_dots += [splat(builder, offset_sum)] * len(block_starts)
            scale_address = address_at(builder, notes_address, builder.add(notes_at, LONG(SCALE)), FLOAT)
            x_scales += [splat(builder, builder.load(scale_address, align=4))] * len(block_starts)
        eight_range = LONG(part * part_inputs // 8), builder.sdiv(first_input, LONG(8)), part_inputs // 8
        int_dots = _add_eights(builder, tile, block_starts, (codes_offset, *eight_range), int_dots)
        float_dots = [builder.sitofp(integer, FLOATS) for integer in int_dots]
        dots = [add_product(builder, *terms) for terms in zip(dots, float_dots, x_scales, strict=True)]
    return dots


def _add_eights(builder, tile, block_starts, eight_range, dots):
    """`dots` with Σ code · x over some eights of inputs. A line's codes (`PanelBlock`) are unpacked once for all rows.

    eight_range: offset of their group's codes in a block, the first one's number in group and row, their number.
    """
    codes_offset, first_eight, first_of_row, eight_count = eight_range
    code_kind, lines_of_eight = tile.block.code_kind, 2 if tile.block.code_kind.bits == 8 else 1
    upper_bits, line_count = code_kind.bits - 4, code_kind.group_size // 8
    upper_offset = builder.add(codes_offset, LONG(LINE * line_count))
    uppers = []
    if code_kind.bits in (5, 6):  # groups of 32 or of 16: one line has all upper bits of a group
        uppers = [load_vector(builder, start, upper_offset, WORDS) for start in block_starts]
        _prefetch_next(builder, tile, block_starts, [upper_offset])
    step_count, type_of_x, unpack = (2, INT, four_codes) if tile.by_bytes else (4, FLOAT, two_codes)

    def add_eight(eight, dots):
        eight_index = builder.add(first_eight, eight)
        offset = builder.add(codes_offset, builder.mul(eight_index, LONG(LINE * lines_of_eight)))
        offsets = [builder.add(offset, LONG(LINE * line)) for line in range(lines_of_eight)]
        _prefetch_next(builder, tile, block_starts, offsets)
        words = [[load_vector(builder, start, line, WORDS) for line in offsets] for start in block_starts]
        # A word has the upper bits of four of the eight codes.
        shift = builder.trunc(builder.mul(eight_index, LONG(4 * upper_bits)), ir.IntType(16))
        shifted = [builder.lshr(upper, in_all_words(builder, shift)) for upper in uppers] or [None] * len(block_starts)
        x_begin = builder.mul(builder.add(first_of_row, eight), LONG(2 if tile.by_bytes else 8))
        for step in range(step_count):
            panel_codes = [unpack(builder, code_kind, *codes, step) for codes in zip(words, shifted, strict=True)]
            input_codes = [panel_codes] if tile.by_bytes else [*zip(*panel_codes, strict=True)]
            for index, panel_vectors in enumerate(input_codes):  # bytes of x are in the order of `four_codes`, too
                at = builder.add(x_begin, LONG(step * len(input_codes) + index))
                inputs = [builder.load(address_at(builder, source, at, type_of_x), align=4) for source in tile.sources]
                terms = [(codes, splat(builder, x)) for x in inputs for codes in panel_vectors]
                add = add_byte_products if tile.by_bytes else add_product
                dots = [add(builder, dot, *term) for dot, term in zip(dots, terms, strict=True)]
        return dots

    return loop(builder, LONG(eight_count), dots, add_eight)


def _prefetch_next(builder, tile, current_block_starts, offsets):
    """Prefetch the lines at these offsets in the blocks of the next tile's panels."""
    for start, offset in product(current_block_starts, offsets):
        prefetch_line(builder, builder.gep(start, [builder.add(offset, tile.ahead)]))


def _add_tile(builder, tile):
    """Emit code for some rows of a product and the outputs of some panels of one kind.

    A sum's terms are added group by group, in the order of inputs, so it does not depend on other rows or panels.
    """

    def add_block(block_number, totals):
        block_offset = builder.mul(block_number, LONG(tile.block.size))
        block_starts = [builder.gep(panel, [block_offset]) for panel in tile.panels]
        _prefetch_next(builder, tile, block_starts, [LONG(offset) for offset in range(0, tile.block.header, LINE)])
        return loop(
            builder, LONG(tile.block.code_kind.block_groups), totals,
            lambda group, totals: _add_group(builder, tile, block_starts, block_number, group, totals),
        )  # fmt: skip

    totals = loop(builder, tile.blocks, [ZEROS] * (len(tile.rows) * len(tile.panels)), add_block)
    bias_scales = [tile.outputs[0].biases_and_scales(builder, column) for column in tile.columns]

    def put(form_index):
        for index, total in enumerate(totals):
            row, panel = divmod(index, len(tile.panels))
            tile.outputs[form_index].put(builder, total, bias_scales[panel], tile.rows[row], tile.columns[panel])

    switch_between(builder, range(len(tile.outputs)), tile.output_form, put)


def _least(builder, first, second):
    return builder.select(builder.icmp_signed("<", first, second), first, second)


@intrinsic(prefer_literal=True)
def multiply_tile(context, number, linear, x, sums, outs, tile):
    """Multiply by the smallest of `_TILES` that holds the rows. number: the number of a kind of codes, a literal.

    outs: the outputs as float32, and where sums are rounded to bfloat16, the same memory as bfloat16; else as float32.
    tile: the index in `outs` of the form that is asked for, first row, number of rows, first and last panel.
    """
    code_kind, to_bf16 = [*CODE_KINDS.values()][number.literal_value], outs.types[0] != outs.types[1]
    block = PanelBlock(code_kind)

    def make(context, builder, signature, arguments):
        linear_fields, in_bf16 = cgutils.unpack_tuple(builder, arguments[1]), ir.Constant(ir.IntType(1), to_bf16)
        panel_table, of_x, of_sums = arrays_of(
            context, builder, (linear.types[0], x, sums), (linear_fields[0], arguments[2], arguments[3])
        )
        typed_outs = [*zip(outs.types, cgutils.unpack_tuple(builder, arguments[4]), strict=True)][: 1 + to_bf16]
        outputs = [Outputs.of(context, builder, (linear, t), (arguments[1], out), in_bf16) for t, out in typed_outs]
        form_index, first_row, row_count, first_panel, last_panel = cgutils.unpack_tuple(builder, arguments[5])
        last_row = builder.sub(builder.add(first_row, row_count), LONG(1))
        block_count = builder.sdiv(linear_fields[1], LONG(code_kind.inputs))

        def address_of(panel):
            entry_address = address_at(builder, panel_table.data, builder.mul(panel, LONG(2)), LONG)
            return builder.inttoptr(builder.load(entry_address, align=8), BYTE.as_pointer())

        def add(tile_rows):
            tile_panels = _TILES[tile_rows]
            # The last row and the last panel may be computed several times.
            rows = [_least(builder, builder.add(first_row, LONG(row)), last_row) for row in range(tile_rows)]
            panels = [_least(builder, builder.add(first_panel, LONG(n)), last_panel) for n in range(tile_panels)]
            operands = _Tile(
                block=block, by_bytes=x.dtype == types.int8, blocks=block_count, rows=rows,
                panels=[address_of(panel) for panel in panels],
                columns=[builder.mul(panel, LONG(PANEL)) for panel in panels],
                sources=[row_of(builder, of_x, row) for row in rows],
                sums=[row_of(builder, of_sums, row) for row in rows],
                outputs=outputs, output_form=form_index, ahead=builder.mul(block_count, LONG(tile_panels * block.size)),
            )  # fmt: skip
            _add_tile(builder, operands)

        fit_rows = LONG(_MOST_ROWS)
        for case_rows in sorted(_TILES, reverse=True)[1:]:
            fit_rows = builder.select(builder.icmp_signed("<=", row_count, LONG(case_rows)), LONG(case_rows), fit_rows)
        switch_between(builder, _TILES, fit_rows, add)
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
        panels, inputs, *scale_arrays = cgutils.unpack_tuple(builder, arguments[1])
        array_types = (linear.types[0], *linear.types[2:], x, sums, out)
        arrays = arrays_of(context, builder, array_types, (panels, *scale_arrays, *arguments[2:5]))
        panels, scales, biases, x_at, sums_at, out_at = (builder.ptrtoint(array.data, LONG) for array in arrays)
        x_stride, out_stride = (
            builder.sdiv(cgutils.unpack_tuple(builder, array.strides)[0], LONG(array_type.dtype.bitwidth // 8))
            for array, array_type in ((arrays[3], x), (arrays[5], out))
        )
        form_index = LONG(int(out.dtype == types.uint16))
        table_values = (panels, inputs, scales, biases, x_at, x_stride, sums_at, out_at, out_stride, form_index)
        table = cgutils.alloca_once(builder, LONG, size=LAST + 1)
        for index, value in enumerate((*table_values, *cgutils.unpack_tuple(builder, arguments[5]))):
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

    x is float32, or bfloat16 where `HAS_BYTES`. in_bf16: round to bfloat16; not read: the function is compiled for it.
    """
    rows_at_once = max(_MOST_ROWS, min(_MOST_TOGETHER, _STACK // (2 * linear.inputs)))
    for row in range(0, rows, rows_at_once):
        _multiply_rows(linear, x, row, min(rows_at_once, rows - row), begin, end, out)


def _multiply_rows(linear, x, first_row, rows, begin, end, out):
    """`by_codes` for `rows` rows from row `first_row` on."""


@overload(_multiply_rows)
def _multiply_rows_of(linear, x, first_row, rows, begin, end, out):
    if x.dtype != types.uint16:
        return _multiply_floats.py_func

    def multiply_bytes(linear, x, first_row, rows, begin, end, out):
        inputs, notes_in_row = linear.inputs, NOTES * (linear.inputs // ROUNDED)
        bytes_address = _workspace(rows * inputs // 4) - first_row * inputs  # no row before has bytes here
        notes_address = _workspace(rows * notes_in_row) - 4 * first_row * notes_in_row
        for row in range(first_row, first_row + rows):
            round_row(x, row, inputs, bytes_address + row * inputs, notes_address + 4 * row * notes_in_row)
        x_bytes = array_of(bytes_address, (first_row + rows, inputs), _INT8S)
        notes = array_of(notes_address, (first_row + rows, notes_in_row), linear.scales)
        _multiply_panels(linear, x_bytes, notes, first_row, rows, begin, end, out)

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
    panel_table = linear.weights
    panel = begin // PANEL
    while panel < end // PANEL:
        function_address, panel_end = panel_table[2 * panel + 1], panel + 1
        while panel_end < end // PANEL and panel_table[2 * panel_end + 1] == function_address:
            panel_end += 1
        _call_function(function_address, linear, x, sums, out, (first_row, rows, panel, panel_end))
        panel = panel_end
