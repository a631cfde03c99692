"""From the words of a command line to settings.

add_methods      what follows from the words KEY=VALUE: a drafter without a method gets its default method
check_words      unknown options and choices are refused, with the name that was likely meant
store_defaults   the defaults of the settings class become the first entry of conf/NAME.yaml's list of defaults
                 (here Hydra composes the config: defaults, YAML files, words)
build            pydantic makes the settings; `_adapt` has made numbers texts where the type is a text

`compose_config` does these steps for words that no command line has. The settings class alone defines names, types,
defaults and checks. YAML files only choose values. A group is a folder of YAML files in conf/, of which GROUP=FILE
chooses one; a method (how to draft) can also be composed as SOURCE/SHAPE/STOP, a kind of drafter, a shape of drafts and
a stop rule: method=eagle3/opt_tree. A sweep, KEY=A,B with --multirun, is a run for each value.
"""

import dataclasses
import os
import re
import typing
from collections.abc import Collection, Sequence
from contextlib import suppress

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from outrider.base.errors import UserError
from outrider.base.settings import Config, constraints_of, construct, field_types, missing_error
from outrider.base.words import did_you_mean, list_words, quote_word, write_option
from outrider.cli import COMMANDS
from outrider.draft_models.targets.settings import InputPath
from outrider.inference.settings.kinds import PROMPT_LOOKUP, presets_of
from outrider.inference.settings.method import CONF_DIR, PARTS, choices_of, method_key, no_such_method, settings_of


def compose_config(command_name: str, words: Sequence[str]) -> DictConfig:
    """conf/<name>.yaml composed over the defaults of the command's settings, with the options `words`.

    Raises `UserError` as `check_words` does, and errors of Hydra and OmegaConf for other faults (see `explain`).
    """
    words = keep_texts(command_name, words)
    check_words(command_name, words)
    store_defaults(command_name)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), version_base=None):
        return compose(command_name, overrides=words)


def build(settings_class: type[Config], composed: DictConfig, typed_keys: Collection[str] = ()) -> Config:
    """The composed config as an instance of `settings_class`. typed_keys: the dotted keys that the command line gave.

    Raises `UserError` naming a key that is missing or impossible, or lies in a method or source that was not chosen.
    """
    if missing_keys := OmegaConf.missing_keys(composed):
        first_key = min(missing_keys)
        descriptions = (constraint.what for constraint in constraints_of(option_type(settings_class, first_key)))
        raise missing_error(first_key, next(descriptions, "its value"))
    for key in typed_keys:
        _require_chosen(settings_class, composed, key)
    return construct(settings_class, _adapt(OmegaConf.to_container(composed, resolve=True), settings_class))


def typed_keys_of(words: Sequence[str]) -> frozenset[str]:
    """The dotted keys to which `words` give values; of a choice GROUP@KEY=FILE the key."""
    overrides = [word for word in words if "=" in word and word[0] not in "-~"]
    return frozenset(word.partition("=")[0].lstrip("+").rpartition("@")[2] for word in overrides)


def store_defaults(command_name: str) -> None:
    """Store the defaults of a command's settings as "<name>_schema", the first entry of conf/<name>.yaml's list.

    In YAML ${by_device:A,B} is A with a GPU and B without one; ${unless:${debug},A} is A, in a rehearsal null.
    """
    OmegaConf.register_new_resolver("by_device", lambda gpu, cpu: gpu if has_gpu() else cpu, replace=True)
    OmegaConf.register_new_resolver("unless", lambda flag, value: None if flag else value, replace=True)
    ConfigStore.instance().store(f"{command_name}_schema", _plain_defaults(COMMANDS[command_name].load_settings()))


def has_gpu() -> bool:
    """Whether there is a GPU that is not hidden, judged without torch by the files of NVIDIA's and AMD's drivers."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not is_hidden and any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd")))


def check_words(command_name: str, words: Sequence[str]) -> None:
    """Raise `UserError` for an unknown option or choice, and for a value given to an option that holds options.

    Composed methods are added to the choices of Hydra's group `method`. Hydra checks other flags and their values.
    """
    groups, settings_class = groups_of(command_name), COMMANDS[command_name].load_settings()
    for word in words:
        if word.startswith("-"):
            _check_flag(word, [*field_types(settings_class), *groups])
        elif "=" in word or word.startswith("~"):
            (override,) = OverridesParser.create().parse_overrides([word])
            key = override.key_or_group
            if override.is_sweep_override() and {"-m", "--multirun"}.isdisjoint(words):
                raise UserError(_not_an_option(word))
            if override.package is not None or key in groups:  # package: KEY of GROUP@KEY=FILE
                _check_choice(override)
            elif not key.startswith("hydra"):
                holds_options = dataclasses.is_dataclass(option_type(settings_class, key, groups))
                if holds_options and not (override.is_delete() or isinstance(override.value(), dict)):
                    raise UserError(f"{word}: expected names with values, as {key}={{NAME:VALUE}}")
    # Runs of a sweep must not share a folder: its name varies by a list of values (,), by ${KEY} or by {target}.
    folders = [word for word in words if word.startswith(("out_dir=", "experiment="))]  # an experiment gives an out_dir
    folders = folders or [str(field.default) for field in dataclasses.fields(settings_class) if field.name == "out_dir"]
    is_swept = any(word.startswith(("target=", "tokenizer=")) and "," in word for word in words)  # for {target}
    varying_chars = {*"$,{"} if is_swept else {*"$,"}
    has_own_folders = not folders or "plan=true" in words or any(varying_chars & {*folder} for folder in folders)
    if {"-m", "--multirun"} & {*words} and not has_own_folders:
        raise UserError("--multirun: each run needs a folder of its own, as 'out_dir=runs/grid/${hydra:job.num}'")


def keep_texts(command_name: str, words: Sequence[str]) -> list[str]:
    """`words` with quotes around a text that Hydra would read as a number: out_dir=2024_11_29 is no 20241129."""
    groups, settings_class = groups_of(command_name), COMMANDS[command_name].load_settings()
    quoted_words = []
    for word in words:
        key, _, value = word.partition("=")
        is_number = re.fullmatch(r"[+-]?[\d_.]+(e[+-]?\d+)?", value, re.IGNORECASE)
        if is_number and key not in groups and not key.startswith(("hydra", "+hydra", "~")):
            with suppress(UserError):  # an unknown option, which `check_words` reports
                option_types = _types_of(option_type(settings_class, key.lstrip("+"), groups))
                word = f"{key}='{value}'" if str in option_types and not option_types & {int, float} else word
        quoted_words.append(word)
    return quoted_words


def _types_of(type_hint: object) -> set[type]:
    """The classes of which a type is made, as a union, or with metadata."""
    return {type_hint} if isinstance(type_hint, type) else set().union(*map(_types_of, typing.get_args(type_hint)))


def option_type(settings_class: type, key: str, groups: Collection[str] = ()) -> object:
    """The type of the option of `settings_class` with a dotted key. Raises `UserError` if there is none.

    groups: the groups of the command, for suggestions.
    """
    type_so_far, key_so_far = typing.cast(object, settings_class), ""
    for key_part in key.split("."):
        key_so_far = f"{key_so_far}.{key_part}" if key_so_far else key_part
        if type_so_far in (typing.Any, object):
            return type_so_far
        options = field_types(type_so_far) if dataclasses.is_dataclass(type_so_far) else {}
        if not (type_so_far := options.get(key_part) or _member_type(type_so_far)):
            hint = did_you_mean(key_part, [*options, *groups])
            raise UserError(f"{key_so_far}: no such option{hint or '.'} Allowed here: {', '.join(options) or 'none'}")
    return type_so_far


def _member_type(kind: object) -> object:
    """The type of the values of a mapping; None for another type."""
    bare_type = typing.get_args(kind)[0] if hasattr(kind, "__metadata__") else kind  # of Annotated[dict[str, int], …]
    return typing.get_args(bare_type)[1] if typing.get_origin(bare_type) is dict else None


def _check_flag(word: str, option_names: Collection[str]) -> None:
    """Raise `UserError` for an option written as a flag, "--target X" or "-target X", and for a misspelt --help.

    option_names: the names of the command's options and groups.
    """
    if hint := did_you_mean(word, ["--help"] if word != "--hydra-help" else []):
        raise UserError(f"{word}: no such flag{hint}")
    key, _, value = word.lstrip("-").partition("=")
    key = key.replace("-", "_")
    if key.partition(".")[0] in option_names:
        raise UserError(f"{word}: options are written without dashes, as {key}={value or 'VALUE'}")


def _check_choice(override: Override) -> None:
    """Raise `UserError` unless the override of a group chooses among its files, or composes a method."""
    group, value = override.key_or_group, override.value()
    if override.is_delete() or (override.is_sweep_override() and not isinstance(value, ChoiceSweep)):
        return
    chosen_names = value.list if isinstance(value, ChoiceSweep) else value if isinstance(value, list) else [value]
    files = sorted((CONF_DIR / group).rglob("*.yaml"))
    choices = [file.relative_to(CONF_DIR / group).with_suffix("").as_posix() for file in files]
    for choice in chosen_names:
        name = choice if isinstance(choice, str) else str(override.input_line).partition("=")[2]  # as it was typed
        if group == "method" and choice == name and "/" in name:
            folder, _, config_name = f"method/{name}".rpartition("/")
            ConfigStore.instance().store(config_name, settings_of(name), folder, package=f"methods.{method_key(name)}")
        elif choice not in choices:
            hint = f"{did_you_mean(name, choices) or '.'} There are {list_words(choices)}; see --help"
            raise UserError(no_such_method(name) if group == "method" else f"{group}={name}: no such choice{hint}")


def groups_of(command_name: str) -> dict[str, list[str]]:
    """By group of conf/<name>.yaml its choices; also the experiments for it, and the parts of a method."""
    defaults = OmegaConf.load(CONF_DIR / f"{command_name}.yaml").defaults
    groups = {group: choices_of(group) for entry in defaults if not isinstance(entry, str) for group in entry}
    if experiments := choices_of(f"experiment/{command_name}"):
        groups["experiment"] = [f"{command_name}/{choice}" for choice in experiments]
    if "method" in groups:
        groups["method"] += ["SOURCE/SHAPE", "SOURCE/STOP", "SOURCE/SHAPE/STOP"]
        groups |= {f"+{part}@methods.NAME": choices_of(part) for part in PARTS}
    return {group: choices for group, choices in groups.items() if choices}


def explain(error: Exception) -> str:
    """An error of Hydra or OmegaConf in one line, which begins with the key if the error has one."""
    if isinstance(error, OverrideParseException):
        return _not_an_option(error.override)
    while isinstance(error.__cause__, OmegaConfBaseException):
        error = error.__cause__
    key = getattr(error, "full_key", None)
    return f"{key}: {str(error).strip().splitlines()[0]}" if key else " ".join(str(error).split())


def value_of(word: str) -> object:
    """The value that Hydra reads from KEY=VALUE; the text itself if Hydra cannot read it."""
    try:
        return OmegaConf.create([OverridesParser.create().parse_override(word).value()])[0]
    except (HydraException, OmegaConfBaseException):
        return word.partition("=")[2]


def add_methods(options: Sequence[str], *, fixed: bool = False) -> list[str]:
    """`options` and, if they choose no method, the default method of each drafter in them, or prompt lookup.

    ["checkpoint=runs/eesd", "seed=1"] → ["checkpoint=runs/eesd", "seed=1", "method=[eesd_survival]"]

    fixed: models draft chains of fixed length. Raises `UserError` for a drafter's directory that cannot be read.
    """
    indices = [index for index, word in enumerate(options) if "=" in word and not word.startswith("-")]
    value_by_key = {options[index].partition("=")[0].lstrip("+~"): value_of(options[index]) for index in indices}
    option_keys = {key.split(".")[0].split("@")[0] for key in value_by_key}
    if option_keys & {"method", "experiment"}:
        return [*options]
    paths_by_key = {key: os.path.expanduser(value) for key, value in value_by_key.items() if isinstance(value, str)}
    preset_names = presets_of(paths_by_key, fixed=fixed)
    if not preset_names and "drafters" in option_keys:  # of kinds without a default method
        return [*options]
    preset_names = preset_names or [PROMPT_LOOKUP.name]
    insert_index = indices[-1] + 1 if indices else 0  # Hydra takes no option after a flag and its value
    return [*options[:insert_index], f"method=[{','.join(preset_names)}]", *options[insert_index:]]


def add_engine_methods(options: Sequence[str]) -> list[str]:
    """`add_methods` for engines, which draft chains of fixed length."""
    return add_methods(options, fixed=True)


def _not_an_option(word: str) -> str:
    key, equals, value = word.partition("=")
    remedy = f"if {value} is one text, as {quote_word(write_option(key, value))}" if equals else "as KEY=VALUE"
    return f"{word}: not an option; give it, {remedy}"


def _require_chosen(settings_class: type, composed: DictConfig, key: str) -> None:
    """Raise `UserError` if `key` lies in an entry of a mapping of settings, such as methods.NAME, that nobody chose.

    An entry that was chosen has a `source`.
    """
    key_parts = key.split(".")
    for part_index in range(1, len(key_parts)):
        outer_key, name = ".".join(key_parts[:part_index]), key_parts[part_index]
        member_type = _member_type(option_type(settings_class, outer_key))
        if dataclasses.is_dataclass(member_type) and not OmegaConf.select(composed, f"{outer_key}.{name}.source"):
            hint = f"{outer_key} holds no {name!r} in this run; choose it first, or check the name"
            raise UserError(f"{outer_key}.{name}: {hint}")


def _plain_defaults(config_class: typing.Any) -> dict[str, object]:
    """The defaults of `config_class` as Hydra takes them; "???", OmegaConf's word, for an option that must be given."""
    defaults, type_hints = dict[str, object](), typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(field_type := type_hints[field.name]):
            defaults[field.name] = _plain_defaults(field_type)
        elif typing.get_origin(field_type) is dict:
            defaults[field.name] = DictConfig({}, flags={"struct": False})  # it takes any name
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
        else:
            defaults[field.name] = "???" if field.default is dataclasses.MISSING else field.default
    return defaults


def _adapt(value: object, type_hint: object, annotated_type: object = None) -> object:
    """`value` for an option of the type `type_hint`: a number becomes a text where the type is a text, and ~/ the home.

    annotated_type: the type with its metadata, by which texts in a list are paths or not.
    """
    if isinstance(value, dict):
        is_known = dataclasses.is_dataclass(type_hint)
        types, hints = (typing.get_type_hints(type_hint, include_extras=e) if is_known else {} for e in (False, True))
        member_type = typing.get_args(type_hint)[-1:]  # of a mapping by name; else empty
        return {key: _adapt(member, types.get(key, *member_type), hints.get(key)) for key, member in value.items()}
    if isinstance(value, list):
        is_text = not any(isinstance(constraint, InputPath) for constraint in constraints_of(annotated_type))
        [member_type, *_] = typing.get_args(type_hint) or (None,)
        return [element if isinstance(element, str) and is_text else _adapt(element, member_type) for element in value]
    if isinstance(value, str):
        return os.path.expanduser(value) if value.startswith("~/") else value
    return str(value) if type_hint in (str, str | None) and isinstance(value, int | float) else value
