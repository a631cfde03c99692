"""Settings: dataclasses whose fields are checked against their types whenever an instance is made.

    @dataclass(frozen=True)
    class Stopping(Settings):
        rule: Literal["fixed", "beta"] = opt("fixed", "when a draft ends")     # the type has the choices
        alpha: Annotated[Positive, only(rule="beta")] = 4.0                    # its range; when it is read
        workers: Count = free(1, "processes at work")                          # affects no result

    construct(Stopping, {"rule": "beta", "alpha": -1})     # UserError: alpha=-1: expected a number greater than 0

`construct` makes settings from plain containers, as in YAML and JSON. pydantic checks types and ranges (`_validate`
turns its errors into `UserError`s). `Settings.__post_init__` checks what pydantic does not know: `only`. A rehearsal
(debug=true) runs a command on tiny models and little data. The dotted key of a nested option is such as fit.seed.
"""

import dataclasses
import json
import re
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, cast, overload

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypedDict

from outrider.base.errors import UserError, require
from outrider.base.files import read_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Data = TypeVar("Data")
Value = TypeVar("Value")
Config = TypeVar("Config", bound="Settings")
READ_WITH = "read with"  # the key of `Only.options` in the JSON schema of a field
_CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


@dataclasses.dataclass(frozen=True)
class Named:
    """Metadata of a text that must not be empty. what: its description, for errors; form: its regular expression."""

    what: str
    form: str = ""

    def __get_pydantic_core_schema__(self, kind: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(kind))

    def _check(self, value: str) -> str:
        if not value or (self.form and not re.fullmatch(self.form, value)):
            raise PydanticCustomError("named", "Input should be {what}", {"what": self.what})
        return value

    def require(self, key: str, value: str) -> None:
        """Nothing here. The subclass for paths raises `UserError` if `value` of the option `key` is no usable path."""


@dataclasses.dataclass(frozen=True, eq=False)
class KeyOf:
    """Metadata of a text that must be a key of `table`, also one added later; --help shows the keys as choices."""

    table: Mapping[str, object]

    def __get_pydantic_core_schema__(self, kind: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(kind))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "enum": [*self.table]}

    def _check(self, value: str) -> str:
        if value not in self.table:
            raise PydanticCustomError("key", "Input should be one of {keys}", {"keys": ", ".join(self.table)})
        return value


@dataclasses.dataclass(frozen=True)
class Only:
    """Metadata of a field that is read only with some values of other options, and else stays at its default."""

    options: tuple[tuple[str, tuple[object, ...]], ...]  # (option, its possible values), all of which must match

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), READ_WITH: self.options}


def only(**options: object) -> Only:
    """`only(rule="beta")`: a field read only with rule=beta. A tuple lists several values; all options must match."""
    return Only(tuple((key, value if isinstance(value, tuple) else (value,)) for key, value in options.items()))


Count = Annotated[int, Ge(1)]
Share = Annotated[float, Ge(0), Le(1)]
Positive = Annotated[float, Gt(0)]
Seed = Annotated[int, Ge(0), Lt(2**31)]
Url = Annotated[str, Named("http://HOST:PORT or https://…, without password and query", r"https?://[^@?#\\\s]+")]
DEFAULT = object()  # debug=DEFAULT: a rehearsal has the field's default


def opt(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    factory: Any = dataclasses.MISSING,
    decides: bool | str = True,
    **debug: object,
) -> Any:
    """A field that affects results, so that a resumed run must agree on it. help: its meaning, as --help shows it.

    decides: whether it affects results, or the name of an option without which it does not.
    debug: its value in a rehearsal: a number is the largest value, a function makes it from the value, `DEFAULT` is the
    field's default, and anything else is the value itself.
    step_debug: the same in a step of a pipeline, which reads text made by an earlier step.
    """
    if debug.get("debug") is DEFAULT:
        debug["debug"] = lambda _: default if factory is dataclasses.MISSING else factory()
    metadata = {"description": help or None, "decides": decides, **debug}  # pydantic reads `description`
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


free = partial(opt, decides=False)  # a field that affects no result, so that a resumed run may change its value


def debug_value(field: "dataclasses.Field[object]", value: object, step: bool) -> object:
    """The value of an option in a rehearsal (see `opt`); step: in a step of a pipeline's rehearsal."""
    rehearsal_value = field.metadata.get("debug", value)
    rehearsal_value = field.metadata.get("step_debug", rehearsal_value) if step else rehearsal_value
    if callable(rehearsal_value):
        return rehearsal_value(value)
    if isinstance(rehearsal_value, int | float) and not isinstance(rehearsal_value, bool):
        return min(value, rehearsal_value) if isinstance(value, int | float) else value
    return rehearsal_value


def always(value: object) -> Callable[[object], object]:
    """debug=always(2): a rehearsal has 2, also where the option is null."""
    return lambda _: value


def unless_null(value: object) -> Callable[[object], object]:
    """debug=unless_null(64): a rehearsal has 64, unless the option is null."""
    return lambda option_value: None if option_value is None else value


_type_hints: Callable[[object], dict[str, object]] = cache(partial(typing.get_type_hints, include_extras=True))


def field_types(dataclass_type: "DataclassInstance | type[DataclassInstance]") -> dict[str, object]:
    """The types of the fields of a dataclass, with their metadata."""
    return {field.name: _type_hints(dataclass_type)[field.name] for field in dataclasses.fields(dataclass_type)}


class Settings:
    """The base class of all settings, which are frozen dataclasses: checks their fields against their types.

    A subclass checks conditions on several fields in `check_fields`, after those of its bases.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG
    __dataclass_fields__: ClassVar[dict[str, "dataclasses.Field[object]"]]  # every subclass is a dataclass

    def __post_init__(self) -> None:
        """Raises `UserError` naming the first field of a wrong type, out of range, or set although it is not read."""
        settings_class: type = type(self)
        _validate(_fields_of(settings_class).validate_python, (vars(self),), key_path="", value=vars(self))
        for field in dataclasses.fields(self):
            for option_name in self.disabled_by(field.name):
                require_defaults(self, [field.name], f"{option_name}={getattr(self, option_name)} does not read it")
        for base in reversed(settings_class.__mro__):  # the method of each class itself, if it has one
            vars(base).get("check_fields", lambda _: None)(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, kind: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(kind)
        cast(dict[str, object], handler.resolve_ref_schema(schema))["post_init"] = False  # `_run_checks` runs it
        return core_schema.no_info_after_validator_function(_run_checks, schema)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The JSON schema of pydantic, with the docstrings of inherited fields too."""
        json_schema = handler(schema)
        field_schemas = handler.resolve_ref_schema(json_schema)["properties"]
        for base in filter(dataclasses.is_dataclass, cls.__bases__):
            for name, base_schema in TypeAdapter(base).json_schema()["properties"].items():
                if "description" in base_schema:
                    field_schemas[name].setdefault("description", base_schema["description"])
        return json_schema

    def require(self, key: str, condition: bool, expected: str) -> None:
        """Raise `UserError` naming the option with the dotted key `key` and its value, unless `condition` holds."""
        require(condition, key, attrgetter(key)(self), expected)

    def disabled_by(self, field_name: str) -> list[str]:
        """The options with whose values the field `field_name` is not read (see `only`)."""
        metadata = getattr(field_types(type(self))[field_name], "__metadata__", ())
        conditions = [condition for rule in metadata if isinstance(rule, Only) for condition in rule.options]
        return [option for option, values in conditions if getattr(self, option) not in values]

    def require_paths(self, is_checked: Callable[[str], bool], prefix: str = "") -> None:
        """Raise `UserError` for the first `InputPath` at which there is nothing, or something that does not suit.

        Nested settings are checked too. is_checked: whether to check the option with a dotted key. prefix: the key of
        these settings.
        """
        for name, field_type in field_types(type(self)).items():
            key, value = _join(prefix, name), getattr(self, name)
            member_values = value if isinstance(value, Mapping) else {"": value}
            for member_name, member_value in member_values.items():
                if isinstance(member_value, Settings):
                    member_value.require_paths(is_checked, _join(key, member_name))
            if value is None or not is_checked(key):
                continue
            paths = [value] if isinstance(value, str) else value.values() if isinstance(value, Mapping) else value
            for constraint in constraints_of(field_type):
                for input_path in paths:
                    constraint.require(key, input_path)

    def decisions(self) -> dict[str, object]:
        """The fields that affect results, as plain containers; a resumed run must agree on them."""
        deciding_values = {}
        for field in dataclasses.fields(self):
            decides = field.metadata.get("decides", True)
            if getattr(self, decides) if isinstance(decides, str) else decides:
                deciding_values[field.name] = _to_plain(getattr(self, field.name))
        return deciding_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """The settings that all commands with an output directory share. run_files: patterns of a run's files there."""

    run_files: ClassVar[tuple[str, ...]] = ()

    out_dir: str = free("runs", "where everything goes")
    resume: bool = free(False, "go on with what an earlier run left in out_dir")

    def check_fields(self) -> None:
        require(bool(self.out_dir), "out_dir", self.out_dir, "a directory")


def covers(keys: Collection[str], key: str) -> bool:
    """Whether `keys` have the dotted `key` or a key that contains it: {"fit"} gives "fit.seed"."""
    return any(key == outer_key or key.startswith(f"{outer_key}.") for outer_key in keys)


def missing_error(key: str, description: str) -> UserError:
    """The error for an option that must be given. description: its description."""
    return UserError(f"{key}: missing; give it as {key}=VALUE: {description}")


def require_defaults(config: Settings, field_names: Iterable[str], why: str, prefix: str = "") -> None:
    """Raise `UserError` unless these fields are at their defaults, since nothing reads them. why: the reason.

    Of nested settings the error names the first field that differs. prefix: the dotted key of `config`, with a dot.
    """
    fields = {field.name: field for field in dataclasses.fields(config)}
    for name in field_names:
        field, setting = fields[name], getattr(config, name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if isinstance(setting, Settings):  # the fields that are changed, one by one
            require_defaults(setting, (option.name for option in dataclasses.fields(setting)), why, f"{prefix}{name}.")
        require(setting == default, prefix + name, setting, f"{default!r}, its default: {why}")


@overload
def construct(value_type: type[Value], value: object, key_path: str = "") -> Value: ...


@overload
def construct(value_type: object, value: object, key_path: str = "") -> Any: ...  # no class, as a union


def construct(value_type: object, value: object, key_path: str = "") -> object:
    """A `value_type` made from `value`, its `dataclasses.asdict` in JSON; restores dataclasses, tuples and sets.

    Raises `UserError` naming the key path of a value that is missing, unknown, of a wrong type, or refused by a
    `__post_init__`. A number of type float may be written as an integer; NaN and infinities are refused.
    """
    try:
        json_text = json.dumps([value])
    except (TypeError, ValueError):
        raise UserError(f"{key_path}={value!r}: expected numbers and texts, and lists and mappings of those") from None
    return _validate(partial(_adapter(value_type).validate_json, strict=True), json_text, key_path, value)[0]


def read_as(value_type: type[Value], path: Path | str, content_name: str, remedy: str) -> Value:
    """The JSON file `path` as a `value_type` (see `construct`). Raises `UserError` as `read_json` does."""
    value = read_json(path, content_name, remedy)
    try:
        return construct(value_type, value)
    except UserError as error:
        raise UserError(f"{path}: damaged {content_name} ({error}); {remedy}") from None


@cache
def _adapter(value_type: Any) -> "TypeAdapter[Any]":
    """pydantic's validator of a 1-tuple of `value_type`: for a bare dataclass it accepts no configuration."""
    return TypeAdapter(tuple[value_type], config=_CONFIG)


@cache
def _fields_of(dataclass_type: type) -> "TypeAdapter[tuple[object]]":
    """The validator of an instance's fields, given as a mapping in a 1-tuple."""
    return _adapter(cast(Any, TypedDict)(dataclass_type.__name__, field_types(dataclass_type)))


def _run_checks(settings: Settings) -> Settings:
    """`settings`, made by pydantic, after their `__post_init__`; pydantic adds the location to its error."""
    try:
        settings.__post_init__()
    except UserError as error:
        raise PydanticCustomError("refused", "{message}", {"message": str(error)}) from None
    return settings


def _validate(validate: Callable[[Data], Value], data: Data, key_path: str, value: object) -> Value:
    """The result of pydantic's `validate` for `data`, which is `value` in a list (its locations begin with 0).

    key_path: the dotted key of `value`, for errors.
    pydantic lists an error for each member of a union, some of them inside a member. The `UserError` names the deepest
    key within the first error's key, and all that is expected there.
    """
    try:
        return validate(data)
    except UserError as error:  # raised by a dataclass that is no `Settings`
        raise UserError(f"{key_path}: {error}" if key_path else str(error)) from None
    except ValidationError as error:
        # (dotted key, the value there, pydantic's record of the fault)
        faults = [(*_value_at(fault["loc"][1:], value, key_path), fault) for fault in error.errors(include_url=False)]
    inside_pattern = re.compile(f"{re.escape(faults[0][0])}($|[.[])")
    key, setting, fault = max((f for f in faults if inside_pattern.match(f[0])), key=lambda f: len(f[0]))
    match fault["type"]:
        case "missing":
            raise UserError(f"{_join(key, str(fault['loc'][-1]))}: missing")
        case "unexpected_keyword_argument":
            raise UserError(f"{key}: unknown")
        case "refused":
            raise UserError(_join(key, fault["msg"]))
        case "json_invalid":  # Python writes such JSON, which pydantic does not read
            raise UserError(f"{key_path or 'found'}: a lone surrogate in a text, or containers nested too deeply")
    texts = dict.fromkeys(f[2]["msg"].removeprefix("Input should be ") for f in faults if f[0] == key)
    phrases = (re.sub(r"^(?=greater|less)", "a number ", re.sub(r"^(a valid \w+),.*", r"\1", text)) for text in texts)
    expected = " or ".join(phrases)
    raise UserError(f"{key}={setting!r}: expected {expected}" if key else f"found {setting!r}: expected {expected}")


def _value_at(location: Sequence[int | str], value: object, key_path: str) -> tuple[str, object]:
    """The dotted key of pydantic's location in `value`, without the names of union members; and the value there."""
    for key_or_index in location:
        if isinstance(value, Mapping) and key_or_index in value:
            key_path, value = _join(key_path, str(key_or_index)), value[key_or_index]
        elif isinstance(value, list | tuple) and isinstance(key_or_index, int) and key_or_index < len(value):
            key_path, value = f"{key_path}[{key_or_index}]", value[key_or_index]
    return key_path, value


def _to_plain(value: object) -> object:
    """`value` with its settings as plain containers of their deciding fields."""
    if isinstance(value, Settings):
        return value.decisions()
    if isinstance(value, Mapping):
        return {key: _to_plain(member) for key, member in value.items()}
    return type(value)(map(_to_plain, value)) if isinstance(value, list | tuple) else value


def constraints_of(value_type: object) -> Iterator[Named]:
    """The `Named` metadata of the type `value_type`, also within a union or a list."""
    yield from (constraint for constraint in getattr(value_type, "__metadata__", ()) if isinstance(constraint, Named))
    for inner_type in typing.get_args(value_type):
        yield from constraints_of(inner_type)


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix and key else prefix or key
