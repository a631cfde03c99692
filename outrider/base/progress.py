"""Progress of a command: a bar on a terminal, elsewhere a line after `INTERVAL` seconds without output.

    with show_command("eesd"):                              # the outermost stage: the name of the command
        with Stage("training", 100, "steps") as stage:      # eesd > training 40/100 steps; left: 3 min 20 s
            stage.advance()
        for row in track_progress(rows, "packing", "rows"):
            ...

The thread of tqdm's monitor shows the stages, since loading and compiling are single calls that cannot print. Progress
goes to stderr, in the main process only.

A command that runs another one (a pipeline its steps) shows the progress of the inner command as a part of its own. The
outer command sets the variable `RELAY`. The inner command then prints its progress as lines that begin with `_MARK`,
which the outer command takes out of the output by `relay_progress`.
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

from outrider.base.words import format_seconds

Item = TypeVar("Item")
INTERVAL = 10.0  # seconds without output before a line is printed; a call that holds the GIL delays it
RELAY = "OUTRIDER_RELAY"  # the variable that an outer command sets for an inner one
_MARK = "\x1eprogress\t"  # the beginning of an inner command's lines of progress
_BAR_FORMAT = "{desc} |{bar:20}| {elapsed}"
_RISE = 1.2  # the time left that is shown rises only if the new estimate exceeds it by this factor


class Stage(AbstractContextManager["Stage"]):
    """A long-running stage, used as a context manager. Stages may be nested; progress names all active ones."""

    def __init__(
        self,
        what: str,
        total: float | None = None,
        unit: str = "",
        *,
        done_before: float = 0,
        max_seconds: float = math.inf,
        estimate: Callable[[], float | None] | None = None,
    ):
        """total: the number of units, None if unknown; `done_before` of them were done before. unit: their name.

        max_seconds: seconds after which the stage is expected to end even if units are left. estimate: computes
        `seconds_left` where it does not follow from the units done.
        """
        self.what, self.total, self.unit, self.done = what, total, unit, done_before
        self._done_before, self._max_seconds, self._estimate = done_before, max_seconds, estimate
        self._shown_left = math.inf
        self.after = 0.0  # seconds from the last unit to the end
        self.began = time.monotonic()

    def advance(self, count: float = 1) -> None:
        self.done += count

    @property
    def seconds_spent(self) -> float:
        return time.monotonic() - self.began

    @property
    def seconds_left(self) -> float | None:
        """Remaining seconds: by the pace of the units so far, and until `max_seconds`; None if neither is known."""
        if self._estimate is not None:
            return self._estimate()
        new_units, estimates = self.done - self._done_before, []
        if self.total is not None and new_units:
            estimates.append(self.seconds_spent / new_units * (self.total - self.done) + self.after)
        if self.seconds_spent < self._max_seconds < math.inf:
            estimates.append(self._max_seconds - self.seconds_spent + self.after)
        return max(0.0, min(estimates)) if estimates else None

    @property
    def shown_left(self) -> float | None:
        """`seconds_left` as shown: it falls steadily, and rises only to an estimate that is far above (`_RISE`)."""
        estimate = self.seconds_left
        if estimate is None:
            return None
        self._shown_left = estimate if estimate > _RISE * self._shown_left else min(self._shown_left, estimate)
        return self._shown_left

    def __str__(self) -> str:
        label = self.what  # then the units done, "40/100 steps", or "40 steps" without a total
        if self.total is not None or self.done:
            label += f" {self.done:.0f}{'' if self.total is None else f'/{self.total:.0f}'} {self.unit}".rstrip()
        return label.strip()

    def __enter__(self) -> "Stage":
        global _bar
        self.began = time.monotonic()
        with tqdm.get_lock():  # the monitor's thread reads the stages
            _stages.append(self)
            if _bar is None and shows_progress():
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


def track_progress(
    items: Iterable[Item], stage_name: str, unit: str, total: int | None = None, *, max_seconds: float = math.inf
) -> Iterator[Item]:
    """Yield `items` within a `Stage`, a unit each. total: their number without a length. max_seconds: see `Stage`."""
    total = len(items) if isinstance(items, Sized) else total
    with Stage(stage_name, total, unit, max_seconds=max_seconds) as stage:
        for item in items:
            yield item
            stage.advance()


@contextmanager
def show_command(name: str) -> Iterator[None]:
    """Context manager: the outermost stage of the command `name`. Output inside is printed above the bar, and restarts
    the interval of silence."""
    global is_step
    is_step = os.environ.pop(RELAY, None) is not None  # removed from the environment of processes that this one starts
    with Stage(name), redirect_stdout(_Above(sys.stdout)), redirect_stderr(_Above(sys.stderr)):
        yield


def hide_stages() -> None:
    """End all stages: from now on the command waits for requests, and has no progress."""
    for stage in [*_stages]:
        stage.__exit__()


def relay_progress(output_line: str) -> bool:
    """Whether a line of an inner command's output is progress, which is then shown from now on.

    An empty line says that the command has ended, and with it its progress.
    """
    global _inner_line
    if output_line and not output_line.startswith(_MARK):
        return False
    _inner_line = output_line.removeprefix(_MARK).rstrip("\n")
    return True


def shows_progress() -> bool:
    """Whether this is the process that shows the progress of all processes."""
    return os.environ.get("RANK", "0") == "0" and parent_process() is None


def _describe_stages(stages: Sequence[Stage]) -> str:
    """All active stages in words, and the time left of the outermost stage that knows it: "a > b 2/9 steps; left: 5 s".

    An inner command separates the time by a tab, for the command that shows it.
    """
    inner_stages, _, inner_duration = _inner_line.partition("\t")
    durations = (format_seconds(seconds) for stage in stages if (seconds := stage.shown_left or 0) >= 1)  # outer first
    duration = next(durations, inner_duration)
    chain, separator = " > ".join(filter(None, [*map(str, stages), inner_stages])), "\t" if is_step else "; left: "
    return f"{chain}{separator}{duration}" if duration else chain


class _Bar(tqdm):
    """The bar of all stages, which tqdm's monitor refreshes. Without a terminal it prints lines instead.

    _heard: the time of the last output. _relayed: the last progress that an inner command printed.
    """

    monitor_interval = 1.0  # seconds

    def __init__(self, out: TextIO):
        self._heard, self._relayed, self._is_drawn = time.monotonic(), "", _can_draw(out) and not is_step
        look = {"leave": False, "dynamic_ncols": True, "bar_format": _BAR_FORMAT, "delay": 1}
        super().__init__(total=1.0, file=out, disable=False, **look)  # whatever TQDM_DISABLE says: others use its state
        self.miniters, self.maxinterval = 2, 0  # the monitor refreshes bars with miniters > 1 after maxinterval seconds

    def clear(self, nolock: bool = False) -> None:
        """Wipe the bar away before other output is printed; tqdm calls this."""
        self._heard = time.monotonic()
        if self._is_drawn:
            super().clear(nolock)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Show the active stages, if it is time to; tqdm calls this. Returns whether a bar is drawn."""
        self.miniters, stages = 2, [*_stages]  # the monitor sets miniters to 1
        with suppress(OSError, ValueError):  # the stream is closed
            if self._is_drawn:
                self.desc, self.last_print_t = _describe_stages(stages), self._time()
                self.n = next((stage.done / stage.total for stage in stages if stage.total and stage.done), 0.0)  # of 1
                return bool(super().display(msg, pos))
            elif is_step:
                stages_text = _describe_stages(stages[1:])  # the starter's own stage says which command this is
                if stages_text not in ("", self._relayed):
                    self._write(f"{_MARK}{stages_text}")
                self._relayed = stages_text
            elif stages and time.monotonic() >= self._heard + INTERVAL:
                self._write(f"progress: {_describe_stages(stages)}; {format_seconds(stages[0].seconds_spent)} so far")
        return False

    def _write(self, line: str) -> None:
        self._heard = time.monotonic()
        self.fp.write(f"{line}\n")
        self.fp.flush()


class _Above(DummyTqdmFile):
    """A stream whose lines are printed above the bar; the bar is on another stream."""

    # W&B replaces `write` by one that calls it: set on the wrapped stream, it would recurse.
    __setattr__ = object.__setattr__

    def write(self, text: str, nolock: bool = False) -> None:
        if _bar is None or not shows_progress():  # a forked worker must not wait for a lock that was held at its fork
            self._wrapped.write(text)
            return
        with tqdm.external_write_mode(file=_bar.fp):
            super().write(text, nolock=True)


def _can_draw(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that can show a bar; a terminal of `script` or a container may have size 0."""
    if not stream.isatty():
        return False
    try:
        return min(os.get_terminal_size(stream.fileno())) > 0
    except OSError:  # the size is unknown
        return True


_stages: list[Stage] = []  # the active ones, in the order in which they began
_bar: _Bar | None = None
is_step = False  # whether this is an inner command, whose progress an outer one shows
_inner_line = ""  # the progress of the inner command that this one runs: its stages, and after a tab the time left
