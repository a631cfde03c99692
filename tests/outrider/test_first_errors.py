"""What is wrong with a path is said before torch is imported, for every path option of every command."""

import dataclasses
import json
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.base import settings
from outrider.base.run_dirs import only_run
from outrider.base.settings import RunConfig, Settings
from outrider.cli import COMMANDS
from outrider.data_prep.text.settings import RecordFile, SourceConfig
from outrider.draft_models.targets.settings import InputPath
from tests.tiers import quick_where, typical_where

RUN = """
import contextlib, io, json, sys
from outrider import cli
sys.modules["torch"] = None  # to import it is a crash, status 3
for words in json.load(sys.stdin):
    sys.argv, said = ["outrider", *words], io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        cli.main()
    print(json.dumps((said.getvalue().splitlines() or [""])[-1]), file=sys.__stdout__)
"""
SOME = {  # what a command needs besides; a name on the Hub is looked up after the import of torch
    **{name: ["target=owner/name"] for name in COMMANDS},
    "measure_engine": ["target=owner/name", "engine=vllm", "draft_tokens=[4]"],
    "replay": ["transcripts=some.jsonl", "tokenizer=owner/name", "prompts=some.jsonl"],
    "audit": ["target=owner/name", "answers=some.jsonl"], "build_trigrams": ["tokenizer=owner/name"],
    "compare_reports": ["compare=[report,report]"], "calibrate": ["checkpoint=report"],
    "export": ["checkpoint=report", "engine=openvino"], "pipeline": ["experiment=demo"],
    "fetch_target": ["model=smollm2_135m"], "toy_target": ["layers=2"],
    "refit": ["checkpoint=report", "logs=some.jsonl"], "restore_mtp": ["target=owner/name", "base=owner/name"],
    "forecast": ["target=owner/name", "answers=some.jsonl", "prompts=some.jsonl"],
}  # fmt: skip
INSTEAD = {"file": "target", "drafter.path": "drafter"}  # options that exclude what `SOME` or a default gives
BESIDES = {
    ("audit", "prompts"): ["server=http://localhost:1"], ("finetune_drafter", "drafter.path"): ["drafter=pretrained"],
}  # fmt: skip


def paths(kind: type[Settings], prefix: str = "") -> Iterator[tuple[str, InputPath, str]]:
    """(key, type, form of its value) of each path option, also in nested settings."""
    for own in dataclasses.fields(kind):
        hint = typing.get_type_hints(kind, include_extras=True)[own.name]
        if isinstance(hint, type) and issubclass(hint, Settings):
            yield from paths(hint, f"{prefix}{own.name}.")
            if issubclass(hint, SourceConfig):
                yield f"{own.name}.path", RecordFile("", begins=(b"",)), "{0}"
        for place in settings.constraints_of(hint):
            many = {list: "[{0},{0}]", tuple: "[{0},{0}]"}.get(typing.get_origin(hint) or hint, "{0}")
            if isinstance(place, InputPath):
                yield prefix + own.name, place, many


def mistakes(command: str) -> Iterator[tuple[list[str], str]]:
    """(options, the value that is refused) for each path option of a command, of which `SOME` has another value. All
    kinds of wrong values take turns."""
    for number, (key, place, form) in enumerate(paths(COMMANDS[command].load_settings())):
        if key == "drafters":  # by name, for kinds that a user adds
            continue
        wrong = ["gone", "empty.jsonl"] + ["empty"] * (not place.begins or bool(place.holds))
        wrong += ["blank.jsonl"] * isinstance(place, RecordFile) + ["some.jsonl"] * (b"" not in place.begins)
        words = [word for word in SOME[command] if word.partition("=")[0] not in (key, INSTEAD.get(key))]
        words = [word for word in words if (command, key) != ("audit", "prompts") or "answers" not in word]
        words += ["data=local"] * key.startswith("data.") + BESIDES.get((command, key), [])
        value = wrong[number % len(wrong)]
        yield [command, *words, f"{key}={form.format(value)}"], value


PARTS = [["eesd"], list(COMMANDS)[::5], list(COMMANDS)]


@pytest.mark.parametrize("commands", typical_where(PARTS[:2].__contains__, quick_where(PARTS[:1].__contains__, PARTS)))
def test_a_wrong_path_and_an_out_dir_in_use_are_refused_without_torch(commands: list[str], tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text('{"turns": ["so"]}\n')
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "report").mkdir()
    (tmp_path / "report/report.json").write_text("{}")
    for name in ("empty", "held"):
        (tmp_path / name).mkdir()
    cases = [case for command in commands for case in mistakes(command)]
    runs = [name for name in commands if issubclass(COMMANDS[name].load_settings(), RunConfig)]
    for name in runs:
        schema = typing.cast(type[RunConfig], COMMANDS[name].load_settings())
        cases.append(([name, *SOME[name], "out_dir=held"], "another run is writing"))
        for number, pattern in enumerate(schema.run_files):
            (tmp_path / f"{name}{number}").mkdir()
            (tmp_path / f"{name}{number}" / pattern.replace("*", "7")).touch()
            cases.append(([name, *SOME[name], f"out_dir={name}{number}"], "holds an earlier run"))
    cases.append((["eesd", *SOME["eesd"], "out_dir=some.jsonl"], "cannot be written"))
    cases.append((["auto", *SOME["auto"], "prompts=some.jsonl"], "expected at least 10"))
    with only_run(tmp_path / "held", "a test"):
        done = subprocess.run(
            [sys.executable, "-c", RUN], input=json.dumps([words for words, _ in cases]),
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
    errors = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]
    assert len(errors) == len(cases) > 4 * len(commands)
    assert [(words, error) for (words, value), error in zip(cases, errors, strict=True)
            if not (error.startswith("error: ") and value in error)] == []  # fmt: skip
    wrong = {value for _, value in cases}
    assert len(commands) < len(COMMANDS) or wrong > {"gone", "empty", "empty.jsonl", "blank.jsonl", "some.jsonl"}
