"""The options of a command as text, and the names of decoding methods.

The meanings, types and defaults of options are taken from the settings' fields; the meaning of a field is its `help`,
or the docstring after it.

A method is a file of conf/method/, or composed as SOURCE/SHAPE, SOURCE/STOP or SOURCE/SHAPE/STOP. SOURCE is a kind of
drafter, SHAPE a file of conf/shape/, STOP one of conf/stop/. The key of "eagle3/opt_tree" is eagle3_opt_tree, as in
`methods.eagle3_opt_tree.structure.nodes=30` and in reports.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, ListConfig, OmegaConf

from outrider.base.errors import UserError
from outrider.base.settings import conditions
from outrider.base.words import did_you_mean
from outrider.cli import Command

CONF_DIR = (Path(__file__).parents[1] / "conf").resolve()
_WORDS: dict[object, str] = {int: "integer", float: "number", str: "text", bool: "true or false", typing.Any: "any"}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}  # of annotated_types' limits
_WIDTH = 110
PARTS = ("shape", "stop")  # the groups that a composed name chooses from, in the order of the name
_COMPOSED = re.compile(r"\w+(?:/\w+)+")


@dataclass(frozen=True)
class Option:
    """An option: its key, its type in words, its default as composed, and its meaning."""

    key: str
    kind: str
    default: str
    meaning: str


def help_text(name: str, schema: type, overrides: list[str]) -> str:
    """The output of `--help` for the command whose config is conf/<name>.yaml, with `overrides` applied."""
    composed = compose_defaults(name, overrides)
    lines = [f"Options are key=value; a group is chosen with group=choice. {first_sentence(schema)}", ""]
    for group, choices in groups_of(name).items():
        chosen = f"{group}: {', '.join(choices)}"
        lines += textwrap.wrap(chosen, _WIDTH, subsequent_indent=" " * 4)
    lines.append("")
    for option in options_of(schema, composed):
        lines.append(f"{option.key}={option.default}   ({option.kind})")
        lines += textwrap.wrap(option.meaning, _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 4)
    return "\n".join(
        [*lines, "", "--cfg job prints the config as composed; --multirun runs several, e.g. -m fit.seed=0,1"]
    )


def markdown(commands: Mapping[str, Command]) -> str:
    """The content of docs/options.md: the options of all commands, by the name of their YAML."""
    parts = [
        "# Options",
        "Every command takes `key=value`. This page is made from the settings by `python docs/make_options.py`; "
        "`--help` prints the same of one command.",
    ]
    for name, command in commands.items():
        schema = command.load_settings()
        parts += [f"## {command.typed}", first_sentence(schema), f"`outrider {command.typed}` or `{command.script}`"]
        groups = [f"- `{group}`: {', '.join(choices)}" for group, choices in groups_of(name).items()]
        if groups:
            parts.append("Groups, chosen with `group=choice`:\n\n" + "\n".join(groups))
        rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
        like = [other for other in commands.values() if other.load_settings() in schema.__mro__[1:]]
        parts += [f"It has all options of {other.typed}, and these:" for other in like]
        same = {field.name for other in like for field in dataclasses.fields(other.load_settings())} - {"out_dir"}
        for option in options_of(schema, compose_defaults(name, [])):
            if option.key.partition(".")[0] in same:
                continue
            cells = (f"`{option.key}`", option.kind, f"`{option.default}`" if option.default else "", option.meaning)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def compose_defaults(name: str, overrides: list[str]) -> DictConfig:
    """conf/<name>.yaml composed over its registered schema, with `overrides`."""
    store_composed(overrides)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), version_base=None):
        return compose(name, overrides=overrides)


def groups_of(name: str) -> dict[str, list[str]]:
    """The groups that conf/<name>.yaml chooses from, the experiments for it, and the parts of a method, with their
    choices."""
    defaults = OmegaConf.load(CONF_DIR / f"{name}.yaml").defaults
    named = [next(iter(item)) for item in defaults if not isinstance(item, str)]
    groups = {group: choices_of(group) for group in named}
    for group in groups:
        own = [f"{name}/{file.stem}" for file in sorted((CONF_DIR / group / name).glob("*.yaml"))]
        groups[group] = own if group == "experiment" and own else groups[group]
    if "method" in groups:
        groups["method"] += ["SOURCE/SHAPE", "SOURCE/STOP", "SOURCE/SHAPE/STOP"]
        groups |= {f"+{part}@methods.NAME": choices_of(part) for part in PARTS}
    return {group: choices for group, choices in groups.items() if choices}


def options_of(schema: type, composed: DictConfig | None, prefix: str = "") -> Iterator[Option]:
    """Every option of `schema`, nested ones by dotted key; composed: the config that holds their defaults."""
    meanings, hints = meanings_of(schema), typing.get_type_hints(schema, include_extras=True)
    for field in dataclasses.fields(schema):
        key, kind = prefix + field.name, hints[field.name]
        value = None if composed is None else _default(composed, field.name)
        if dataclasses.is_dataclass(kind):
            yield from options_of(typing.cast(type, kind), value, f"{key}.")
            continue
        inner = typing.get_args(kind)[1:] if typing.get_origin(kind) is dict else ()
        if inner and dataclasses.is_dataclass(inner[0]):
            yield Option(f"{key}.NAME", "settings", "", meanings.get(field.name, ""))
            yield from options_of(typing.cast(type, inner[0]), None, f"{key}.NAME.")
            continue
        missing = composed is not None and OmegaConf.is_missing(composed, field.name)
        if composed is None:
            value = field.default if field.default is not dataclasses.MISSING else None
        meaning = meanings.get(field.name, "")
        if read := conditions(kind):
            meaning = f"with {' and '.join(f'{option}={_either(values)}' for option, values in read)}: {meaning}"
        yield Option(key, words(kind), "" if missing else typed(value), meaning)


def _default(composed: DictConfig, name: str) -> typing.Any:
    """The composed value; of one that depends on the device, both in words."""
    if OmegaConf.is_interpolation(composed, name):
        written = dict(composed.items_ex(resolve=False))[name]
        return re.sub(r"\$\{by_device:(.+),(.+)\}", r"\1, without a GPU \2", str(written))
    return OmegaConf.select(composed, name, throw_on_missing=False)


def words(kind: object) -> str:
    """A type in words, with its choices or its range."""
    if typing.get_origin(kind) is typing.Annotated:
        inner, *said = typing.get_args(kind)
        ends = [f"{sign} {getattr(one, end)}" for one in said for end, sign in _SIGNS.items() if hasattr(one, end)]
        return f"{words(inner)} {' and '.join(ends)}".rstrip()
    if typing.get_origin(kind) is typing.Literal:
        return _either(typing.get_args(kind))
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        parts = [part for part in typing.get_args(kind) if part is not type(None)]
        optional = len(parts) < len(typing.get_args(kind))
        return " or ".join([*map(words, parts), *(["null"] if optional else [])])
    if typing.get_origin(kind) in (list, tuple):
        return f"list of {words(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) is dict:
        return f"{words(typing.get_args(kind)[1])} by name"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))


def _either(values: Sequence[object]) -> str:
    *others, last = map(typed, values)
    return f"{', '.join(others)} or {last}" if others else last


def typed(value: object) -> str:
    """A value as written on a command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple | ListConfig):
        return "[" + ",".join(map(typed, value)) + "]"
    return "{}" if isinstance(value, dict | DictConfig) else str(value)


def first_sentence(schema: type) -> str:
    """The purpose of the settings: the first sentence of their docstring."""
    return re.split(r"(?<=[.!])\s", inspect.getdoc(schema) or "", maxsplit=1)[0]


def meanings_of(schema: type) -> dict[str, str]:
    """The meaning of each field by name, inherited fields included."""
    found = {own.name: str(own.metadata.get("help", "")) for own in dataclasses.fields(schema)}
    for cls in reversed(schema.__mro__):
        found |= _after_fields(cls) if dataclasses.is_dataclass(cls) else {}
    return found


def _after_fields(cls: type) -> dict[str, str]:
    """The docstrings of fields, which Python itself does not keep."""
    (declared,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(declared, ast.ClassDef)
    found = {}
    for own, after in pairwise(declared.body):
        match own, after:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


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


def store_composed(words: Sequence[str]) -> None:
    """Add the composed methods in `words`, the overrides of a command, to the choices of Hydra's group `method`.

    Raises `UserError` like `settings_of`.
    """
    for word in words:
        key, _, value = word.partition("=")
        for name in _COMPOSED.findall(value) if key.lstrip("+").partition("@")[0] == "method" else ():
            group, _, last = f"method/{name}".rpartition("/")
            ConfigStore.instance().store(last, settings_of(name), group, package=f"methods.{known_as(name)}")
