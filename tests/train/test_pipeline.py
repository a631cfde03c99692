"""The pipeline: the real commands once, small; its rules about order, skipping and failing with stand-ins for them."""

import json
import os
import shutil
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
from outrider.base.progress import Stage
from outrider.base.run_dirs import only_run
from outrider.base.settings import Settings
from outrider.commands import config_for, main_of
from outrider.draft_models.targets.settings import TARGET
from outrider.train.pipeline_run import Job, jobs_of, run_pipeline, step_stage, words_of
from outrider.train.pipeline_settings import HERE, STEPS, Options, PipelineConfig, PipelineStep
from tests.refusals import refusal
from tests.tiers import typical_where
from tests.train.test_pipeline_options import EXPERIMENTS, PAPERS, pipeline, steps_of

ROOT = Path(__file__).parents[2]
STAND_IN = """
import json, sys
from pathlib import Path
held = json.loads(Path(sys.argv[2]).read_text())
given = dict(word.split("=", 1) for word in held["words"]) | held["settings"]
print("words", *held["words"], held["settings"])
if Path(given["fails"]).exists():
    print("no luck", file=sys.stderr)
    sys.exit(3)
out_dir = Path(given["out_dir"])
out_dir.mkdir(exist_ok=True)
(out_dir / "product").write_text("made")
with open(given["calls"], "a") as calls:
    calls.write(out_dir.name + "\\n")
"""


def run_here(*words: str) -> str:
    """What the pipeline says; it and its steps run in this process, without the seconds that imports take."""
    config = pipeline(list(words))
    return said_by(lambda: run_pipeline(config, jobs_of(config, config_for)))


def said_by(run: Callable[[], object]) -> str:
    """What `run` says, whose steps run in this process."""
    said = StringIO()

    def call(command: list[str], log: Path) -> int:
        script = Path(command[1]).relative_to(ROOT).with_suffix("")
        with log.open("a") as file, redirect_stdout(file), redirect_stderr(file), patch("sys.argv", command[1:]):
            print("$", *command)
            main_of(script.name)()
        return 0

    with patch("outrider.train.pipeline_run._tee", call), redirect_stdout(said):
        run()
    return said.getvalue()


@pytest.mark.parametrize("experiment", typical_where("vicuna_7b".__eq__, [*PAPERS]))
@pytest.mark.slow
def test_one_command_runs_the_whole_mission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experiment: str) -> None:
    """One test, for it takes long: what it leaves, what it says, and that nothing of it is done again."""
    monkeypatch.chdir(tmp_path)
    out_dir, made = tmp_path / "run-debug", steps_of(experiment)
    words = [f"experiment={experiment}", "debug=true", f"out_dir={tmp_path / 'run'}", "steps.report.max_new_tokens=6"]
    said = run_here(*words)
    for name in made:
        assert (out_dir / STEPS[name].product).exists()
        assert (out_dir / "logs" / f"{name}.log").read_text().startswith("$ ")
        assert said.count(f"pipeline step={name} ") == 2
    check_report(out_dir, experiment)
    methods = {"eesd": "eesd_survival", "small_lm": "vanilla"}
    for drafter in methods.keys() & made:
        _, _, measured = (out_dir / drafter / "README.md").read_text().partition("## Measured")
        assert f"| {methods[drafter]} |" in measured
    before = {path: path.stat().st_mtime_ns for path in out_dir.rglob("*.safetensors")}
    again = run_here(*words, "resume=true")
    assert again.count("state=done-before") == len(made)
    assert (out_dir / "report/report.md").read_text() in again
    assert {path: path.stat().st_mtime_ns for path in out_dir.rglob("*.safetensors")} == before


@pytest.mark.slow
@pytest.mark.thorough
def test_steps_are_processes(tmp_path: Path) -> None:
    """Started as from a shell, in a directory of the user's."""
    command = [sys.executable, ROOT / "train/pipeline.py", "experiment=smollm2_demo", "debug=true", "~steps.report"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=570, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
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
def test_what_steps_leave_for_others_need_not_be_there(tmp_path: Path, experiment: str) -> None:
    words = [f"experiment={experiment}", f"out_dir={tmp_path / 'run'}"]
    words += ["debug=true"] if experiment in PAPERS else []  # their targets are on the Hub
    jobs_of(pipeline(words), config_for)


@pytest.mark.parametrize(("words", "step", "said"), [
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
    tmp_path: Path, tiny_models: Path, words: list[str], step: str, said: str
) -> None:
    shutil.copytree(tiny_models / TARGET, tmp_path / "bare")
    (tmp_path / "bare.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    given = [word.replace("BARE", str(tmp_path / "bare")) for word in words]
    config = pipeline(["experiment=demo", f"out_dir={tmp_path / 'run'}", *given])
    with pytest.raises(UserError, match=f"step {step}, before any has run: .*{said}"):
        import_module("outrider.train.pipeline").main.__wrapped__(config)
    assert not (tmp_path / "run").exists()


class Mission:
    """A pipeline of three of the steps, each made from the one before, by `STAND_IN`; with NAME.fails one fails."""

    names = ("responses", "eesd", "calibrate")

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out_dir, self.calls, self.script = folder / "out", folder / "calls", folder / "stand_in.py"
        self.script.write_text(STAND_IN)
        before: tuple[str, ...] = ()
        for name in self.names:
            links = {"calls": self.calls, "fails": f"{folder}/{name}.fails", "reads": f"{HERE}/{''.join(before)}"}
            monkeypatch.setitem(STEPS, name, PipelineStep(str(self.script), f"{name}/product", links))
            before = (name,)

    def run(self, resume: bool = True, debug: bool = False, **more: Options) -> list[str]:
        """The steps that ran."""
        self.calls.write_text("")
        steps = {name: {"o": 1} for name in self.names}
        config = PipelineConfig(steps=steps, more=more, out_dir=str(self.out_dir), resume=resume, debug=debug)
        run_pipeline(config, stand_ins(config))
        return self.calls.read_text().split()


@dataclass(frozen=True)
class Given(Settings):
    """The settings of a stand-in."""

    out_dir: str
    minutes: float | None = None


def stand_ins(config: PipelineConfig) -> dict[str, Job]:
    """Jobs without settings of a command, in the directory in which the pipeline runs them."""
    placed = {name: config.arguments(name) for name in config.to_do}
    return {name: Job(STEPS[name].script, words_of(all_), Given(all_["out_dir"])) for name, all_ in placed.items()}


@pytest.fixture
def mission(tmp_path, monkeypatch) -> Mission:
    return Mission(tmp_path, monkeypatch)


def test_steps_run_in_order_and_once(mission, capsys):
    assert mission.run(resume=False) == list(mission.names)
    said = capsys.readouterr().out
    assert f"words calls={mission.calls}" in said
    assert f"reads={mission.out_dir}/responses o=1 out_dir={mission.out_dir}/eesd resume=true" in said
    assert f"--settings {mission.out_dir}/logs/eesd.settings.json" in (mission.out_dir / "logs/eesd.log").read_text()
    assert mission.run() == []
    refusal(r"holds an earlier run \(logs\); resume=true continues it", mission.run, resume=False)


def test_a_product_that_is_gone_is_made_again_with_what_was_made_from_it(mission):
    mission.run()
    (mission.out_dir / "eesd/product").unlink()
    for name in mission.names:
        (mission.out_dir / name / "checkpoint").touch()
    assert mission.run() == ["eesd", "calibrate"]
    assert mission.run() == []
    kept = [name for name in mission.names if (mission.out_dir / name / "checkpoint").exists()]
    assert kept == ["responses", "eesd"]  # nobody goes on with what was made from something else


def test_what_is_to_be_made_again_is_not_removed_under_a_run(mission):
    """A step's command may be run by hand, in the pipeline's directory."""
    mission.run()
    (mission.out_dir / "eesd/product").unlink()
    calibrate = mission.out_dir / "calibrate"
    (calibrate / "checkpoint").touch()
    with only_run(calibrate, "a training"):
        refusal(r"calibrate: another run is writing the product of step calibrate there", mission.run)
        assert (calibrate / "checkpoint").exists()
    assert mission.run() == ["calibrate"]
    assert not (calibrate / "checkpoint").exists()


def test_other_options_are_refused_by_name(mission):
    mission.run(eesd={"x.y": 1})
    refusal(r"logs/eesd\.json was made with other settings: x\.y=\"2\" \(was \"1\"\)", mission.run, eesd={"x.y": 2})


def test_a_failure_names_the_step_and_its_log_and_the_next_run_goes_on_there(mission, capsys):
    (mission.out_dir.parent / "eesd.fails").touch()
    refusal(r"step eesd failed \(exit status 3\); see .*logs/eesd\.log; resume=true continues", mission.run)
    assert "no luck" in (mission.out_dir / "logs/eesd.log").read_text()
    assert "pipeline step=eesd seconds=0" in capsys.readouterr().out
    (mission.out_dir.parent / "eesd.fails").unlink()
    assert mission.run(eesd={"z": 1}) == ["eesd", "calibrate"]  # what failed may be tried with other options
    assert "no luck" in (mission.out_dir / "logs/eesd.log").read_text()  # which is kept
    (mission.out_dir / "eesd/product").unlink()
    (mission.out_dir.parent / "eesd.fails").touch()
    refusal("step eesd failed", mission.run, eesd={"z": 1})
    (mission.out_dir.parent / "eesd.fails").unlink()
    assert mission.run(eesd={"z": 2}) == ["eesd", "calibrate"]  # also what was done once


def test_a_step_took_all_the_time_of_its_runs(mission):
    (mission.out_dir.parent / "eesd.fails").touch()
    refusal("step eesd failed", mission.run)
    record = mission.out_dir / "logs/eesd.json"
    spent = json.loads(record.read_text())
    assert (spent["seconds"] > 0, spent["finished"]) == (True, 0)
    record.write_text(json.dumps({**spent, "seconds": 100}))
    (mission.out_dir.parent / "eesd.fails").unlink()
    mission.run()
    took = {name: json.loads((mission.out_dir / f"logs/{name}.json").read_text())["seconds"] for name in mission.names}
    assert 100 < took["eesd"] < 160
    assert took["calibrate"] < 60


def test_the_time_left_is_that_of_all_steps_that_are_not_done(monkeypatch):
    """Also of a step that was cut and goes on where it was; nobody knows it where one step does not say."""
    minutes = {"target": 5, "eesd": 3, "report": 2}
    config = PipelineConfig(steps={name: {} for name in minutes}, expected_minutes=minutes)
    monkeypatch.setattr(Stage, "spent", 50.0)
    assert str(step_stage(config, "eesd", {"target"})) == "step 2/3 eesd"
    assert step_stage(config, "eesd", {"target"}).left == 250.0
    assert step_stage(config, "eesd", {"target"}, spent=100.0).left == 150.0
    assert step_stage(config, "eesd", {"target"}, spent=1000.0).left == 120.0  # those after it still take theirs
    assert step_stage(config, "report", {"target", "eesd"}, spent=1000.0).left == 0.0
    assert step_stage(replace(config, debug=True), "eesd", {"target"}).left is None
    unknown = replace(config, expected_minutes={"target": 5, "eesd": 3})
    assert step_stage(unknown, "eesd", {"target"}).left is None


@pytest.mark.parametrize(
    ("script", "why"), [("", "it left no responses/product"), (STAND_IN + "sys.exit(1)", "exit status 1")]
)
def test_a_step_that_leaves_nothing_or_says_that_it_failed_has_failed(mission, script, why):
    mission.script.write_text(script)
    refusal(rf"step responses failed \({why}\)", mission.run)


def test_a_rehearsal_lies_beside_the_run(mission):
    mission.run()
    assert mission.run(resume=False, debug=True) == list(mission.names)
    debug = mission.out_dir.with_name("out-debug")
    assert f" o=1 out_dir={debug}/eesd " in (debug / "logs/eesd.log").read_text()
    (debug / "rubbish").touch()
    assert mission.run(debug=True) == []
    assert (debug / "rubbish").exists()
    assert mission.run(resume=False, debug=True) == list(mission.names)
    assert not (debug / "rubbish").exists()


def test_a_given_target_is_not_made_again(mission, monkeypatch):
    """And what was done with another one is not gone on with."""
    links = {"calls": mission.calls, "fails": f"{mission.out_dir}/none"}
    monkeypatch.setitem(STEPS, "fetch", PipelineStep(str(mission.script), "fetch/product", links))
    monkeypatch.setitem(STEPS, "eesd", PipelineStep(str(mission.script), "eesd/product", {**links, "t": "{target}"}))
    config = PipelineConfig(steps={"fetch": {}, "eesd": {}}, out_dir=str(mission.out_dir))
    run_pipeline(config, stand_ins(config))
    assert mission.calls.read_text().split() == ["fetch", "eesd"]
    with pytest.raises(UserError, match=r'made with other settings: t="mine" \(was ".?{out_dir}/fetch'):
        run_pipeline(replace(config, target="mine", resume=True), {})
    other = replace(config, target="mine", out_dir=str(mission.out_dir.with_name("other")))
    run_pipeline(other, stand_ins(other))
    assert mission.calls.read_text().split() == ["fetch", "eesd", "eesd"]


def test_one_process_is_enough(mission, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refusal("started as several processes", mission.run)


def test_a_running_step_ends_with_the_pipeline(tmp_path):
    """SIGTERM to the pipeline alone, as `kill` sends it: no orphan goes on writing, and its user reads how to go on."""
    script = tmp_path / "sleeper.py"
    script.write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    code = (
        "from outrider.train.pipeline_settings import *\nfrom outrider.train.pipeline_run import Job, run_pipeline\n"
        "from outrider.commands import reported\nfrom outrider.commands.interrupts import terminable\n"
        f"STEPS['target'] = PipelineStep({str(script)!r}, 'x')\n"
        f"config = PipelineConfig(steps={{'target': {{}}}}, out_dir={str(tmp_path / 'out')!r})\n"
        "with terminable(), reported('again'):\n"
        f"    run_pipeline(config, {{'target': Job({str(script)!r}, [], config)}})\n"
    )
    pipeline = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child = int((tmp_path / "pid").read_text())
    pipeline.terminate()
    assert pipeline.communicate(timeout=30)[1].splitlines()[-2:] == ["interrupted; this continues it:", "again"]
    assert pipeline.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
