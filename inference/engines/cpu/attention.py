# mypy: allow-untyped-defs
"""Compiled attention of a few queries, and the steps that it shares with `attention_amx`.

All work on a head's keys and values is done while they are in a near cache.
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
    added,
    arrays_of,
    every,
    loaded,
    loop,
    row_of,
    sums_of_lanes,
)

_HIDDEN = np.float32(-1e30)  # a mask value below it hides a position
_BLOCK = 64  # positions that are checked together


class AttentionTask(NamedTuple):
    """Queries of some rows over one sequence's keys and values in one layer, and workspaces.

    The rows are row … row + rows − 1 of queries float32 [R, H·D], D a multiple of `LANES`. keys, values [G, positions,
    D], of which the first `seen` are used; mask [rows, seen], or [rows, 0] for a chain; scale: of query · key.
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
    mask, count = task.mask[row - task.row], task.seen
    if mask.shape[0] == 0:
        return count - (task.rows - 1) + (row - task.row)
    while count > 1 and wide(mask[count - 1]) < _HIDDEN:
        count -= 1
    return count


@kernel
def _first_gap(mask, count):
    """The first of `count` positions that is hidden after a visible one; `count` if there is none."""
    begin = 0
    while begin < count and wide(mask[begin]) < _HIDDEN:  # before a window
        begin += 1
    while begin < count:
        end, hidden = min(count, begin + _BLOCK), 0
        for j in range(begin, end):
            hidden += wide(mask[j]) < _HIDDEN
        if hidden > 0:
            while wide(mask[begin]) >= _HIDDEN:
                begin += 1
            return begin
        begin = end
    return count


@kernel
def softmax(scores, line, count, size, mask, scale):
    """softmax(scale · score + mask) of the first `count` of a line of scores, in place, and 0 after it up to `size`.

    Hidden positions between visible ones are removed for the sum. So a row of a tree, whose ancestors are not adjacent,
    has the same sum as in a chain, bit for bit.
    """
    own = scores[line]
    for j in range(count):
        own[j] *= scale
    gap = seen = count
    if mask.shape[0] > 0:
        for j in range(count):
            own[j] += wide(mask[j])
        gap = seen = _first_gap(mask, count)
        for j in range(gap, count):
            if wide(mask[j]) >= _HIDDEN:
                own[seen] = own[j]
                seen += 1
    vectors = -(-seen // LANES) * LANES
    for j in range(seen, vectors):
        own[j] = np.float32(-np.inf)
    softmax_row(scores, line, vectors)
    for j in range(count, size):
        own[j] = np.float32(0.0)
    if gap == count:
        return
    for j in range(count - 1, gap - 1, -1):
        if wide(mask[j]) < _HIDDEN:
            own[j] = np.float32(0.0)
        else:
            seen -= 1
            own[j] = own[seen]


_KEYS = 8  # keys whose scores are summed at once
_VECTORS = 4  # vectors of a value that are summed at once
NEAR = 64  # positions whose keys or values stay in the nearest cache while all queries read them


def _scores_of(keys_at_once):
    """A function (query [D], keys [positions, D], row, scores, place) for the scores of `keys_at_once` keys from `row`.

    They are written to `scores` from `place` on. A score does not depend on how many are computed at once.
    """

    @intrinsic
    def scores_of(context, query, keys, row, scores, place):
        def make(context, builder, signature, given):
            kinds, arrays = (query, keys, scores), (given[0], given[1], given[3])
            of_query, of_keys, of_scores = arrays_of(context, builder, kinds, arrays)
            row, place = given[2], given[4]
            rows = [row_of(builder, of_keys, builder.add(row, LONG(number))) for number in range(keys_at_once)]

            def multiply(block, sums):
                at = builder.mul(block, LONG(LANES))
                part = loaded(builder, of_query.data, at, query.dtype)
                each = [loaded(builder, one, at, keys.dtype) for one in rows]
                return [added(builder, total, part, one) for total, one in zip(sums, each, strict=True)]

            width = cgutils.unpack_tuple(builder, of_query.shape, 1)[0]
            blocks = builder.sdiv(width, LONG(LANES))
            sums = sums_of_lanes(builder, loop(builder, blocks, [ZEROS] * keys_at_once, multiply))
            into = builder.gep(of_scores.data, [place])
            builder.store(sums, builder.bitcast(into, sums.type.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(query, keys, types.int64, scores, types.int64), make

    return scores_of


def _weighed(vectors):
    """A function (weights, place, values [positions, D], row, count, column, sums [D]) for `vectors` from `column` on.

    sums[column:] += Σ_j weights[place + j] · values[row + j] over `count` rows, in order.
    """

    @intrinsic
    def weighed(context, weights, place, values, row, count, column, sums):
        def make(context, builder, signature, given):
            kinds, arrays = (weights, values, sums), (given[0], given[2], given[6])
            of_weights, of_values, of_sums = arrays_of(context, builder, kinds, arrays)
            place, (row, count, column) = given[1], given[3:6]
            columns = [builder.add(column, LONG(number * LANES)) for number in range(vectors)]

            def multiply(position, totals):
                address = builder.gep(of_weights.data, [builder.add(place, position)])
                weight = every(builder, builder.load(address, align=4))
                value = row_of(builder, of_values, builder.add(row, position))
                each = [loaded(builder, value, at, values.dtype) for at in columns]
                return [added(builder, total, weight, one) for total, one in zip(totals, each, strict=True)]

            starting = [loaded(builder, of_sums.data, at, types.float32) for at in columns]
            for at, total in zip(columns, loop(builder, count, starting, multiply), strict=True):
                into = builder.bitcast(builder.gep(of_sums.data, [at]), FLOATS.as_pointer())
                builder.store(total, into, align=4)
            return context.get_dummy_value()

        whole = types.int64
        return types.void(weights, whole, values, whole, whole, whole, sums), make

    return weighed


_scores_of_some, _score_of_one = _scores_of(_KEYS), _scores_of(1)
_weigh_some, _weigh_one = _weighed(_VECTORS), _weighed(1)


@kernel
def attend(task, first, last, halves, out):
    """Write to out [R, H·D], for queries first … last − 1, the means of values by softmax(scale · query · key + mask).

    Queries are numbered by key head, then by the task's rows, then by the heads that share a key head. Positions after
    a row's last visible one are not read, so a row of a chain gets the same result as alone.
    """
    heads = task.queries.shape[1] // task.keys.shape[2]
    each = task.rows * heads // task.keys.shape[0]
    while first < last:
        head = first // each
        end = min(last, (head + 1) * each)
        _attend_head(task, heads, head, first - head * each, end - head * each, halves, out)
        first = end


@kernel
def _attend_head(task, heads, head, first, last, halves, out):
    """`attend` for queries first … last − 1 of one key head."""
    keys, values, near = task.keys[head], task.values[head], task.near
    width, group = keys.shape[1], heads // task.keys.shape[0]
    widen = keys.itemsize == 2 and last - first > 2  # once for all queries
    for begin in range(0, task.seen, NEAR):
        if widen:
            _widen(keys, begin, min(begin + NEAR, task.seen), near)
        for query in range(first, last):
            row, place = task.row + query // group, head * group + query % group
            count = min(NEAR, seen_by(task, row) - begin)
            own, scores = task.queries[row, place * width : (place + 1) * width], task.scores[row * heads + place]
            if widen:
                _score(own, near, 0, count, scores, begin)
            else:
                _score(own, keys, begin, count, scores, begin)
    for query in range(first, last):
        row, place = task.row + query // group, head * group + query % group
        count = seen_by(task, row)
        softmax(
            task.scores, row * heads + place, count, -(-count // LANES) * LANES, task.mask[row - task.row], task.scale
        )
        task.sums[row, place * width : (place + 1) * width] = np.float32(0.0)
    for begin in range(0, task.seen, NEAR):
        if widen:
            _widen(values, begin, min(begin + NEAR, task.seen), near)
        for query in range(first, last):
            row, place = task.row + query // group, head * group + query % group
            count = min(NEAR, seen_by(task, row) - begin)
            scores, sums = task.scores[row * heads + place], task.sums[row, place * width : (place + 1) * width]
            if widen:
                _weigh(scores, begin, near, 0, count, sums)
            else:
                _weigh(scores, begin, values, begin, count, sums)
    for query in range(first, last):
        row, place = task.row + query // group, head * group + query % group
        put_columns(task.sums, row, place * width, out, row, place * width, width, halves)


@kernel
def _widen(stored, begin, end, near):
    for j in range(end - begin):
        for i in range(near.shape[1]):
            near[j, i] = wide(stored[begin + j, i])


@kernel
def _score(query, keys, row, count, scores, place):
    """scores[place + j] = query · keys[row + j], j < count."""
    whole = max(count, 0) // _KEYS * _KEYS
    for j in range(0, whole, _KEYS):
        _scores_of_some(query, keys, row + j, scores, place + j)
    for j in range(whole, count):
        _score_of_one(query, keys, row + j, scores, place + j)


@kernel
def _weigh(scores, place, values, row, count, sums):
    """sums += Σ_j scores[place + j] · values[row + j], j < count."""
    if count <= 0:
        return
    column = 0
    while column + _VECTORS * LANES <= sums.shape[0]:
        _weigh_some(scores, place, values, row, count, column, sums)
        column += _VECTORS * LANES
    while column < sums.shape[0]:
        _weigh_one(scores, place, values, row, count, column, sums)
        column += LANES
