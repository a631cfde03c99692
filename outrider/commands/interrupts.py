"""Ctrl-C and SIGTERM: a command ends in order, and its main process prints the command line that continues it."""

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import psutil

from outrider.base.progress import RELAY
from outrider.base.words import clean


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
