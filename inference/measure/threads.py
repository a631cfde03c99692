"""How many CPU threads to use, measured where others may be at work on the same cores.

A product that two threads share waits for the slower of them. Where another process holds one core, two threads can be
thirty times as slow as one: the thread on the busy core gets a slice of time every few milliseconds. So the number is
chosen by measurement, at the start and again before every prompt.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from inference.engines.blocked import PackedLinear, can_pack
from outrider.machine import usable_cores

ROWS, IN, OUT = 4, 1024, 4096  # of the product that is timed: a small model's, for a draft of a few tokens
REPEATS = 24  # of each number of threads, in turn; about 50 ms in all on an idle machine
LEAD = 0.9  # more threads are taken where they need less than this share of the time


def thread_counts() -> list[int]:
    """The numbers worth trying: powers of two up to the cores of this process, and all of them."""
    cores = usable_cores()
    return sorted({1 << power for power in range(cores.bit_length()) if 1 << power <= cores} | {cores})


def use_threads(threads: int | str | None) -> int:
    """Use as many CPU threads as the option `threads` says; how many those are."""
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
    """A float32 layer as a stand-in for the runtime's: packed where it packs. Plain products gain less by threads."""
    linear = nn.Linear(IN, OUT, bias=False).requires_grad_(False)
    return PackedLinear(linear) if can_pack(linear.weight.device, linear.weight.dtype) else linear


@torch.inference_mode()
def time_product(threads: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one product by `threads` threads, which stay set."""
    torch.set_num_threads(threads)
    layer, x = _layer(), torch.ones(ROWS, IN)
    layer(x)  # wakes the threads up
    started = clock()
    layer(x)
    return clock() - started


def choose_threads(
    counts: Sequence[int] | None = None, timed: Callable[[int], float] = time_product, repeats: int = REPEATS
) -> int:
    """Set and return the number of threads that is fastest now: the least one that no other beats clearly.

    The numbers take turns, so that a disturbance meets all alike. The mean counts, as it is what decoding would feel
    of threads that are slow now and then. The slowest tenth of each is left out.
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
