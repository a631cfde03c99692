"""The version of the code: a change of any source is another version, one of a document is none."""

import runpy
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import setuptools

from outrider.files import PACKAGES, code_version

ROOT = Path(__file__).parents[2]


def test_it_covers_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: asked.update(options))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["setup.py", "editable_wheel"])
    runpy.run_path("setup.py")
    assert {name.partition(".")[0] for name in asked["packages"]} == {*PACKAGES}
    folders = {str(p.parent.relative_to(ROOT)) for package in PACKAGES for p in (ROOT / package).rglob("*.py")}
    assert {name.replace(".", "/") for name in asked["packages"]} == folders
    assert code_version().startswith(version("outrider") + "+")


def test_an_edit_is_another_version_and_a_document_is_none(tmp_path: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))

    def version_now() -> str:
        code = "from outrider.files import code_version; print(code_version())"
        return subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    before = version_now()
    assert before.strip() == code_version()
    (tmp_path / "README.md").write_text("more")
    (tmp_path / "train" / "notes.txt").write_text("more")
    assert version_now() == before
    source = tmp_path / "inference" / "core" / "verify.py"
    source.write_text(source.read_text() + "\n")
    assert version_now() != before
