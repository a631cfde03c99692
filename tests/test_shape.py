"""The shape of the source in numbers that may only fall: what grows here has to say what it replaces.

Imports are those at the top of a module, without `TYPE_CHECKING`: what runs when it is imported.
"""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from outrider.versions import PACKAGES

ROOT = Path(__file__).parent.parent
# At most. Lower one whenever it is beaten; never raise one: what grows removes something first.
MOST = {
    "source lines": 44_230,
    "modules on the longest chain of imports": 14,
    "modules below the decode loop": 20,
    "lines below the decode loop": 2_735,
    "modules below the drafter's interface": 9,
    "lines below the drafter's interface": 863,
    "lines with Any": 228,
    "lines with type: ignore": 16,
    "presets of methods": 15,
}
Graph = dict[str, set[str]]


@cache
def sources() -> dict[str, Path]:
    """The files of the source, by module."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


@cache
def imports() -> Graph:
    """The modules of ours that each module imports at its top."""
    return {module: {*_imported(file)} - {module} for module, file in sources().items()}


def _imported(file: Path) -> list[str]:
    found = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name if name in sources() else node.module for name in names]
    return [module for module in found if module in sources()]


def below(module: str) -> set[str]:
    """It and all that importing it imports."""
    seen, todo = {module}, [module]
    while todo:
        new = imports()[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def lines(modules: set[str]) -> int:
    return sum(len(sources()[module].read_text().splitlines()) for module in modules)


def longest_chain() -> int:
    longest: dict[str, int] = {}
    for module in TopologicalSorter(imports()).static_order():
        longest[module] = 1 + max((longest[other] for other in imports()[module]), default=0)
    return max(longest.values())


def lines_with(pattern: str) -> int:
    every = (line for file in sources().values() for line in file.read_text().splitlines())
    return sum(re.search(pattern, line) is not None for line in every)


@cache
def measured() -> dict[str, int]:
    loop, interface = below("inference.core.decode"), below("inference.core.drafter")
    return {
        "source lines": lines({*sources()}),
        "modules on the longest chain of imports": longest_chain(),
        "modules below the decode loop": len(loop),
        "lines below the decode loop": lines(loop),
        "modules below the drafter's interface": len(interface),
        "lines below the drafter's interface": lines(interface),
        "lines with Any": lines_with(r"\bAny\b"),
        "lines with type: ignore": lines_with("type: ignore"),
        "presets of methods": len([*(ROOT / "conf" / "method").glob("*.yaml")]),
    }


@pytest.mark.parametrize("what", MOST)
def test_nothing_grows(what: str) -> None:
    assert measured()[what] <= MOST[what]
