"""A time limit: when a command stops, and the order of an evaluation's prompts that suits an early stop."""

import math
import time
from collections.abc import Collection
from dataclasses import dataclass

from outrider.inference.core.rounds import Clock
from outrider.inference.measure.statistics import MIN_PROMPTS


@dataclass(frozen=True)
class TimeLimit:
    """The time during which a command starts new work.

    minutes: the total of all runs in the command's directory; None: no limit. started: when this run began, in seconds
    of `clock`. earlier: seconds of the runs before this run.
    """

    minutes: float | None
    started: float = 0.0
    earlier: float = 0.0
    clock: Clock = time.perf_counter

    def spent(self) -> float:
        """Seconds that all runs have taken so far."""
        return self.earlier + self.clock() - self.started

    def left(self, spent_seconds: float | None = None) -> float:
        """Seconds until the limit after `spent_seconds` seconds (None: now), 0 beyond it."""
        spent_seconds = self.spent() if spent_seconds is None else spent_seconds
        return math.inf if self.minutes is None else max(0.0, 60 * self.minutes - spent_seconds)

    def holds(self, spent: float, seconds: float) -> bool:
        """Whether work of `seconds` may begin after `spent` seconds: at least half of it must fit into the limit."""
        return not self.is_over(spent + seconds / 2)

    def is_over(self, spent_seconds: float) -> bool:
        return self.minutes is not None and spent_seconds >= 60 * self.minutes

    def to_do(self, prompts: int, finished_positions: Collection[int]) -> tuple[list[int], int]:
        """The positions of the remaining prompts, in the order to run, and the number of them that must run.

        With `minutes` the first positions are spread over all `prompts`, and as many must run as a verdict needs. If
        the time was over before the run began, only those that must run remain.
        """
        order = range(prompts) if self.minutes is None else spread_order(prompts)
        queue = [position for position in order if position not in finished_positions]
        least = len(queue) if self.minutes is None else max(0, min(len(queue), MIN_PROMPTS - len(finished_positions)))
        return queue[:least] if self.is_over(self.earlier) else queue, least


def spread_order(count: int) -> list[int]:
    """0 … count − 1 in bit-reversed order: every prefix is spread evenly over all. Of 5: [0, 4, 2, 1, 3]."""
    bits = max(1, (count - 1).bit_length())
    reversed_indices = (int(f"{index:0{bits}b}"[::-1], 2) for index in range(1 << bits))
    return [position for position in reversed_indices if position < count]
