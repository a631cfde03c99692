"""Faults planted into the functions that ship."""

import inspect
from textwrap import dedent
from typing import Any

import pytest


def plant(patch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str) -> None:
    """Replace the function `name` of a class or module by itself with `new` where its source has `old`, once."""
    function = getattr(owner, name)
    source, altered = dedent(inspect.getsource(function)), dict[str, Any]()
    assert source.count(old) == 1
    own = source.replace(old, new).replace("super()", f"super({owner.__name__}, self)")
    exec(own, function.__globals__, altered)
    patch.setattr(owner, name, altered[name])
