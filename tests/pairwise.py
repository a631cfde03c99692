"""Fewer cases than a product has: every value still meets every value of every other column."""

from collections.abc import Collection, Sequence
from itertools import combinations, product
from typing import Any


def all_pairs(*columns: Collection[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each column, in which any two values of different columns stand together at least once.

    What two of five settings do to each other shows as well as in their product, at about the rows of its two longest
    columns. The same columns give the same rows. Each row begins with a pair that no row has yet; the other columns
    then take the value that adds the most such pairs.
    """
    values = [list(column) for column in columns]
    places = [[(column, place) for place in range(len(column_values))] for column, column_values in enumerate(values)]
    missing = dict.fromkeys(pair for one, other in combinations(places, 2) for pair in product(one, other))
    rows = []
    while missing:
        chosen = list(next(iter(missing)))
        for column in places:
            if column[0][0] not in dict(chosen):
                chosen.append(max(column, key=lambda place: sum(_pair(place, other) in missing for other in chosen)))
        for pair in combinations(sorted(chosen), 2):
            missing.pop(pair, None)
        rows.append(tuple(values[column][place] for column, place in sorted(chosen)))
    return rows


def each_value(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Some of `rows`, in which every value of every column stands at least once: about as many as its longest column.

    They stand for the pairs in `make test`. The first row is one of them.
    """
    missing = {place for row in rows for place in enumerate(row)}
    chosen = []
    while missing:
        chosen.append(max(rows, key=lambda row: len(missing.intersection(enumerate(row)))))
        missing.difference_update(enumerate(chosen[-1]))
    return chosen


def _pair(one: tuple[int, int], other: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return min(one, other), max(one, other)
