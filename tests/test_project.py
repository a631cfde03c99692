"""The shape of the project: imports point one way and in no circle, names do not shadow dependencies."""

import ast
import importlib.util
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from outrider.cli import COMMANDS
from outrider.versions import PACKAGES

ROOT = Path(__file__).parent.parent
ENTRIES = {command.script for command in COMMANDS.values()}
API = "outrider/api.py"  # stands on everything; `import outrider` reaches it only when it is asked for
ABOVE = {API, "outrider/chat.py"}  # in the package that all others stand on
# What each part of the source may import besides itself. Text is below the runtime, generated text above it.
TEXT = {"data_prep/settings", "data_prep/text"}
MAY_IMPORT = {
    "outrider": set[str](),
    "conf": {"outrider"},
    "draft_models": {"outrider"},
    "data_prep/settings": {"draft_models", "outrider"},
    "data_prep/text": {"data_prep/settings", "draft_models", "outrider"},
    "data_prep/ngrams": {*TEXT, "draft_models", "outrider"},
    "inference": {*TEXT, "draft_models", "outrider"},
    "data_prep/responses": {*TEXT, "draft_models", "inference", "outrider"},
    "data_prep/python_docs": {*TEXT, "outrider"},
    "data_prep/targets": {"data_prep/settings", "draft_models", "outrider"},
    "data_prep": {
        "data_prep/settings",
        "data_prep/ngrams",
        "data_prep/responses",
        "data_prep/targets",
        "data_prep/python_docs",
    },  # its entries
    "train": {*TEXT, "data_prep/responses", "draft_models", "inference", "outrider"},
}


def modules() -> list[Path]:
    return sorted(p.relative_to(ROOT) for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path, *, typing: bool = True) -> set[str]:
    """All that a file imports, also in functions; with typing=False not what it imports for a type checker only."""
    tree = ast.parse((ROOT / path).read_text())
    unread = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    skipped = {id(inner) for node in unread for inner in ast.walk(node)} if not typing else set[int]()
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def part_of(name: str) -> str | None:
    """The key of `MAY_IMPORT` that a module falls under, its folder where that is tests or benchmarks, else None."""
    first, _, rest = name.partition(".")
    inner = f"{first}/{rest.partition('.')[0]}"
    if first in ("tests", "benchmarks"):
        return first
    return inner if inner in MAY_IMPORT else first if first in PACKAGES else None


@pytest.mark.parametrize("path", modules(), ids=str)
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(name_of(path))
    assert part is not None
    allowed = {part, *MAY_IMPORT[part]}
    if str(path) in {*ENTRIES, API}:
        allowed.add("conf")  # entries are leaves: they compose, nothing imports them
    if str(path) in ABOVE:
        allowed |= {*TEXT, "draft_models", "inference"}
    assert {part_of(name) for name in imports_of(path)} - {None} <= allowed


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Also not in a function, where Python would let it pass."""
    known = {name_of(path): path for path in modules()}
    graph = {name: imports_of(path, typing=False) & known.keys() - {name} for name, path in known.items()}
    assert sum(map(len, graph.values())) > 400
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_no_command_is_forgotten() -> None:
    entries = {str(path) for path in modules() if "\n@entry(" in (ROOT / path).read_text()}
    assert entries == ENTRIES


def test_entries_are_leaves() -> None:
    entry_modules = {entry.removesuffix(".py").replace("/", ".") for entry in {*ENTRIES, API}}
    for path in modules():
        if path == Path("outrider/__init__.py"):
            continue
        assert not imports_of(path) & entry_modules, path


@pytest.mark.parametrize("package", ["train", "inference", "data_prep"])
def test_no_module_shadows_another_when_its_folder_is_the_script_path(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python train/eesd.py` puts train/ first on sys.path, so no file there may be called like a dependency."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if ROOT / "tests" not in Path(path).parents])
    for path in (ROOT / package).glob("*.py"):
        assert path.stem not in sys.stdlib_module_names
        assert path.stem in ("__init__",) or importlib.util.find_spec(path.stem) is None, path


LOADERS = ("from_pretrained", "from_config")


def test_code_of_a_model_is_never_run() -> None:
    """Whatever transformers loads is told not to trust code beside it: left open, it would ask on a terminal."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOADERS:
                    owner = ast.unparse(node.func.value)
                    trusts = {word.arg: ast.unparse(word.value) for word in node.keywords}.get("trust_remote_code")
                    found.append((f"{path.relative_to(ROOT)}:{node.lineno} {owner}", trusts))
    assert len(found) >= 6
    assert [place for place, trusts in found if trusts != "False"] == []
