"""The modules of benchmarks/ as its scripts import them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts() -> Iterator[None]:
    """The modules of benchmarks/ can be imported as its scripts import them, and are gone afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - before:
        if isinstance(sys.modules[name], ModuleType) and str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
