"""Every command locks its out_dir: a second command is refused, with the name of the first, and changes nothing."""

import itertools
import os
import socket
from pathlib import Path

import pytest

from outrider.base.errors import UserError
from outrider.base.run_dirs import only_run
from outrider.cli import COMMANDS
from outrider.commands import main_of
from outrider.draft_models.targets.settings import EAGLE3, EARLY_EXIT, TABLE, TARGET
from tests.tiers import typical_where
from tests.typed import status_of

NAMES = {*COMMANDS} - {"serve"}  # which has no out_dir
# The options that each command needs to run, besides its out_dir.
OPTIONS = {
    "audit": [f"target={TARGET}", f"answers={TARGET}/config.json"],
    "auto": [f"target={TARGET}", "template=vicuna", "train=[]"],
    "build_trigrams": [f"tokenizer={TARGET}"],
    "calibrate": [f"checkpoint={EARLY_EXIT}"],
    "compare_reports": ["compare=[report,report]"],
    "convert_target": [f"target={TARGET}"],
    "eagle3": [f"target={TARGET}", "seq_len=64"],
    "eesd": [f"target={TARGET}"],
    "evaluate_checkpoint": [f"checkpoint={EARLY_EXIT}", "method=eesd_fixed", "prompt_text=[hello]"],
    "export": [f"checkpoint={EAGLE3}", f"target={TARGET}"],
    "dspark": [f"target={TARGET}"],
    "finetune_drafter": [f"target={TARGET}"],
    "forecast": [f"target={TARGET}", f"answers={TARGET}/config.json", "prompts=mt_bench"],
    "fetch_target": [],
    "generate_responses": [f"target={TARGET}"],
    "measure_engine": [f"target={TARGET}", "method=prompt_lookup", "draft_tokens=[3]", "engine=transformers"],
    "pipeline": ["experiment=demo"],
    "refit": [f"checkpoint={EARLY_EXIT}", f"logs={TARGET}/config.json"],
    "restore_mtp": [f"target={TARGET}", f"base={TARGET}"],
    "toy_target": [],
    "write_prompts": [f"target={TARGET}"],
}
ELSEWHERE = {"build_trigrams": "out.building"}  # the table is renamed when it is complete


@pytest.fixture
def out(tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for out_dirs, with the models in it."""
    for name in (TARGET, EARLY_EXIT, EAGLE3, TABLE):
        (tmp_path / name).symlink_to(tiny_models / name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report").mkdir()
    (tmp_path / "report/report.json").write_text("{}")
    return tmp_path


def run(command: str, *options: str) -> int:
    """The exit status of a command run in this process."""
    return status_of(main_of(command), command, *OPTIONS[command], "out_dir=out", *options)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_command_is_forgotten() -> None:
    assert {*OPTIONS, "replay"} == NAMES  # which does not go on: a test of its own has it


RESUMED = list(itertools.product(OPTIONS, ["true", "false"]))
ONCE = list(zip(OPTIONS, itertools.cycle(["true", "false"]), strict=False))  # every command, and both in turn


@pytest.mark.parametrize(("command", "resume"), typical_where(ONCE.__contains__, RESUMED))
def test_a_second_run_is_refused_by_the_first_ones_name(
    out: Path, capsys: pytest.CaptureFixture, command: str, resume: str
) -> None:
    folder = out / ELSEWHERE.get(command, "out")
    folder.mkdir()
    (folder / "log.jsonl").write_text("of the first run")
    with only_run(folder, "something"):
        before = content(out)
        status = run(command, f"resume={resume}")
        assert content(out) == before
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert status == 2
    assert "another run is writing" in said
    assert f"process {os.getpid()} on {socket.gethostname()}, since 20" in said


@pytest.mark.parametrize("command", ["eesd", "build_trigrams", "evaluate_checkpoint", "pipeline"])
def test_a_rehearsal_is_not_cleared_by_another(out: Path, capsys: pytest.CaptureFixture, command: str) -> None:
    folder = out / "out-debug"
    for mark in ("tiny_models", "logs"):
        (folder / mark).mkdir(parents=True)
        (folder / mark / "something").touch()
    with only_run(folder, "something"):
        before = content(out)
        assert run(command, "debug=true") == 2
        assert content(out) == before
    assert f"process {os.getpid()} on {socket.gethostname()}" in capsys.readouterr().err


def test_a_calibration_holds_the_drafters_directory(
    out: Path, tiny_models: Path, capsys: pytest.CaptureFixture
) -> None:
    """It writes the head there, so no training and no other calibration may run in it."""
    with only_run(tiny_models / EARLY_EXIT, "something"):
        assert run("calibrate") == 2
    assert f"out_dir={EARLY_EXIT}: another run is writing" in capsys.readouterr().err


def test_a_plan_needs_no_directory(out: Path, capsys: pytest.CaptureFixture) -> None:
    """It can be asked for while the training runs."""
    (out / "out").mkdir()
    with only_run(out / "out", "something"):
        before = content(out)
        assert run("eesd", "plan=true") == 0
        assert content(out) == before
    assert "plan exit_layer=1/4" in capsys.readouterr().out


def test_a_command_that_has_failed_lets_go(out: Path) -> None:
    assert run("eesd", "seq_len=9999") == 2
    with only_run(out / "out", "something"):
        pass
    with only_run(out / "out", "something"), pytest.raises(UserError, match="another run"), only_run(out / "out", ""):
        pass
