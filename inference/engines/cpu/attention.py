# mypy: allow-untyped-defs
"""Compiled attention of a few queries, and the steps that it shares with `attention_amx`.

All work on a head's keys and values is done while they are in a near cache. A `kernel` is compiled by numba, an
`intrinsic` emits LLVM code by its `builder`. A vector has `LANES` floats; `wide` makes a float32 of a stored number.
"""

from typing import NamedTuple

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from outrider.inference.engines.cpu.elementwise import put_columns, softmax_row
from outrider.inference.engines.cpu.numbers import kernel, wide
from outrider.inference.engines.cpu.vectors import (
    FLOATS,
    LANES,
    LONG,
    ZEROS,
    add_product,
    arrays_of,
    load_floats,
    loop,
    row_of,
    splat,
    sums_of_lanes,
)

_HIDDEN = np.float32(-1e30)  # a mask value below it hides a position
_BLOCK = 64  # positions that are checked together


class AttentionTask(NamedTuple):
    """Queries of some rows over one sequence's keys and values in one layer, and workspaces.

    The rows are row … row + rows − 1 of queries float32 [R, H·D]: R rows of the pass, H heads, D a multiple of `LANES`.
    keys, values [G, positions, D] of G key heads, of which the first `seen` are used; mask [rows, seen], or [rows, 0]
    for a chain; scale: of query · key.
    scores float32 [R·H, seen or more, a multiple of `LANES`]; sums float32 [R, H·D]; near float32 [NEAR, D], of this
    thread only.
    """

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    seen: int
    mask: np.ndarray
    scale: float
    scores: np.ndarray
    sums: np.ndarray
    near: np.ndarray
    row: int
    rows: int


@kernel
def seen_by(task, row):
    """The number of positions up to the last one that a row sees."""
    mask, visible_count = task.mask[row - task.row], task.seen
    if mask.shape[0] == 0:  # in a chain the last row sees all, the row before it one position fewer, …
        return visible_count - (task.rows - 1) + (row - task.row)
    while visible_count > 1 and wide(mask[visible_count - 1]) < _HIDDEN:
        visible_count -= 1
    return visible_count


@kernel
def _first_gap(mask, count):
    """The first of `count` positions that is hidden after a visible one; `count` if there is none."""
    begin = 0
    while begin < count and wide(mask[begin]) < _HIDDEN:  # before a window
        begin += 1
    while begin < count:
        block_end, hidden_count = min(count, begin + _BLOCK), 0
        for j in range(begin, block_end):
            hidden_count += wide(mask[j]) < _HIDDEN
        if hidden_count > 0:
            while wide(mask[begin]) >= _HIDDEN:
                begin += 1
            return begin
        begin = block_end
    return count


@kernel
def softmax(scores, line, count, size, mask, scale):
    """softmax(scale · score + mask) of the first `count` of a line of scores, in place, and 0 after it up to `size`.

    Hidden positions between visible ones are removed for the sum. So a row of a tree, whose ancestors are not adjacent,
    has the same sum as in a chain, bit for bit.
    """
    line_scores = scores[line]
    for j in range(count):
        line_scores[j] *= scale
    first_gap = visible_count = count
    if mask.shape[0] > 0:
        for j in range(count):
            line_scores[j] += wide(mask[j])
        first_gap = visible_count = _first_gap(mask, count)
        for j in range(first_gap, count):  # later visible scores move down into the gaps
            if wide(mask[j]) >= _HIDDEN:
                line_scores[visible_count] = line_scores[j]
                visible_count += 1
    padded_visible = -(-visible_count // LANES) * LANES
    for j in range(visible_count, padded_visible):
        line_scores[j] = np.float32(-np.inf)
    softmax_row(scores, line, padded_visible)
    for j in range(count, size):
        line_scores[j] = np.float32(0.0)
    if first_gap == count:
        return
    for j in range(count - 1, first_gap - 1, -1):  # they move back
        if wide(mask[j]) < _HIDDEN:
            line_scores[j] = np.float32(0.0)
        else:
            visible_count -= 1
            line_scores[j] = line_scores[visible_count]


_KEYS = 8  # keys whose scores are summed at once
_VECTORS = 4  # vectors of a value that are summed at once
NEAR = 64  # positions whose keys or values stay in the nearest cache while all queries read them


def _scores_of(keys_at_once):
    """A function (query [D], keys [positions, D], row, scores, begin) for the scores of `keys_at_once` keys from `row`.

    They are written to `scores` from `begin` on. A score does not depend on how many are computed at once.
    """

    @intrinsic
    def scores_of(context, query, keys, row, scores, begin):
        def make(context, builder, signature, arguments):
            array_types, arrays = (query, keys, scores), (arguments[0], arguments[1], arguments[3])
            of_query, of_keys, of_scores = arrays_of(context, builder, array_types, arrays)
            key_row, begin = arguments[2], arguments[4]
            key_rows = [row_of(builder, of_keys, builder.add(key_row, LONG(number))) for number in range(keys_at_once)]

            def multiply(block, sums):
                at = builder.mul(block, LONG(LANES))
                q_part = load_floats(builder, of_query.data, at, query.dtype)
                key_parts = [load_floats(builder, row, at, keys.dtype) for row in key_rows]
                return [add_product(builder, total, q_part, key) for total, key in zip(sums, key_parts, strict=True)]

            width = cgutils.unpack_tuple(builder, of_query.shape, 1)[0]
            block_count = builder.sdiv(width, LONG(LANES))
            sums = sums_of_lanes(builder, loop(builder, block_count, [ZEROS] * keys_at_once, multiply))
            score_address = builder.gep(of_scores.data, [begin])
            builder.store(sums, builder.bitcast(score_address, sums.type.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(query, keys, types.int64, scores, types.int64), make

    return scores_of


def _weighed(vectors):
    """A function (weights, begin, values [positions, D], row, count, column, sums [D]) for so many `vectors`.

    sums[column:] += Σ_j weights[begin + j] · values[row + j] over `count` rows, in order.
    """

    @intrinsic
    def weighed(context, weights, begin, values, row, count, column, sums):
        def make(context, builder, signature, arguments):
            array_types, arrays = (weights, values, sums), (arguments[0], arguments[2], arguments[6])
            of_weights, of_values, of_sums = arrays_of(context, builder, array_types, arrays)
            begin, (row, count, column) = arguments[1], arguments[3:6]
            columns = [builder.add(column, LONG(number * LANES)) for number in range(vectors)]

            def multiply(position, totals):
                address = builder.gep(of_weights.data, [builder.add(begin, position)])
                weight = splat(builder, builder.load(address, align=4))
                value_row = row_of(builder, of_values, builder.add(row, position))
                parts = [load_floats(builder, value_row, at, values.dtype) for at in columns]
                return [add_product(builder, total, weight, part) for total, part in zip(totals, parts, strict=True)]

            initial_sums = [load_floats(builder, of_sums.data, at, types.float32) for at in columns]
            for at, total in zip(columns, loop(builder, count, initial_sums, multiply), strict=True):
                sum_address = builder.bitcast(builder.gep(of_sums.data, [at]), FLOATS.as_pointer())
                builder.store(total, sum_address, align=4)
            return context.get_dummy_value()

        index = types.int64
        return types.void(weights, index, values, index, index, index, sums), make

    return weighed


_scores_of_some, _score_of_one = _scores_of(_KEYS), _scores_of(1)
_weigh_some, _weigh_one = _weighed(_VECTORS), _weighed(1)


@kernel
def attend(task, first_query, end_query, in_bf16, out):
    """For queries first_query … end_query − 1, write to out [R, H·D] means of values by softmax(scale · q · k + mask).

    Queries are numbered by key head, then by the task's rows, then by the heads that share a key head. Positions after
    a row's last visible one are not read, so a row of a chain gets the same result as alone. in_bf16: out is rounded.
    """
    heads = task.queries.shape[1] // task.keys.shape[2]
    per_head = task.rows * heads // task.keys.shape[0]
    while first_query < end_query:
        key_head = first_query // per_head
        end = min(end_query, (key_head + 1) * per_head)
        _attend_head(task, heads, key_head, first_query - key_head * per_head, end - key_head * per_head, in_bf16, out)
        first_query = end


@kernel
def _attend_head(task, heads, key_head, first_query, end_query, in_bf16, out):
    """`attend` for queries first_query … end_query − 1 of one key head."""
    keys, values, near_buffer = task.keys[key_head], task.values[key_head], task.near
    width, heads_per_key = keys.shape[1], heads // task.keys.shape[0]
    is_widened = keys.itemsize == 2 and end_query - first_query > 2  # once for all queries
    for block_begin in range(0, task.seen, NEAR):
        if is_widened:
            _widen(keys, block_begin, min(block_begin + NEAR, task.seen), near_buffer)
        for query in range(first_query, end_query):
            row, head = task.row + query // heads_per_key, key_head * heads_per_key + query % heads_per_key
            count = min(NEAR, seen_by(task, row) - block_begin)
            vector, scores = task.queries[row, head * width : (head + 1) * width], task.scores[row * heads + head]
            if is_widened:
                _score(vector, near_buffer, 0, count, scores, block_begin)
            else:
                _score(vector, keys, block_begin, count, scores, block_begin)
    for query in range(first_query, end_query):
        row, head = task.row + query // heads_per_key, key_head * heads_per_key + query % heads_per_key
        count = seen_by(task, row)
        softmax(
            task.scores, row * heads + head, count, -(-count // LANES) * LANES, task.mask[row - task.row], task.scale
        )
        task.sums[row, head * width : (head + 1) * width] = np.float32(0.0)
    for block_begin in range(0, task.seen, NEAR):
        if is_widened:
            _widen(values, block_begin, min(block_begin + NEAR, task.seen), near_buffer)
        for query in range(first_query, end_query):
            row, head = task.row + query // heads_per_key, key_head * heads_per_key + query % heads_per_key
            count = min(NEAR, seen_by(task, row) - block_begin)
            scores, sums = task.scores[row * heads + head], task.sums[row, head * width : (head + 1) * width]
            if is_widened:
                _weigh(scores, block_begin, near_buffer, 0, count, sums)
            else:
                _weigh(scores, block_begin, values, block_begin, count, sums)
    for query in range(first_query, end_query):
        row, head = task.row + query // heads_per_key, key_head * heads_per_key + query % heads_per_key
        put_columns(task.sums, row, head * width, out, row, head * width, width, in_bf16)


@kernel
def _widen(stored, begin, end, near):
    """near[j] = stored[begin + j] as float32, begin + j < end."""
    for j in range(end - begin):
        for i in range(near.shape[1]):
            near[j, i] = wide(stored[begin + j, i])


@kernel
def _score(query, keys, row, count, scores, begin):
    """scores[begin + j] = query · keys[row + j], j < count."""
    tail_begin = max(count, 0) // _KEYS * _KEYS
    for j in range(0, tail_begin, _KEYS):
        _scores_of_some(query, keys, row + j, scores, begin + j)
    for j in range(tail_begin, count):
        _score_of_one(query, keys, row + j, scores, begin + j)


@kernel
def _weigh(scores, begin, values, row, count, sums):
    """sums += Σ_j scores[begin + j] · values[row + j], j < count."""
    if count <= 0:
        return
    column = 0
    while column + _VECTORS * LANES <= sums.shape[0]:
        _weigh_some(scores, begin, values, row, count, column, sums)
        column += _VECTORS * LANES
    while column < sums.shape[0]:
        _weigh_one(scores, begin, values, row, count, column, sums)
        column += LANES
