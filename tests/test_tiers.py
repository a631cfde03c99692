"""The quick tier: less of every subject, and of none nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import quick_where

ROOT = Path(__file__).parents[1]
SLOW_BY_NATURE = {  # all that these do is start processes, or repeat something until chance would show
    "tests/draft_models/ngrams/test_damaged_tables.py",
}


def test_cases_that_are_not_quick_are_marked_and_none_is_lost() -> None:
    cases = quick_where(lambda case: case == ("a", 1), [("a", 1), ("b", 2)])
    assert cases[0] == ("a", 1)
    assert cases[1].values == ("b", 2)
    assert [mark.name for mark in cases[1].marks] == ["slow"]
    (single,) = quick_where(lambda _: False, ["word"])
    assert single.values == ("word",)


def collected(*options: str) -> list[str]:
    """The tests that pytest would run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", *options]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if "::" in line]


@pytest.mark.slow
def test_the_quick_tier_touches_every_file() -> None:
    quick, whole = collected("-m", "not slow and not gpu"), collected("-m", "not gpu")
    assert set(quick) < set(whole)
    untouched = {name.partition("::")[0] for name in whole} - {name.partition("::")[0] for name in quick}
    assert untouched == SLOW_BY_NATURE
