"""Progress of a command: a bar on a terminal, elsewhere a line after `INTERVAL` seconds without output.

A separate thread prints it, since loading and compiling are single calls that cannot print. It goes to stderr, in the
main process only. A command that runs another one shows the other's progress as a part of its own (see `relayed`).
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import parent_process
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

from outrider.words import in_words

Item = TypeVar("Item")
INTERVAL = 10.0  # seconds without output before a line is printed; a call that holds the GIL delays it
REDRAW = 1.0  # seconds between redraws of the bar
RELAY = "OUTRIDER_RELAY"  # the environment of a command whose starter hands every line of output to `relayed`
_MARK = "\x1eprogress\t"  # what such a command's progress begins with
_RISE = 1.2  # an estimate of the time left that is so much above an earlier one is not told


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

        most: seconds after which the stage ends even if work is left. left: computes the property of this name if it
        does not follow from the work done.
        """
        self.what, self.total, self.unit, self.done = what, total, unit, first
        self._first, self._most, self._left, self._told = first, most, left, math.inf
        self.began = time.monotonic()

    def advance(self, count: float = 1) -> None:
        """Count `count` more units as done."""
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
        done, known = self.done - self._first, []
        if self.total is not None and done:
            known.append(self.spent / done * (self.total - self.done))
        if self._most < math.inf:
            known.append(self._most - self.spent)
        return max(0.0, min(known)) if known else None

    @property
    def told(self) -> float | None:
        """`left` as it is shown, which only falls; None while it is far above what was shown before."""
        left = self.left
        if left is None or left > _RISE * self._told:
            return None
        self._told = min(self._told, left)
        return self._told

    @property
    def share(self) -> float | None:
        """The finished share; None if unknown."""
        return self.done / self.total if self.total else None

    def __str__(self) -> str:
        words = self.what
        if self.total is not None or self.done:
            words += f" {self.done:.0f}{'' if self.total is None else f'/{self.total:.0f}'} {self.unit}".rstrip()
        return words.strip()

    def __enter__(self) -> "Stage":
        self.began = time.monotonic()
        _enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _leave(self)


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
    global _relays
    _relays = os.environ.pop(RELAY, None) is not None  # not for the processes that this one starts
    with Stage(name):
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_Heard(stream) for stream in before)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def relayed(line: str) -> bool:
    """Take over the progress in a line of a command that was started with `RELAY`; False for its other output.

    The empty line ends it, after the command.
    """
    global _below
    if line and not line.startswith(_MARK):
        return False
    _below = line.removeprefix(_MARK).rstrip("\n")
    return True


def _say_all(stages: Sequence[Stage]) -> str:
    """All active stages in words, and the time left once: that of the outermost one that knows it."""
    words, _, left_below = _below.partition("\t")
    left = next((in_words(left) for stage in stages if (left := stage.told) is not None and left >= 1), left_below)
    said, mark = " > ".join(filter(None, [*map(str, stages), words])), "\t" if _relays else "; left: "
    return f"{said}{mark}{left}" if left else said


class _Heard:
    """A stream that notifies the `_Speaker` of its output."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        if _speaker is not None:
            _speaker.hear(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class _Speaker:
    """The thread that prints progress while there are stages."""

    def __init__(self) -> None:
        self._out = sys.stderr
        self._heard, self._within_line = time.monotonic(), False
        self._bar: Any = None
        self._relayed = ""
        self._drawn = False  # whether the bar is on the current line
        self._over = Event()
        self._thread = Thread(target=self._go_on, name="progress", daemon=True)
        self._thread.start()

    def hear(self, text: str) -> None:
        """Note that other code is about to write `text`, and clear the bar for it."""
        self._heard, self._within_line = time.monotonic(), not text.endswith(("\n", "\r"))
        if self._drawn:
            self._bar.clear()
            self._drawn = False

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.close()

    def _go_on(self) -> None:
        try:
            if _relays:
                while not self._over.wait(REDRAW):
                    self._relay()
            elif _has_room(self._out):
                while not self._over.wait(REDRAW):
                    self._draw()
            else:
                while not self._over.wait(max(0.0, self._heard + INTERVAL - time.monotonic())):
                    self._say()
        except (OSError, ValueError):  # the stream is closed
            pass

    def _say(self) -> None:
        if time.monotonic() < self._heard + INTERVAL:
            return
        self._heard, stages = time.monotonic(), [*_stages]
        if stages:
            self._out.write(f"progress: {_say_all(stages)}; {in_words(stages[0].spent)} so far\n")
            self._out.flush()

    def _relay(self) -> None:
        words = _say_all([*_stages][1:])  # the starter's own stage says which command this is
        if words and not self._within_line and words != self._relayed:
            self._relayed = words
            self._out.write(f"{_MARK}{words}\n")
            self._out.flush()

    def _draw(self) -> None:
        stages = [*_stages]
        if not stages or self._within_line:
            return
        words = _say_all(stages)
        if self._bar is None:
            shape = "{desc} |{bar:20}| {elapsed}"
            self._bar = tqdm(total=1.0, desc=words, leave=False, file=self._out, bar_format=shape, dynamic_ncols=True)
        self._bar.n = next(filter(None, (stage.share for stage in stages)), 0.0)
        self._bar.set_description_str(words)
        self._drawn = True


def speaks() -> bool:
    """Whether this is the process that says for all of them what is going on."""
    return os.environ.get("RANK", "0") == "0" and parent_process() is None


def _has_room(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that can show a bar; that of `script` or of a container may have size 0."""
    if not stream.isatty():
        return False
    try:
        return min(os.get_terminal_size(stream.fileno())) > 0
    except OSError:  # the size is unknown
        return True


_stages: list[Stage] = []  # the active ones, in the order in which they began
_speaker: _Speaker | None = None
_relays = False  # whether this process' progress is shown by the one that started it
_below = ""  # the progress of a command that this one runs: its stages, and after a tab the time left
_lock = Lock()  # guards `_stages` and `_speaker`


def _enter(stage: Stage) -> None:
    global _speaker
    with _lock:
        _stages.append(stage)
        if _speaker is None and speaks():
            _speaker = _Speaker()


def _leave(stage: Stage) -> None:
    global _speaker
    with _lock:
        _stages.remove(stage)
        over = None
        if not _stages:
            over, _speaker = _speaker, None
    if over is not None:
        over.stop()
