"""The quick tier keeps some cases of a test, the whole suite has all of them."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

# Of every test that was collected, before any was left out: its file and the names of its marks.
COLLECTED = pytest.StashKey[list[tuple[str, set[str]]]]()


def quick_where(is_quick: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """`cases` for `parametrize`, in their order; those of which `is_quick(case)` is false are marked slow.

    A case of several parameters is a tuple.
    """
    return [case if is_quick(case) else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
