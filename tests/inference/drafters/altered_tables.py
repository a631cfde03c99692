"""A program: n-gram drafters on tables whose numbers were altered, in compiled code that checks bounds.

    NUMBA_BOUNDSCHECK=1 python -m tests.inference.drafters.altered_tables FOLDER

It says how many tables were drafted from and how many were refused. An index outside of its array is an IndexError.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from outrider.base.errors import UserError
from outrider.draft_models.ngrams.table import ARRAYS, TrigramTable
from outrider.inference.drafters.ngrams.drafter import make_ngram_drafter
from outrider.inference.settings.method import NgramConfig
from tests.inference.ngram_cases import draft, make_table

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]


@njit
def beyond(array):  # type: ignore[no-untyped-def]
    """What bounds checking must refuse."""
    return array[len(array)]


def tables(folder: Path) -> Iterator[bool]:
    """Whether each table with altered arrays, and digests that are right, was drafted from."""
    table, rng = make_table(orders=(2, 3), suffixes=True), np.random.default_rng(2)
    configs = [NgramConfig(nodes=12), NgramConfig(nodes=12, evidence="mixed")]
    for number, (name, fill) in enumerate(itertools.product(ARRAYS, ("zeros", "ones", "random", "permuted"))):
        level = table.levels[3]
        array = getattr(level, name).copy()
        most = np.iinfo(array.dtype).max
        filled = {
            "zeros": 0,
            "ones": most,
            "random": rng.integers(0, 12, array.shape),
            "permuted": rng.permutation(array),
        }
        array[:] = filled[fill]
        where = folder / f"table{number}"
        replace(table, levels={**table.levels, 3: level._replace(**{name: array})}).save(where)

        def use(where: Path = where) -> None:
            opened = TrigramTable.open(where)
            for config in configs:
                draft(make_ngram_drafter(opened, config, 0), TEXT)

        yield _accepted(use)


def _accepted(use: Any) -> bool:
    try:
        use()
    except UserError:
        return False
    return True


if __name__ == "__main__":
    try:
        beyond(np.zeros(3))
    except IndexError:
        print("bounds are checked")
    found = list(tables(Path(sys.argv[1])))
    print(f"drafted={sum(found)} refused={len(found) - sum(found)}")
