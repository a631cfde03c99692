"""Every option of every command is checked, and decides the result unless it is marked otherwise."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.errors import UserError
from outrider.settings import RunConfig, Settings, decides
from tests.conf.test_configs import COMMANDS, compose_and_build

GIVEN = {
    "eesd": ["target=t", "decode_prompts=2"],
    "finetune_drafter": ["target=t", "drafter=pretrained", "drafter.path=x"],
    "evaluate_checkpoint": ["checkpoint=c", "small_lm=d", "table=t", "method=[eesd_beta,opt_tree,ngrams]"],
    "pipeline": ["experiment=demo"],
}
# Marked for what holds in general; with these the command itself chooses among the weights, or has it on record.
BESIDES = {"eesd": {"fit.eval_every"}, "eagle3": {"fit.eval_every"}, "finetune_drafter": {"fit.eval_every", "revision"}}


def made(command: str) -> Any:
    return compose_and_build(command, GIVEN.get(command, COMMANDS[command][2]))


def leaves(config: Any, decided: bool = True, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """(dotted key, whether nothing on the way to it is marked as free) of every option that holds no others."""
    for own in dataclasses.fields(config):
        value, key, still = getattr(config, own.name), prefix + own.name, decided and decides(own)
        inner = value if isinstance(value, dict) else {}
        if isinstance(value, Settings):
            yield from leaves(value, still, f"{key}.")
        elif inner and all(isinstance(item, Settings) for item in inner.values()):
            for name, item in inner.items():
                yield from leaves(item, still, f"{key}.{name}.")
        else:
            yield key, still


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
    before, seen = config.deciding(), set()
    for key, decided in leaves(config):
        changes = another(config, key).deciding() != before
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
