"""The processor of an evaluation: how many threads are fastest at its start, and whether it was busy with other work.

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
from torch import nn

from outrider.base.machine import usable_cores
from outrider.base.streams import Streams
from outrider.inference.core.rounds import Generation
from outrider.inference.engines.blocked import PackedLinear
from outrider.inference.engines.cpu.recorded import can_pack
from outrider.inference.measure.results import Arm

ROWS, IN, OUT = 4, 1024, 4096  # shape of the timed product: a small model's, for a draft of a few tokens
REPEATS = 24  # per number of threads, in turn; about 50 ms in total on an idle machine
LEAD = 0.9  # more threads are chosen if they need less than this share of the time
LEAST_SHARE = 0.8  # of its threads' CPU time; one other process on two cores leaves 0.67 to 0.75
MOST_LOAD = 0.75  # above the number of cores; background work of a quiet system adds about 0.2


def thread_counts() -> list[int]:
    """The candidates: powers of two up to the cores of this process, and the number of cores."""
    cores = usable_cores()
    return sorted({1 << power for power in range(cores.bit_length()) if 1 << power <= cores} | {cores})


def use_threads(threads: int | str | None, choose: Callable[[], int] | None = None) -> int:
    """Set the number of CPU threads by the option `threads`, and return it.

    choose: what finds it for auto, by default by timing.
    """
    if threads == "auto":
        before, chosen = torch.get_num_threads(), (choose or choose_threads)()
        torch.set_num_threads(chosen)
        if chosen != before:
            print(f"threads={chosen} before={before}", flush=True)
    elif isinstance(threads, int):
        torch.set_num_threads(threads)
    return torch.get_num_threads()


@functools.cache
def _layer() -> nn.Module:
    """A float32 layer like the runtime's: packed if the runtime packs. Plain products gain less from threads."""
    linear = nn.Linear(IN, OUT, bias=False).requires_grad_(False)
    return PackedLinear(linear) if can_pack(linear.weight.device, linear.weight.dtype) else linear


@torch.inference_mode()
def time_product(threads: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one product with `threads` threads, which remain set."""
    torch.set_num_threads(threads)
    layer, x = _layer(), torch.ones(ROWS, IN)
    layer(x)  # wakes the threads up
    started = clock()
    layer(x)
    return clock() - started


def choose_threads(
    counts: Sequence[int] | None = None, timed: Callable[[int], float] = time_product, repeats: int = REPEATS
) -> int:
    """Set and return the fastest number of threads now: the smallest that no other clearly beats.

    The candidates are timed in turn, so that disturbances affect all alike. The mean counts, since decoding suffers
    from threads that are occasionally slow; the slowest tenth of each is left out.
    """
    counts = thread_counts() if counts is None else counts
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(repeats):
        for count in counts:
            seconds[count].append(timed(count))
    kept = {count: statistics.mean(sorted(times)[: max(1, len(times) * 9 // 10)]) for count, times in seconds.items()}
    chosen = counts[0]
    for count in counts[1:]:
        if kept[count] < LEAD * kept[chosen]:
            chosen = count
    torch.set_num_threads(chosen)
    return chosen


class CpuWatch:
    """Measures the share of CPU time that this process gets per thread while arms wrapped by `around` run."""

    def __init__(
        self,
        used: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.perf_counter,
        cores: Callable[[], int] = usable_cores,
    ) -> None:
        """used: seconds of CPU time of all threads so far. cores: how many of them can run at once."""
        self._used, self._clock, self._cores = used, clock, cores
        self._got = self._due = 0.0

    def around(self, arm: Arm) -> Arm:
        """`arm`, with its CPU time measured."""

        def watched(prompt: Sequence[int], streams: Streams) -> Generation:
            used, started = self._used(), self._clock()
            generation = arm(prompt, streams)
            self._got += self._used() - used
            self._due += (self._clock() - started) * min(torch.get_num_threads(), self._cores())
            return generation

        return watched

    def take(self) -> float | None:
        """The share since the last call; None if nothing ran."""
        share = self._got / self._due if self._due else None
        self._got = self._due = 0.0
        return share


def load_average() -> float | None:
    """The system's load average over the last minute; None if it is not reported."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows; temporarily unavailable
        return None


def machine_load(
    shares: Iterable[float | None], loads: Iterable[float | None], cores: int
) -> dict[str, float | str | None]:
    """{"cpu_share", "load_average", "busy"} from values per prompt: medians, and the reason in words.

    None for values not recorded, and as the reason if it was not busy. cores: the machine's number of cores.
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
