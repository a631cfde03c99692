"""The pipeline: the real commands once, small; the rules of steps (order, skipping, failing) with a tiny command."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from importlib import import_module
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

from outrider.base.errors import UserError
from outrider.base.run_dirs import only_run
from outrider.base.settings import RunConfig
from outrider.cli import COMMANDS
from outrider.commands import config_for, main_of
from outrider.draft_models.targets.settings import TARGET
from outrider.train.pipeline_run import check_steps, estimate_left, plan_steps, run_pipeline
from outrider.train.settings.pipeline import PipelineConfig
from outrider.train.steps import Record, Step
from tests.forked import Fork
from tests.refusals import refusal
from tests.tiers import typical_where
from tests.train.test_pipeline_options import EXPERIMENTS, PAPERS, pipeline

ROOT = Path(__file__).parents[2]
TINY = """
import json, sys
from pathlib import Path
record = json.loads(Path(sys.argv[2]).read_text())
out_dir = Path(record["settings"]["out_dir"])
print("words", *record["words"], record["settings"])
if (out_dir.parent / f"{out_dir.name}.fails").exists():
    print("no luck", file=sys.stderr)
    sys.exit(3)
out_dir.mkdir(exist_ok=True)
(out_dir / "product").touch()
"""
NAMES = ("responses", "eesd", "calibrate")


def run_here(*words: str) -> str:
    """What the pipeline prints; it and its steps run in this process, without the seconds that imports take."""
    config = pipeline(list(words))
    return printed_by(lambda: run_pipeline(config, plan_steps(config, config_for)))


def printed_by(run: Callable[[], object]) -> str:
    """What `run` prints, whose steps run in this process."""
    printed = StringIO()

    def call(command: list[str], log: Path) -> int:
        script = str(Path(command[1]).relative_to(ROOT))
        (name,) = (listing.name for listing in COMMANDS.values() if listing.script == script)
        with log.open("a") as file, redirect_stdout(file), redirect_stderr(file), patch("sys.argv", command[1:]):
            print("$", *command)
            main_of(name)()
        return 0

    with patch("outrider.train.steps.run_logged", call), redirect_stdout(printed):
        run()
    return printed.getvalue()


@pytest.mark.parametrize("experiment", typical_where("vicuna_7b".__eq__, [*PAPERS]))
@pytest.mark.slow
def test_one_command_runs_the_whole_mission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experiment: str) -> None:
    """One test, for it takes long: what it leaves, what it prints, and that nothing of it is done again."""
    monkeypatch.chdir(tmp_path)
    out_dir = tmp_path / "run-debug"
    words = [f"experiment={experiment}", "debug=true", f"out_dir={tmp_path / 'run'}", "steps.report.max_new_tokens=6"]
    steps = plan_steps(pipeline(words), config_for)
    printed = run_here(*words)
    for step in steps:
        assert step.product.exists()
        assert (out_dir / "logs" / f"{step.name}.log").read_text().startswith("$ ")
        assert printed.count(f"pipeline step={step.name} ") == 2
    check_report(out_dir, experiment)
    methods = {"eesd": "eesd_survival", "small_lm": "vanilla"}
    for drafter in methods.keys() & {step.name for step in steps}:
        _, _, measured = (out_dir / drafter / "README.md").read_text().partition("## Measured")
        assert f"| {methods[drafter]} |" in measured
    before = {path: path.stat().st_mtime_ns for path in out_dir.rglob("*.safetensors")}
    again = run_here(*words, "resume=true")
    assert again.count("state=done-before") == len(steps)
    assert (out_dir / "report/report.md").read_text() in again
    assert {path: path.stat().st_mtime_ns for path in out_dir.rglob("*.safetensors")} == before


@pytest.mark.slow
@pytest.mark.thorough
def test_steps_are_processes(tmp_path: Path) -> None:
    """Started as from a shell, in a directory of the user's."""
    command = [sys.executable, ROOT / "train/pipeline.py", "experiment=smollm2_demo", "debug=true", "~steps.report"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=570, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr
    for product in ("fetch/fetched.json", "prompts/prompts.json"):
        assert (tmp_path / "runs/smollm2_demo-debug" / product).exists()


def check_report(out_dir: Path, experiment: str) -> None:
    reports = json.loads((out_dir / "report/report.json").read_text())["reports"]
    assert len(reports) == {"vicuna_7b": 10, "llama2_13b": 6, "opt_13b": 7}[experiment]
    for figures in reports:
        lossless = figures["lossless"]
        assert lossless["identical"] + lossless["excused_ties"] == lossless["checked"] == 2
        assert figures["tau"] >= 1
        assert len(figures["speedup"]["ci95"]) == len(figures["speedup"]["vs_transformers_generate"]["ci95"]) == 2


@pytest.mark.parametrize("experiment", typical_where({"demo", "vicuna_7b"}.__contains__, EXPERIMENTS))
def test_what_steps_leave_for_later_ones_need_not_be_there(tmp_path: Path, experiment: str) -> None:
    words = [f"experiment={experiment}", f"out_dir={tmp_path / 'run'}"]
    words += ["debug=true"] if experiment in PAPERS else []  # their targets are on the Hub
    config = pipeline(words)
    check_steps(config, plan_steps(config, config_for))


@pytest.mark.parametrize(("words", "step", "message"), [
    (["steps.report.prompts=nowhere.jsonl"], "report", "prompts=nowhere.jsonl: no such"),
    (["steps.trigrams.orders=[7]"], "trigrams", r"orders\[0\]=7: expected"),
    (["steps.report.max_new=7"], "report", "max_new: no such option"),
    (["steps.trigrams.data=local", "steps.trigrams.data.path=nowhere"], "trigrams", "data.path='nowhere'"),
    (["target=nobody/nothing"], "responses", "target=nobody/nothing: "),
    (["target=BARE", "steps.responses.data=local", "steps.responses.data.path=BARE.jsonl"], "responses", "no chat"),
    (["target=BARE", *(f"~steps.{name}" for name in ("responses", "eesd", "small_lm", "calibrate", "report")),
      "steps.trigrams.tokenizer=BARE/config.json"], "trigrams", "another kind of file; give a Sent"),
])  # fmt: skip
def test_no_step_starts_where_a_later_one_could_not(
    tmp_path: Path, tiny_models: Path, words: list[str], step: str, message: str
) -> None:
    shutil.copytree(tiny_models / TARGET, tmp_path / "bare")
    (tmp_path / "bare.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    options = [word.replace("BARE", str(tmp_path / "bare")) for word in words]
    config = pipeline(["experiment=demo", f"out_dir={tmp_path / 'run'}", *options])
    with pytest.raises(UserError, match=f"step {step}, before any has run: .*{message}"):
        import_module("outrider.train.pipeline").carry_out_steps(config)
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True, kw_only=True)
class TinyConfig(RunConfig):
    """The settings of the tiny command."""

    minutes: float | None = None


class Mission:
    """Three steps of the tiny command, each made from the one before; with NAME.fails a step fails."""

    def __init__(self, folder: Path) -> None:
        self.out_dir, self.script = folder / "out", folder / "tiny.py"
        self.script.write_text(TINY)

    def steps(self, folder: Path, **options: str) -> list[Step]:
        """options: one of a step, by its name."""
        earlier = [[], *([name] for name in NAMES)]
        return [
            Step(name, str(self.script), ["o=1"], TinyConfig(out_dir=str(folder / name)), folder / name / "product",
                 ["o=1", *([options[name]] if name in options else [])], inputs)
            for name, inputs in zip(NAMES, earlier, strict=False)
        ]  # fmt: skip

    def run(self, resume: bool = True, debug: bool = False, **options: str) -> None:
        config = PipelineConfig(
            steps={name: {} for name in NAMES}, out_dir=str(self.out_dir), resume=resume, debug=debug
        )
        run_pipeline(config, self.steps(config.folder, **options))


@pytest.fixture
def mission(tmp_path: Path) -> Mission:
    return Mission(tmp_path)


def ran(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The steps that ran since."""
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("pipeline step=")]
    return [words[1].removeprefix("step=") for words in lines if words[2] == "state=started"]


def test_steps_run_in_order_and_once(mission, capsys):
    mission.run(resume=False)
    printed = capsys.readouterr().out
    assert [printed.index(f"pipeline step={name} ") for name in NAMES] == sorted(
        printed.index(f"pipeline step={name} ") for name in NAMES
    )
    assert f"words o=1 {{'out_dir': '{mission.out_dir}/eesd'" in printed
    assert f"--settings {mission.out_dir}/logs/eesd.settings.json" in (mission.out_dir / "logs/eesd.log").read_text()
    mission.run()
    assert ran(capsys) == []
    refusal(r"holds an earlier run \(logs\); resume=true continues it", mission.run, resume=False)


def test_a_product_that_is_gone_is_made_again_with_what_was_made_from_it(mission, capsys):
    """A step's command may be run by hand there: nothing is removed under it."""
    mission.run()
    (mission.out_dir / "eesd/product").unlink()
    for name in NAMES:
        (mission.out_dir / name / "checkpoint").touch()
    capsys.readouterr()
    with only_run(mission.out_dir / "calibrate", "a training"):
        refusal(r"calibrate: another run is writing the product of step calibrate there", mission.run)
        assert (mission.out_dir / "calibrate/checkpoint").exists()
    assert ran(capsys) == ["eesd"]
    mission.run()
    assert ran(capsys) == ["calibrate"]
    mission.run()
    assert ran(capsys) == []
    remaining = [name for name in NAMES if (mission.out_dir / name / "checkpoint").exists()]
    assert remaining == ["responses", "eesd"]  # nobody goes on with what was made from something else


def test_another_option_of_a_finished_step_is_refused_by_name(mission):
    mission.run(eesd="x.y=1")
    refusal(r"logs/eesd\.json was made with other settings: x\.y=\"2\" \(was \"1\"\)", mission.run, eesd="x.y=2")


def test_a_failure_names_the_step_and_its_log_and_the_next_run_goes_on_there(mission, capsys):
    fails = mission.out_dir / "eesd.fails"
    mission.out_dir.mkdir()
    fails.touch()
    refusal(r"step eesd failed \(exit status 3\); see .*logs/eesd\.log; resume=true continues", mission.run)
    assert "no luck" in (mission.out_dir / "logs/eesd.log").read_text()
    assert "pipeline step=eesd seconds=0" in capsys.readouterr().out
    fails.unlink()
    mission.run(eesd="z=1")  # what failed may be tried with other options
    assert ran(capsys) == ["eesd", "calibrate"]
    assert "no luck" in (mission.out_dir / "logs/eesd.log").read_text()  # which is kept
    (mission.out_dir / "eesd/product").unlink()
    fails.touch()
    refusal("step eesd failed", mission.run, eesd="z=1")
    fails.unlink()
    mission.run(eesd="z=2")  # also what was done once


@pytest.mark.parametrize(
    ("script", "reason"), [("", "it left no responses/product"), (TINY + "sys.exit(1)", "exit status 1")]
)
def test_a_step_that_leaves_nothing_or_says_that_it_failed_has_failed(mission, script, reason):
    mission.script.write_text(script)
    refusal(rf"step responses failed \({reason}\)", mission.run)


def test_a_step_took_all_the_time_of_its_runs(mission):
    mission.out_dir.mkdir()
    (mission.out_dir / "eesd.fails").touch()
    refusal("step eesd failed", mission.run)
    file = mission.out_dir / "logs/eesd.json"
    record = json.loads(file.read_text())
    assert (record["seconds"] > 0, record["finished"]) == (True, 0)
    file.write_text(json.dumps({**record, "seconds": 100}))
    (mission.out_dir / "eesd.fails").unlink()
    mission.run()
    seconds = {name: json.loads((mission.out_dir / f"logs/{name}.json").read_text())["seconds"] for name in NAMES}
    assert 100 < seconds["eesd"] < 160
    assert seconds["calibrate"] < 60


def test_the_time_left_is_that_of_all_steps_that_are_not_done(mission):
    """Also of a step that was cut and goes on where it was; nobody knows it where one step does not say."""
    steps = mission.steps(mission.out_dir)
    answers, eesd, head = (replace(step, expected=minutes) for step, minutes in zip(steps, (5, 3, 2), strict=True))
    records = {"responses": Record([], 1.0, 1.0, {}), "eesd": Record([], 1.0, 0.0, {})}
    assert estimate_left(eesd, [head], records)(50.0) == 250.0
    assert estimate_left(eesd, [head], records)(1000.0) == 120.0  # those after it still take theirs
    assert estimate_left(answers, [eesd, head], records)(0.0) == 600.0
    assert estimate_left(head, [], records)(1000.0) == 0.0
    assert estimate_left(eesd, [replace(head, expected=None)], records)(0.0) is None


def test_a_rehearsal_lies_beside_the_run(mission, capsys):
    mission.run()
    capsys.readouterr()
    debug = mission.out_dir.with_name("out-debug")
    mission.run(resume=False, debug=True)
    assert ran(capsys) == [*NAMES]
    (debug / "rubbish").touch()
    mission.run(debug=True)
    assert ran(capsys) == []
    assert (debug / "rubbish").exists()
    mission.run(resume=False, debug=True)
    assert ran(capsys) == [*NAMES]
    assert not (debug / "rubbish").exists()


def test_one_process_is_enough(mission, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refusal("started as several processes", mission.run)


def test_a_running_step_ends_with_the_pipeline(tmp_path: Path) -> None:
    """SIGTERM to the pipeline alone, as `kill` sends it: no orphan goes on writing, and its user reads how to go on."""
    pid, script = tmp_path / "pid", tmp_path / "sleeper.py"
    script.write_text(f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n")
    code = (
        "from outrider.commands.ending import end_on_sigterm, report_errors\n"
        "from tests.train.test_pipeline import *\n"
        f"mission = Mission(Path({str(tmp_path)!r}))\nmission.script = Path({str(script)!r})\n"
        "with end_on_sigterm(), report_errors('again'):\n    mission.run()\n"
    )
    running = Fork(["-c", code])
    deadline = time.monotonic() + 60
    while not pid.exists() or not pid.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child = int(pid.read_text())
    running.send_signal(signal.SIGTERM)
    assert running.communicate(timeout=30)[1].splitlines()[-2:] == ["interrupted; this continues it:", "again"]
    assert running.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
