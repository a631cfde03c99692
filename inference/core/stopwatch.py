"""Where the time of a round goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Clock = Callable[[], float]


class Stopwatch:
    """Seconds since the last `restart`, and those of named parts. Of a part within a part the inner one gets all."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """A round begins."""
        self._started = self._clock()
        self._within = 0.0  # seconds of the parts inside the one that runs now
        self.parts: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Since the round began."""
        return self._clock() - self._started

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is done in here counts for `name`."""
        before, self._within = self._within, 0.0
        started = self._clock()
        yield
        spent = self._clock() - started
        self.parts[name] = self.parts.get(name, 0.0) + spent - self._within
        self._within = before + spent


def synchronized_clock() -> float:
    """`time.perf_counter` after the CUDA device has finished what it was given."""
    torch.cuda.synchronize()
    return time.perf_counter()
