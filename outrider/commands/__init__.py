"""Commands: from the words of a command line to the function that `COMMANDS` names.

    main_of("eesd")()  →  run_words  →  compose_and_run  →  carry_out  →  train.eesd:train_early_exit(config)

composing.py checks the words and makes the settings, options.py writes --help, ending.py ends the process. Words are
KEY=VALUE and Hydra's flags; Hydra composes the config from YAML files and words. debug=true is a rehearsal, a run on
tiny models; plan=true only prints the memory that the command would take.
"""

import logging
import os
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from outrider.base.errors import UserError
from outrider.base.files import read_mapping
from outrider.base.large_imports import import_large
from outrider.base.progress import show_command, shows_progress
from outrider.base.run_dirs import rehearsal_folder, remove_if_unused, require_free, require_usable
from outrider.base.settings import RunConfig, Settings, construct, covers, field_types
from outrider.cli import COMMANDS, USER_ERROR_STATUS, print_anything, print_text, report_crash, usage
from outrider.commands import composing
from outrider.commands.ending import end_on_sigterm, report_errors, write_resume_line
from outrider.commands.options import help_text
from outrider.draft_models.targets.settings import Rehearsed
from outrider.inference.settings.method import CONF_DIR


def main_of(command_name: str) -> Callable[[], None]:
    """The command `command_name`, which reads its words from sys.argv.

    A `UserError`, a config error or a storage error (disk full, no permission) ends the process with one message on
    stderr and status 2, Ctrl-C with 130, SIGTERM with 143, everything else with its traceback and status 3.
    """

    @report_crash()
    def main() -> None:
        print_anything()
        resume_line = write_resume_line() if "resume" in field_types(COMMANDS[command_name].load_settings()) else ""
        with end_on_sigterm(), report_errors(resume_line):
            run_words(command_name, sys.argv[1:], resume_line)

    return main


def run_script(name: str) -> NoReturn:
    """Run the command `name` and end the process.

    A command's script calls this before its imports: torch and transformers, which take seconds, come after the checks.
    """
    main_of(name)()
    sys.exit()


def run_words(command_name: str, words: Sequence[str], resume_line: str) -> None:
    """Print the help for --help, the usual command lines for no words; else run the command.

    With --settings FILE it runs with the settings in a file that a pipeline wrote; the file also has the words of which
    they were made. resume_line: the command line that continues the command, printed after an interrupt.
    """
    if {"--help", "-h"} & {*words}:
        overrides = [word for word in words if not word.startswith("-")]
        print_text("\n".join([*usage(command_name), "", help_text(command_name, overrides)]))
        return
    if not words:
        print("\n".join([*usage(command_name), "any option starts it; --help has all"]), file=sys.stderr)
        sys.exit(USER_ERROR_STATUS)
    _quiet_libraries()
    if words[:1] == ["--settings"] and words[1:]:
        record = read_mapping(words[1], "settings of a command", "the pipeline writes them again")
        sys.argv[1:] = construct(list[str], record["words"])  # records of the run have the command line
        carry_out(command_name, construct(COMMANDS[command_name].load_settings(), record["settings"]))
    else:
        compose_and_run(command_name, words, resume_line)


def compose_and_run(command_name: str, words: Sequence[str], resume_line: str) -> None:
    """Run the command with the options `words`: Hydra reads conf/NAME.yaml and the options in sys.argv."""
    sys.argv[1:] = COMMANDS[command_name].complete_words(composing.keep_texts(command_name, words))
    composing.check_words(command_name, sys.argv[1:])
    composing.store_defaults(command_name)

    def job(composed: DictConfig) -> None:
        with report_errors(resume_line):  # here, as Hydra prints a banner around an exception that leaves it
            typed_keys = composing.typed_keys_of(HydraConfig.get().overrides.task)
            config: Settings = composing.build(COMMANDS[command_name].load_settings(), composed, typed_keys)
            carry_out(command_name, config, typed_keys)

    hydra.main(version_base=None, config_path=str(CONF_DIR), config_name=command_name)(job)()


def carry_out(name: str, config: Settings, typed_keys: Collection[str] = ()) -> None:
    """Look for the input files of the command `name`, then call its function. typed_keys: those that the words gave.

    The module of the function is imported last, since torch and transformers take seconds.
    """
    look_for_files(config, typed_keys)
    with show_command(name), remove_if_unused(Path(getattr(config, "out_dir", "."))):
        look_for_out_dir(config)
        run_command = partial(_call, COMMANDS[name].runs)
        if isinstance(config, Rehearsed) and config.debug:
            import_large("outrider.inference.loading.rehearsal").rehearse(run_command, config, typed_keys)
        else:
            run_command(config)


def _call(function_path: str, config: Settings) -> None:
    """Call the function `function_path`, "module:function" in outrider, with `config`."""
    module_name, _, function_name = function_path.partition(":")
    getattr(import_large(f"outrider.{module_name}"), function_name)(config)


def config_for(script_path: str, words: Sequence[str]) -> Any:
    """The settings of the command in `script_path`, such as "train/eesd.py", with the options `words`.

    Raises `UserError`.
    """
    (command,) = (command for command in COMMANDS.values() if command.script == script_path)
    overrides = command.complete_words(words)
    try:
        composed = composing.compose_config(command.name, overrides)
        return composing.build(command.load_settings(), composed, composing.typed_keys_of(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(composing.explain(error)) from None


def look_for_files(config: Settings, typed_keys: Collection[str] = ()) -> None:
    """Raise `UserError` for a missing input file of the command, before torch is imported.

    A rehearsal reads only the files that its command line gives. A plan reads no text; it reads prompts only if the
    target is to answer them (`asks`, in the settings of generate-responses).
    """
    debug = getattr(config, "debug", False)
    is_plan = getattr(config, "plan", False) and not getattr(config, "asks", False)

    def is_checked(key: str) -> bool:
        return not (is_plan and key.partition(".")[0] in ("data", "prompts")) and (covers(typed_keys, key) or not debug)

    config.require_paths(is_checked)


def look_for_out_dir(config: Settings) -> None:
    """Raise `UserError` for an out_dir that cannot be written, that another run holds, or that holds an earlier run if
    resume is off; before torch is imported, and in one of a launcher's processes."""
    if not isinstance(config, RunConfig) or getattr(config, "plan", False) or not shows_progress():  # in one process
        return
    debug = getattr(config, "debug", False)
    require_usable(rehearsal_folder(config.out_dir) if debug else Path(config.out_dir))
    require_free(Path(config.out_dir), () if debug else config.run_files, config.resume)  # globs of a run's files


def _quiet_libraries() -> None:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that composition errors arrive unformatted
    for library_name in ("HUB", "DATASETS"):  # transformers' bars go by the first
        os.environ.setdefault(f"HF_{library_name}_DISABLE_PROGRESS_BARS", "1")
    # Without the warning that DeepSpeed logs on a machine without a GPU.
    logging.getLogger("DeepSpeed").addFilter(lambda log_record: "Setting accelerator" not in log_record.getMessage())
