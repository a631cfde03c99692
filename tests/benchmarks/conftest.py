"""The modules of benchmarks/ as its scripts import them."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

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


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], dict[str, Any]]:
    """Of a script that trains, the settings of every training that it makes, by the name of its directory."""

    def watch(module: ModuleType) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        def watching(kind: Any) -> Any:
            def train(config: Any) -> None:
                assert Path(config.out_dir).name not in seen
                seen[Path(config.out_dir).name] = config
                kind.train(config)

            return replace(kind, train=train)

        monkeypatch.setattr(module, "KINDS", {name: watching(kind) for name, kind in module.KINDS.items()})
        return seen

    return watch
