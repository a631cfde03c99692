"""Capturing CUDA graphs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def can_capture(device: torch.device) -> bool:
    """Whether what runs on `device` becomes a graph; elsewhere it runs as it is."""
    return device.type == "cuda"


class GraphPool:
    """CUDA graphs that share a stream and their scratch memory. They run one after the other, and live as long as this.

    PyTorch frees cuBLAS's workspace of a stream with the first graph of that stream that goes. Hence there is a stream
    for each pool, and no graph goes before the others.
    """

    def __init__(self) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._place: tuple[Any, Any] | None = None  # handle of the memory, stream

    def capture(self, run: Callable[[], None], changed: Sequence[Tensor] = ()) -> torch.cuda.CUDAGraph:
        """`run` as a graph. changed: what `run` reads and changes; it is as before when this returns."""
        before = [tensor.clone() for tensor in changed]

        def restore() -> None:
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)

        for _ in range(2):  # lets libraries choose what they need, uncaptured
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
        # What other threads do meanwhile (of a logger, a data loader) is no part of the graph and no error in it.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
        return graph
