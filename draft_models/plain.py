"""Plain containers, as YAML and JSON hold them, made into frozen dataclasses again."""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from draft_models.errors import UserError

_hints = functools.cache(typing.get_type_hints)


def construct(kind: Any, value: Any, path: str = "") -> Any:
    """`value`, what `dataclasses.asdict` leaves of a `kind` in JSON, as a `kind` again: dataclasses, tuples, sets.

    Every `__post_init__` is run; the `UserError` it raises gets the key path in front. Nothing else is checked.
    """
    if isinstance(kind, types.UnionType):
        kind = next((one for one in typing.get_args(kind) if _holds(one, value)), None)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = _hints(kind)
        inner = {k: construct(hints[k], v, f"{path}{k}.") for k, v in value.items()}
        try:
            return typing.cast(Any, kind)(**inner)
        except UserError as error:
            raise UserError(f"{path}{error}") from None
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {k: construct(arguments[1], v, f"{path}{k}.") for k, v in value.items()}
    if origin in (tuple, frozenset) and isinstance(value, list):
        return origin(construct(arguments[0], item, path) for item in value)
    return value


def _holds(kind: Any, value: Any) -> bool:
    """Whether `kind` is a kind of container that `value` is the plain form of."""
    if isinstance(value, dict):
        return dataclasses.is_dataclass(kind) or typing.get_origin(kind) in (dict, Mapping)
    return isinstance(value, list) and typing.get_origin(kind) in (tuple, frozenset)


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
