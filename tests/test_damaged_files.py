"""Every JSON file that a command reads, damaged: it goes through, or ends with status 2 and one line that names it.

What reads a file is called as the commands call it (`conf.reported`); three of them are run as such, too.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf import reported
from data_prep.conversations import render_prompt
from draft_models.target import load_tokenizer
from draft_models.tiny_model import TARGET, save_tiny_models
from inference import compare
from inference.settings import EvaluateConfig, MethodConfig
from inference.subject import find_subject, load_drafters, load_models, load_plain
from tests.mutants import mutants

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny_models(folder, "llama")
    return folder


@pytest.fixture
def folder(tmp_path: Path, models: Path) -> Path:
    """A copy of the models to damage."""
    return Path(shutil.copytree(models, tmp_path / "models"))


def require_named(file: Path, run: Callable[[], Any], capsys: pytest.CaptureFixture[str], count: int) -> None:
    """Damage `file` in many ways, one after the other, and `run` what reads it."""
    whole, statuses = file.read_bytes(), set()
    run()
    for name, content in mutants(whole, count):
        file.write_bytes(content)
        capsys.readouterr()
        status = 0
        try:
            with reported():
                run()
        except SystemExit as ended:
            status = ended.code
        except Exception as error:
            raise AssertionError(f"{file.name}, {name}: {type(error).__name__}: {error}") from error
        statuses.add(status)
        if status:
            errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
            assert (status, len(errors)) == (2, 1), name
    file.write_bytes(whole)
    run()
    assert 2 in statuses


def on_target(folder: Path, **changes: Any) -> EvaluateConfig:
    methods = {"lookup": MethodConfig(source="prompt_lookup")}
    return EvaluateConfig(**{"target": str(folder / TARGET), "methods": methods, "max_new_tokens": 8, **changes})


def evaluate_shortly(config: EvaluateConfig) -> None:
    """An evaluation up to the first warm tokens of every arm."""
    subject = find_subject(config)
    ids = render_prompt(["to be or not to be"], subject.tokenizer)
    drafters = load_drafters(config, subject)
    prepared = compare.Prepared(config.methods, {})
    compare.make_bench(config, subject, load_models(config, subject, drafters), prepared, ids)


# ----------------------------------------------------------------------------------------------- models


def test_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_named(folder / TARGET / "config.json", lambda: evaluate_shortly(on_target(folder)), capsys, 100)


def test_generation_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def read() -> None:
        config = on_target(folder)
        subject = find_subject(config)
        load_plain(subject.source, None, subject.dtype, subject.device)

    require_named(folder / TARGET / "generation_config.json", read, capsys, 100)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    def read() -> None:
        tokenizer = load_tokenizer(str(folder / TARGET))
        render_prompt(["to be or not to be </s>"], tokenizer)

    require_named(folder / TARGET / name, read, capsys, 150)
