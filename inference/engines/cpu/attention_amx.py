# mypy: allow-untyped-defs
"""Attention over bfloat16s by AMX, Intel's matrix registers, for 16 queries (`BLOCK`) of a key head at once.

A register has 16 lines of 32 bfloat16s (`STEP`), 64 bytes (`LINE`) each. Keys are read as they are stored: a register
of 16 positions, times queries, gives scores with positions in rows. These are transposed for the softmax. A float32
weight becomes two bfloat16s, whose sum it is: the nearest one and the remainder. 32 weights of each query fill one
register, their remainders another. Values are interleaved by pairs of positions, as a right operand is read. A `kernel`
is compiled by numba, an `intrinsic` emits LLVM code by its `builder`. The body of a `loop` gets the loop's values, and
returns new ones: here an empty list, `nothing` or `empty`.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from outrider.inference.engines.cpu.attention import seen_by, softmax
from outrider.inference.engines.cpu.by_amx import BLOCK, LINE, REGISTER, STEP, call_amx, set_down, set_up
from outrider.inference.engines.cpu.elementwise import put_columns
from outrider.inference.engines.cpu.numbers import kernel
from outrider.inference.engines.cpu.vectors import (
    BYTE,
    FLOAT,
    INT,
    INTS,
    LANES,
    LONG,
    address_at,
    arrays_of,
    load_floats,
    loop,
    nearest_bfloat16,
    rounded,
    row_of,
)

# Registers. The first four have as many rows as there are queries.
_SUM_REGS, _WEIGHT_REGS, _RIGHT_REGS, _SCORE_REG, _KEY_REG = (0, 1), (2, 3), (4, 5), 6, 7
_LAST_QUERY_REG = 3  # the last of those four
_TRUE_BIT = ir.Constant(ir.IntType(1), 1)
_SHORT = ir.IntType(16)
_SHORTS = ir.VectorType(_SHORT, LANES)


def _bytes_of(builder, array):
    """The address of an array's numbers as one of bytes."""
    return builder.bitcast(array.data, BYTE.as_pointer())


def _line_of(builder, array):
    """The row stride of a two-dimensional array in bytes."""
    return cgutils.unpack_tuple(builder, array.strides, 2)[0]


def _transposed(builder, vectors):
    """Sixteen vectors of ints: lane j of vector i becomes lane i of vector j."""
    distance = 1
    while distance < LANES:
        for i in range(LANES):
            if i & distance:
                continue
            first, second = vectors[i], vectors[i + distance]
            lower_lanes = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
            upper_lanes = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
            vectors[i], vectors[i + distance] = (
                builder.shuffle_vector(first, second, ir.Constant(INTS, mask)) for mask in (lower_lanes, upper_lanes)
            )
        distance *= 2
    return vectors


def _shorts(builder, values):
    """Floats as bfloat16s."""
    return builder.trunc(builder.lshr(nearest_bfloat16(builder, values), ir.Constant(INTS, [16] * LANES)), _SHORTS)


def _vector_at(builder, address, vector_type):
    """An address as one of a vector."""
    return builder.bitcast(address, vector_type.as_pointer())


@intrinsic
def _place_queries(context, block, count, packed):
    """Pack queries float32 block[:count] [16, D], rounded, as a right operand: pairs of one query in a column."""

    def make(context, builder, signature, arguments):
        of_block, of_packed = arrays_of(context, builder, (block, packed), (arguments[0], arguments[2]))
        last_query = builder.sub(arguments[1], LONG(1))
        width = cgutils.unpack_tuple(builder, of_block.shape, 2)[1]

        def pack(step, nothing):
            query_rows = []
            for number in range(BLOCK):
                query = builder.select(builder.icmp_signed("<", LONG(number), last_query), LONG(number), last_query)
                query_row, at = row_of(builder, of_block, query), builder.mul(step, LONG(STEP))
                halves = [
                    _shorts(builder, load_floats(builder, query_row, builder.add(at, LONG(half)), types.float32))
                    for half in (0, LANES)
                ]
                joined = builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(INT, STEP), list(range(STEP))))
                query_rows.append(builder.bitcast(joined, INTS))
            address = builder.gep(_bytes_of(builder, of_packed), [builder.mul(step, LONG(REGISTER))])
            for number, row in enumerate(_transposed(builder, query_rows)):
                builder.store(row, _vector_at(builder, builder.gep(address, [LONG(number * LINE)]), INTS), align=4)
            return nothing

        loop(builder, builder.sdiv(width, LONG(STEP)), [], pack)
        return context.get_dummy_value()

    return types.void(block, types.int64, packed), make


def _copy_tail(builder, keys, position, key_count, width, tail_keys):
    """Copy 16 keys from a position on to contiguous memory; positions after the last key get the last one."""
    last_key = builder.sub(key_count, LONG(1))

    def copy(block, nothing):
        at = builder.mul(block, LONG(LANES))
        for number in range(BLOCK):
            key_index = builder.add(position, LONG(number))
            key_index = builder.select(builder.icmp_signed("<", key_index, last_key), key_index, last_key)
            source = address_at(builder, row_of(builder, keys, key_index), at, _SHORT)
            destination = address_at(builder, tail_keys, builder.add(builder.mul(width, LONG(number)), at), _SHORT)
            vector = builder.load(_vector_at(builder, source, _SHORTS), align=2)
            builder.store(vector, _vector_at(builder, destination, _SHORTS), align=2)
        return nothing

    loop(builder, builder.sdiv(width, LONG(LANES)), [], copy)


@intrinsic
def _score_keys(context, keys, position, packed, work, tail, scores, line, count):
    """scores[line + i, position + j] = query i · keys[position + j], i < count ≤ 16, j < 16.

    work: a workspace of 16 · 16 floats; tail: one of 16 keys, used if fewer are left.
    """

    def make(context, builder, signature, arguments):
        array_types, arrays = (keys, packed, work, tail, scores), (arguments[0], *arguments[2:6])
        of_keys, of_packed, of_work, of_tail, of_scores = arrays_of(context, builder, array_types, arrays)
        position, line, count = arguments[1], arguments[6], arguments[7]
        key_count, width = cgutils.unpack_tuple(builder, of_keys.shape, 2)
        packed_queries, tail_keys = _bytes_of(builder, of_packed), _bytes_of(builder, of_tail)
        is_complete = builder.icmp_signed("<=", builder.add(position, LONG(BLOCK)), key_count)
        with builder.if_then(builder.not_(is_complete)):
            _copy_tail(builder, of_keys, position, key_count, width, tail_keys)
        key_address = builder.select(is_complete, row_of(builder, of_keys, position), tail_keys)
        row_stride = builder.select(is_complete, _line_of(builder, of_keys), builder.mul(width, LONG(2)))
        call_amx(builder, "tilezero", _SCORE_REG)

        def multiply(step, nothing):
            address = builder.gep(key_address, [builder.mul(step, LONG(LINE))])
            call_amx(builder, "tileloadd64", _KEY_REG, address, row_stride)
            address = builder.gep(packed_queries, [builder.mul(step, LONG(REGISTER))])
            call_amx(builder, "tileloadd64", _RIGHT_REGS[0], address, LONG(LINE))
            call_amx(builder, "tdpbf16ps", _SCORE_REG, _KEY_REG, _RIGHT_REGS[0])
            return nothing

        loop(builder, builder.sdiv(width, LONG(STEP)), [], multiply)
        scratch = _bytes_of(builder, of_work)
        call_amx(builder, "tilestored64", _SCORE_REG, scratch, LONG(LINE))
        rows = [
            builder.load(_vector_at(builder, builder.gep(scratch, [LONG(number * LINE)]), INTS), align=4)
            for number in range(BLOCK)
        ]
        for number, row in enumerate(_transposed(builder, rows)):
            into = address_at(builder, row_of(builder, of_scores, builder.add(line, LONG(number))), position, INT)
            is_query = builder.icmp_signed("<", LONG(number), count)
            into = builder.select(is_query, builder.bitcast(into, BYTE.as_pointer()), scratch)  # else to the workspace
            builder.store(row, _vector_at(builder, into, INTS), align=4)
        return context.get_dummy_value()

    index = types.int64
    return types.void(keys, index, packed, work, tail, scores, index, index), make


@intrinsic
def _split_weights(context, scores, line, steps):
    """Replace every 32 floats of a line by the 32 nearest bfloat16s and 32 bfloat16s of the remainders."""

    def make(context, builder, signature, arguments):
        (of_scores,) = arrays_of(context, builder, (scores,), arguments[:1])
        start = row_of(builder, of_scores, arguments[1])

        def split(step, nothing):
            at = builder.mul(step, LONG(STEP))
            values = [load_floats(builder, start, builder.add(at, LONG(half)), types.float32) for half in (0, LANES)]
            remainders = [builder.fsub(value, rounded(builder, value, _TRUE_BIT)) for value in values]
            for number, value in enumerate((*values, *remainders)):
                address = builder.gep(start, [builder.add(builder.mul(at, LONG(4)), LONG(number * LINE // 2))])
                builder.store(_shorts(builder, value), _vector_at(builder, address, _SHORTS), align=2)
            return nothing

        loop(builder, arguments[2], [], split)
        return context.get_dummy_value()

    return types.void(scores, types.int64, types.int64), make


@intrinsic
def _weigh_values(context, scores, line, values, seen, nothing, work, block, column):
    """block[i, column:][:32] = Σ_j weight j of a split line i of scores · values[j, column:][:32], j < seen.

    nothing: 32 bfloat16 zeros, not a loop's values; work: a workspace of 32 · 32 bfloat16s.
    """

    def make(context, builder, signature, arguments):
        array_types = (scores, values, nothing, work, block)
        arrays = (arguments[0], arguments[2], *arguments[4:7])
        of_scores, of_values, of_zeros, of_work, of_block = arrays_of(context, builder, array_types, arrays)
        key_count, column = arguments[3], arguments[7]
        row_start = row_of(builder, of_scores, arguments[1])
        packed, zeros = _bytes_of(builder, of_work), _bytes_of(builder, of_zeros)
        lane_order = [lane // 2 + LANES * (lane % 2) for lane in range(STEP)]
        interleave = ir.Constant(ir.VectorType(INT, STEP), lane_order)
        for register in _SUM_REGS:
            call_amx(builder, "tilezero", register)

        def place_pair(pair, step):
            position = builder.add(builder.mul(step, LONG(STEP)), builder.mul(pair, LONG(2)))
            sources = []
            for offset in (0, 1):
                value_row = builder.add(position, LONG(offset))
                source = address_at(builder, row_of(builder, of_values, value_row), column, _SHORT)
                source = builder.bitcast(source, BYTE.as_pointer())
                sources.append(builder.select(builder.icmp_signed("<", value_row, key_count), source, zeros))
            for number in range(len(_SUM_REGS)):
                vectors = [
                    builder.load(_vector_at(builder, builder.gep(source, [LONG(number * LINE // 2)]), _SHORTS), align=2)
                    for source in sources
                ]
                offset = builder.add(builder.mul(pair, LONG(LINE)), LONG(number * REGISTER))
                joined = builder.shuffle_vector(*vectors, interleave)
                builder.store(joined, _vector_at(builder, builder.gep(packed, [offset]), joined.type), align=2)
            return ()

        def multiply(step, empty):
            loop(builder, LONG(STEP // 2), [], lambda pair, _: place_pair(pair, step))
            weight_offset = builder.mul(step, LONG(2 * LINE))
            for number, register in enumerate(_WEIGHT_REGS):
                address = builder.gep(row_start, [builder.add(weight_offset, LONG(number * LINE))])
                call_amx(builder, "tileloadd64", register, address, _line_of(builder, of_scores))
            for number, (sum_register, register) in enumerate(zip(_SUM_REGS, _RIGHT_REGS, strict=True)):
                call_amx(builder, "tileloadd64", register, builder.gep(packed, [LONG(number * REGISTER)]), LONG(LINE))
                for weight_register in _WEIGHT_REGS:
                    call_amx(builder, "tdpbf16ps", sum_register, weight_register, register)
            return empty

        loop(builder, builder.sdiv(builder.add(key_count, LONG(STEP - 1)), LONG(STEP)), [], multiply)
        for number, register in enumerate(_SUM_REGS):
            sum_address = address_at(builder, of_block.data, builder.add(column, LONG(number * LANES)), FLOAT)
            sum_address = builder.bitcast(sum_address, BYTE.as_pointer())
            call_amx(builder, "tilestored64", register, sum_address, _line_of(builder, of_block))
        return context.get_dummy_value()

    index = types.int64
    return types.void(scores, index, values, index, nothing, work, block, index), make


# Offsets in a thread's workspace `near`, in rows of D floats: queries, later their results, [16, D]; queries as a right
# operand; intermediate scores or values, 2 KiB if D is 32; keys, if fewer than 16 are left, [16, D]; zeros.
_PACKED_AT, _WORK_AT, _TAIL_AT, _ZEROS_AT, USED = 16, 24, 40, 48, 50


@kernel
def attend_by_amx(task, first_query, end_query, in_bf16, out):
    """`attention.attend` for bfloat16 keys and values whose head dimension is a multiple of 32.

    task: an `AttentionTask`; its queries are numbered by key head, then by row, then by query head of the key head.
    They are rounded to bfloat16. Weights of hidden positions are 0, but their values are read nevertheless. in_bf16:
    the results are rounded, too. `task.near` and `task.scores` are workspaces.
    """
    width = task.keys.shape[2]
    queries_per_head = task.rows * (task.queries.shape[1] // width) // task.keys.shape[0]
    zero_rows = task.near[_ZEROS_AT:USED]
    for row in range(zero_rows.shape[0]):
        zero_rows[row] = np.float32(0.0)
    while first_query < end_query:
        key_head = first_query // queries_per_head
        block_end = min(end_query, (key_head + 1) * queries_per_head, first_query + BLOCK)
        set_up(block_end - first_query, _LAST_QUERY_REG)
        _attend_block(task, key_head, first_query, block_end - first_query, in_bf16, out)
        first_query = block_end
    set_down()


@kernel
def _attend_block(task, key_head, first, count, in_bf16, out):
    """`attend_by_amx` for queries first … first + count − 1, all of one key head."""
    keys, values, near, scores = task.keys[key_head], task.values[key_head], task.near, task.scores
    key_count, width = task.seen, task.keys.shape[2]
    query_heads = task.queries.shape[1] // width
    group = query_heads // task.keys.shape[0]  # query heads of a key head: query % group gives the head in it
    per_head, score_row = group * task.rows, task.row * query_heads + first  # lines of scores: one per query
    steps = -(-key_count // STEP)
    for i in range(count):
        row, head = task.row + (first + i - key_head * per_head) // group, key_head * group + (first + i) % group
        for j in range(width):
            near[i, j] = task.queries[row, head * width + j]
    packed_queries, work = near[_PACKED_AT:_WORK_AT], near[_WORK_AT:_TAIL_AT]
    _place_queries(near, count, packed_queries)
    for position in range(0, key_count, BLOCK):
        _score_keys(keys, position, packed_queries, work, near[_TAIL_AT:_ZEROS_AT], scores, score_row, count)
    for i in range(count):
        row = task.row + (first + i - key_head * per_head) // group
        softmax(scores, score_row + i, seen_by(task, row), steps * STEP, task.mask[row - task.row], task.scale)
        _split_weights(scores, score_row + i, steps)
    for column in range(0, width, STEP):
        _weigh_values(scores, score_row, values, key_count, near[_ZEROS_AT:USED], work, near, column)
    for i in range(count):
        row, head = task.row + (first + i - key_head * per_head) // group, key_head * group + (first + i) % group
        put_columns(near, i, 0, out, row, head * width, width, in_bf16)
