"""In which order a run sees its rows: a pure function of (seed, step), so that a resumed run continues it."""

import functools
from collections.abc import Sequence

from outrider.streams import Streams


@functools.lru_cache(maxsize=2)  # a step may take rows of two epochs
def epoch_order(count: int, seed: int, epoch: int) -> Sequence[int]:
    """The order of `count` rows in one epoch: a pure function of its arguments."""
    return tuple(Streams(seed).arrays("row order", epoch).permutation(count).tolist())


def step_rows(count: int, batch: int, seed: int, step: int) -> list[int]:
    """The rows of optimizer step `step` (from 0), `batch` of them.

    Epoch follows epoch without a gap. Step s takes places [s · batch, (s + 1) · batch) of that sequence.
    """
    places = range(step * batch, (step + 1) * batch)
    return [epoch_order(count, seed, place // count)[place % count] for place in places]


def own_share(rows: Sequence[int], micro: int, process: int, processes: int) -> list[Sequence[int]]:
    """Those of a step's `rows` that one process has, in micro batches of `micro` rows.

    The processes take micro batches in turn. len(rows) is a multiple of micro · processes.
    """
    return [rows[start : start + micro] for start in range(process * micro, len(rows), processes * micro)]
