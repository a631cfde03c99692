"""The quick tier keeps one case of a test, the usual one every kind of case, the thorough one all there are."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

# Of every test that was collected, before any was left out: its file and the names of its marks.
COLLECTED = pytest.StashKey[list[tuple[str, set[str]]]]()


def beyond_one_case(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The cases of parametrized tests that the quick tier leaves out: all quick ones but the first."""
    quick: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not any(map(item.get_closest_marker, ("slow", "thorough"))):
            quick.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [item for cases in quick.values() for item in cases[1:]]


def quick_where(is_quick: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """`cases` for `parametrize`, in their order; those of which `is_quick(case)` is false are marked slow.

    A case of several parameters is a tuple.
    """
    return [case if is_quick(case) else _marked(case, "slow") for case in cases]


def typical_where(is_typical: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """`cases` for `parametrize`, in their order; those of which `is_typical(case)` is false are marked thorough.

    They repeat, for one more model or combination, what typical cases show. A case may be one of `quick_where`.
    """
    return [case if is_typical(_value(case)) else _marked(case, "thorough") for case in cases]


_thorough = True


def choose_tier(marks: str) -> None:
    """marks: which tests are to run, as -m says. Called before any is imported."""
    global _thorough
    _thorough = "not thorough" not in marks


def as_many(count: int) -> int:
    """How many of `count` random examples a test takes: a third of them where thorough cases are left out."""
    return count if _thorough else -(-count // 3)


PARAM = type(pytest.param())


def _value(case: Any) -> Any:
    """What stands in a case, be it marked or not."""
    if not isinstance(case, PARAM):
        return case
    return case.values[0] if len(case.values) == 1 else case.values


def _marked(case: Any, mark: str) -> Any:
    value = _value(case)
    marks = [*(case.marks if isinstance(case, PARAM) else ()), getattr(pytest.mark, mark)]
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
