"""What a run says and does with its minutes, and what a base model needs no template for.

Times are of clocks that the tests turn.
"""

import json
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from outrider.base import progress
from outrider.base.errors import UserError
from outrider.base.progress import RELAY, Stage
from outrider.base.settings import RunConfig
from outrider.commands import config_for, main_of
from outrider.draft_models.targets.settings import EAGLE3, EARLY_EXIT, TARGET
from outrider.inference.loading.rehearsal import check_inputs
from outrider.inference.measure.statistics import MIN_PROMPTS
from outrider.inference.measure.time_limit import TimeLimit
from outrider.train import auto
from outrider.train.auto_choice import FirstAnswers, choose_trainings, configure_pipeline, describe_choice
from outrider.train.auto_run import run_auto
from outrider.train.pipeline_run import plan_steps, run_pipeline
from outrider.train.settings.auto import AutoConfig
from outrider.train.steps import run_logged
from tests.conf.test_configs import compose_and_build
from tests.typed import status_of

CONFIG = AutoConfig(target="org/model", prompts="p.jsonl", minutes=15.0)
# thirty prompts on two shared cores: the look has answered all that are not held out, and a step takes long to load
BUSY = FirstAnswers(
    "cpu", 20, tokens_per_second=14.0, answer_tokens=157.0, prompts=20, answered=20, loading=0.5, spent=5.0
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Commands that take `seconds` of `clock`, by step, and leave their products; their settings are in `given`."""
    made = SimpleNamespace(clock=Clock(), seconds={}, given={})

    def run(script: str, words: list[str], settings: RunConfig, log: Path) -> int:
        made.given[log.stem] = settings
        made.clock.now += made.seconds.get(log.stem, 0.0)
        Path(settings.out_dir).mkdir(exist_ok=True)
        for product in ("prompts.json", "summary.json", "table.safetensors", "report.json"):
            (Path(settings.out_dir) / product).touch()
        return 0

    monkeypatch.setattr("outrider.train.steps.run_command", run)
    monkeypatch.setattr("outrider.train.steps.time", SimpleNamespace(time=lambda: 1e9 + made.clock.now))
    return made


configure = partial(configure_pipeline, config_for=config_for)


@pytest.mark.parametrize("slow", [20.0, 200.0])
def test_what_a_step_leaves_goes_to_the_report(tmp_path: Path, steps: SimpleNamespace, slow: float) -> None:
    """And what it takes too long for is taken from there; a resumed run knows what the one before has spent."""
    pipeline = replace(configure(CONFIG, choose_trainings(CONFIG, BUSY, {}), BUSY), out_dir=str(tmp_path / "out"))
    steps.seconds = {"responses": slow}
    plan = plan_steps(pipeline, config_for)
    run_pipeline(pipeline, plan, TimeLimit(15.0, earlier=300.0, clock=steps.clock))
    left = (15 * 60 - 300 - slow) / 60
    assert steps.given["report"].minutes == pytest.approx(left - BUSY.loading, rel=0.01)
    (tmp_path / "out/report/report.json").unlink()
    run_pipeline(pipeline, plan, TimeLimit(15.0, started=steps.clock.now, earlier=300.0, clock=steps.clock))
    assert steps.given["report"].minutes == pytest.approx(left - BUSY.loading, rel=0.01)


def test_a_plan_gives_no_minutes_to_answers_that_are_there() -> None:
    """They have those that the look took to answer; what else it spent, as on its prompts, is no step's."""
    choice = choose_trainings(CONFIG, BUSY, {})
    looked = 20 * 157 / 14 / 60
    assert choice.minutes["responses"] == pytest.approx(looked)
    assert sum(choice.minutes.values()) == pytest.approx(CONFIG.minutes - 1.5 - 2 * BUSY.loading - (5 - looked))


def test_a_report_is_planned_with_its_loading_or_the_plan_says_that_it_is_too_long() -> None:
    """Texts become shorter until the fewest prompts fit; if they do not, the plan says what is missing."""
    for minutes in (13.0, 15.0, 20.0, 60.0):
        config = replace(CONFIG, minutes=minutes)
        choice = choose_trainings(config, BUSY, {})
        held, tokens = choice.minutes["report"], BUSY.text_tokens((), choice.minutes["report"])
        assert configure(config, choice, BUSY).steps["report"]["max_new_tokens"] == tokens
        fits = BUSY.report_minutes((), tokens) <= held + 0.1
        assert fits == ("cannot hold" not in describe_choice(choice, BUSY))
        assert fits or tokens == 64
        assert BUSY.report_minutes((), tokens) > 3 * BUSY.loading
    assert BUSY.text_tokens((), 60.0) == 157
    short = describe_choice(choose_trainings(replace(CONFIG, minutes=10.0), BUSY, {}), BUSY)
    assert f"cannot hold the {MIN_PROMPTS} prompts" in short
    assert "give minutes=" in short


def test_work_begins_only_where_half_of_it_fits() -> None:
    limit = TimeLimit(1.0)
    assert limit.holds(0, 100)
    assert limit.holds(40, 39)
    assert not limit.holds(40, 41)
    assert not limit.holds(60, 0)
    assert TimeLimit(None).holds(1e9, 1e9)


def test_a_plan_says_its_minutes(tiny_models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the command says something before it imports torch."""
    with patch("outrider.train.auto_run.run_auto", lambda *_: print("torch is there")):
        auto.make_drafter(CONFIG)
    assert "minutes=15" in capsys.readouterr().out.partition("torch is there")[0]
    run_auto(AutoConfig(target=str(tiny_models / TARGET), template="none", minutes=30.0, plan=True), config_for)
    said = capsys.readouterr().out
    assert "before anything ran" in said
    numbers = [float(number) for number in re.findall(r"(\d+\.\d+) (?:for|to look|without it)", said)]
    assert sum(numbers[:5]) == pytest.approx(30, abs=0.2)  # the look, what needs no target, and one way of the rest


def test_time_left_is_one_number_that_falls_until_it_is_far_too_small() -> None:
    estimates = [100.0, 80.0, 90.0, 300.0, 70.0, 79.0, 0.0, None, 360.0, 370.0]
    stage = Stage("outer", estimate=iter(estimates).__next__)
    assert [stage.shown_left for _ in estimates] == [100, 80, 80, 300, 70, 70, 0, None, 360, 360]
    with Stage("outer", estimate=lambda: 100.0), Stage("inner", estimate=lambda: 50.0):
        assert progress._describe_stages(progress._stages).count("left") == 1
        assert "left: 1 min 40 s" in progress._describe_stages(progress._stages)


CHILD = f"""
import os
from outrider.base import progress
from outrider.base.progress import Stage
with progress.show_command("evaluate"), Stage("measuring", 12, "prompts") as stage, Stage("arm 2/4 ngrams"):
    assert "{RELAY}" not in os.environ
    for done in (0, 0, 3):
        stage.done = done
        progress._bar.refresh()
    print("a word")
"""


def test_progress_of_a_command_is_shown_as_part_of_the_one_that_runs_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one stream, once for each change, and neither on the screen nor in the log as lines of its own."""
    seen = []
    with patch("outrider.train.steps.relay_progress", lambda line: seen.append(line) or progress.relay_progress(line)):
        (tmp_path / "child.py").write_text(CHILD)
        assert run_logged([sys.executable, str(tmp_path / "child.py")], tmp_path / "log") == 0
    shown = [line for line in seen if line.startswith("\x1e")]
    assert [re.findall(r"\d+/12 prompts > arm 2/4 ngrams", line) for line in shown] == [
        ["0/12 prompts > arm 2/4 ngrams"], ["3/12 prompts > arm 2/4 ngrams"],
    ]  # fmt: skip
    assert "measuring" not in (tmp_path / "log").read_text() + "".join(capfd.readouterr())
    assert "a word\n" in (tmp_path / "log").read_text()
    assert progress._inner_line == ""


@pytest.mark.parametrize(("name", "words", "option"), [
    ("eesd", ["data=local", "data.path=HERE/talk.jsonl"], "data.template"),
    ("generate_responses", ["data=local", "data.path=HERE/asked.jsonl", "data.layout=prompts"], "data.template"),
    ("evaluate_checkpoint", ["method=prompt_lookup", "prompts=HERE/asked.jsonl"], "template"),
])  # fmt: skip
def test_an_error_about_a_template_spells_the_option_of_its_command(
    tiny_models: Path, tmp_path: Path, name: str, words: list[str], option: str
) -> None:
    says = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": says}))
    (tmp_path / "asked.jsonl").write_text(json.dumps({"turns": ["hi"]}))
    given = [f"target={tiny_models / TARGET}", *(word.replace("HERE", str(tmp_path)) for word in words)]
    config = compose_and_build(name, given)
    with pytest.raises(UserError, match="no chat template") as raised:
        check_inputs(config, lambda _: True)
    assert {*re.findall(r"\S*template=\w+", str(raised.value))} == {f"{option}=none", f"{option}=vicuna"}
    check_inputs(compose_and_build(name, [*given, f"{option}=none"]), lambda _: True)


def test_auto_without_a_template_names_both(tiny_models: Path, tmp_path: Path) -> None:
    config = AutoConfig(target=str(tiny_models / TARGET), out_dir=str(tmp_path / "out"))
    with pytest.raises(UserError, match="no chat template") as raised:
        run_auto(config, config_for)
    assert {*re.findall(r"\S*template=\w+", str(raised.value))} == {"template=none", "template=vicuna"}
    assert not (tmp_path / "out").exists()


def test_what_failed_before_it_wrote_leaves_no_directory(tmp_path: Path, tiny_models: Path) -> None:
    """A refusal of any command; what was there before stays."""
    folder = tmp_path / "new"
    given = {
        "export": [f"checkpoint={tiny_models / EAGLE3}", f"target={tiny_models / TARGET}", "engine=openvino"],
        "compare_reports": [f"compare=[{tiny_models / TARGET},{tiny_models / EARLY_EXIT}]"],
    }
    for name, words in given.items():
        for there in (False, True):
            if there:
                folder.mkdir()
            command = main_of(name)
            assert (status_of(command, name, *words, f"out_dir={folder}"), folder.exists()) == (2, there)
            shutil.rmtree(folder, ignore_errors=True)
