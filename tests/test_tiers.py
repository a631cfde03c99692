"""The quick tier: less of every subject, and of none nothing."""

import pytest

from tests.tiers import COLLECTED, quick_where


def test_cases_that_are_not_quick_are_marked_and_none_is_lost() -> None:
    cases = quick_where(lambda case: case == ("a", 1), [("a", 1), ("b", 2)])
    assert cases[0] == ("a", 1)
    assert cases[1].values == ("b", 2)
    assert [mark.name for mark in cases[1].marks] == ["slow"]
    (single,) = quick_where(lambda _: False, ["word"])
    assert single.values == ("word",)


def test_the_quick_tier_touches_every_file(pytestconfig: pytest.Config) -> None:
    """Of what this run has collected: in a run of the whole suite every file."""
    collected = pytestconfig.stash[COLLECTED]
    without_gpu = {file for file, marks in collected if "gpu" not in marks}
    quick = {file for file, marks in collected if not marks & {"gpu", "slow"}}
    assert without_gpu - quick == set()
