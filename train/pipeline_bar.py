"""How far a pipeline is, and how long it will go on: one bar over all of its steps."""

import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType

from tqdm import tqdm

from inference.stopwatch import Clock
from outrider.words import in_words

LEAST = 0.05  # of what a step was expected to take is taken to be left of it while it runs on


@dataclass
class Pace:
    """Seconds that steps were expected to take, in order (None: nobody knows), and that those done have taken.

    given: of those expected the ones that a step is given to work in, on any machine.
    """

    expected: Mapping[str, float | None]
    done: dict[str, float] = field(default_factory=dict)
    given: Mapping[str, float] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        """How much slower this machine is than the one that the expectations are from, by the steps done; 1 before.

        Time that a step is given says nothing of it.
        """
        known = [name for name in self.done if self.expected.get(name)]
        expected = sum((self.expected[name] or 0.0) - self.given.get(name, 0.0) for name in known)
        taken = sum(max(0.0, self.done[name] - self.given.get(name, 0.0)) for name in known)
        return taken / expected if expected > 0 else 1.0

    def left(self, current: str | None = None, spent: float = 0.0) -> float | None:
        """Seconds until all is done, of the `current` step `spent` seconds behind it; None where nobody knows."""
        total = 0.0
        for name, expected in self.expected.items():
            if name in self.done:
                continue
            if expected is None:
                return None
            given = self.given.get(name, 0.0)
            needed = given + (expected - given) * self.scale
            total += max(needed - spent, LEAST * needed) if name == current else needed
        return total

    def share(self, current: str | None = None, spent: float = 0.0) -> float:
        """Which part of all is behind: of the time, or of the steps where their time is not known."""
        left = self.left(current, spent)
        if left is None:
            return len(self.done) / len(self.expected)
        behind = sum(self.done.values()) + spent
        return behind / (behind + left) if behind + left else 1.0

    def words(self, current: str | None = None, spent: float = 0.0) -> str:
        """The time left, for people."""
        left = self.left(current, spent)
        return "unknown" if left is None else in_words(left)


class StepBar(AbstractContextManager):
    """The bar while one step runs, drawn anew every second; only where stderr is a terminal."""

    def __init__(self, pace: Pace, step: str, clock: Clock = time.monotonic, spent: float = 0.0):
        """spent: seconds that earlier runs of the step have taken."""
        self._pace, self._step, self._clock, self._spent = pace, step, clock, spent
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self) -> "StepBar":
        self._began = self._clock()
        names = list(self._pace.expected)
        said = f"pipeline {names.index(self._step) + 1}/{len(names)} {self._step}"
        self._bar = tqdm(total=1.0, desc=said, bar_format="{desc} |{bar:30}| {postfix}", leave=False, disable=None)
        if not self._bar.disable:
            self._draw()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._bar.close()

    def _go_on(self) -> None:
        while not self._over.wait(1.0):
            self._draw()

    def _draw(self) -> None:
        spent = self._spent + self._clock() - self._began
        share = self._pace.share(self._step, spent)
        self._bar.n = round(share, 3)
        self._bar.set_postfix_str(f"{100 * share:.0f} %, left: {self._pace.words(self._step, spent)}")
