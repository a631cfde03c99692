"""An evaluation of so many minutes: which prompts it takes first, and when it takes no further one."""

import time
from collections.abc import Collection
from dataclasses import dataclass

from inference.core.stopwatch import Clock
from inference.measure.verdict import MIN_PROMPTS


@dataclass(frozen=True)
class TimeLimit:
    """How long an evaluation takes new prompts.

    minutes: of all runs in its directory together, None: until all prompts are done. started: when this run began,
    by `clock`, which says seconds. earlier: seconds that the runs before it took.
    """

    minutes: float | None
    started: float = 0.0
    earlier: float = 0.0
    clock: Clock = time.perf_counter

    def spent(self) -> float:
        """Seconds that all runs have taken by now."""
        return self.earlier + self.clock() - self.started

    def is_over(self, spent: float) -> bool:
        """Whether no further prompt is to be taken, once so many seconds are spent."""
        return self.minutes is not None and spent >= 60 * self.minutes

    def to_do(self, prompts: int, done: Collection[int]) -> tuple[list[int], int]:
        """The positions of the prompts that are left, in the order in which they are taken; how many must be.

        With `minutes` the first of them are spread over all `prompts`, and must are as many as a verdict needs. A run
        whose time was over before it began has nothing left once it has those.
        """
        order = range(prompts) if self.minutes is None else spread_order(prompts)
        left = [position for position in order if position not in done]
        must = len(left) if self.minutes is None else max(0, min(len(left), MIN_PROMPTS - len(done)))
        return left[:must] if self.is_over(self.earlier) else left, must


def spread_order(count: int) -> list[int]:
    """0 … count − 1, so ordered that wherever it is cut, the beginning is spread evenly over all: bits reversed."""
    bits = max(1, (count - 1).bit_length())
    reverse = (int(f"{index:0{bits}b}"[::-1], 2) for index in range(1 << bits))
    return [position for position in reverse if position < count]
