# mypy: allow-untyped-defs
"""What attention is given, and what of it does not depend on how it is computed."""

from typing import NamedTuple

import numpy as np

from inference.cpu.elementwise import softmax_row
from inference.cpu.numbers import kernel, wide

_HIDDEN = np.float32(-1e30)  # a mask below it lets nothing through


class Task(NamedTuple):
    """Queries of some rows over one sequence's keys and values in one layer, and where to work.

    The rows are row … row + rows − 1 of queries float32 [R, H·D], D a multiple of `LANES`. keys, values [G, positions,
    D], of which `seen` count; mask [R, seen], or [R, 0] where all is seen; scale: of query · key.
    scores float32 [R·H, seen or more, a multiple of `LANES`]; sums float32 [R, H·D]; near float32 [NEAR, D], of one
    thread alone.
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
    """How many positions there are up to the last one that a row's mask lets through."""
    mask, count = task.mask[row], task.seen
    while mask.shape[0] > 0 and count > 1 and wide(mask[count - 1]) < _HIDDEN:
        count -= 1
    return count


@kernel
def softmax(scores, line, count, size, mask, scale):
    """softmax(scale · score + mask) of the first `count` of a line of scores, in place; then 0 up to whole vectors."""
    own = scores[line]
    for j in range(count):
        own[j] *= scale
    if mask.shape[0] > 0:
        for j in range(count):
            own[j] += wide(mask[j])
    for j in range(count, size):
        own[j] = np.float32(-np.inf)
    softmax_row(scores, line, size)
