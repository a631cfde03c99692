"""The limits of a device: bytes per second of memory far larger than its caches, and steps per second."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from inference.engines.packing import PackedLinear, can_pack

Clock = Callable[[], float]


@torch.inference_mode()
def measure_device(device: torch.device, dtype: torch.dtype, gigabytes: float) -> dict[str, float]:
    """The highest bytes per second, and the seconds to launch a step that computes almost nothing."""
    clock = make_clock(device)
    found = measure_bandwidth(device, dtype, gigabytes, clock)
    one = torch.zeros(1, device=device)

    def tiny() -> None:
        for _ in range(1000):
            one.add_(1)

    found["launch_seconds"] = min(sample(tiny, clock, 8)) / 1000
    if device.type == "cuda":
        found["launch_in_graph_seconds"] = min(sample(captured(tiny), clock, 8)) / 1000
        found["graph_replay_seconds"] = min(sample(captured(lambda: one.add_(1)), clock, 50))
    return found


def measure_bandwidth(device: torch.device, dtype: torch.dtype, gigabytes: float, clock: Clock) -> dict[str, float]:
    """The highest bytes per second of reductions and a matrix-vector product, and of a copy, which reads and writes."""
    matrix = torch.ones(int(gigabytes * 1e9 / dtype.itemsize) // 8192, 8192, dtype=dtype, device=device)
    other, vector = torch.empty_like(matrix), matrix[0].clone()
    reads: list[Callable[[], Any]] = [matrix.sum, matrix.max, lambda: matrix @ vector]
    if can_pack(device, dtype):
        linear = nn.Linear(8192, len(matrix), bias=False, device="meta")
        linear.weight = nn.Parameter(matrix, requires_grad=False)
        packed = PackedLinear(linear)
        reads.append(lambda: packed(vector[None]))
    return {
        "read_bytes_per_second": matrix.nbytes / min(min(sample(read, clock, 8)) for read in reads),
        "copy_bytes_per_second": 2 * matrix.nbytes / min(sample(lambda: other.copy_(matrix), clock, 8)),
    }


def captured(run: Callable[[], Any]) -> Callable[[], None]:
    """`run` as a CUDA graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def make_clock(device: torch.device) -> Clock:
    """A clock that waits until the device has finished its work. Seconds."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def sample(run: Callable[[], Any], clock: Clock, times: int) -> list[float]:
    """Seconds of each of `times` runs, after one warm-up."""
    run()
    seconds = []
    for _ in range(times):
        started = clock()
        run()
        seconds.append(clock() - started)
    return seconds
