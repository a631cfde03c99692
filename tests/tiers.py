"""The quick tier keeps some cases of a test, the whole suite has all of them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

# Of every test that was collected, before any was left out: its file and the names of its marks.
COLLECTED = pytest.StashKey[list[tuple[str, set[str]]]]()


def beyond_one_case(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The cases of parametrized tests that the quick tier leaves out: all quick ones but the first."""
    quick: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            quick.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [item for cases in quick.values() for item in cases[1:]]


def quick_where(is_quick: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """`cases` for `parametrize`, in their order; those of which `is_quick(case)` is false are marked slow.

    A case of several parameters is a tuple.
    """
    return [case if is_quick(case) else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
