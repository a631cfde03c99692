"""Every pair of values occurs."""

from itertools import combinations, product

import pytest

from tests.pairwise import all_pairs, each_value

COLUMNS = [
    [("a", "b", "c"), (0, 1)],
    [("a", "b", "c", "d", "e"), (False, True), (4, 2), (1, 2, 3), tuple("ABCDEFG"), (20, 1)],
    [range(9), range(3), range(9), range(2)],
    [(None,), (0, 1), (0, 1)],  # a column of one value, and two of the same values
]


@pytest.mark.parametrize("columns", COLUMNS)
def test_any_two_values_meet(columns: list) -> None:
    rows = all_pairs(*columns)
    assert all(value in column for row in rows for value, column in zip(row, columns, strict=True))
    for one, other in combinations(range(len(columns)), 2):
        assert {(row[one], row[other]) for row in rows} == set(product(columns[one], columns[other]))


@pytest.mark.parametrize("columns", COLUMNS)
def test_some_rows_have_every_value(columns: list) -> None:
    rows = all_pairs(*columns)
    some = each_value(rows)
    assert some[0] == rows[0]
    assert [set(column) for column in zip(*some, strict=True)] == [set(column) for column in columns]
    assert set(some) <= set(rows)
    assert len(some) <= max(map(len, columns)) + 2
