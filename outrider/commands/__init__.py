"""Hydra glue: compose a command's YAML over its dataclass, validate it, pass the frozen dataclass on.

The dataclass alone defines names, types, defaults and checks; YAML files only choose values. Nothing that an entry
script calls sees a DictConfig.
"""

import dataclasses
import errno
import functools
import logging
import os
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from outrider.base.errors import UserError, missing
from outrider.base.files import read_mapping, write_json
from outrider.base.large_imports import import_large
from outrider.base.progress import command, speaks
from outrider.base.run_dirs import look_at, made_for_something, rehearsal_folder, require_free
from outrider.base.settings import Named, RunConfig, Settings, construct
from outrider.base.words import did_you_mean, in_shell, legible, listed, option
from outrider.cli import COMMANDS, crashing, print_anything, say, usage
from outrider.commands.interrupts import continuing, leave, terminable
from outrider.commands.options import compose_defaults, groups_of, help_text, store_composed
from outrider.inference.settings.method import CONF_DIR, no_such_method

Config = TypeVar("Config", bound=Settings)
USER_ERROR_STATUS = 2
_TEXTS = (str, str | None, list[str], dict[str, str])  # OmegaConf reads a number as a text there
_ENTRIES: dict[str, tuple[type, Callable[[Sequence[str]], list[str]]]] = {}  # (schema, complete) by command
_MEANINGS = {  # of OmegaConf's errors, by a part of each
    "is not a ListConfig": "expected a list, as [A,B]", "is not Optional": "null: expected a value",
    "is not a subclass of": "expected names with values, as {NAME:VALUE}",
    "DictConfig with ListConfig": "expected the other of a list [A,B] and names with values {NAME:VALUE}",
}  # fmt: skip
_STORAGE_ERRORS = {
    errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS,
    errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip


def entry(
    name: str, schema: type[Config], *, complete: Callable[[Sequence[str]], list[str]] = list
) -> Callable[[Callable[[Config], object]], Callable[[], None]]:
    """Turn `run(config)` into a command: Hydra reads conf/<name>.yaml and the overrides in sys.argv.

    With --settings FILE it runs with settings that a pipeline made, and wrote beside the overrides they were made of.
    complete: adds the overrides that follow from those given.

    A `UserError`, a config error or a storage error (disk full, no permission) ends the process with one
    message on stderr and status 2, Ctrl-C with 130, SIGTERM with 143, everything else with its traceback and status 3.
    """
    register(name, schema)
    _ENTRIES[name] = (schema, complete)
    resumes = "resume" in schema.__dataclass_fields__

    def decorate(run: Callable[[Config], object]) -> Callable[[], None]:
        def carry_out(config: Config) -> None:
            look_for_places(config)
            with command(name), made_for_something(Path(getattr(config, "out_dir", "."))):
                look_for_out_dir(config)
                run(config)

        @functools.wraps(run)
        @crashing()
        def main() -> None:
            print_anything()
            words, line = sys.argv[1:], continuing() if resumes else ""
            with terminable(), reported(line):
                if {"--help", "-h"} & {*words}:
                    overrides = [word for word in words if not word.startswith("-")]
                    say("\n".join([*usage(name), "", help_text(name, schema, overrides)]))
                    return
                if not words:
                    print("\n".join([*usage(name), "any option starts it; --help has all"]), file=sys.stderr)
                    sys.exit(USER_ERROR_STATUS)
                os.environ["HYDRA_FULL_ERROR"] = "1"  # so that composition errors arrive unformatted
                for library in ("HUB", "DATASETS"):  # transformers' bars go by the first
                    os.environ.setdefault(f"HF_{library}_DISABLE_PROGRESS_BARS", "1")
                # A warning that DeepSpeed has without a GPU.
                logging.getLogger("DeepSpeed").addFilter(lambda log: "Setting accelerator" not in log.getMessage())
                if words[:1] == ["--settings"] and words[1:]:
                    record = read_mapping(words[1], "settings of a command", "the pipeline writes them again")
                    sys.argv[1:] = construct(list[str], record["words"])  # the options that its records name
                    carry_out(construct(schema, record["settings"]))
                    return
                refuse_flags(name, words)
                sys.argv[1:] = complete(words)
                store_composed(sys.argv[1:])

                def job(composed: DictConfig) -> None:
                    with reported(line):  # here, as Hydra prints a banner around an exception that leaves it
                        carry_out(build(schema, composed, HydraConfig.get().overrides.task))

                hydra.main(version_base=None, config_path=str(CONF_DIR), config_name=name)(job)()

        return main

    return decorate


def script(name: str, run: str, *, complete: Callable[[Sequence[str]], list[str]] = list) -> Callable[[], None]:
    """The command `name` that calls the function `run`, "module:function", with its config; complete: as of `entry`.

    The module is imported once the config is known to be good: torch and transformers take seconds.
    """

    def call(config: object) -> None:
        module, _, function = run.partition(":")
        getattr(import_large(module), function)(config)

    return entry(name, COMMANDS[name].load_settings(), complete=complete)(call)


def main_of(name: str) -> Callable[[], None]:
    """The command `name`: it checks its options, then imports what it does and calls it with them (see `Command`)."""
    listing = COMMANDS[name]
    if ":" in listing.runs:
        return script(name, f"outrider.{listing.runs}")
    main: Callable[[], None] = import_module(f"outrider.{listing.module}").main
    return main


def run_script(name: str) -> typing.NoReturn:
    """Run the command `name` and end the process. A file that is the command begins with it where it runs as a script:
    so the options are checked before the file's own imports, which take seconds."""
    main_of(name)()
    sys.exit()


def config_for(script: str, words: Sequence[str]) -> Any:
    """The config with which the entry script `script`, such as "train/eesd.py", would run given the options `words`.

    Raises `UserError`.
    """
    (listing,) = (entry for entry in COMMANDS.values() if entry.script == script)
    main_of(listing.name)
    schema, complete = _ENTRIES[listing.name]
    overrides = complete(words)
    try:
        return build(schema, compose_defaults(listing.name, overrides), overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from None


def value_of(word: str) -> object:
    """The value that Hydra reads from KEY=VALUE; the text itself if Hydra cannot read it."""
    try:
        return OmegaConf.create([OverridesParser.create().parse_override(word).value()])[0]
    except (HydraException, OmegaConfBaseException):
        return word.partition("=")[2]


def refuse_flags(name: str, words: Sequence[str]) -> None:
    """Raise `UserError` for an option of the command that is written as a flag, "--target X" or "-target X", and for a
    misspelt --help."""
    options = {field.name for field in dataclasses.fields(_ENTRIES[name][0])} | groups_of(name).keys()
    for word in words:
        hint = did_you_mean(word, ["--help"]) if word[0] == "-" and word != "--hydra-help" else ""
        if hint:
            raise UserError(f"{word}: no such flag{hint}")
        key, _, value = word.lstrip("-").partition("=")
        key = key.replace("-", "_")
        if word.startswith("-") and key.partition(".")[0] in options:
            raise UserError(f"{word}: options are written without dashes, as {key}={value or 'VALUE'}")


def look_for_places(config: Settings) -> None:
    """Raise `UserError` for a missing input file of the command, before torch is imported.

    A rehearsal reads only the files that its command line gives; a plan reads no text, and only prompts that are to be
    answered.
    """
    debug = getattr(config, "debug", False)
    plan = getattr(config, "plan", False) and not getattr(config, "asks", False)

    def is_checked(key: str) -> bool:
        return not (plan and key.partition(".")[0] in ("data", "prompts")) and (config.gives(key) or not debug)

    config.require_places(is_checked)


def look_for_out_dir(config: Settings) -> None:
    """Raise `UserError` for an out_dir that cannot be written, that another run holds, or that holds an earlier run if
    resume is off; before torch is imported, and in one of a launcher's processes."""
    if not isinstance(config, RunConfig) or getattr(config, "plan", False) or not speaks():
        return
    debug = getattr(config, "debug", False)
    look_at(rehearsal_folder(config.out_dir) if debug else Path(config.out_dir))
    require_free(Path(config.out_dir), () if debug else config.leaves, config.resume)


@contextmanager
def reported(line: str = "") -> Iterator[None]:
    """Context manager: a `UserError`, a config or storage error ends the process, with one line on stderr and status 2.

    line: of `continuing`, printed after Ctrl-C and SIGTERM.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemError) as error:
        if isinstance(error, SystemError) and not isinstance(error.__cause__, KeyboardInterrupt):
            raise  # compiled code that is interrupted raises one from the interrupt
        leave(error, line)
    except UserError as error:
        _fail(" ".join(str(error).splitlines()).encode(errors="backslashreplace").decode())
    except (HydraException, OmegaConfBaseException) as error:
        _fail(explain(error))
    except OSError as error:
        if error.errno not in _STORAGE_ERRORS:
            raise
        _fail(f"{error.filename or 'output'}: {error.strerror}; free space or choose another out_dir")


def register(name: str, schema: type) -> None:
    """Store `schema` under "<name>_schema", the first item of conf/<name>.yaml's defaults list.

    In YAML ${by_device:A,B} is A with a GPU and B without one; ${unless:${debug},A} is A, in a rehearsal null.
    """
    OmegaConf.register_new_resolver("by_device", lambda gpu, cpu: gpu if has_gpu() else cpu, replace=True)
    OmegaConf.register_new_resolver("unless", lambda flag, value: None if flag else value, replace=True)
    ConfigStore.instance().store(f"{name}_schema", _open(schema))


def has_gpu() -> bool:
    """Whether there is a GPU that is not hidden, judged without torch by the files of NVIDIA's and AMD's drivers."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd")))


def build(schema: type[Config], composed: DictConfig, overrides: Sequence[str] = ()) -> Config:
    """The composed config as an instance of `schema`; raises `UserError` naming a missing or impossible key.

    A leading ~/ of a value is expanded, as shells do not expand it after "key=". overrides: those of the command line;
    their keys become the config's `typed_keys`.
    """
    try:
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = getattr(error, "full_key", None) or str(error)
        hint = typing.get_type_hints(schema, include_extras=True).get(key)
        what = (kind.what for kind in getattr(hint, "__metadata__", ()) if isinstance(kind, Named))
        raise missing(key, next(what, "its value")) from None
    config = construct(schema, _at_home(values))
    if overrides:
        keys = (override.partition("=")[0].lstrip("+~").rpartition("@")[2] for override in overrides)
        object.__setattr__(config, "typed_keys", frozenset(keys))  # data@data.mix.open=…
    return config


def _at_home(value: object) -> object:
    if isinstance(value, dict):
        return {key: _at_home(inner) for key, inner in value.items()}
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def explain(error: Exception) -> str:
    """One readable message for a Hydra or OmegaConf error: the key, and the options or values allowed there."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_such_choice(error.missing_cfg_file)
    several = str(error).partition("Ambiguous value for argument '")[2].rpartition("'\n1. To use it as a list")[0]
    if word := error.override if isinstance(error, OverrideParseException) else several:
        key, equals, value = word.partition("=")
        remedy = f"if {value} is one text, as {in_shell(option(key, value))}" if equals else "as KEY=VALUE"
        return f"{word}: not an option; give it, {remedy}"
    unread, none, _ = str(error).partition("Could not override '")[2].partition("'. No match in the defaults list")
    if none:
        return f"{unread}: no such option of this command, whose options --help says"
    cause = error
    while isinstance(cause.__cause__, OmegaConfBaseException):
        cause = cause.__cause__
    key = str(getattr(cause, "full_key", None) or "")
    if not key:
        return " ".join(str(error).split())
    outer, _, leaf = key.rpartition(".")
    if isinstance(cause, ConfigAttributeError) and cause.parent_node is not None:
        allowed = [str(name) for name in cause.parent_node]
        hint = did_you_mean(leaf, [*allowed, "experiment", "method"])
        return f"{key}: no such option{hint or '.'} Allowed here: {', '.join(allowed)}"
    if isinstance(cause, ConfigKeyError):
        return f"{key}: {outer} holds no {leaf!r} in this run; choose it first, or check the name"
    text = str(cause).strip().splitlines()[0]
    return f"{key}: {next((meaning for part, meaning in _MEANINGS.items() if part in text), text)}"


def _no_such_choice(missing: str) -> str:
    """The error message for an unknown choice. missing: "GROUP/CHOICE"."""
    group, _, name = missing.partition("/")
    if group == "method":
        return no_such_method(name)
    files = sorted((CONF_DIR / group).rglob("*.yaml"))
    choices = [file.relative_to(CONF_DIR / group).with_suffix("").as_posix() for file in files]
    return f"{group}={name}: no such choice{did_you_mean(name, choices) or '.'} There are {listed(choices)}; see --help"


def _fail(message: str) -> typing.NoReturn:
    print(line := f"error: {legible(message)}", file=sys.stderr)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # the last lines of a launcher are of it
        write_json(Path(report), {"message": line, "timestamp": int(time.time())})
    sys.exit(USER_ERROR_STATUS)


def _open(kind: Any) -> Any:
    """Settings as OmegaConf takes them: names, defaults, and which are texts. `construct` checks other types."""
    opened, hints = [], typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint, default, factory = hints[field.name], field.default, field.default_factory
        by_name = typing.get_args(hint)[1:] if typing.get_origin(hint) is dict else ()
        schema_type = hint if hint in _TEXTS else Any
        if dataclasses.is_dataclass(hint):
            schema_type = factory = _open(hint)
        elif by_name and dataclasses.is_dataclass(by_name[0]):
            schema_type = types.GenericAlias(dict, (str, _open(by_name[0])))
        elif by_name:
            factory = functools.partial(DictConfig, {}, flags={"struct": False})  # it takes any name
        elif default is factory is dataclasses.MISSING:
            default = "???"  # OmegaConf's word for what must be given
        opened.append((field.name, schema_type, dataclasses.field(default=default, default_factory=factory)))
    return dataclasses.make_dataclass(kind.__name__, opened)
