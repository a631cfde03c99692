"""How many rows of each source a mix takes, and in which order."""

from collections.abc import Sequence

import numpy as np


def rows_taken(available: Sequence[int], supervised: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Rows to take of each source, so that sources have shares of the supervised tokens in proportion to `weights`.

    available, supervised: rows of each source, and labels in them. A row counts as its source's mean. As many rows as
    possible are taken: the source that is shortest for its share gives all it has. At least one of each is taken.
    Example: 100 and 300 rows of equal labels, weights 1 and 1: 100 rows of each.
    """
    per_row = [labels / rows for labels, rows in zip(supervised, available, strict=True)]
    wanted = [weight / mean for weight, mean in zip(weights, per_row, strict=True)]
    scale = min(rows / want for rows, want in zip(available, wanted, strict=True))
    return [min(rows, max(1, round(scale * want))) for rows, want in zip(available, wanted, strict=True)]


def interleave(taken: Sequence[int], available: Sequence[int]) -> np.ndarray:
    """int64 [rows, 2]: (source, row) of a mix; any stretch of it has the sources in about their proportions.

    The rows of a source are evenly spread over its own (neighbours share a document) and keep their order.
    """
    source = np.repeat(np.arange(len(taken)), taken)
    rank = np.concatenate([np.arange(count) for count in taken])
    own, total = np.array(taken)[source], np.array(available)[source]
    order = np.argsort((rank + 0.5) / own, kind="stable")
    return np.stack([source, rank * total // own], axis=1)[order]
