"""Commands: an entry script names a function, and this calls it with the settings of the command line."""

import functools
import logging
import os
import sys
import typing
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from outrider.base.errors import UserError
from outrider.base.files import read_mapping
from outrider.base.large_imports import import_large
from outrider.base.progress import command, speaks
from outrider.base.run_dirs import look_at, made_for_something, rehearsal_folder, require_free
from outrider.base.settings import Config, RunConfig, Settings, construct, gives
from outrider.cli import COMMANDS, USER_ERROR_STATUS, crashing, print_anything, say, usage
from outrider.commands.composing import (
    build,
    check_words,
    compose_config,
    explain,
    store_defaults,
    typed_keys_of,
)
from outrider.commands.ending import continuing, reported, terminable
from outrider.commands.options import help_text
from outrider.draft_models.targets.settings import Rehearsed
from outrider.inference.settings.method import CONF_DIR

Complete = Callable[[Sequence[str]], list[str]]  # adds the options that follow from those given
_COMPLETIONS: dict[str, Complete] = {}  # by command


def entry(
    name: str, schema: type[Config], *, complete: Complete = list
) -> Callable[[Callable[[Config], object]], Callable[[], None]]:
    """Turn `run(config)` into a command: Hydra reads conf/<name>.yaml and the options in sys.argv.

    With --settings FILE it runs with settings that a pipeline made, and wrote beside the options they were made of.
    complete: adds the options that follow from those given.

    A `UserError`, a config error or a storage error (disk full, no permission) ends the process with one
    message on stderr and status 2, Ctrl-C with 130, SIGTERM with 143, everything else with its traceback and status 3.
    """
    _COMPLETIONS[name] = complete
    resumes = "resume" in schema.__dataclass_fields__

    def decorate(run: Callable[[Config], object]) -> Callable[[], None]:
        @functools.wraps(run)
        @crashing()
        def main() -> None:
            print_anything()
            words, line = sys.argv[1:], continuing() if resumes else ""
            with terminable(), reported(line):
                if {"--help", "-h"} & {*words}:
                    overrides = [word for word in words if not word.startswith("-")]
                    say("\n".join([*usage(name), "", help_text(name, overrides)]))
                    return
                if not words:
                    print("\n".join([*usage(name), "any option starts it; --help has all"]), file=sys.stderr)
                    sys.exit(USER_ERROR_STATUS)
                _quiet_libraries()
                if words[:1] == ["--settings"] and words[1:]:
                    record = read_mapping(words[1], "settings of a command", "the pipeline writes them again")
                    sys.argv[1:] = construct(list[str], record["words"])  # the options that its records name
                    carry_out(name, run, construct(schema, record["settings"]))
                    return
                sys.argv[1:] = complete(words)
                check_words(name, sys.argv[1:])
                store_defaults(name)

                def job(composed: DictConfig) -> None:
                    with reported(line):  # here, as Hydra prints a banner around an exception that leaves it
                        typed_keys = typed_keys_of(HydraConfig.get().overrides.task)
                        carry_out(name, run, build(schema, composed, typed_keys), typed_keys)

                hydra.main(version_base=None, config_path=str(CONF_DIR), config_name=name)(job)()

        return main

    return decorate


def script(name: str, run: str, *, complete: Complete = list) -> Callable[[], None]:
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


def carry_out(name: str, run: Callable[[Config], object], config: Config, typed_keys: Collection[str] = ()) -> None:
    """Run the command `name` after its files were looked for. typed_keys: those that the command line gave."""
    look_for_files(config, typed_keys)
    with command(name), made_for_something(Path(getattr(config, "out_dir", "."))):
        look_for_out_dir(config)
        if isinstance(config, Rehearsed) and config.debug:
            import_large("outrider.inference.loading.rehearsal").rehearse(run, config, typed_keys)
        else:
            run(config)


def config_for(script: str, words: Sequence[str]) -> Any:
    """The config with which the entry script `script`, such as "train/eesd.py", would run given the options `words`.

    Raises `UserError`.
    """
    (listing,) = (entry for entry in COMMANDS.values() if entry.script == script)
    main_of(listing.name)
    overrides = _COMPLETIONS[listing.name](words)
    try:
        return build(listing.load_settings(), compose_config(listing.name, overrides), typed_keys_of(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error)) from None


def look_for_files(config: Settings, typed_keys: Collection[str] = ()) -> None:
    """Raise `UserError` for a missing input file of the command, before torch is imported.

    A rehearsal reads only the files that its command line gives; a plan reads no text, and only prompts that are to be
    answered.
    """
    debug = getattr(config, "debug", False)
    plan = getattr(config, "plan", False) and not getattr(config, "asks", False)

    def is_checked(key: str) -> bool:
        return not (plan and key.partition(".")[0] in ("data", "prompts")) and (gives(typed_keys, key) or not debug)

    config.require_paths(is_checked)


def look_for_out_dir(config: Settings) -> None:
    """Raise `UserError` for an out_dir that cannot be written, that another run holds, or that holds an earlier run if
    resume is off; before torch is imported, and in one of a launcher's processes."""
    if not isinstance(config, RunConfig) or getattr(config, "plan", False) or not speaks():
        return
    debug = getattr(config, "debug", False)
    look_at(rehearsal_folder(config.out_dir) if debug else Path(config.out_dir))
    require_free(Path(config.out_dir), () if debug else config.leaves, config.resume)


def _quiet_libraries() -> None:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that composition errors arrive unformatted
    for library in ("HUB", "DATASETS"):  # transformers' bars go by the first
        os.environ.setdefault(f"HF_{library}_DISABLE_PROGRESS_BARS", "1")
    # A warning that DeepSpeed has without a GPU.
    logging.getLogger("DeepSpeed").addFilter(lambda log: "Setting accelerator" not in log.getMessage())
