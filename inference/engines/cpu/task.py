# mypy: allow-untyped-defs
"""The inputs of attention, and the steps that all its kernels share."""

from typing import NamedTuple

import numpy as np

from inference.engines.cpu.elementwise import softmax_row
from inference.engines.cpu.numbers import kernel, wide
from inference.engines.cpu.vectors import LANES

_HIDDEN = np.float32(-1e30)  # a mask value below it hides a position
_BLOCK = 64  # positions that are checked together


class AttentionTask(NamedTuple):
    """Queries of some rows over one sequence's keys and values in one layer, and workspaces.

    The rows are row … row + rows − 1 of queries float32 [R, H·D], D a multiple of `LANES`. keys, values [G, positions,
    D], of which the first `seen` are used; mask [R, seen], or [R, 0] if all are visible; scale: of query · key.
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
    mask, count = task.mask[row], task.seen
    while mask.shape[0] > 0 and count > 1 and wide(mask[count - 1]) < _HIDDEN:
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
