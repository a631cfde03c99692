"""Methods by their names, as `method=` takes them and the Python API.

A method is a file of conf/method/, or composed as SOURCE/SHAPE, SOURCE/STOP or SOURCE/SHAPE/STOP. SOURCE is a kind of
drafter, SHAPE a file of conf/shape/, STOP one of conf/stop/. The key of "eagle3/opt_tree" is eagle3_opt_tree, as in
`methods.eagle3_opt_tree.structure.nodes=30` and in reports.
"""

from pathlib import Path

from omegaconf import OmegaConf

from outrider.base.errors import UserError
from outrider.base.settings import construct
from outrider.base.words import did_you_mean
from outrider.inference.settings.method import MethodConfig

CONF_DIR = (Path(__file__).parents[2] / "conf").resolve()
PARTS = ("shape", "stop")  # the groups that a composed name chooses from, in the order of the name


def preset(name: str) -> MethodConfig:
    """The method called `name`, as in the option `method=`. Raises `UserError` for an unknown name."""
    return construct(MethodConfig, settings_of(name))


def choices_of(group: str) -> list[str]:
    """The names of the files of conf/<group>/."""
    return sorted(file.stem for file in (CONF_DIR / group).glob("*.yaml"))


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
        content = OmegaConf.to_container(OmegaConf.load(CONF_DIR / f"{file}.yaml"))
        settings |= {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}
    return settings


def no_such_method(name: str) -> str:
    """The error message for an unknown method: the existing names."""
    presets, shapes, stops = (choices_of(group) for group in ("method", *PARTS))
    parts = name.split("/")[1:]
    known = [*shapes, *stops] if parts else presets
    odd = next((part for part in parts or [name] if part not in known), "")
    return (
        f"method={name}: no such method{did_you_mean(odd, known) or '.'} There are {', '.join(presets)}, and "
        "SOURCE/SHAPE/STOP, SOURCE/SHAPE and SOURCE/STOP with "
        f"a shape of {', '.join(shapes)}, a stop of {', '.join(stops)}"
    )
