"""A round: the tokens it committed and its time by part."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Clock = Callable[[], float]


@dataclass(frozen=True)
class Round:
    """The tokens committed by one pass of the target. The first round of a generation is the prefill.

    tokens: committed ids, never beyond the first EOS or the budget.
    drafted: proposed tokens. accepted: how many of `tokens` came from the draft.
    depth: the draft's depth, which is the largest possible `accepted`.

    Seconds are of the whole round and of its parts. draft: the drafter's forward passes. structure: the drafter's
    other work. verify: the target's pass and its transfer; in plain decoding the pass alone.
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
    """Seconds since the last `restart`, and by named part. The time of a nested part counts for the inner one only."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Begin a round."""
        self._started = self._clock()
        self._within = 0.0  # seconds of the parts nested in the running one
        self.parts: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Seconds since the round began."""
        return self._clock() - self._started

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time spent inside the context for `name`."""
        before, self._within = self._within, 0.0
        started = self._clock()
        yield
        spent = self._clock() - started
        self.parts[name] = self.parts.get(name, 0.0) + spent - self._within
        self._within = before + spent


def synchronized_clock() -> float:
    """`time.perf_counter` after all queued work of the CUDA device has finished."""
    torch.cuda.synchronize()
    return time.perf_counter()
