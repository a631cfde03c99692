"""Decoding methods by name: a file of conf/method/, or composed as SOURCE/SHAPE, SOURCE/STOP or SOURCE/SHAPE/STOP.

SOURCE is a kind of drafter, SHAPE a file of conf/shape/, STOP one of conf/stop/. The key of "eagle3/opt_tree" is
eagle3_opt_tree, as in `methods.eagle3_opt_tree.structure.nodes=30` and in reports.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from outrider.errors import UserError
from outrider.words import did_you_mean

PARTS = ("shape", "stop")  # the groups that a composed name chooses from, in the order of the name
_CONF = Path(__file__).resolve().parent
_COMPOSED = re.compile(r"\w+(?:/\w+)+")


def choices_of(group: str) -> list[str]:
    """The names of the files of conf/<group>/."""
    return sorted(file.stem for file in (_CONF / group).glob("*.yaml"))


def known_as(name: str) -> str:
    """The key of the method `name` in `methods` and in reports."""
    return name.replace("/", "_")


def settings_of(name: str) -> dict[str, object]:
    """The settings of the method `name`, as plain containers without the defaults.

    Raises `UserError` for a name that is neither a preset nor composed of existing parts.
    """
    source, *parts = name.split("/")
    found = {group: part for group in PARTS for part in parts if part in choices_of(group)}
    if list(found.values()) != parts or (not parts and source not in choices_of("method")):
        raise UserError(no_such_method(name))
    settings: dict[str, object] = {"source": source} if parts else {}
    for file in [f"{group}/{part}" for group, part in found.items()] or [f"method/{name}"]:
        content = OmegaConf.to_container(OmegaConf.load(_CONF / f"{file}.yaml"))
        settings |= {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}
    return settings


def no_such_method(name: str) -> str:
    """The error message for an unknown method: the existing names."""
    presets, shapes, stops = (choices_of(group) for group in ("method", *PARTS))
    parts = name.split("/")[1:]
    known = [*shapes, *stops] if parts else presets
    odd = next((part for part in parts or [name] if part not in known), "")
    return (
        f"method={name}: no such method{did_you_mean(odd, known) or ';'} There are {', '.join(presets)}, and "
        "SOURCE/SHAPE/STOP, SOURCE/SHAPE and SOURCE/STOP with "
        f"a shape of {', '.join(shapes)}, a stop of {', '.join(stops)}"
    )


def store_composed(words: Sequence[str]) -> None:
    """Add the composed methods in `words`, the overrides of a command, to the choices of Hydra's group `method`.

    Raises `UserError` like `settings_of`.
    """
    for word in words:
        key, _, value = word.partition("=")
        for name in _COMPOSED.findall(value) if key.lstrip("+").partition("@")[0] == "method" else ():
            group, _, last = f"method/{name}".rpartition("/")
            ConfigStore.instance().store(last, settings_of(name), group, package=f"methods.{known_as(name)}")
