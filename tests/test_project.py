"""The shape of the project: imports point one way and in no circle, names do not shadow dependencies."""

import ast
import importlib.util
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from outrider.cli import COMMANDS
from outrider.files import PACKAGES

UNTYPED = "# mypy: allow-untyped-defs"
ROOT = Path(__file__).parent.parent
ENTRIES = {command.script for command in COMMANDS.values()}
API = "outrider/api/model.py"  # stands on everything; `import outrider` reaches it only when it is asked for
# The folders of the source from below: a module imports from its own and from those above it in this list, also within
# a function. Text is below the runtime, generated text above it.
FLOORS = (
    "outrider",
    "conf",
    "data_prep/formats",
    "draft_models/targets",
    "draft_models",
    "draft_models/early_exit",
    "draft_models/small_lm",
    "draft_models/eagle3",
    "draft_models/ngrams",
    "draft_models/tiny",
    "data_prep/text",
    "inference/settings",
    "inference/core",
    "inference/engines/cpu",
    "inference/engines/graphs",
    "inference/engines",
    "inference/sizing",
    "inference/stopping",
    "inference/shapes",
    "inference/drafters",
    "inference/drafters/ngram",
    "inference/serving",
    "inference/loading",
    "inference/measure",
    "inference/doctor",
    "inference/report",
    "data_prep/responses",
    "inference/audit",
    "inference/evaluate",
    "inference",
    "data_prep/ngrams",
    "data_prep",
    "train/settings",
    "train/core",
    "train/parts",
    "train/recipes",
    "train",
    "outrider/api",
)


def modules() -> list[Path]:
    return sorted(p.relative_to(ROOT) for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All there is in a file of the source."""
    return [*ast.walk(ast.parse((ROOT / path).read_text()))]


@cache
def imports_of(path: Path, *, typing: bool = True) -> set[str]:
    """All that a file imports, also in functions; with typing=False not what it imports for a type checker only."""
    nodes = nodes_of(path)
    unread = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    skipped = {id(inner) for node in unread for inner in ast.walk(node)} if not typing else set[int]()
    found = set()
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def folder_of(module: str) -> str:
    return str(KNOWN[module].parent)


KNOWN = {name_of(path): path for path in modules()}


def test_every_folder_has_its_floor() -> None:
    assert {folder_of(module) for module in KNOWN} == {*FLOORS}


@pytest.mark.parametrize("path", modules(), ids=str)
def test_imports_point_down(path: Path) -> None:
    imported = imports_of(path, typing=False) & KNOWN.keys()
    floor = FLOORS.index(str(path.parent))
    above = {module for module in imported if FLOORS.index(folder_of(module)) > floor}
    assert above <= ({name_of(Path(API)), "outrider.api"} if path == Path("outrider/__init__.py") else set())


@pytest.mark.parametrize("path", modules(), ids=str)
def test_configs_are_composed_by_entries_alone(path: Path) -> None:
    if path.parts[0] != "conf" and str(path) not in {*ENTRIES, API}:
        assert not {name for name in imports_of(path) if name.partition(".")[0] == "conf"}


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Also not in a function, where Python would let it pass."""
    graph = {name: imports_of(path, typing=False) & KNOWN.keys() - {name} for name, path in KNOWN.items()}
    assert sum(map(len, graph.values())) > 400
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_only_what_numba_compiles_has_no_types() -> None:
    """In the files that ask mypy for none. All of engines/cpu is for the compiler: code, or what makes code."""
    untyped = {path: source for path in modules() if (source := (ROOT / path).read_text()).startswith(UNTYPED)}
    assert untyped
    for path, source in untyped.items():
        functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        for function in functions if "engines/cpu" not in str(path) else ():
            typed = function.returns is not None or any(argument.annotation for argument in function.args.args)
            compiled = any(re.search("kept|lean|triton.jit", ast.unparse(one)) for one in function.decorator_list)
            assert typed or compiled, f"{path}: {function.name}"


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
            for node in nodes_of(path.relative_to(ROOT)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOADERS:
                    owner = ast.unparse(node.func.value)
                    trusts = {word.arg: ast.unparse(word.value) for word in node.keywords}.get("trust_remote_code")
                    found.append((f"{path.relative_to(ROOT)}:{node.lineno} {owner}", trusts))
    assert len(found) >= 6
    assert [place for place, trusts in found if trusts != "False"] == []
