"""The number of CPU threads, chosen by measurement if other processes may use the same cores.

A product split over two threads waits for the slower one. If another process occupies one core, two threads can be
thirty times slower than one: the thread on the busy core gets a time slice every few milliseconds. So the number is
measured at the start and again before every prompt.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from inference.engines.blocked import PackedLinear, can_pack
from outrider.machine import usable_cores

ROWS, IN, OUT = 4, 1024, 4096  # shape of the timed product: a small model's, for a draft of a few tokens
REPEATS = 24  # per number of threads, in turn; about 50 ms in total on an idle machine
LEAD = 0.9  # more threads are chosen if they need less than this share of the time


def thread_counts() -> list[int]:
    """The candidates: powers of two up to the cores of this process, and the number of cores."""
    cores = usable_cores()
    return sorted({1 << power for power in range(cores.bit_length()) if 1 << power <= cores} | {cores})


def use_threads(threads: int | str | None) -> int:
    """Set the number of CPU threads by the option `threads`, and return it."""
    if threads == "auto":
        before, chosen = torch.get_num_threads(), choose_threads()
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
