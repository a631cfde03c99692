"""Whether a machine was busy with other work while an evaluation took its times.

Two signs. The process gets less CPU time than its threads could use: others take its cores, or a quota holds it back.
Plain decoding keeps all threads at work, as those of OpenMP wait in a loop for the next product. And the load average
says that more threads want to run than there are cores. On a GPU only the second is looked at.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from inference.core.generation import Generation
from inference.measure.results import Arm
from outrider.machine import usable_cores
from outrider.streams import Streams

LEAST_SHARE = 0.8  # of the CPU time of its threads; one other process on two cores leaves 0.67 to 0.75
MOST_LOAD = 0.75  # above the number of cores; what a quiet system does besides comes to some 0.2


class CpuWatch:
    """What share of the time of its CPU threads this process gets while arms run that `around` has wrapped."""

    def __init__(
        self, used: Callable[[], float] = time.process_time, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """used: seconds of CPU time of all threads so far."""
        self._used, self._clock = used, clock
        self._got = self._due = 0.0

    def around(self, arm: Arm) -> Arm:
        """`arm`, watched."""

        def watched(prompt: Sequence[int], streams: Streams) -> Generation:
            used, started = self._used(), self._clock()
            generation = arm(prompt, streams)
            self._got += self._used() - used
            self._due += (self._clock() - started) * min(torch.get_num_threads(), usable_cores())
            return generation

        return watched

    def take(self) -> float | None:
        """The share since it was last taken; None where nothing ran."""
        share = self._got / self._due if self._due else None
        self._got = self._due = 0.0
        return share


def load_average() -> float | None:
    """How many threads of the machine wanted to run in the last minute, on average; None where no system says it."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows; a system that cannot say it now
        return None


def machine_load(
    shares: Iterable[float | None], loads: Iterable[float | None], cores: int
) -> dict[str, float | str | None]:
    """{"cpu_share", "load_average", "busy"} of what was noted prompt by prompt: medians, and what was wrong in words.

    None stands for what was not noted, and for a machine that was not busy. cores: of the machine.
    """
    share, load = (_median(values) for values in (shares, loads))
    signs = []
    if share is not None and share < LEAST_SHARE:
        signs.append(f"plain decoding got {100 * share:.0f} % of the CPU time that its threads could use")
    if load is not None and load > cores + MOST_LOAD:
        signs.append(f"the load average was {load:.1f} on {cores} cores")
    busy = f"The machine was busy: {' and '.join(signs)}." if signs else None
    return {"cpu_share": share, "load_average": load, "busy": busy}


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
