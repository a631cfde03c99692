"""Plain containers, as YAML and JSON hold them, made into frozen dataclasses again."""

import dataclasses
import functools
import json
import reprlib
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import UserError
from outrider.files import read_json

_hints = functools.cache(typing.get_type_hints)
_SCALARS = {
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    str: "a text",
    types.NoneType: "null",
    Path: "a path",
}


def construct(kind: Any, value: Any, path: str = "") -> Any:
    """`value`, what `dataclasses.asdict` leaves of a `kind` in JSON, as a `kind` again: dataclasses, tuples, sets.

    Raises `UserError` naming the key path of what is missing, unknown or of another type, and of what a
    `__post_init__` refuses. A number of type float may be written as an integer; NaN and infinities are none.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, object):
        return value
    if origin in (types.UnionType, typing.Union):
        kind = next((one for one in arguments if _holds(one, value)), None)
        return _refuse(arguments, value, path) if kind is None else construct(kind, value, path)
    if not _holds(kind, value):
        return _refuse((kind,), value, path)
    if _is_dataclass(kind):
        return _construct_dataclass(kind, value, path)
    if origin in (dict, Mapping):
        return {key: construct(arguments[1], inner, _at(path, key)) for key, inner in value.items()}
    if origin in (list, tuple, frozenset):
        if arguments[0] in _SCALARS and not _is_fixed(kind) and all(_holds(arguments[0], item) for item in value):
            return origin(map(float, value) if arguments[0] is float else value)  # quick: tokens are many
        kinds = arguments if _is_fixed(kind) else arguments[:1] * len(value)
        pairs = enumerate(zip(kinds, value, strict=True))
        return origin(construct(one, item, f"{path}[{i}]") for i, (one, item) in pairs)
    return kind(value) if kind in (float, Path) else value


def read_as(kind: Any, path: Path | str, what: str, remedy: str) -> Any:
    """The JSON file `path` as a `kind` (see `construct`). Raises `UserError` as `read_json` does."""
    value = read_json(path, what, remedy)
    try:
        return construct(kind, value)
    except UserError as error:
        raise UserError(f"{path}: damaged {what} ({error}); {remedy}") from None


def _construct_dataclass(kind: Any, value: Mapping[str, Any], path: str) -> Any:
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


def _holds(kind: Any, value: Any) -> bool:
    """Whether `value` is of a `kind`, as far as it shows without looking into containers."""
    origin = typing.get_origin(kind)
    if kind in (Any, object):
        return True
    if origin is typing.Literal:
        return value in typing.get_args(kind)
    if _is_dataclass(kind) or origin in (dict, Mapping):
        return isinstance(value, dict)
    if origin in (list, tuple, frozenset):
        return isinstance(value, list | tuple) and (not _is_fixed(kind) or len(value) == len(typing.get_args(kind)))
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is (str if kind is Path else kind)


def _is_dataclass(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _is_fixed(kind: Any) -> bool:
    """Whether a kind is a tuple with a type for each of its items."""
    return typing.get_origin(kind) is tuple and ... not in typing.get_args(kind)


def _refuse(kinds: tuple[Any, ...], value: Any, path: str) -> typing.NoReturn:
    found = f"{path}={reprlib.repr(value)}" if path else f"found {reprlib.repr(value)}"
    raise UserError(f"{found}: expected {' or '.join(dict.fromkeys(map(_name, kinds)))}")


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if _is_fixed(kind):
        return f"a list of {len(typing.get_args(kind))}"
    if typing.get_origin(kind) in (list, tuple, frozenset):
        return f"a list, each {_name(typing.get_args(kind)[0])}"
    return _SCALARS.get(kind, "a mapping")


def _at(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def listed(words: Sequence[str], limit: int = 6) -> str:
    """The first few of `words`, and how many more there are."""
    return ", ".join(words[:limit]) + (f" and {len(words) - limit} more" if len(words) > limit else "")


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


def differences(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of all that differs between two plain values; what one lacks is `ABSENT`.

    A mapping that only one of them has counts as one difference. Values are compared as JSON holds them.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = sorted(old.keys() | new.keys(), key=str)
        pairs = ((inner, old.get(inner, ABSENT), new.get(inner, ABSENT)) for inner in keys)
        return [found for inner, a, b in pairs for found in differences(a, b, f"{key}.{inner}" if key else inner)]
    return [] if _plain(old) == _plain(new) else [(key, old, new)]


def _plain(value: Any) -> str:
    return repr(value) if value is ABSENT else json.dumps(value, sort_keys=True)
