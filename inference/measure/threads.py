"""Whether the processor of an evaluation was busy with other work.

A product split over two threads waits for the slower one. If another process occupies one core, two threads can be
thirty times slower than one: the thread on the busy core gets a time slice every few milliseconds.

There are two signs of other work. The process gets less CPU time than its threads could use: others use its cores, or a
quota limits it. (Plain decoding keeps all threads busy, as OpenMP threads spin between products.) Or the load average
exceeds the number of cores. On a GPU only the second is checked.
"""

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from outrider.base import progress
from outrider.base.errors import warn
from outrider.base.limits import usable_time
from outrider.base.streams import Streams
from outrider.inference.core.rounds import Generation
from outrider.inference.measure.results import Arm
from outrider.inference.measure.statistics import MachineLoad

LEAST_SHARE = 0.8  # of the CPU time of the process's threads; one other process on two cores leaves 0.67 to 0.75
MOST_LOAD = 0.75  # of the load average above the number of cores; background work of a quiet system adds about 0.2


class CpuWatch:
    """Measures the share of CPU time that this process gets per thread while arms wrapped by `around` run.

    An arm decodes a prompt in one way: by a method, or by a baseline.
    """

    def __init__(
        self,
        used: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.perf_counter,
        cores: Callable[[], float] = usable_time,
    ) -> None:
        """used: seconds of CPU time of all threads so far. cores: how many threads can run at once."""
        self._used, self._clock, self._cores = used, clock, cores
        self._spent = self._possible = 0.0  # seconds of CPU time

    def around(self, arm: Arm) -> Arm:
        """`arm`, with its CPU time measured."""

        def run_watched(prompt: Sequence[int], streams: Streams) -> Generation:
            cpu_before, started = self._used(), self._clock()
            generation = arm(prompt, streams)
            self._spent += self._used() - cpu_before
            self._possible += (self._clock() - started) * min(torch.get_num_threads(), self._cores())
            return generation

        return run_watched

    def take(self) -> float | None:
        """The share since the last call of `take`; None if nothing ran."""
        share = self._spent / self._possible if self._possible else None
        self._spent = self._possible = 0.0
        return share


def load_average() -> float | None:
    """The system's load average over the last minute; None if it is not reported."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows; temporarily unavailable
        return None


@functools.cache
def warn_if_busy() -> None:
    """Warn, once, that the machine is busy before a command begins. A step of a pipeline does not: the pipeline did."""
    load, cores = load_average(), os.cpu_count() or 1
    if load is not None and load > cores + MOST_LOAD and not progress.is_step:
        effects = "minutes= hold less, and speeds measured now get no verdict; end other programs, or run this later"
        warn(f"the load average is {load:.1f} on {cores} cores: {effects}")


def judge_load(cpu_shares: Iterable[float | None], loads: Iterable[float | None], cores: int) -> MachineLoad:
    """The load from values per prompt, None for a value that was not recorded. cores: the number of the machine."""
    recorded_values = ([value for value in values if value is not None] for values in (cpu_shares, loads))
    cpu_share, load = (statistics.median(values) if values else None for values in recorded_values)
    busy_signs = []
    if cpu_share is not None and cpu_share < LEAST_SHARE:
        busy_signs.append(f"plain decoding got {100 * cpu_share:.0f} % of the CPU time that its threads could use")
    if load is not None and load > cores + MOST_LOAD:
        busy_signs.append(f"the load average was {load:.1f} on {cores} cores")
    busy = f"The machine was busy: {' and '.join(busy_signs)}." if busy_signs else None
    return MachineLoad(cpu_share, load, busy)
