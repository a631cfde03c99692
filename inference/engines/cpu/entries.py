# mypy: allow-untyped-defs
"""Compiled passes as C functions, for a team of threads that is not Python's.

A function is called with the address of a table of addresses and numbers, int64. The constants below are its indices.
Types of stored numbers: uint16 is a bfloat16; uint32 and uint64 are two and four of them; int64 are addresses of codes.
"""

import zlib
from functools import partial
from pathlib import Path

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from outrider.base.compiled import compile_entry
from outrider.inference.engines.cpu import by_codes as codes
from outrider.inference.engines.cpu.attention import NEAR
from outrider.inference.engines.cpu.by_amx import STEP
from outrider.inference.engines.cpu.elementwise import norm_row
from outrider.inference.engines.cpu.likeliest import first_largest, likeliest_children
from outrider.inference.engines.cpu.numbers import FAST, array_at, kernel, put, wide
from outrider.inference.engines.cpu.passes import (
    Layers,
    LayerShape,
    PassRows,
    Workspace,
    part,
    product,
    run,
    stored_numbers,
)
from outrider.inference.engines.cpu.vectors import LANES, PARTS, Linear

NumberType = type  # a numpy type that compiled code supports
# numba caches compiled functions on disk by their own file and their closures. These close over all files here.
_FILES_CRC = zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
_inlined = njit(inline="always")  # a function that returns an array it makes cannot be a `kernel`
_entry = partial(compile_entry, signature="void(int64)", fastmath=FAST)


@intrinsic
def _call(context, address):
    """The return value of the C function int f(void) at an address."""

    def make(context, builder, signature, arguments):
        function_type = ir.FunctionType(ir.IntType(32), []).as_pointer()
        return builder.sext(builder.call(builder.inttoptr(arguments[0], function_type), []), ir.IntType(64))

    return types.int64(types.int64), make


# Indices of a table. THREAD, THREADS: functions that return a thread's number and the number of threads, 0 for a single
# thread; ARRIVED: the counter of `wait`, in the table itself; MOST: threads for which WORK has memory.
THREAD, THREADS, ARRIVED, WEIGHTS, SCALES, BIASES, WORK, ROWS, INPUTS, OUTPUTS, X, OUT = range(12)
NORMS, HEAD_NORMS, EPS, LAYERS, HEADS, KEY_HEADS, WIDTH, INNER, COS, SIN, TEXTS = range(12, 23)
COUNT, POSITIONS, PAST, START, STOP, MOST, VALUES = range(23, 30)
TABLE = 30
_PACK_SIZES: dict[NumberType, int] = {np.uint32: 2, np.uint64: 4, np.int64: 0}  # weights in a stored number; 0: codes


def parts_of(weight_type: NumberType, dtype: NumberType) -> int:
    """The number of bfloat16s whose sum is an operand of products: more than one if AMX multiplies float32s."""
    return PARTS if weight_type is np.uint64 and dtype is np.float32 else 1


@_inlined
def _table(address, sources):
    """The table at an address. sources: `_FILES_CRC`, closed over by the caller."""
    return carray(array_at(address, np.int64), TABLE)


@kernel
def _team(table):
    """(this thread's number, the number of threads)."""
    if table[THREADS] == 0:
        return np.int64(0), np.int64(1)
    return _call(table[THREAD]), _call(table[THREADS])


@_inlined
def _floats(address, rows, columns):
    return carray(array_at(address, np.float32), (rows, columns))


@kernel
def workspace_sizes(shape, rows, threads, positions, parts):
    """The size in floats of each field of `Workspace` except the last. parts: see `parts_of`."""
    return (
        rows * (shape.heads + 2 * shape.key_heads) * shape.width,
        parts * rows * shape.heads * shape.width,
        rows * max(shape.hidden, 2 * shape.inner),
        parts * rows * shape.inner,
        threads * parts * rows * shape.hidden,
        rows * shape.heads * -(-positions // STEP) * STEP,
        rows * shape.heads * shape.width,
        threads * NEAR * shape.width,
        rows * shape.hidden,
    )


@_inlined
def _workspace_of(table, shape, x_type, parts):
    """The workspace of a table; see `workspace_sizes`. x_type: the type of operands of products."""
    address, rows, max_threads, positions = table[WORK], table[ROWS], table[MOST], table[POSITIONS]
    sizes = workspace_sizes(shape, rows, max_threads, positions, parts)
    qkv_heads = _floats(address, rows, sizes[0] // rows)
    address += 4 * sizes[0]
    mixed = carray(array_at(address, x_type), (parts * rows, shape.heads * shape.width))
    address += 4 * sizes[1]
    joined = _floats(address, rows, sizes[2] // rows)
    address += 4 * sizes[2]
    inner = carray(array_at(address, x_type), (parts * rows, shape.inner))
    address += 4 * sizes[3]
    normed = carray(array_at(address, x_type), (max_threads, parts * rows, shape.hidden))
    address += 4 * sizes[4]
    scores = _floats(address, rows * shape.heads, -(-positions // STEP) * STEP)
    address += 4 * sizes[5]
    sums = _floats(address, rows, shape.heads * shape.width)
    address += 4 * sizes[6]
    near = carray(array_at(address, np.float32), (max_threads, NEAR, shape.width))
    address += 4 * sizes[7]
    hidden = _floats(address, rows, shape.hidden)
    rank, threads = _team(table)
    arrived = table[ARRIVED : ARRIVED + 1]
    return Workspace(rank, threads, qkv_heads, mixed, joined, inner, normed, scores, sums, near, hidden, arrived)


@_inlined
def _linear_at(table, weight_type, in_number):
    """The layer of a table. weight_type: the type of its weights; in_number: see `_PACK_SIZES`."""
    inputs, outputs = table[INPUTS], table[OUTPUTS]
    weights = carray(array_at(table[WEIGHTS], weight_type), stored_numbers(outputs, inputs, in_number))
    return Linear(weights, inputs, _floats(table[SCALES], 1, outputs)[0], _floats(table[BIASES], 1, outputs)[0])


def product_entry(weight_type: NumberType, x_type: NumberType, dtype: NumberType, files_crc: int = _FILES_CRC) -> CFunc:
    """`product` over a whole layer as a C function void f(int64 *table).

    weight_type, x_type, dtype: the types of weights, operands and outputs. A store to `out` rounds to its type, so
    `in_bf16` of `product` is False.
    """
    pack_size, part_count = _PACK_SIZES.get(weight_type, 1), parts_of(weight_type, dtype)

    @_entry
    def entry(address):
        table = _table(address, files_crc)
        rows, inputs, outputs = table[ROWS], table[INPUTS], table[OUTPUTS]
        begin, end = part(outputs, *_team(table))
        x, out = carray(array_at(table[X], x_type), (part_count * rows, inputs)), array_at(table[OUT], dtype)
        product(_linear_at(table, weight_type, pack_size), x, rows, begin, end, False, carray(out, (rows, outputs)))

    return entry


def codes_entry(kind_number: int, x_type: NumberType, out_type: NumberType, files_crc: int = _FILES_CRC) -> CFunc:
    """The function of `by_codes` for the kind of codes with this number, void f(int64 *table) with that module's table.

    It is compiled by itself, as all that multiply by codes share it.
    """
    inputs_per_sum = codes.ROUNDED // codes.NOTES if x_type is np.int8 else codes.SUMMED  # of `sums`

    @_entry
    def entry(address):
        table = _table(address, files_crc)
        inputs, rows, first_panel, last = table[codes.INPUTS], table[codes.ROWS], table[codes.FIRST], table[codes.LAST]
        first_row, end, outputs = table[codes.FIRST_ROW], table[codes.FIRST_ROW] + rows, codes.PANEL * last
        linear = Linear(
            carray(array_at(table[codes.PANELS], np.int64), 2 * last), inputs,
            _floats(table[codes.SCALES], 1, outputs)[0], _floats(table[codes.BIASES], 1, outputs)[0],
        )  # fmt: skip
        x = carray(array_at(table[codes.X], x_type), (end, table[codes.X_APART]))
        sums = _floats(table[codes.SUMS], end, inputs // inputs_per_sum)
        out = _floats(table[codes.OUT], end, table[codes.OUT_APART])
        outs = (out, carray(array_at(table[codes.OUT], out_type), out.shape))
        tile_rows, panels = codes.tile_sizes(rows)
        for panel in range(first_panel, last, panels):
            for row in range(first_row, end, tile_rows):
                tile = (table[codes.OUTPUT_FORM], row, min(tile_rows, end - row), panel, min(last, panel + panels) - 1)
                codes.multiply_tile(kind_number, linear, x, sums, outs, tile)

    return entry


def maxima_entry(dtype: NumberType, files_crc: int = _FILES_CRC) -> CFunc:
    """`first_largest` of rows as a C function void f(int64 *table), for numbers of this type.

    It writes columns, int64, to OUT, and the numbers there to VALUES, if given. Without VALUES a column is −1 if its
    number is not finite. WORK has 8 · LANES bytes.
    """

    @_entry
    def entry(address):
        table = _table(address, files_crc)
        rows, column_count = table[ROWS], table[INPUTS]
        numbers = carray(array_at(table[X], dtype), (rows, column_count))
        columns, values = carray(array_at(table[OUT], np.int64), rows), carray(array_at(table[VALUES], dtype), rows)
        has_values = table[VALUES] != 0
        lane_maxima = carray(array_at(table[WORK], np.float32), LANES)
        lane_blocks = carray(array_at(table[WORK] + 4 * LANES, np.int32), LANES)
        for row in range(rows):
            columns[row] = first_largest(numbers[row], lane_maxima, lane_blocks)
            if has_values:
                values[row] = numbers[row, columns[row]]
            elif not abs(wide(numbers[row, columns[row]])) < np.float32(np.inf):
                columns[row] = -1

    return entry


def children_entry(dtype: NumberType, files_crc: int = _FILES_CRC) -> CFunc:
    """`likeliest_children` as a C function void f(int64 *table), for logits of this type.

    WEIGHTS: of rows; EPS: the sharpness; OUTPUTS: results. Values float32 to VALUES, rows, then columns int64 to OUT.
    """

    @_entry
    def entry(address):
        table = _table(address, files_crc)
        rows, vocab_size, child_count = table[ROWS], table[INPUTS], table[OUTPUTS]
        indices = carray(array_at(table[OUT], np.int64), (2, child_count))
        likeliest_children(
            carray(array_at(table[X], dtype), (rows, vocab_size)), _floats(table[WEIGHTS], 1, rows)[0],
            _floats(table[EPS], 1, 1)[0, 0], _floats(table[WORK], 1, vocab_size // LANES)[0],
            _floats(table[VALUES], 1, child_count)[0], indices[0], indices[1],
        )  # fmt: skip

    return entry


def head_entry(weight_type: NumberType, x_type: NumberType, dtype: NumberType, files_crc: int = _FILES_CRC) -> CFunc:
    """`product` over a whole layer of a norm's output, as of a model's last norm and head; void f(int64 *table).

    weight_type, x_type, dtype: as in `product_entry`; the norm's input and its weight NORMS are also of type `dtype`.
    WORK, float32: epsilon, which is given; then, for each thread, [2 · INPUTS] for the weight and a row, followed by
    the operand of products, `part_count` · ROWS · INPUTS.
    """
    pack_size, part_count, in_bf16 = _PACK_SIZES.get(weight_type, 1), parts_of(weight_type, dtype), dtype is np.uint16

    @_entry
    def entry(address):
        table = _table(address, files_crc)
        rank, threads = _team(table)
        rows, inputs, outputs = table[ROWS], table[INPUTS], table[OUTPUTS]
        x, weight = carray(array_at(table[X], dtype), (rows, inputs)), carray(array_at(table[NORMS], dtype), inputs)
        work_address = table[WORK] + 4 * (1 + rank * (2 + part_count * rows) * inputs)
        eps, work = _floats(table[WORK], 1, 1)[0, 0], _floats(work_address, 2, inputs)
        normed = carray(array_at(work_address + 8 * inputs, x_type), (part_count * rows, inputs))
        for i in range(inputs):
            work[0, i] = wide(weight[i])
        for row in range(rows):
            for i in range(inputs):
                work[1, i] = wide(x[row, i])
            norm_row(work, 1, row, work[0], eps, in_bf16, normed)
        linear = _linear_at(table, weight_type, pack_size)
        begin, end = part(outputs, rank, threads)
        product(linear, normed, rows, begin, end, False, carray(array_at(table[OUT], dtype), (rows, outputs)))

    return entry


def mask_entry(dtype: NumberType, files_crc: int = _FILES_CRC) -> CFunc:
    """A C function void f(int64 *table) that writes an additive mask [ROWS, PAST + OUTPUTS] of this type to OUT.

    Row i sees the first PAST columns, and later column PAST + j if bit j of X[i], int64, is set.
    """
    zero = dtype(0)
    lowest = dtype(0xFF7F) if dtype is np.uint16 else np.finfo(np.float32).min  # of bfloat16

    @_entry
    def entry(address):
        table = _table(address, files_crc)
        rows, past_columns, columns = table[ROWS], table[PAST], table[OUTPUTS]
        ancestor_bits = carray(array_at(table[X], np.int64), rows)
        out = carray(array_at(table[OUT], dtype), (rows, past_columns + columns))
        for row in range(rows):
            for column in range(past_columns):
                out[row, column] = zero
            for column in range(columns):
                is_hidden = (ancestor_bits[row] >> column) & 1 == 0
                out[row, past_columns + column] = lowest if is_hidden else zero

    return entry


def layers_entry(weight_type: NumberType, x_type: NumberType, dtype: NumberType, files_crc: int = _FILES_CRC) -> CFunc:
    """`run` as a C function void f(int64 *table).

    weight_type, x_type, dtype: the types of weights, operands and caches, and of hidden states. TEXTS: its texts, COUNT
    in number. POSITIONS: the most positions that a row sees.
    """
    pack_size, part_count, in_bf16 = _PACK_SIZES.get(weight_type, 1), parts_of(weight_type, dtype), dtype is np.uint16

    @_entry
    def entry(address):
        table = _table(address, files_crc)
        dim, heads, key_heads, width = table[INPUTS], table[HEADS], table[KEY_HEADS], table[WIDTH]
        inner, layer_count, rows = table[INNER], table[LAYERS], table[ROWS]
        shape, qkv_size = LayerShape(dim, heads, key_heads, width, inner), (heads + 2 * key_heads) * width
        layer_outputs = qkv_size + 2 * dim + 2 * inner
        layer_numbers = stored_numbers(qkv_size, dim, pack_size) + stored_numbers(dim, heads * width, pack_size)
        layer_numbers += stored_numbers(2 * inner, dim, pack_size) + stored_numbers(dim, inner, pack_size)
        layers = Layers(
            carray(array_at(table[WEIGHTS], weight_type), (layer_count, layer_numbers)),
            _floats(table[SCALES], layer_count, layer_outputs),
            _floats(table[BIASES], layer_count, layer_outputs),
            carray(array_at(table[NORMS], np.float32), (layer_count, 2, dim)),
            carray(array_at(table[HEAD_NORMS], np.float32), (layer_count, heads + key_heads, width)),
        )
        work = _workspace_of(table, shape, x_type, part_count)
        cos, sin = array_at(table[COS], dtype), array_at(table[SIN], dtype)
        texts = carray(array_at(table[TEXTS], np.int64), (table[COUNT], 7))  # see `passes.BEGIN`
        pass_rows = PassRows(carray(cos, (rows, width)), carray(sin, (rows, width)), texts)
        x, out = carray(array_at(table[X], dtype), (rows, dim)), carray(array_at(table[OUT], dtype), (rows, dim))
        # Every thread writes the same values, and changes them only after all threads have arrived once.
        for row in range(rows):
            for i in range(dim):
                work.hidden[row, i] = wide(x[row, i])
        run(shape, layers, table[START], table[STOP], pass_rows, _floats(table[EPS], 1, 3)[0], work)
        begin, end = part(dim, work.rank, work.threads)
        for row in range(rows):
            for i in range(begin, end):
                put(out[row], i, work.hidden[row, i], in_bf16)

    return entry
