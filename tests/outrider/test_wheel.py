"""A wheel works outside a clone and installs one name, so that a user's own `conf` or `train.py` stays theirs; the
version of the code changes with any source, and with no document."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from outrider.base.run_dirs import FOLDERS, code_version

ROOT = Path(__file__).parents[2]
BUILD = """
from setuptools import build_meta
named = build_meta.prepare_metadata_for_build_wheel("..")
build_meta.build_wheel("../made", metadata_directory=f"../{named}")
"""  # as pip does


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = subprocess.run(["git", "ls-files", "outrider", "conf", *FOLDERS, "*.toml", "README.md", "LICENSE"],
                             cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()  # fmt: skip
    for name in tracked:
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_symlink():
                (source / name).symlink_to((ROOT / name).readlink())
            else:
                (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-c", BUILD], cwd=source, check=True, capture_output=True)
    (made,) = (folder / "made").glob("*.whl")
    return made


@pytest.fixture(scope="module")
def environment(wheel: Path) -> Path:
    """An environment into which pip has installed it; the packages that it needs are found where they are here."""
    folder = wheel.parent.with_name("env")
    venv.create(folder)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib"))
    return folder


@pytest.mark.slow
def test_what_is_installed_is_what_is_tested(environment: Path) -> None:
    """File by file, YAML too; in the clone the folders of the package are links."""
    (site,) = environment.glob("lib/python*/site-packages")
    for installed in (file for file in (site / "outrider").rglob("*") if file.suffix not in ("", ".pyc")):
        assert installed.read_bytes() == (ROOT / installed.relative_to(site)).read_bytes()
    for pattern in ("*.py", "*.yaml", "*.txt"):
        for folder in ("outrider", "conf", *FOLDERS):
            for file in (ROOT / folder).rglob(pattern):
                within = file.relative_to(ROOT)
                assert (site / ("outrider" if folder != "outrider" else "") / within).exists(), within


def typed(environment: Path, cwd: Path, *words: str | Path) -> str:
    """What a command of the environment prints in `cwd`, as a user types it."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [environment / "bin" / words[0], *words[1:]]
    done = subprocess.run(command, cwd=cwd, env=outside, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_it_installs_one_name_and_nothing_of_it_imports_the_clone(environment: Path, tmp_path: Path) -> None:
    """Beside files that have the names of its packages."""
    (top,) = environment.glob("lib/python*/site-packages/outrider-*.dist-info/top_level.txt")
    assert top.read_text().split() == ["outrider"]
    for name in FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError(__file__)")
    (tmp_path / "train.py").write_text("raise RuntimeError(__file__)")
    code = (
        "import pkgutil, importlib, sys, outrider\n"
        "from outrider.cli import COMMANDS\n"
        "for command in COMMANDS.values():\n"
        "    command.load_settings(), importlib.import_module('outrider.' + command.script[:-3].replace('/', '.'))\n"
        f"print(*{{name.partition('.')[0] for name in sys.modules}} & {{*{('outrider', *FOLDERS)}}}, outrider.__file__)"
    )
    names, place = typed(environment, tmp_path, "python", "-c", code).split()
    assert names == "outrider"
    assert Path(place).is_relative_to(environment)


@pytest.mark.slow
def test_pip_installs_what_runs_in_any_folder(environment: Path, tmp_path: Path) -> None:
    """Also in one that holds a folder of our name, as a clone is."""
    (tmp_path / "outrider").mkdir()
    (tmp_path / "mine.py").write_text("import outrider\nprint(outrider.__file__, outrider.UserError)")
    place, error = typed(environment, tmp_path, "python", "mine.py").split(" ", 1)
    assert Path(place).is_relative_to(environment)
    assert error == "<class 'outrider.base.errors.UserError'>\n"
    assert typed(environment, tmp_path, "outrider", "--version") == f"outrider {stated('version')}\n"
    assert typed(environment, tmp_path, "outrider").startswith("outrider auto target=MODEL ")


@pytest.mark.slow
@pytest.mark.thorough
def test_pip_installs_what_goes_from_a_model_to_a_report(environment: Path, tmp_path: Path) -> None:
    """It compiles its kernels first."""
    fetched = typed(environment, tmp_path, "outrider", "fetch-target", "model=tiny", "out_dir=model")
    assert "fetch_target out_dir=model model=tiny" in fetched
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt": "one two three"}\n')
    options = ["target=model", "method=prompt_lookup", "prompts=prompts.jsonl", "max_new_tokens=8", "out_dir=out"]
    typed(environment, tmp_path, "evaluate-checkpoint", *options)
    assert (tmp_path / "out" / "report.json").exists()


def stated(key: str) -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][key])


def test_what_is_cited_is_what_is_released() -> None:
    """And the newest changes are those of that version."""
    cited = OmegaConf.to_container(OmegaConf.load(ROOT / "CITATION.cff"))
    assert isinstance(cited, dict)
    assert (cited["version"], cited["license"]) == (stated("version"), stated("license"))
    assert {"cff-version", "message", "title", "abstract", "authors", "keywords"} <= cited.keys()
    papers = {"2406.03853", "2407.12021", "2407.16207", "2406.17276", "2401.06706"}
    assert {str(reference["url"])[-10:] for reference in cited["references"]} >= papers
    heading = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert stated("version") in heading


def test_an_edit_is_another_version_and_a_document_is_none(tmp_path: Path) -> None:
    for folder in ("outrider", *FOLDERS):
        unread = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=unread)

    def version_now() -> str:
        code = "from outrider.base.run_dirs import code_version; print(code_version())"
        return subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    before = version_now()
    assert before.strip() == code_version()
    (tmp_path / "README.md").write_text("more")
    (tmp_path / "train" / "notes.txt").write_text("more")
    assert version_now() == before
    seen = {before}
    for folder in ("outrider", *FOLDERS):
        source = next((tmp_path / folder).rglob("*.py"))
        source.write_text(source.read_text() + "\n")
        seen.add(version_now())
    assert len(seen) == 2 + len(FOLDERS)
