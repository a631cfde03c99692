"""Capturing CUDA graphs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def can_capture(device: torch.device) -> bool:
    """Whether passes on `device` are captured as graphs; on others they run directly."""
    return device.type == "cuda"


class GraphPool:
    """CUDA graphs that share a stream and scratch memory. They run one at a time, and live as long as the pool.

    PyTorch frees cuBLAS's workspace of a stream when the first graph of that stream is freed. So each pool has its own
    stream, and its graphs are freed together.
    """

    def __init__(self) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._place: tuple[Any, Any] | None = None  # handle of the memory, stream

    def capture(self, run: Callable[[], None], changed: Sequence[Tensor] = ()) -> torch.cuda.CUDAGraph:
        """`run` captured as a graph. changed: tensors that `run` updates; they are restored before this returns."""
        before = [tensor.clone() for tensor in changed]

        def restore() -> None:
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)

        for _ in range(2):  # uncaptured warm-up, in which libraries initialise
            run()
            restore()
        self._graphs.append(self._capture(run))
        restore()
        return self._graphs[-1]

    def _capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if self._place is None:
            self._place = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        pool, stream = self._place
        graph = torch.cuda.CUDAGraph()
        # CUDA calls of other threads (a logger, a data loader) neither enter the graph nor invalidate it.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
        return graph
