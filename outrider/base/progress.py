"""Progress of a command: a bar on a terminal, elsewhere a line after `INTERVAL` seconds without output.

The thread of tqdm's monitor shows it, since loading and compiling are single calls that cannot print. It goes to
stderr, in the main process only. A command that runs another one shows the other's progress as a part of its own (see
`relayed`).
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout, suppress
from multiprocessing import parent_process
from typing import TextIO, TypeVar

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from outrider.base.words import in_words

Item = TypeVar("Item")
INTERVAL = 10.0  # seconds without output before a line is printed; a call that holds the GIL delays it
RELAY = "OUTRIDER_RELAY"  # the environment of a command whose starter hands every line of output to `relayed`
_MARK = "\x1eprogress\t"  # the beginning of such a command's lines of progress
_SHAPE = "{desc} |{bar:20}| {elapsed}"
_RISE = 1.2  # the time left that is shown rises only to an estimate that exceeds it by this factor


class Stage(AbstractContextManager["Stage"]):
    """A long-running stage, used as a context manager. Stages may be nested; progress names all active ones."""

    def __init__(
        self,
        what: str,
        total: float | None = None,
        unit: str = "",
        *,
        first: float = 0,
        most: float = math.inf,
        left: Callable[[], float | None] | None = None,
    ):
        """total: the number of units, None if unknown; `first` of them were done before. unit: their name.

        most: seconds after which the stage ends even if work is left, unless it goes on for another reason. left:
        computes the property of this name if it does not follow from the work done.
        """
        self.what, self.total, self.unit, self.done = what, total, unit, first
        self._first, self._most, self._left, self._shown_left = first, most, left, math.inf
        self.after = 0.0  # seconds from the last unit to the end
        self.began = time.monotonic()

    def advance(self, count: float = 1) -> None:
        self.done += count

    @property
    def spent(self) -> float:
        """Seconds since the stage began."""
        return time.monotonic() - self.began

    @property
    def left(self) -> float | None:
        """Remaining seconds; None if unknown."""
        if self._left is not None:
            return self._left()
        units, estimates = self.done - self._first, []
        if self.total is not None and units:
            estimates.append(self.spent / units * (self.total - self.done) + self.after)
        if self.spent < self._most < math.inf:
            estimates.append(self._most - self.spent)
        return max(0.0, min(estimates)) if estimates else None

    @property
    def shown_left(self) -> float | None:
        """`left` as it is shown: it falls, until the estimate is far above it, which is then shown."""
        estimate = self.left
        if estimate is not None:
            self._shown_left = estimate if estimate > _RISE * self._shown_left else min(self._shown_left, estimate)
        return None if estimate is None else self._shown_left

    def __str__(self) -> str:
        words = self.what
        if self.total is not None or self.done:
            words += f" {self.done:.0f}{'' if self.total is None else f'/{self.total:.0f}'} {self.unit}".rstrip()
        return words.strip()

    def __enter__(self) -> "Stage":
        global _bar
        self.began = time.monotonic()
        with tqdm.get_lock():
            _stages.append(self)
            if _bar is None and speaks():
                _bar = _Bar(sys.stderr._wrapped if isinstance(sys.stderr, _Above) else sys.stderr)
        return self

    def __exit__(self, *error: object) -> None:
        global _bar
        with tqdm.get_lock():
            if self in _stages:
                _stages.remove(self)
            if not _stages and _bar is not None:
                _bar.close()
                _bar = None


def counted(
    items: Iterable[Item], what: str, unit: str, total: int | None = None, *, most: float = math.inf
) -> Iterator[Item]:
    """Yield `items` as a `Stage` whose total is their number if they have a length, else `total`."""
    total = len(items) if isinstance(items, Sized) else total
    with Stage(what, total, unit, most=most) as stage:
        for item in items:
            yield item
            stage.advance()


@contextmanager
def command(name: str) -> Iterator[None]:
    """The outermost stage of a command. Its output restarts the interval of silence, and is printed above the bar."""
    global is_step
    is_step = os.environ.pop(RELAY, None) is not None  # removed from the environment of processes that this one starts
    with Stage(name), redirect_stdout(_Above(sys.stdout)), redirect_stderr(_Above(sys.stderr)):
        yield


def hide_stages() -> None:
    """Show no progress of the stages that are open: of a command that waits for requests from now on."""
    for stage in [*_stages]:
        stage.__exit__()


def relayed(line: str) -> bool:
    """Take over the progress in a line of a command that was started with `RELAY`; False for other output.

    An empty line ends the progress, after the command.
    """
    global _below
    if line and not line.startswith(_MARK):
        return False
    _below = line.removeprefix(_MARK).rstrip("\n")
    return True


def speaks() -> bool:
    """Whether this is the process that shows the progress of all processes."""
    return os.environ.get("RANK", "0") == "0" and parent_process() is None


def _say_all(stages: Sequence[Stage]) -> str:
    """All active stages in words, and the time left of the outermost stage that knows it."""
    words, _, left_below = _below.partition("\t")
    duration = next((in_words(seconds) for stage in stages if (seconds := stage.shown_left or 0) >= 1), left_below)
    chain, mark = " > ".join(filter(None, [*map(str, stages), words])), "\t" if is_step else "; left: "
    return f"{chain}{mark}{duration}" if duration else chain


class _Bar(tqdm):
    """The bar of all stages, which tqdm's monitor refreshes. Without a terminal it prints lines instead."""

    monitor_interval = 1.0  # seconds

    def __init__(self, out: TextIO):
        self._heard, self._relayed, self._is_drawn = time.monotonic(), "", _can_draw(out) and not is_step
        super().__init__(total=1.0, leave=False, file=out, dynamic_ncols=True, bar_format=_SHAPE, delay=1)
        self.miniters, self.maxinterval = 2, 0  # only such bars are refreshed by the monitor, and these every time

    def clear(self, nolock: bool = False) -> None:
        """Wipe the bar away before others print; tqdm calls it."""
        self._heard = time.monotonic()
        if self._is_drawn:
            super().clear(nolock)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Show the active stages, if it is time to; tqdm calls it. Returns whether there is a bar now."""
        self.miniters, stages = 2, [*_stages]
        with suppress(OSError, ValueError):  # the stream is closed
            if self._is_drawn:
                self.desc, self.last_print_t = _say_all(stages), self._time()
                self.n = next((stage.done / stage.total for stage in stages if stage.total and stage.done), 0.0)
                return bool(super().display(msg, pos))
            elif is_step:
                words = _say_all(stages[1:])  # the starter's own stage says which command this is
                if words not in ("", self._relayed):
                    self._write(f"{_MARK}{words}")
                self._relayed = words
            elif stages and time.monotonic() >= self._heard + INTERVAL:
                self._write(f"progress: {_say_all(stages)}; {in_words(stages[0].spent)} so far")
        return False

    def _write(self, line: str) -> None:
        self._heard = time.monotonic()
        self.fp.write(f"{line}\n")
        self.fp.flush()


class _Above(DummyTqdmFile):
    """A stream whose lines are printed above the bar; the bar is on another stream."""

    __setattr__ = object.__setattr__  # W&B puts its own `write` around this one: on the wrapped stream it would recurse

    def write(self, text: str, nolock: bool = False) -> None:
        if _bar is None or not speaks():  # a forked worker must not wait for a lock that was held at its fork
            self._wrapped.write(text)
            return
        with tqdm.external_write_mode(file=_bar.fp):
            super().write(text, nolock=True)


def _can_draw(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that can show a bar; that of `script` or of a container may have size 0."""
    if not stream.isatty():
        return False
    try:
        return min(os.get_terminal_size(stream.fileno())) > 0
    except OSError:  # the size is unknown
        return True


_stages: list[Stage] = []  # the active ones, in the order in which they began
_bar: _Bar | None = None
is_step = False  # of another command, which started this process and shows its progress
_below = ""  # the progress of a command that this one runs: its stages, and after a tab the time left
