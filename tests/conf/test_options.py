"""Every option of every command has a meaning, is checked, and decides the result unless it is marked otherwise."""

import copy
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.make_options import PAGE, STOPS, page, page_of_rules
from outrider.base.errors import UserError
from outrider.base.settings import RunConfig, Settings
from outrider.cli import COMMANDS as LISTED
from outrider.commands.composing import compose_config, groups_of
from outrider.commands.options import help_text, options_of
from tests.conf.test_configs import COMMANDS, compose_and_build

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    """Where it is not: python docs/make_options.py."""
    assert PAGE.read_text() == page()
    assert STOPS.read_text() == page_of_rules()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_meaning(name: str) -> None:
    options = options_of(LISTED[name].load_settings(), compose_config(name, []))
    assert [option.key for option in options if not option.meaning] == []
    assert all("GGUF" in option.meaning for option in options if option.key == "target")
    keys = [option.key for option in options]
    assert len(set(keys)) == len(keys) >= 4


def test_help_is_of_this_command_and_of_what_is_chosen() -> None:
    text = help_text("eesd", ["data=ultrachat", "fit.lr=0.25"])
    assert "data.path=HuggingFaceH4/ultrachat_200k" in text
    assert "fit.lr=0.25   (number > 0)\n    the highest learning rate" in text
    assert "exit_layer=null   (integer ≥ 1 or null)\n    with start=null: N, the target layers under" in text
    assert "target=   (text)" in text  # must be given
    assert set(groups_of("eesd")) == {"data", "experiment"}
    assert all(choice.startswith("eesd/") for choice in groups_of("eesd")["experiment"])
    assert "sweep" not in text


@pytest.mark.slow
def test_the_command_prints_it_without_torch_and_whoever_reads_may_leave() -> None:
    command = [sys.executable, ROOT / "train/eesd.py", "--help"]
    whole = subprocess.run(command, capture_output=True, text=True, check=True)
    assert whole.stdout.startswith("outrider eesd target=MODEL ")
    assert whole.stderr == ""
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stderr is not None
    reader.stdout.close()
    assert reader.stderr.read() == ""
    assert reader.wait() == 0


GIVEN = {
    "eesd": ["target=t", "decode_prompts=2"],
    "finetune_drafter": ["target=t", "drafter=pretrained", "drafter.path=x"],
    "evaluate_checkpoint": ["checkpoint=c", "small_lm=d", "table=t", "method=[eesd_beta,opt_tree,ngrams]"],
    "pipeline": ["experiment=demo"],
}
# Marked for what holds in general; with these the command itself chooses among the weights, or has it on record.
BESIDES = {name: {"fit.eval_every"} for name in ("eesd", "eagle3", "dspark", "finetune_drafter")}


def made(command: str) -> Any:
    return compose_and_build(command, GIVEN.get(command, COMMANDS[command][2]))


def leaves(config: Any, decided: bool = True, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """(dotted key, whether nothing on the way to it is marked as free) of every option that holds no others."""
    for own in dataclasses.fields(config):
        value, key, still = getattr(config, own.name), prefix + own.name, decided and own.metadata.get("decides", True)
        inner = value if isinstance(value, dict) else {}
        if isinstance(value, Settings):
            yield from leaves(value, still, f"{key}.")
        elif inner and all(isinstance(item, Settings) for item in inner.values()):
            for name, item in inner.items():
                yield from leaves(item, still, f"{key}.{name}.")
        else:
            yield key, bool(still)


def another(config: Any, key: str) -> Any:
    """`config` with another value at `key`, whether it could be or not."""
    changed = inner = copy.deepcopy(config)
    *outer, last = key.split(".")
    for part in outer:
        inner = inner[part] if isinstance(inner, dict) else getattr(inner, part)
    object.__setattr__(inner, last, "another value")
    return changed


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_decides_unless_it_is_marked(command: str) -> None:
    config = made(command)
    before, seen = config.decisions(), set()
    for key, decided in leaves(config):
        changes = another(config, key).decisions() != before
        assert changes == (decided or key in BESIDES.get(command, ())), key
        seen.add(decided)
    assert seen == {True, False}


@pytest.mark.parametrize("command", [name for name, (schema, *_) in COMMANDS.items() if issubclass(schema, RunConfig)])
def test_where_and_how_often_a_command_runs_decides_nothing(command: str) -> None:
    config = made(command)
    assert isinstance(config, RunConfig)
    free = {key for key, decided in leaves(config) if not decided}
    assert {"out_dir", "resume"} <= free
    assert not any(key.split(".")[-1] in ("seed", "lr", "objective", "temperature") for key in free)


def depth(kind: type) -> int:
    return 1 + max((depth(base) for base in kind.__bases__ if issubclass(base, Settings)), default=0)


def test_settings_are_three_classes_deep() -> None:
    """`Settings`, a base or mixins, the command's own; measure-engine has those of evaluate-checkpoint and more."""
    deep = {name: depth(command.load_settings()) for name, command in LISTED.items()}
    assert {name for name, count in deep.items() if count > 3} == {"measure_engine"}


def settings_in(value: Any) -> Iterator[Settings]:
    """All settings in `value`, itself too."""
    if isinstance(value, Settings):
        yield value
        for own in dataclasses.fields(value):  # type: ignore[arg-type]
            yield from settings_in(getattr(value, own.name))
    elif isinstance(value, dict):
        for inner in value.values():
            yield from settings_in(inner)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_checked_however_it_is_made(command: str) -> None:
    found = {type(config): config for config in settings_in(made(command))}
    assert found
    for config in found.values():
        for own in dataclasses.fields(config):  # type: ignore[arg-type]
            with pytest.raises(UserError, match=f"^{own.name}="):
                dataclasses.replace(config, **{own.name: object()})  # type: ignore[type-var]
