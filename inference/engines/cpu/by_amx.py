# mypy: allow-untyped-defs
"""Products by AMX, Intel's matrix registers: 16 rows by 16 outputs over 32 inputs in one instruction.

A panel of pairs of bfloat16s is stored as that instruction reads it. It multiplies 16 rows in about the time of one
row, and faster than memory delivers the weights, so a pass of few rows takes as long as a pass of one.
A float32 is the sum of three bfloat16s, its parts. So in float32 three times as many rows are multiplied, and the
results are as exact as those of floats. A `kernel` is compiled by numba; an `intrinsic` emits LLVM code by its
`builder`. A panel has the weights of `PANEL` outputs. A tile is some rows and some panels; a turn is one of the passes
over the same panels for more rows than a register has.
"""

import ctypes
import platform
import sys
from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from outrider.inference.engines.cpu.numbers import kernel
from outrider.inference.engines.cpu.vectors import (
    BYTE,
    FEATURES,
    FLOAT,
    LANES,
    LONG,
    PANEL,
    PARTS,
    Outputs,
    Tile,
    arrays_of,
    distances_ahead,
    load_floats,
    loop,
    prefetch_line,
    row_of,
    switch_between,
)

BLOCK = 16  # rows of a register
STEP = 32  # inputs of a register: bfloat16s in a row of 64 bytes
LINE = 64  # bytes of a row of a register, and of a cache line
REGISTER = BLOCK * LINE
_REGISTERS = 8
_MOST = 4  # most panels read at once: registers hold their sums and `x` (the rows), and the others weights
_SUMS = PARTS * REGISTER  # bytes of the sums of a panel
_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64
_SHORT = ir.IntType(16)
_POINTER = types.CPointer(types.float32)


@cache
def has_amx() -> bool:
    """Whether the processor has AMX for bfloat16s and this process may use it, which it must request from Linux."""
    if not (FEATURES.get("amx-tile") and FEATURES.get("amx-bf16") and FEATURES.get("avx512f")):
        return False
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    syscall_args = (ctypes.c_long(number) for number in (_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA))
    return bool(ctypes.CDLL(None).syscall(*syscall_args) == 0)


def call_amx(builder, name, *operands):
    """Call one of LLVM's functions for AMX. Registers are 8-bit constants at compile time."""
    kinds = [BYTE if isinstance(operand, int) else operand.type for operand in operands]
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), kinds), f"llvm.x86.{name}")
    builder.call(function, [BYTE(operand) if isinstance(operand, int) else operand for operand in operands])


def _lines(builder, size):
    """Bytes on the stack, aligned to a cache line."""
    with builder.goto_entry_block():  # numba's own function stores a 0 in each byte, which takes LLVM 15 s
        work = builder.alloca(ir.ArrayType(BYTE, size))
    work.align = LINE
    return builder.bitcast(work, BYTE.as_pointer())


@intrinsic
def _work_of_sums(context):
    """A workspace for the sums of a block, [panels, PARTS, rows, PANEL]."""

    def make(context, builder, signature, arguments):
        return builder.bitcast(_lines(builder, _MOST * _SUMS), FLOAT.as_pointer())

    return _POINTER(), make


@intrinsic
def set_up(context, rows, panels):
    """Configure registers 0 … `panels` for `rows` rows, and the others, of weights, for 16; see `_add_block`."""

    def make(context, builder, signature, arguments):
        block_rows, panel_count = arguments
        # Intel's format: byte 0: 1; from byte 16 on: bytes in a row of each register; from byte 48 on: their rows.
        tile_config = _lines(builder, LINE)
        cgutils.memset(builder, tile_config, LONG(LINE), 0)
        builder.store(BYTE(1), tile_config)
        for register in range(_REGISTERS):
            width_address = builder.bitcast(builder.gep(tile_config, [LONG(16 + 2 * register)]), _SHORT.as_pointer())
            builder.store(_SHORT(LINE), width_address)
            is_weight = builder.icmp_signed(">", LONG(register), panel_count)  # they have all 16 rows
            row_count = builder.select(is_weight, LONG(BLOCK), block_rows)
            builder.store(builder.trunc(row_count, BYTE), builder.gep(tile_config, [LONG(48 + register)]))
        call_amx(builder, "ldtilecfg", tile_config)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 2), make


@intrinsic
def set_down(context):
    """Release the registers, so that context switches do not save them."""

    def make(context, builder, signature, arguments):
        call_amx(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), make


def _add_block(builder, weights, source, line, step_count, tile, work, panel_count):
    """Emit code for the sums of a block of rows, whose first begins at `source` and each next one `line` bytes later.

    Registers are, in order, sums of each panel, `x`, and weights. A sum's terms are added in the order of inputs, and
    those of one step in the processor's order. So a sum does not depend on other rows or other panels.
    """
    weight_registers = range(panel_count + 1, _REGISTERS)
    panel_bytes = builder.mul(step_count, LONG(REGISTER))
    first_panel = builder.gep(weights, [builder.mul(builder.sdiv(tile.panel, LONG(LANES)), panel_bytes)])
    panel_starts = [builder.gep(first_panel, [builder.mul(panel_bytes, LONG(index))]) for index in range(panel_count)]
    prefetch_distances = distances_ahead(builder, panel_bytes, panel_count, tile.turn, tile.turns)
    for index in range(panel_count):
        call_amx(builder, "tilezero", index)

    def multiply(k, nothing):
        call_amx(builder, "tileloadd64", panel_count, builder.gep(source, [builder.mul(k, LONG(LINE))]), line)
        at = builder.mul(k, LONG(REGISTER))
        for index, (start, distance) in enumerate(zip(panel_starts, prefetch_distances, strict=True)):
            weights_at, register = builder.gep(start, [at]), weight_registers[index % len(weight_registers)]
            # If another turn prefetches this line, prefetch cached data instead, which is cheaper than loading a line.
            fetches = builder.icmp_signed("!=", distance, LONG(0))
            address = builder.select(fetches, builder.gep(weights_at, [distance]), source)
            for offset in range(0, REGISTER, LINE):
                prefetch_line(builder, builder.gep(address, [LONG(offset)]))
            call_amx(builder, "tileloadd64", register, weights_at, LONG(LINE))
            call_amx(builder, "tdpbf16ps", index, panel_count, register)
        return nothing

    loop(builder, step_count, [], multiply)
    for index in range(panel_count):
        call_amx(builder, "tilestored64", index, builder.gep(work, [LONG(index * _SUMS)]), LONG(LINE))


@intrinsic
def _multiply_block(context, weights, x, depth, tile, work, at):
    """The sums of a block of x's rows for a tile's panels, into `work` from row `at` on."""

    def make(context, builder, signature, arguments):
        of_weights, of_x = arrays_of(context, builder, (weights, x), arguments[:2])
        step_count, tile, work, work_row = arguments[2:]
        tile = Tile(*cgutils.unpack_tuple(builder, tile))
        weight_address = builder.bitcast(of_weights.data, BYTE.as_pointer())
        x_address, row_stride = row_of(builder, of_x, tile.row), cgutils.unpack_tuple(builder, of_x.strides, 2)[0]
        sums_address = builder.gep(builder.bitcast(work, BYTE.as_pointer()), [builder.mul(work_row, LONG(LINE))])

        def add(panel_count):
            _add_block(builder, weight_address, x_address, row_stride, step_count, tile, sums_address, panel_count)

        switch_between(builder, (1, _MOST), tile.panels, add)
        return context.get_dummy_value()

    return types.void(weights, x, depth, tile, _POINTER, types.int64), make


@intrinsic
def _put_sums(context, linear, out, work, row, rows, panel, apart, in_bf16):
    """Write a panel's outputs for rows from `row` on, from the sums of parts, `apart` rows apart; 0: x has one part."""

    def make(context, builder, signature, arguments):
        outputs = Outputs.of(context, builder, (linear, out), arguments[:2], arguments[-1])
        work, row, rows, panel, part_stride = arguments[2:-1]
        bias_and_scale = outputs.biases_and_scales(builder, panel)
        has_parts = builder.icmp_signed(">", part_stride, LONG(0))

        def sums_of(row, part_index):
            index = builder.add(row, builder.mul(part_stride, LONG(part_index)))
            return load_floats(builder, work, builder.mul(index, LONG(LANES)), types.float32)

        def put(block_row, nothing):
            total = sums_of(block_row, 0)
            remainder = builder.fadd(sums_of(block_row, 1), sums_of(block_row, 2))
            total = builder.select(has_parts, builder.fadd(total, remainder), total)
            outputs.put(builder, total, bias_and_scale, builder.add(row, block_row), panel)
            return nothing

        loop(builder, rows, [], put)
        return context.get_dummy_value()

    return types.void(linear, out, _POINTER, *[types.int64] * 4, types.boolean), make


@intrinsic
def _sums_of_panel(context, work, index):
    """The address of a panel's sums in `work`."""

    def make(context, builder, signature, arguments):
        return builder.gep(arguments[0], [builder.mul(arguments[1], LONG(_SUMS // 4))])

    return _POINTER(_POINTER, types.int64), make


@kernel
def by_amx(linear, x, rows, begin, end, in_bf16, out):
    """`passes.product` for uint64 weights (four bfloat16s): outputs begin … end − 1 of rows of x, to `out`."""
    part_count = x.shape[0] // rows
    turn_count = -(-rows // BLOCK)
    parts_per_block = part_count if part_count * rows <= BLOCK else 1  # parts of the same rows in one block
    blocks, step_count = part_count // parts_per_block, linear.inputs // STEP
    panel_count = min(_MOST, (end - begin) // PANEL)
    panel_count = _MOST if panel_count == _MOST else 1
    work = _work_of_sums()
    for panel_begin in range(begin, end, panel_count * PANEL):
        panel = min(panel_begin, end - panel_count * PANEL)  # the last panels may be computed twice
        row = 0
        for turn in range(turn_count):
            count = (rows - row + turn_count - turn - 1) // (turn_count - turn)  # nearly as many in each turn
            if turn_count > 1 or panel_begin == begin:
                set_up(parts_per_block * count, panel_count)
            for block in range(blocks):
                tile = Tile(block * rows + row, count, panel, panel_count, turn * blocks + block, turn_count * blocks)
                _multiply_block(linear.weights, x, step_count, tile, work, block * BLOCK)
            stride = 0 if part_count == 1 else count if parts_per_block > 1 else BLOCK  # from part to part
            for index in range(panel_count):
                _put_sums(linear, out, _sums_of_panel(work, index), row, count, panel + index * PANEL, stride, in_bf16)
            row += count
    set_down()
