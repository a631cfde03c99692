"""A round: what it committed, and where its time goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Clock = Callable[[], float]


@dataclass(frozen=True)
class Round:
    """What one pass of the target committed. The first round of a generation is the prefill.

    tokens: committed ids, never beyond the first EOS or the budget.
    drafted: proposed tokens. accepted: how many of `tokens` came from the draft.
    depth: the draft's, so how many could have.

    Seconds are of the whole round and of its parts. draft: the drafter's forward passes. structure: everything else
    that the drafter does. verify: the target's pass and its transfer; in plain decoding the pass alone.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    depth: int
    seconds: float
    draft_seconds: float = 0.0
    structure_seconds: float = 0.0
    verify_seconds: float = 0.0


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
