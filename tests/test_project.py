"""The shape of the project: imports point one way, every config composes, names do not shadow dependencies."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("conf", "data_prep", "draft_models", "inference", "outrider", "train")
ENTRIES = {
    "data_prep/build_trigrams.py",
    "data_prep/convert_target.py",
    "data_prep/generate_responses.py",
    "inference/evaluate_checkpoint.py",
    "train/calibrate.py",
    "train/eesd.py",
    "train/finetune_drafter.py",
    "train/pipeline.py",
    "train/toy_target.py",
}
API = "outrider/api.py"  # stands on everything; `import outrider` reaches it only when it is asked for
MAY_IMPORT = {
    "outrider": {"outrider"},
    "draft_models": {"draft_models", "outrider"},
    "inference": {"inference", "draft_models", "outrider"},
    "data_prep": {"data_prep", "draft_models", "inference", "outrider"},
    "train": {"train", "data_prep", "draft_models", "inference", "outrider"},
    "conf": {"conf", "outrider"},
}


def modules() -> list[Path]:
    return sorted(p.relative_to(ROOT) for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", modules(), ids=str)
def test_imports_point_one_way(path: Path) -> None:
    package = path.parts[0]
    allowed = set(MAY_IMPORT[package])
    if str(path) in {*ENTRIES, API}:
        allowed |= {"conf", "data_prep"}  # entries are leaves: they compose, nothing imports them
    if str(path) == API:
        allowed |= {"draft_models", "inference"}
    ours = {name.partition(".")[0] for name in imports_of(path)} & {*PACKAGES, "tests", "benchmarks"}
    assert ours <= allowed


def test_entries_are_leaves() -> None:
    entry_modules = {entry.removesuffix(".py").replace("/", ".") for entry in {*ENTRIES, API}}
    for path in modules():
        if path == Path("outrider/__init__.py"):
            continue
        assert not imports_of(path) & entry_modules, path


@pytest.mark.parametrize("package", ["train", "inference", "data_prep"])
def test_no_module_shadows_another_when_its_folder_is_the_script_path(package: str) -> None:
    """`python train/eesd.py` puts train/ first on sys.path, so no file there may be called like a dependency."""
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
