"""How a command ends: bad input with one line, Ctrl-C and SIGTERM in order, with the command line that continues it."""

import errno
import os
import shlex
import signal
import sys
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
from outrider.base.words import clean, legible
from outrider.cli import USER_ERROR_STATUS
from outrider.commands.composing import explain

_STORAGE_ERRORS = {
    errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS,
    errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


@contextmanager
def terminable() -> Iterator[None]:
    """Context manager: SIGTERM raises `Terminated` in the process that a user started. Its forks, a launcher's other
    processes and the steps of a pipeline end at once."""
    process = os.getpid()

    def handle(number: int, _: object) -> None:
        if os.getpid() != process:
            os._exit(128 + number)
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle if _is_typed() else signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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


def leave(error: BaseException, line: str) -> NoReturn:
    """End the process after `error`, an interrupt, with `line` of `continuing`; further signals of a launcher wait."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if os.environ.get("RANK", "0") == "0":
        print(f"interrupted{line and '; this continues it:'}\n{line}".rstrip(), file=sys.stderr, flush=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT))


def continuing() -> str:
    """The line that continues this command with resume=true, as its user typed it: also `make` or a launcher. Empty for
    other processes of a launcher and for steps of a pipeline."""
    name, *words = sys.argv
    if not _is_typed():
        return ""
    resumed = resuming(words)
    command = ["python", name] if name.endswith(".py") else Path(name).name.split(" ")
    typed = _typed_above(words, make=resumed == words) or [*command, *words]
    return clean(shlex.join([*typed[: -len(words)], *resumed] if typed[-len(words) :] == words else typed))


def resuming(words: Sequence[str]) -> list[str]:
    """The options `words` with resume=true once, after the last of them: Hydra takes no option after its own flags."""
    if "resume=true" in words:
        return [*words]
    options = [word for word in words if word.partition("=")[0] != "resume"]
    end = max((number for number, word in enumerate(options, 1) if "=" in word and word[0] != "-"), default=0)
    return [*options[:end], "resume=true", *options[end:]]


def _typed_above(words: Sequence[str], *, make: bool) -> list[str]:
    """The command line of the highest parent process but a shell that ends with `words`, as a launcher's does; with
    `make`, of the make that runs this. Empty if there is none."""
    typed, line = list[str](), list[str]()
    for parent in psutil.Process().parents():
        with suppress(psutil.Error):  # it has ended, or is another user's
            line = parent.cmdline()
        program = Path(line[0]).name if line else ""
        if make and program == "make":
            return ["make", *line[1:]]
        if line[-len(words) :] == [*words] and not program.endswith("sh"):
            script = program.startswith("python") and not line[1].startswith("-") and not Path(line[1]).suffix
            typed = [Path(line[script]).name, *line[script + 1 :]]  # of an installed command without its Python
    return typed


def _is_typed() -> bool:
    return os.environ.get("RANK", "0") == "0" and RELAY not in os.environ


def _fail(message: str) -> NoReturn:
    print(line := f"error: {legible(message)}", file=sys.stderr)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # the last lines of a launcher are of it
        write_json(Path(report), {"message": line, "timestamp": int(time.time())})
    sys.exit(USER_ERROR_STATUS)
