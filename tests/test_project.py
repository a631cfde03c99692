"""The shape of the project: imports point one way and in no circle, names do not shadow dependencies."""

import ast
import importlib.util
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from outrider.base.run_dirs import FOLDERS
from outrider.cli import COMMANDS

LATER = {  # files whose strings name modules above them, and why
    Path("inference/settings/kinds.py"): "a kind's description, without torch, stands in the folder of the kind",
    Path("outrider/base/errors.py"): "a message is bounded and freed of secrets when there is one",
    Path("inference/core/ops.py"): "the compiled engine is imported where a CPU runs it",
    Path("outrider/__init__.py"): "load, with torch, is imported when it is asked for",
}
UNTYPED = "# mypy: allow-untyped-defs"
ROOT = Path(__file__).parent.parent
ENTRIES = {command.script for command in COMMANDS.values()}
ENTRY = re.compile(r"\n    run_script\(")  # in the file of a command
API = "outrider/api/model.py"  # stands on everything; `import outrider` reaches it only when it is asked for
# From below: a module imports from its own floor and from those before it, also within a function or by a name in a
# string. The last one has the Python API, the commands and their entry scripts, wherever these lie.
FLOORS = ("outrider/base", "draft_models", "data_prep", "inference", "train", "outrider")


def modules() -> list[Path]:
    folders = (ROOT / folder for folder in ("outrider", *FOLDERS))
    return sorted(path.relative_to(ROOT) for folder in folders for path in folder.rglob("*.py"))


def name_of(path: Path) -> str:
    dotted = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    return dotted if path.parts[0] == "outrider" else f"outrider.{dotted}"


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All there is in a file of the source."""
    return [*ast.walk(ast.parse((ROOT / path).read_text()))]


@cache
def imports_of(path: Path, *, typing: bool = True) -> set[str]:
    """All that a file imports, also in functions, and the modules that its strings name, as "outrider.a.b:NAME".

    With typing=False not what it imports for a type checker only.
    """
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
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value and path not in LATER:
            found |= {node.value.partition(":")[0]} & KNOWN.keys()
    return found


def floor_of(path: Path) -> int:
    above = str(path) in ENTRIES or (path.parts[0] == "outrider" and path.parts[1] != "base")
    return FLOORS.index("outrider" if above else "outrider/base" if path.parts[0] == "outrider" else path.parts[0])


KNOWN = {name_of(path): path for path in modules()}


@pytest.mark.parametrize("path", modules(), ids=str)
def test_imports_point_down(path: Path) -> None:
    imported = imports_of(path, typing=False) & KNOWN.keys()
    assert {module for module in imported if floor_of(KNOWN[module]) > floor_of(path)} == set()


def test_no_folder_imports_itself_by_way_of_others() -> None:
    """The folders of a floor stand in an order too; entry scripts are above all of them."""
    graph: dict[str, set[str]] = {}
    for name, path in KNOWN.items():
        if str(path) not in ENTRIES and path.parts[-2:] != ("outrider", "__init__.py"):
            found = (KNOWN[module] for module in imports_of(path, typing=False) & KNOWN.keys() - {name})
            own = graph.setdefault(str(path.parent), set())
            own |= {str(other.parent) for other in found} - {str(path.parent)}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("path", modules(), ids=str)
def test_configs_are_composed_by_entries_alone(path: Path) -> None:
    if path.parts[0] != "outrider" and str(path) not in ENTRIES:
        assert not {name for name in imports_of(path) if name.startswith("outrider.commands")}


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
            compiled = any(
                re.search("compile_(function|uncounted)|lean|triton.jit", ast.unparse(one))
                for one in function.decorator_list
            )
            assert typed or compiled, f"{path}: {function.name}"


NAMING = {Path("outrider/cli.py"), Path("tests/test_silence.py")}  # which put "outrider." before their names


def test_a_folder_is_imported_as_part_of_the_package() -> None:
    """Under its bare name a module would be there twice, and a test would patch the one that nobody uses."""
    others = [file.relative_to(ROOT) for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    for path in {*modules(), *others} - NAMING:
        texts = (node.value for node in nodes_of(path) if isinstance(node, ast.Constant))
        words = {text.partition(":")[0] for text in texts if isinstance(text, str)} | imports_of(path)
        named = {f"outrider.{word}" for word in words if word.partition(".")[0] in FOLDERS and "." in word}
        within = {name for name in named if name.count(".") > 2 and name.rpartition(".")[0] in KNOWN}
        assert not (named & KNOWN.keys()) | within, path


def test_no_command_is_forgotten() -> None:
    entries = {str(path) for path in modules() if re.search(ENTRY, (ROOT / path).read_text())}
    assert entries == ENTRIES


def test_entries_are_leaves() -> None:
    entry_modules = {name_of(Path(entry)) for entry in {*ENTRIES, API}}
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


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by it, from folders that are no packages: it would end before the first test."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert [name for name in {*names} if names.count(name) > 1] == []


LOADERS = ("from_pretrained", "from_config")


def test_code_of_a_model_is_never_run() -> None:
    """Whatever transformers loads is told not to trust code beside it: left open, it would ask on a terminal."""
    found = []
    for path in modules():
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOADERS:
                owner = ast.unparse(node.func.value)
                trusts = {word.arg: ast.unparse(word.value) for word in node.keywords}.get("trust_remote_code")
                found.append((f"{path}:{node.lineno} {owner}", trusts))
    assert len(found) >= 6
    assert [place for place, trusts in found if trusts != "False"] == []
