"""How a command ends: bad input with one line and status 2; Ctrl-C and SIGTERM in order, with status 130 and 143.

After an interrupt the command line is printed that continues the command (`write_resume_line`).
"""

import errno
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import psutil
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from outrider.base.errors import UserError
from outrider.base.files import write_json
from outrider.base.progress import RELAY
from outrider.base.words import make_legible, remove_secrets
from outrider.cli import USER_ERROR_STATUS
from outrider.commands.composing import explain

_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS,
                   errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}  # fmt: skip
_AGAIN = 0.05  # seconds after which an interrupt that Python passed over comes again


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


@contextmanager
def end_on_sigterm() -> Iterator[None]:
    """Context manager: SIGTERM raises `Terminated` in the process that a user started.

    The forks of this process, a launcher's other processes and the steps of a pipeline end at once. Python passes over
    an interrupt that is raised in a destructor or a callback of the garbage collector: then it is raised again.
    """
    process_id = os.getpid()

    def handle(signal_number: int, _: object) -> None:
        if os.getpid() != process_id:
            os._exit(128 + signal_number)
        raise Terminated

    def interrupt_again(hook_args: "sys.UnraisableHookArgs") -> None:
        if os.getpid() == process_id and issubclass(hook_args.exc_type, KeyboardInterrupt):
            signal_number = signal.SIGTERM if hook_args.exc_type is Terminated else signal.SIGINT
            threading.Timer(_AGAIN, os.kill, (process_id, signal_number)).start()
        else:
            old_hook(hook_args)

    old_handler = signal.signal(signal.SIGTERM, handle if _is_typed() else signal.SIG_DFL)
    old_hook, sys.unraisablehook = sys.unraisablehook, interrupt_again
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old_handler)
        sys.unraisablehook = old_hook


@contextmanager
def report_errors(resume_line: str = "") -> Iterator[None]:
    """Context manager: a `UserError`, a config or storage error ends the process, with one line on stderr and status 2.

    resume_line: from `write_resume_line`, printed after Ctrl-C and SIGTERM.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemError) as error:
        if isinstance(error, SystemError) and not isinstance(error.__cause__, KeyboardInterrupt):
            raise  # compiled code that is interrupted raises a SystemError from the interrupt
        exit_interrupted(error, resume_line)
    except UserError as error:
        _fail(" ".join(str(error).splitlines()).encode(errors="backslashreplace").decode())
    except (HydraException, OmegaConfBaseException) as error:
        _fail(explain(error))
    except OSError as error:
        if error.errno not in _STORAGE_ERRORS:
            raise
        _fail(f"{error.filename or 'output'}: {error.strerror}; free space or choose another out_dir")


def exit_interrupted(error: BaseException, resume_cmd: str) -> NoReturn:
    """Print the command line `resume_cmd`, "" for none, and end the process after the interrupt `error`.

    A launcher sends SIGTERM after SIGINT: further signals are ignored until the line is printed.
    """
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    if os.environ.get("RANK", "0") == "0":
        print(f"interrupted{resume_cmd and '; this continues it:'}\n{resume_cmd}".rstrip(), file=sys.stderr, flush=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT))


def write_resume_line() -> str:
    """The command line that continues this command: what its user typed, `make` or a launcher too, and resume=true.

    Empty for a launcher's other processes and for the steps of a pipeline, which no user typed.
    """
    program, *words = sys.argv
    if not _is_typed():
        return ""
    resuming_words = add_resume(words)
    command_words = ["python", program] if program.endswith(".py") else Path(program).name.split(" ")
    line_words = find_typed_line(words, make=resuming_words == words) or [*command_words, *words]
    ends_with_words = line_words[-len(words) :] == words  # not that of a make, which has options of its own
    return remove_secrets(shlex.join([*line_words[: -len(words)], *resuming_words] if ends_with_words else line_words))


def add_resume(words: Sequence[str]) -> list[str]:
    """The options `words` with resume=true once, after the last option: Hydra takes no option after its own flags."""
    if "resume=true" in words:
        return [*words]
    options = [word for word in words if word.partition("=")[0] != "resume"]
    insert_index = max((number for number, word in enumerate(options, 1) if "=" in word and word[0] != "-"), default=0)
    return [*options[:insert_index], "resume=true", *options[insert_index:]]


def find_typed_line(words: Sequence[str], *, make: bool) -> list[str]:
    """The command line of the highest parent process, no shell, whose line ends with `words`, as a launcher's does.

    make: take that of the make that runs this, if any: it resumes if `words` do. Empty if no parent has such a line.
    """
    typed, argv, parents = list[str](), list[str](), list[psutil.Process]()
    with suppress(psutil.Error):
        parents = psutil.Process().parents()
    for parent in parents:
        with suppress(psutil.Error):  # it has ended, or is another user's
            argv = parent.cmdline()
        program = Path(argv[0]).name if argv else ""
        if make and program == "make":
            return ["make", *argv[1:]]
        if argv[-len(words) :] == [*words] and not program.endswith("sh"):
            installed = program.startswith("python") and not argv[1].startswith("-") and not Path(argv[1]).suffix
            typed = [Path(argv[installed]).name, *argv[installed + 1 :]]  # installed is 1: argv[0] is Python
    return typed


def _is_typed() -> bool:
    """Whether a user started this process: it is a launcher's first process, and no step of a pipeline (`RELAY`)."""
    return os.environ.get("RANK", "0") == "0" and RELAY not in os.environ


def _fail(message: str) -> NoReturn:
    """Print the error and exit. A launcher prints the error in TORCHELASTIC_ERROR_FILE last."""
    print(line := f"error: {make_legible(message)}", file=sys.stderr)
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        write_json(Path(error_file), {"message": line, "timestamp": int(time.time())})
    sys.exit(USER_ERROR_STATUS)
