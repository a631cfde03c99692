"""A program: n-gram drafters on kept files and tables whose numbers were altered, in compiled code that checks bounds.

    NUMBA_BOUNDSCHECK=1 python -m tests.inference.drafters.altered_files FOLDER

It says how many files were drafted from and how many were refused. An index outside of its array is an IndexError.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from draft_models.ngrams.table import TrigramTable
from draft_models.ngrams.table_files import ARRAYS
from inference.drafters.ngram.ngram_memory import close, open_memory
from inference.drafters.ngram.ngrams import make_ngram_drafter
from inference.settings.method import NgramConfig
from outrider.errors import UserError
from tests.inference.drafters.test_ngram_memory import CONFIGS, TARGET, forged, hits
from tests.inference.ngram_cases import TABLE, draft, make_table

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
ODD = (5e-324, 1e-300, 0.5, 1.0, 2.0, 1e18, 1e300)
Change = Any  # of an array, in place


@njit
def beyond(array):  # type: ignore[no-untyped-def]
    """What bounds checking must refuse."""
    return array[len(array)]


def alterations(rng: np.random.Generator) -> Iterator[tuple[str, Change]]:
    """(what is altered, how): of floats to odd ones, of integers to their type's extremes and to small ones."""
    for name in ("sums", "weights", "shares", "recycled_probs"):
        yield from ((name, lambda array, to=value: array * 0 + to) for value in ODD)
        yield name, lambda array: rng.choice(ODD, array.shape).astype(array.dtype)
    for name in ("tokens", "lengths", "seen", "newest", "keys", "recycled_tokens", "recycled_seen"):
        yield name, lambda array: rng.permutation(array.reshape(-1)).reshape(array.shape)
        yield name, lambda array: rng.integers(0, 12, array.shape).astype(array.dtype)
        yield from ((name, lambda array, end=end: array * 0 + end(array.dtype)) for end in (_least, _most))


def _least(dtype: np.dtype) -> int:
    return int(np.iinfo(dtype).min)


def _most(dtype: np.dtype) -> int:
    return int(np.iinfo(dtype).max)


def draft_from_kept(config: NgramConfig, path: Path) -> None:
    """A few rounds with the memory in `path`."""
    open_memory(config, TABLE, TARGET)
    try:
        hits(config, TEXT)
    finally:
        close(str(path))


def kept_files(folder: Path) -> Iterator[bool]:
    """Whether each altered kept file was drafted from."""
    for name, config in CONFIGS.items():
        path = folder / f"{name}.safetensors"
        config = replace(config, keep=str(path))
        draft_from_kept(config, path)
        whole = path.read_bytes()
        for array, change in alterations(np.random.default_rng(1)):
            path.write_bytes(whole)
            forged(path, {array: change})
            yield _accepted(lambda: draft_from_kept(config, path))  # noqa: B023  # called at once


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
        replace(table, levels={**table.levels, 3: replace(level, **{name: array})}).save(where)

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
    with np.errstate(all="ignore"):
        found = [*kept_files(Path(sys.argv[1])), *tables(Path(sys.argv[1]))]
    print(f"drafted={sum(found)} refused={len(found) - sum(found)}")
