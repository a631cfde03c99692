"""The number of rows that a mix takes from each source, and their order."""

from collections.abc import Sequence

import numpy as np


def rows_taken(available: Sequence[int], supervised: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Rows to take from each source, so that their shares of the supervised tokens are proportional to `weights`.

    available, supervised: rows of each source, and labels in them. Every row counts as its source's mean. The total is
    as large as possible: the scarcest source is used up. Every source contributes at least one row.
    Example: 100 and 300 rows of equal labels, weights 1 and 1: 100 rows of each.
    """
    per_row = [labels / rows for labels, rows in zip(supervised, available, strict=True)]
    wanted = [weight / mean for weight, mean in zip(weights, per_row, strict=True)]
    scale = min(rows / want for rows, want in zip(available, wanted, strict=True))
    return [min(rows, max(1, round(scale * want))) for rows, want in zip(available, wanted, strict=True)]


def interleave(taken: Sequence[int], available: Sequence[int]) -> np.ndarray:
    """int64 [rows, 2]: (source, row) of a mix, in which every stretch has about the overall proportions.

    The rows taken are spread evenly over a source, since neighbours share documents, and keep their order.
    """
    source = np.repeat(np.arange(len(taken)), taken)
    rank = np.concatenate([np.arange(count) for count in taken])
    own, total = np.array(taken)[source], np.array(available)[source]
    order = np.argsort((rank + 0.5) / own, kind="stable")
    return np.stack([source, rank * total // own], axis=1)[order]
