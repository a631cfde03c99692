"""The options of a command as text: pydantic's schema of its settings, with the defaults as Hydra composes them.

Hydra composes a config from YAML files; a group is a set of files, of which one is chosen. `usage(command)` has the
usual command lines of a command.
"""

import inspect
import re
import shlex
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter

from outrider.base.settings import READ_WITH
from outrider.base.words import format_value
from outrider.cli import COMMANDS, usage
from outrider.commands.composing import compose_config, groups_of

_WORDS = {"string": "text", "boolean": "true or false", "null": "null", "integer": "integer", "number": "number"}
_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_WIDTH = 110
_USUAL = 5  # options that --help shows first
_COMMON = ("target", "checkpoint", "prompts", "minutes", "out_dir", "resume")


@dataclass(frozen=True)
class Option:
    """An option: its key, its type in words, its default as composed, and its meaning."""

    key: str
    kind: str
    default: str
    meaning: str


def help_text(command_name: str, overrides: list[str]) -> str:
    """The output of `--help` for the command with `overrides`, words KEY=VALUE, applied to its defaults."""
    settings_class = COMMANDS[command_name].load_settings()
    first_sentence = re.split(r"(?<=[.!])\s", inspect.getdoc(settings_class) or "", maxsplit=1)[0]
    indent, lines_by_key = " " * 4, dict[str, list[str]]()
    for group, choices in groups_of(command_name).items():
        lines_by_key[group] = textwrap.wrap(f"{group}: {', '.join(choices)}", _WIDTH, subsequent_indent=indent)
    for option in options_of(settings_class, compose_config(command_name, overrides)):
        meaning_lines = textwrap.wrap(option.meaning, _WIDTH, initial_indent=indent, subsequent_indent=indent)
        lines_by_key[option.key] = [f"{option.key}={option.default}   ({option.kind})", *meaning_lines]
    lines = [f"Options are key=value; a group is chosen with group=choice. {first_sentence}", ""]
    for key in usual_keys(command_name, lines_by_key):
        lines += lines_by_key.pop(key)
    lines += ["", "The others:", *chain(*lines_by_key.values()), ""]
    multirun_hint = "--multirun runs several, e.g. -m fit.seed=0,1 'out_dir=runs/a/${fit.seed}'"
    return "\n".join([*lines, f"--cfg job prints the config as composed; {multirun_hint}"])


def usual_keys(command_name: str, available_keys: Collection[str]) -> list[str]:
    """The options and groups of a command to read first, `_USUAL` of those `available_keys`.

    The options of its usual command lines come first, then options that most commands have.
    """
    words = [word for line in usage(command_name) for word in shlex.split(line, comments=True) if "=" in word]
    keys = dict.fromkeys([*(word.partition("=")[0] for word in words), *_COMMON])
    return [key for key in keys if key in available_keys][:_USUAL]


def options_of(settings_class: type, composed: DictConfig) -> list[Option]:
    """Every option of `settings_class`, nested ones by dotted key; composed: the config that holds their defaults."""
    return list(_options(TypeAdapter(settings_class).json_schema(), composed, ""))


def _options(settings_schema: Mapping[str, Any], composed: DictConfig | None, key_prefix: str) -> Iterator[Option]:
    """The options of the JSON schema `settings_schema`, each with its default in `composed`, or else in the schema."""
    for name, schema in settings_schema["properties"].items():
        key, meaning = key_prefix + name, " ".join(schema.get("description", "").split())
        by_name = schema.get("additionalProperties")  # of a mapping: the schema of its values
        if "properties" in schema:
            yield from _options(schema, composed and composed[name], f"{key}.")
        elif isinstance(by_name, dict) and "properties" in by_name:
            yield Option(f"{key}.NAME", "settings", "", meaning)
            yield from _options(by_name, None, f"{key}.NAME.")
        else:
            if conditions := schema.get(READ_WITH):  # (option, values) with which alone this option is read
                phrases = (f"{option}={_either(values)}" for option, values in conditions)
                meaning = f"with {' and '.join(phrases)}: {meaning}"
            in_schema = schema.get("default", by_name and {})  # {}: no settings by name
            default = format_value(in_schema) if composed is None else _default(composed, name)
            yield Option(key, describe_schema(schema), default, meaning)


def _default(composed: DictConfig, name: str) -> str:
    """The composed value; both values if it depends on the device; "" if the option is required."""
    if OmegaConf.is_interpolation(composed, name):
        interpolation = str(dict(composed.items_ex(resolve=False))[name])
        return re.sub(r"\$\{by_device:(.+),(.+)\}", r"\1, without a GPU \2", interpolation)
    return "" if OmegaConf.is_missing(composed, name) else format_value(composed[name])


def describe_schema(schema: Any) -> str:
    """The type of a JSON schema in words, with its choices or its range."""
    if schema is True or {"anyOf", "enum", "const", "type"}.isdisjoint(schema):  # True: JSON schema for any value
        return "any"
    if "anyOf" in schema:
        null_last = sorted(schema["anyOf"], key=lambda branch: branch.get("type") == "null")
        return " or ".join(map(describe_schema, null_last))
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return _either(choices)
    if schema["type"] == "array":  # a tuple (prefixItems) is described by its first member
        return f"list of {describe_schema(schema['items'] if 'items' in schema else schema['prefixItems'][0])}"
    if schema["type"] == "object":
        return f"{describe_schema(schema['additionalProperties'])} by name"
    bounds = [f"{sign} {schema[bound_key]}" for bound_key, sign in _SIGNS.items() if bound_key in schema]
    return f"{_WORDS[schema['type']]} {' and '.join(bounds)}".rstrip()


def _either(values: Sequence[object]) -> str:
    """The values as a choice: "a, b or c"."""
    *head, last = map(format_value, values)
    return f"{', '.join(head)} or {last}" if head else last
