"""Every command's config composes with every choice, and says clearly what is wrong with a bad one."""

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from outrider import cli
from outrider.base.errors import UserError
from outrider.base.progress import RELAY
from outrider.commands import CONF_DIR, config_for, main_of, report_errors
from outrider.commands.composing import build, check_words, compose_config, typed_keys_of
from outrider.commands.ending import Terminated, end_on_sigterm, write_resume_line
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import StopConfig, choices_of
from outrider.inference.settings.method import preset as method
from tests.pairwise import each_value
from tests.refusals import refusal
from tests.tiers import typical_where
from tests.typed import status_of

ROOT = Path(__file__).parent.parent.parent
# What each command must be told.
MANDATORY = {
    "build_trigrams": ["tokenizer=t"],
    "evaluate_checkpoint": ["checkpoint=c", "small_lm=d", "eagle3=e", "dflash=f", "table=t"],
    "measure_engine": ["checkpoint=c", "engine=vllm"],
    "replay": ["transcripts=t", "tokenizer=t", "prompts=p"],
    "calibrate": ["checkpoint=c"],
    "export": ["checkpoint=c"],
    "compare_reports": ["compare=[a,b]"],
    **{
        name: ["target=t"]
        for name in ("eesd", "finetune_drafter", "eagle3", "dspark", "generate_responses", "convert_target")
    },
    "audit": ["target=t", "answers=a"],
    "serve": ["target=t"],
    "forecast": ["target=t", "answers=a.jsonl", "prompts=p.jsonl"],
    "refit": ["checkpoint=c", "logs=l.jsonl", "target=t"],
    "write_prompts": ["target=t"],
    "restore_mtp": ["target=t", "base=b"],
}
COMMANDS: dict[str, tuple[type, str, list[str]]] = {
    name: (command.load_settings(), command.script, MANDATORY.get(name, [])) for name, command in cli.COMMANDS.items()
}
GROUPS = {
    p.name: sorted(f.stem for f in p.glob("*.yaml")) for p in CONF_DIR.iterdir() if p.is_dir() and p.name[0] != "_"
}
REQUIRED = {"drafter=pretrained": ["drafter.path=x"], "data=local": ["data.path=x.jsonl"]}


def compose_and_build(command: str, overrides: Sequence[str]) -> Any:
    return _composed(command, *overrides)


def as_typed(command: str, overrides: Sequence[str]) -> Any:
    """The settings of a whole command line, with the methods that follow from drafters; of a grid, the first ones."""
    first = [re.sub(r"^([^,[]*),.*", r"\1", word) for word in overrides if word != "--multirun"]
    return config_for(cli.COMMANDS[command].script, first if "--multirun" in overrides else overrides)


@cache  # what is composed is frozen, and no file of conf/ changes meanwhile
def _composed(command: str, *overrides: str) -> Any:
    return build(COMMANDS[command][0], compose_config(command, overrides), typed_keys_of(overrides))


def test_every_primary_config_belongs_to_a_command() -> None:
    assert {p.stem for p in CONF_DIR.glob("*.yaml")} - {"hydra_quiet"} == set(COMMANDS)


def choices() -> list[tuple[str, str]]:
    reading = ("build_trigrams", "eesd", "calibrate", "eagle3", "dspark", "toy_target", "generate_responses")
    used: dict[str, tuple[str, ...]] = {"evaluate_checkpoint": ("method",), "finetune_drafter": ("data", "drafter")}
    used |= dict.fromkeys(reading, ("data",))
    listed = [(c, f"{g}={o}") for c, groups in used.items() for g in groups for o in GROUPS[g]]
    listed.remove(("build_trigrams", "data=self_distillation"))  # a mix: its weights would say nothing in a table
    return listed


CHOICES = choices()


@pytest.mark.parametrize(("command", "choice"), typical_where(each_value(CHOICES).__contains__, CHOICES))
def test_every_choice_composes_and_validates(command: str, choice: str) -> None:
    config = compose_and_build(command, [*COMMANDS[command][2], choice, *REQUIRED.get(choice, [])])
    assert isinstance(config, COMMANDS[command][0])
    with pytest.raises(AttributeError):
        config.out_dir = "elsewhere"  # frozen


@pytest.mark.parametrize(("command", "override", "message"), [
    ("build_trigrams", "orders=[3,5]", r"orders\[1\]=5: expected a number less than or equal to 4"),
    ("build_trigrams", "data=self_distillation", r"data\.source='mix': expected one source"),
    ("eesd", "data.heldout_fraction=1.5", r"data\.heldout_fraction=1\.5: expected"),
    ("eesd", "fit.wandb.mode=maybe", r"fit\.wandb\.mode='maybe': expected 'auto', 'online'"),
    ("serve", "method=[prompt_lookup,ngrams]", r"^method=\['ngrams', 'prompt_lookup'\]: expected one, as"),
    ("evaluate_checkpoint", "methods.eesd_survival.stop.max_draft=auto", r"eesd_survival\.stop\.max_draft='auto'"),
    ("evaluate_checkpoint", "methods.eesd_survival.source=ngrams", "expected 'fixed', its default: source=ngrams"),
])  # fmt: skip
def test_impossible_values_name_the_key_and_what_is_allowed(command: str, override: str, message: str) -> None:
    refusal(message, compose_and_build, command, [*COMMANDS[command][2], override])


# An interpreter that has imported what commands begin with, and runs each in a fork: a line says where, which and how.
WITHOUT_TORCH = """
import json, os, runpy, sys
from outrider.commands.composing import compose_config
from outrider.cli import COMMANDS
for command in COMMANDS.values():
    command.load_settings()
compose_config("fetch_target", [])
for line in sys.stdin:
    here, *sys.argv = json.loads(line)
    if not (fork := os.fork()):
        os.chdir(here)
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        os.dup2(os.open(here + "/../said", os.O_WRONLY | os.O_CREAT), 2)
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
"""
Refuse = Callable[..., str]


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    modules = tmp_path_factory.mktemp("modules")
    (modules / "torch").mkdir()
    (modules / "torch/__init__.py").write_text("raise ImportError('no torch before the config is checked')")
    command = [sys.executable, "-c", WITHOUT_TORCH]
    env = os.environ | {"PYTHONPATH": str(modules)}
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT, env=env) as process:
        yield process
        process.stdin.close()  # type: ignore[union-attr]


@pytest.fixture
def refused_without_torch(without_torch: subprocess.Popen[str], tmp_path: Path) -> Refuse:
    """The one line by which a command refuses `words`; whoever mistypes one does not wait for torch.

    Here there is none to be had.
    """

    def refused(command: str, *words: str) -> str:
        (tmp_path / "here").mkdir()
        line = json.dumps([str(tmp_path / "here"), str(ROOT / COMMANDS[command][1]), *words])
        print(line, file=without_torch.stdin, flush=True)
        status = without_torch.stdout.readline()  # type: ignore[union-attr]
        said = (tmp_path / "said").read_text()
        assert status == "2\n", said
        assert re.fullmatch(r"error: [^\n]+\n", said)
        assert not list((tmp_path / "here").iterdir())
        return said

    return refused


@pytest.mark.parametrize(("override", "message"), [
    ("out_dirr=x", "out_dirr: no such option; did you mean 'out_dir'? Allowed here: "),
    ("data=ultracat", "data=ultracat: no such choice; did you mean 'ultrachat'?"),
    ("data=null", "data=null: no such choice. There are local, "),
    ("experiment=[eesd/demo,3]", "experiment=[eesd/demo,3]: no such choice; did you mean 'eesd/demo'?"),
    ("--seq-len=7", "--seq-len=7: options are written without dashes, as seq_len=7"),
    ("--hlep", "--hlep: no such flag; did you mean '--help'?"),
    ("out_dir=", "out_dir='': expected a directory"),
    ("fit=x", "fit=x: expected names with values, as fit={NAME:VALUE}"), ("fit=null", "fit=null: expected names with"),
    ("out_dir=~/runs", "out_dir=~/runs: not an option; give it, if ~/runs is one text, as \"out_dir='~/runs'"),
    ("seq_len=many", "seq_len='many': expected a valid integer"),
    ("method=[mcsd,small_lm/optree]", "method=small_lm/optree: no such method; did you mean 'opt_tree'? There are"),
    ("method=eesd_bta", "method=eesd_bta: no such method; did you mean 'eesd_beta'? There are aded, "),
])  # fmt: skip
def test_bad_overrides_fail_fast_on_the_command_line(
    refused_without_torch: Refuse, override: str, message: str
) -> None:
    """Of any command, as one function reads them."""
    command = "evaluate_checkpoint" if override.startswith("method") else "eesd"
    assert message in refused_without_torch(command, "target=t", override)


def test_every_run_of_a_grid_has_a_folder_of_its_own() -> None:
    grid = ["--multirun", "target=t", "exit_layer=1,2"]
    refusal(r"'out_dir=runs/grid/\$\{hydra:job.num\}'", check_words, "eesd", [*grid, "out_dir=runs/grid"])
    for folders in ("out_dir=runs/grid/${exit_layer}", "out_dir=a,b", "plan=true"):
        check_words("eesd", [*grid, folders])
    check_words("auto", ["-m", "target=a,b"])  # its folder has the target's name
    refusal("a folder of its own", check_words, "auto", ["-m", "minutes=5,30"])


def test_a_text_stays_as_it_is_typed_though_it_looks_like_a_number() -> None:
    config = config_for(
        "train/eesd.py", ["target=m", "data=responses", "data.path=a", "out_dir=2024_11_29", "revision=1e5"]
    )
    assert (config.out_dir, config.revision) == ("2024_11_29", "1e5")


def preset_refusal(name: str) -> str:
    try:
        return "accepted" if method(name).source == name.split("/")[0] else "of another source"
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("source", KINDS)
def test_every_shape_and_stop_composes_with_every_source_or_says_why_not(source: str) -> None:
    """What is refused is refused by its key, with what it may be."""
    shapes, stops = (["", *(f"/{part}" for part in choices_of(group))] for group in ("shape", "stop"))
    accepted = set()
    for shape, stop in itertools.product(shapes, stops):
        if not shape + stop:
            continue
        said = preset_refusal(f"{source}{shape}{stop}")
        assert re.match(r"(stop|structure|ngrams)\.\w+=.*: expected |accepted$", said)
        if said == "accepted":
            accepted.add((shape, stop))
    if KINDS[source].calibration is not None:
        assert {shape for shape, _ in accepted} == {*shapes}
        assert {stop for _, stop in accepted} == {*stops}
        assert {("/opt_tree", "/beta"), ("/chain", "/survival")} < accepted
    assert not accepted & {("/opt_tree", "/survival"), ("/opt_tree_auto", "/beta"), ("/k_config", "/auto")}


def test_presets_are_what_their_parts_compose() -> None:
    parts = {
        "vanilla": "small_lm/fixed", "mcsd": "small_lm/k_config", "gsd": "small_lm/token_graph",
        "opt_tree": "small_lm/opt_tree", "opt_tree_auto": "small_lm/opt_tree_auto", "eagle3": "eagle3/fixed",
        "eesd_fixed": "early_exit/fixed", "eesd_auto": "early_exit/auto", "eesd_beta": "early_exit/beta",
        "eesd_cali": "early_exit/calibrated", "eesd_survival": "early_exit/survival",
    }  # fmt: skip
    assert all(method(name) == method(composed) for name, composed in parts.items())
    assert {name: method(name).copy for name in parts if method(name).copy} == {"eesd_survival": 3, "opt_tree_auto": 3}
    assert {*GROUPS["method"]} - {*parts} == {"aded", "ngrams", "ngrams_recycled", "prompt_lookup"}
    assert not {*GROUPS["shape"]} & {*GROUPS["stop"]}


def test_composed_methods_stand_beside_presets_and_have_their_options() -> None:
    options = [
        "checkpoint=c", "small_lm=s", "method=[early_exit/opt_tree/beta,mcsd,small_lm/survival]",
        "methods.early_exit_opt_tree_beta.structure.nodes=7", "+method@methods.naive=mcsd",
        "methods.naive.verify=naive", "+stop@methods.mcsd=beta", "+shape@methods.small_lm_survival=chain",
        "methods.small_lm_survival.copy=null",
    ]  # fmt: skip
    methods = compose_and_build("evaluate_checkpoint", options).methods
    assert list(methods) == ["early_exit_opt_tree_beta", "mcsd", "small_lm_survival", "naive"]
    tree, mcsd, chain, naive = methods.values()
    assert tree == replace(method("early_exit/opt_tree/beta"), structure=replace(tree.structure, nodes=7))
    assert mcsd == replace(method("mcsd"), stop=StopConfig(rule="beta"))
    assert chain == replace(method("small_lm/survival"), copy=None)
    assert naive == replace(method("mcsd"), verify="naive")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_options_shows_its_usual_lines(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One to three, which compose; `--help` begins with them, and with five options that stand in them or that most
    commands have. Nothing runs, even if no option is required."""
    lines = cli.usage(cli.COMMANDS[command].typed)
    used = [overrides for found, overrides in written_commands(lines) if found == command]
    assert 1 <= len(used) == len(lines) <= 3
    for overrides in used:
        as_typed(command, overrides)
    assert status_of(main_of(command), command, "--help") == 0
    text = capsys.readouterr().out
    assert text.startswith("\n".join(lines))
    first, _, others = text.partition("The others:\n")
    keys = re.findall(r"^([\w.]+)(?:=|: )", first.partition("\n\n")[2].partition("\n\n")[2], re.MULTILINE)
    words = [word for line in lines for word in shlex.split(line, comments=True) if "=" in word]
    typed = [*dict.fromkeys(word.partition("=")[0] for word in words)]
    assert keys[: len(typed)] == typed[:5]
    usual = "target|checkpoint|prompts|minutes|out_dir|resume"
    assert {*keys[len(typed) :]} <= {*usual.split("|")}
    assert len(keys) == 5 or not re.search(f"^({usual})=", others, re.MULTILINE)
    assert status_of(main_of(command), command) == 2
    assert capsys.readouterr().err.splitlines() == [*lines, "any option starts it; --help has all"]


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_goes_to_weights_and_biases_unless_asked(command: str) -> None:
    config = compose_and_build(command, COMMANDS[command][2])
    settings = getattr(getattr(config, "fit", config), "wandb", None)
    assert settings is None or settings.mode == "disabled"


def test_a_path_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = compose_and_build("evaluate_checkpoint", ['checkpoint="~/eesd"', 'prompt_text=["~/ is home"]'])
    assert (config.checkpoint, list(config.prompt_text)) == ("/home/me/eesd", ["~/ is home"])
    reports = compose_and_build("compare_reports", ['compare=["~/runs/a","~/runs/b"]'])
    assert [*reports.compare] == ["/home/me/runs/a", "/home/me/runs/b"]


TYPED = ["out_dir=a b", "resume=false", "prompts='x'", "-m"]
LAUNCHER = ["/x/bin/python3.11", "/x/bin/accelerate", "launch", "--num_processes", "2", "train/eesd.py"]
RESUMED = """'out_dir=a b' 'prompts='"'"'x'"'"'' resume=true -m"""


@pytest.mark.parametrize(
    ("name", "words", "above", "line"),
    [
        ("outrider auto", ["minutes=5"], [["bash", "-c", "outrider auto"]], "outrider auto minutes=5 resume=true"),
        ("/x/bin/evaluate-checkpoint", TYPED, [], f"evaluate-checkpoint {RESUMED}"),
        ("train/eesd.py", TYPED, [["bash", "run.sh", *TYPED]], f"python train/eesd.py {RESUMED}"),
        ("train/eesd.py", TYPED, [[*LAUNCHER, *TYPED]], f"accelerate launch --num_processes 2 train/eesd.py {RESUMED}"),
        ("train/eesd.py", ["a=1"], [["timeout", "9", *LAUNCHER[1:], "a=1"]],
         "timeout 9 /x/bin/accelerate launch --num_processes 2 train/eesd.py a=1 resume=true"),
        ("train/pipeline.py", ["a=1", "resume=true"], [["sh"], ["/usr/bin/make", "demo", "a=1"]], "make demo a=1"),
        ("outrider eesd", ["a=1"], [["sh"], ["make", "mine"]], "outrider eesd a=1 resume=true"),  # make does not resume
    ],
)  # fmt: skip
@pytest.mark.parametrize("error", [KeyboardInterrupt, Terminated])
def test_an_interrupt_prints_the_line_that_goes_on_as_it_was_typed(
    name: str, words: list[str], above: list[list[str]], line: str, error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """By one of a launcher's processes, and by no step of a pipeline."""
    monkeypatch.setattr(sys, "argv", [name, *words])
    parents = [Mock(**{"cmdline.return_value": [*typed]}) for typed in above]
    monkeypatch.setattr(psutil.Process, "parents", lambda _: parents)
    for variables, lines in (
        ({}, ["interrupted; this continues it:", line]), ({RELAY: "1"}, ["interrupted"]), ({"RANK": "1"}, []),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            for key, value in variables.items():
                patch.setenv(key, value)
            with pytest.raises(SystemExit) as ended, report_errors(write_resume_line()):
                raise error
        assert ended.value.code == (130 if error is KeyboardInterrupt else 143)
        assert capsys.readouterr().err.splitlines() == lines


def test_an_interrupt_that_a_destructor_swallows_comes_again() -> None:
    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def run() -> None:
        Dying()
        time.sleep(30)  # it ends at once

    with pytest.raises(Terminated), end_on_sigterm():
        run()


def test_a_launcher_is_told_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own last lines then have it."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit), report_errors():
        raise UserError("data: none")
    assert ProcessFailure(0, 1, 2, str(tmp_path / "error.json")).message == "error: data: none"


def test_a_number_is_a_text_where_one_is_asked_for_and_nothing_else_is_converted() -> None:
    config = compose_and_build(
        "evaluate_checkpoint", ["target=2024", "out_dir=7", "prompt_text=[3]", "method=prompt_lookup"]
    )
    assert (config.target, config.out_dir, config.prompt_text) == ("2024", "7", ["3"])
    for wrong in ("num_prompts=true", "resume=1", "minutes='3'"):
        with pytest.raises(UserError, match=f"^{wrong.partition('=')[0]}=.*: expected a valid"):
            compose_and_build("evaluate_checkpoint", ["target=t", "method=prompt_lookup", wrong])


def written_commands(lines: list[str]) -> list[tuple[str, list[str]]]:
    """(command, overrides) of every line that runs one of the entries."""
    scripts = {Path(script).name: command for command, (_, script, _) in COMMANDS.items()}
    scripts["evaluate.sbatch"] = "evaluate_checkpoint"
    typed = {command.typed: name for name, command in cli.COMMANDS.items()}
    found = []
    for line in lines:
        words = (
            shlex.split(line, comments=True)
            if line.startswith(("python ", "accelerate ", "sbatch ", "evaluate-checkpoint ", "outrider "))
            else []
        )
        for place, word in enumerate(words):
            is_typed = word == "evaluate-checkpoint" or words[:1] == ["outrider"]
            command = typed.get(word) if is_typed else scripts.get(Path(word).name)
            if command is not None:
                found.append((command, words[place + 1 :]))
    return found


def test_makefile_commands_compose() -> None:
    lines = re.sub(r"\$\((if .*|OPTIONS|RUN)\)", "", (ROOT / "Makefile").read_text()).splitlines()
    found = written_commands([line.strip() for line in lines if line.startswith("\t")])
    assert [command for command, _ in found] == [*["pipeline"] * 2, "fetch_target", "auto", "auto"]
    for command, overrides in found:
        compose_and_build(command, overrides if command != "auto" else [*overrides, "target=x"])
