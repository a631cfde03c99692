"""The quick tier: less of every subject, and of none nothing."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiers import COLLECTED, beyond_one_case, quick_where, typical_where


def test_cases_that_repeat_another_are_marked_and_none_is_lost() -> None:
    """Also those that are marked already."""
    one, other, third = typical_where({"a", "b"}.__contains__, ["a", *quick_where("a".__eq__, ["b", "c"])])
    assert one == "a"
    assert (other.values, [mark.name for mark in other.marks]) == (("b",), ["slow"])
    assert (third.values, [mark.name for mark in third.marks]) == (("c",), ["slow", "thorough"])
    (pair,) = typical_where(lambda _: False, [("a", 1)])
    assert (pair.values, [mark.name for mark in pair.marks]) == (("a", 1), ["thorough"])


def test_of_every_test_one_quick_case_is_left() -> None:
    """The first; slow ones are left out elsewhere and do not count."""

    def case(name: str, slow: bool = False) -> Any:
        return SimpleNamespace(nodeid=f"file.py::{name}", get_closest_marker=lambda mark: slow or None)

    many = [case("many[0]", slow=True), case("many[1]"), case("many[2]"), case("many[3]")]
    assert beyond_one_case([case("one"), *many, case("other[a]")]) == many[2:]


def test_the_quick_tier_touches_every_file(pytestconfig: pytest.Config) -> None:
    """Of what this run has collected: in a run of the whole suite every file."""
    collected = pytestconfig.stash[COLLECTED]
    without_gpu = {file for file, marks in collected if "gpu" not in marks}
    quick = {file for file, marks in collected if not marks & {"gpu", "slow", "thorough"}}
    assert without_gpu - quick == set()
