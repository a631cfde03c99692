"""Settings: dataclasses whose fields are checked against their types whenever an instance is made.

A field's type gives its choices (`Literal`), its range (`Annotated[int, Ge(1)]`, of annotated_types) and the values of
other options that it applies to (`only`). `free` marks a field that does not affect results. `construct` makes settings
from plain containers, as in YAML and JSON.
"""

import dataclasses
import json
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeGuard, TypeVar, overload

from annotated_types import Ge, Gt, Le, Lt

from outrider.errors import UserError, require
from outrider.files import is_local, read_json

Made = TypeVar("Made")
_hints: Callable[[Any], dict[str, object]] = cache(partial(typing.get_type_hints, include_extras=True))
_SCALARS: dict[object, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    str: "a text",
    types.NoneType: "null",
    Path: "a path",
}
_UNIONS = (types.UnionType, typing.Union)
_SIGNS: dict[type, str] = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}


@dataclasses.dataclass(frozen=True)
class Named:
    """A text that must not be empty. what: its description, for errors; form: a regular expression for it."""

    what: str
    form: str = ""


@dataclasses.dataclass(frozen=True)
class Place(Named):
    """The path of a file or directory that must exist (see `Settings.require_places`).

    hub: whether a Hub name is accepted too, which is not checked. besides: words that are accepted too.
    """

    hub: bool = False
    besides: tuple[str, ...] = ()

    def require(self, key: str, value: str) -> None:
        """Raise `UserError` if `value` is a local path that does not exist."""
        elsewhere = value in self.besides or (self.hub and not is_local(value))
        if not elsewhere and not os.path.exists(value):
            raise UserError(f"{key}={value}: no such directory or file; give {self.what}")


@dataclasses.dataclass(frozen=True)
class Only:
    """The values of other options with which a field is read; with other values it must stay at its default."""

    options: tuple[tuple[str, tuple[object, ...]], ...]


def only(**options: object) -> Only:
    """`only(rule="beta")`: read only with rule=beta. A tuple lists several values; several options must all match."""
    return Only(tuple((key, value if isinstance(value, tuple) else (value,)) for key, value in options.items()))


Count = Annotated[int, Ge(1)]
Share = Annotated[float, Ge(0), Le(1)]
Positive = Annotated[float, Gt(0)]
Seed = Annotated[int, Ge(0), Lt(2**31)]
Url = Annotated[str, Named("http://HOST:PORT or https://…, without password and query", r"https?://[^@?#\\\s]+")]


def free(default: Any = dataclasses.MISSING, *, factory: Any = dataclasses.MISSING) -> Any:
    """A field that does not affect results, so that a resumed run may change its value; all other fields do."""
    return dataclasses.field(default=default, default_factory=factory, metadata={"decides": False})


class Settings:
    """The base class of all settings, which are frozen dataclasses: checks their fields against their types.

    A subclass checks conditions on several fields in `__post_init__`, after `super().__post_init__()`.
    """

    given: ClassVar[Collection[str]] = ()  # the keys that a command line gave, of settings that were made from one
    __dataclass_fields__: ClassVar[dict[str, "dataclasses.Field[Any]"]]  # every subclass is a dataclass

    def __post_init__(self) -> None:
        """Raises `UserError` naming the first field of a wrong type, out of range, or set although it is not read."""
        for field in dataclasses.fields(self):
            _read(_hints(type(self))[field.name], getattr(self, field.name), field.name, made=True)
        for field in dataclasses.fields(self):
            for option, values in conditions(_hints(type(self))[field.name]):
                if getattr(self, option) not in values:
                    require_default(self, field.name, f"{option}={getattr(self, option)} does not read it")

    def gives(self, key: str) -> bool:
        """Whether the command line set the option with the dotted key `key`, or a group that contains it."""
        return any(key == one or key.startswith(f"{one}.") for one in self.given)

    def require_places(self, wanted: Callable[[str], bool], path: str = "") -> None:
        """Raise `UserError` for the first `Place`, also in nested settings, that does not exist; no file is opened.

        wanted: whether to check the option with a given dotted key. path: the key of these settings.
        """
        for field in dataclasses.fields(self):
            key, value = _at(path, field.name), getattr(self, field.name)
            for name, item in value.items() if isinstance(value, Mapping) else [("", value)]:
                if isinstance(item, Settings):
                    item.require_places(wanted, _at(key, name) if name else key)
            for place in _places(_hints(type(self))[field.name]) if value is not None and wanted(key) else ():
                for one in [value] if isinstance(value, str) else value:
                    place.require(key, one)

    def deciding(self) -> dict[str, Any]:
        """The fields that affect results, as plain containers; a resumed run must agree on them."""
        fields = dataclasses.fields(self)
        return {field.name: _decided(getattr(self, field.name)) for field in fields if decides(field)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """The settings that all commands with an output directory share."""

    out_dir: str = free("runs")  # where everything goes
    resume: bool = free(False)  # go on with what an earlier run left in out_dir


def decides(field: "dataclasses.Field[Any]") -> bool:
    """Whether a field affects results (see `free`)."""
    return bool(field.metadata.get("decides", True))


def conditions(kind: object) -> tuple[tuple[str, tuple[object, ...]], ...]:
    """The options and their values with which a field of the type `kind` is read (see `only`)."""
    return tuple(pair for one in _said_of(kind) if isinstance(one, Only) for pair in one.options)


def require_default(config: Settings, name: str, why: str, prefix: str = "") -> None:
    """Raise `UserError` unless a field is at its default, as another value would have no effect."""
    field, given = next(own for own in dataclasses.fields(config) if own.name == name), getattr(config, name)
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    require(given == default, prefix + name, given, f"{default!r}, its default: {why}")


def default_at(config: object, key: str) -> object:
    """The default, plain, of the field at the dotted `key` in `config` that affects results; `ABSENT` without one."""
    *outer, last = key.split(".")
    for part in outer:
        config = config.get(part) if isinstance(config, Mapping) else getattr(config, part, None)
    for field in dataclasses.fields(config) if isinstance(config, Settings) else ():
        if field.name == last and decides(field):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            return ABSENT if default is dataclasses.MISSING else _decided(default)
    return ABSENT


@overload
def construct(kind: type[Made], value: object, path: str = "") -> Made: ...


@overload
def construct(kind: object, value: object, path: str = "") -> Any: ...  # a union, or another type that is not a class


def construct(kind: object, value: object, path: str = "") -> object:
    """A `kind` made from `value`, its `dataclasses.asdict` in JSON; restores dataclasses, tuples and sets.

    Raises `UserError` naming the key path of a value that is missing, unknown, of a wrong type, or refused by a
    `__post_init__`. A number of type float may be written as an integer; NaN and infinities are refused.
    """
    return _read(kind, value, path)


def _read(kind: object, value: object, path: str, made: bool = False) -> object:
    """See `construct`. made: `value` is constructed already, so a mapping instead of a dataclass is an error."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in _UNIONS:
        kinds = [one for one in arguments if _holds(one, value)]
        return _read(kinds[0], value, path, made) if kinds else _refuse(arguments, value, path)
    if not _holds(kind, value):
        _refuse(_kinds(kind), value, path)
    if origin is Annotated:
        return _read(arguments[0], value, path, made)
    if _is_dataclass(kind) and isinstance(value, Mapping):
        require(not made, path, value, f"a {kind.__name__}")
        return _construct_dataclass(kind, value, path)
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {key: _read(arguments[1], item, _at(path, key), made) for key, item in value.items()}
    if origin in (list, tuple, frozenset) and isinstance(value, list | tuple | frozenset):
        return origin(_items(kind, value, path, made))
    if kind is float and isinstance(value, int):
        return float(value)
    return Path(value) if kind is Path and isinstance(value, str) else value


def _items(kind: object, value: Collection[object], path: str, made: bool) -> Iterator[object]:
    arguments, one = typing.get_args(kind), typing.get_args(kind)[0]
    if one in _SCALARS and not _is_fixed(kind) and all(_holds(one, item) for item in value):
        yield from map(float, typing.cast(Collection[float], value)) if one is float else value  # fast, for tokens
        return
    kinds = arguments if _is_fixed(kind) else [one] * len(value)
    for place, (inner, item) in enumerate(zip(kinds, value, strict=True)):
        yield _read(inner, item, f"{path}[{place}]", made)


def read_as(kind: type[Made], path: Path | str, what: str, remedy: str) -> Made:
    """The JSON file `path` as a `kind` (see `construct`). Raises `UserError` as `read_json` does."""
    value = read_json(path, what, remedy)
    try:
        return construct(kind, value)
    except UserError as error:
        raise UserError(f"{path}: damaged {what} ({error}); {remedy}") from None


def _construct_dataclass(kind: type, value: Mapping[str, object], path: str) -> object:
    hints, fields = _hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    unknown = next((key for key in value if key not in fields), None)
    if unknown is not None:
        raise UserError(f"{_at(path, unknown)}: unknown; expected some of {', '.join(fields)}")
    for name, field in fields.items():
        if name not in value and field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"{_at(path, name)}: missing")
    inner = {key: construct(hints[key], item, _at(path, key)) for key, item in value.items()}
    try:
        return kind(**inner)
    except UserError as error:
        raise UserError(_at(path, str(error))) from None


def _holds(kind: object, value: object) -> bool:
    """Whether `value` is of type `kind`, without a check of the items of containers."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, object):
        return True
    if origin is Annotated:
        return _holds(arguments[0], value) and all(_is_within(one, value) for one in _said_of(kind))
    if origin in _UNIONS:
        return any(_holds(one, value) for one in arguments)
    if origin is typing.Literal:
        return value in arguments
    if _is_dataclass(kind):
        return isinstance(value, (dict, kind))
    if origin in (dict, Mapping):
        return isinstance(value, Mapping)
    if origin in (list, tuple, frozenset):
        sized = len(arguments) if _is_fixed(kind) else None
        return isinstance(value, list | tuple | frozenset) and sized in (None, len(value))
    if kind is float:
        return isinstance(value, int | float) and type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is (str if kind is Path else kind)


def _is_within(limit: object, value: Any) -> bool:
    """Whether `value` satisfies the bound `limit`; if that is `Named`, whether it is such a text."""
    if isinstance(limit, Named):
        return bool(value) and (not limit.form or re.fullmatch(limit.form, value) is not None)
    how = type(limit).__name__.lower()  # Ge(ge=1) → ge, also the operator's name
    return type(limit) not in _SIGNS or bool(getattr(operator, how)(value, getattr(limit, how)))


def limits(kind: object) -> str:
    """The range of a number of the type `kind`, such as "≥ 1 and < 8"; empty without limits."""
    ends = [one for one in _said_of(kind) if type(one) in _SIGNS]
    return " and ".join(f"{_SIGNS[type(end)]} {getattr(end, type(end).__name__.lower())}" for end in ends)


def _said_of(kind: object) -> tuple[object, ...]:
    """The metadata of an `Annotated` type; empty for other types."""
    return typing.get_args(kind)[1:] if typing.get_origin(kind) is Annotated else ()


def _decided(value: object) -> object:
    if isinstance(value, Settings):
        return value.deciding()
    if isinstance(value, Mapping):
        return {key: _decided(item) for key, item in value.items()}
    return type(value)(map(_decided, value)) if isinstance(value, list | tuple) else value


def _places(kind: object) -> Iterator[Place]:
    """The `Place` metadata of the type `kind`, also within a union or a list."""
    yield from (one for one in _said_of(kind) if isinstance(one, Place))
    for inner in typing.get_args(kind):
        yield from _places(inner)


def _kinds(kind: object) -> tuple[object, ...]:
    """The types of a union, also within an `Annotated` without limits; any other type as a tuple of one."""
    bare = not any(isinstance(one, Named) or type(one) in _SIGNS for one in _said_of(kind))
    inner = typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated and bare else kind
    return typing.get_args(inner) if typing.get_origin(inner) in _UNIONS else (inner,)


def _is_dataclass(kind: object) -> TypeGuard[type]:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _is_fixed(kind: object) -> bool:
    """Whether a kind is a tuple with a type for each of its items."""
    return typing.get_origin(kind) is tuple and ... not in typing.get_args(kind)


def _refuse(kinds: tuple[object, ...], value: object, path: str) -> typing.NoReturn:
    found = f"{path}={value!r}" if path else f"found {value!r}"
    raise UserError(f"{found}: expected {_either(kinds)}")


def _either(kinds: Sequence[object]) -> str:
    *others, last = dict.fromkeys(map(_name, kinds))
    return f"{', '.join(others)} or {last}" if others else last


def _name(kind: object) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        named = [one.what for one in _said_of(kind) if isinstance(one, Named)]
        bounded = arguments[0] is float and any(isinstance(one, Le | Lt) for one in _said_of(kind))
        number = "a number" if bounded else _name(arguments[0])
        return named[0] if named else f"{number} {limits(kind)}".rstrip()
    if origin in _UNIONS:
        return _either(arguments)
    if origin is typing.Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(_shown, arguments))
    if _is_fixed(kind):
        return f"a list of {len(arguments)}, each {_name(arguments[0])}"
    if origin in (list, tuple, frozenset):
        return f"a list, each {_name(arguments[0])}"
    return _SCALARS.get(kind, "a mapping")


def _shown(choice: object) -> str:
    return str(choice).lower() if isinstance(choice, bool) else str(choice)


def _at(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


def differences(old: object, new: object, key: str = "") -> list[tuple[str, object, object]]:
    """All differences of two plain values, as (dotted key, old value, new value); a missing value is `ABSENT`.

    A mapping that only one of them has counts as one difference. Values are compared as JSON.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        pairs = ((key, old.get(key, ABSENT), new.get(key, ABSENT)) for key in sorted(old.keys() | new.keys(), key=str))
        return [found for inner, a, b in pairs for found in differences(a, b, f"{key}.{inner}" if key else inner)]
    return [] if _plain(old) == _plain(new) else [(key, old, new)]


def _plain(value: object) -> str:
    return repr(value) if value is ABSENT else json.dumps(value, sort_keys=True)
