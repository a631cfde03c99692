"""Fixed-shape passes: widths and buckets, the per-pass data about their rows, and the capture of CUDA graphs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.draft_models.targets.target import Layers, Mask, Masks, Rotary
from outrider.inference.core.cache import KVCache
from outrider.inference.core.rows import RowLayout, unpack

WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # wider passes, and prompts, run without graphs
UPLOADS = 64  # pinned buffers used in turn, so that the host hardly ever waits for the device


class Upload:
    """Uploads the data of a pass: base, first row, end, depths of all rows, ancestors of each row of the pass.

    They are packed as bytes for a single copy. A graph reads `base`, `start` and `stop` int64 [], `depths` int64 [rows]
    and `ancestors` bool [64, rows].
    """

    def __init__(self, rows: int, device: torch.device):
        self.rows = rows
        self._head = 8 * (3 + rows)
        size = self._head + WIDTHS[-1] * rows
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(UPLOADS if pinned else 1)]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if pinned else []
        self._turn = 0
        facts = self._device[: self._head].view(torch.int64)
        self.base, self.start, self.stop = facts[0], facts[1], facts[2]
        self.depths = facts[3:]
        self.ancestors = self._device[self._head :].view(torch.bool).view(WIDTHS[-1], rows)
        self.alone_at: int | None = None  # if the data are of a round of one row, the positions before it

    def send(self, layout: RowLayout, width: int) -> None:
        """Upload `layout`, padded to `width` rows; padding rows see no row of this round."""
        self.alone_at = layout.base if (layout.start, layout.stop, width) == (0, 1, 1) else None
        host = self._hosts[self._turn]
        copied = self._copied[self._turn] if self._copied else None
        self._turn = (self._turn + 1) % len(self._hosts)
        if copied is not None:
            copied.synchronize()
        stop = self._head + width * self.rows
        content = host[:stop].numpy()
        content[:] = 0
        facts = content[: self._head].view("int64")
        facts[:3] = layout.base, layout.start, layout.stop
        facts[3 : 3 + layout.stop] = layout.depths
        first = max(layout.start, 0)
        if layout.stop > first:
            bits = content[self._head :].reshape(width, self.rows)
            row = first - layout.start
            bits[row : row + layout.stop - first] = unpack(layout.ancestors[first:], self.rows)
        self._device[:stop].copy_(host[:stop], non_blocking=True)
        if copied is not None:
            copied.record()


@dataclass(frozen=True)
class FixedView:
    """Positions, slots and masks of `width` rows over `keys` cache positions, computed on the device from an `Upload`.

    spare: the first of `width` cache slots that no pass reads.
    """

    upload: Upload
    width: int
    keys: int
    spare: int
    layers: Layers
    cache: KVCache

    @property
    def rows(self) -> Tensor:
        """Row numbers [width]."""
        return self.upload.start + self._indices

    @property
    def slots(self) -> Tensor:
        """Cache slots [width]. Padding writes to slots that no pass reads, since masking cannot undo NaN (0 · NaN)."""
        rows = self.rows
        return torch.where(rows < self.upload.stop, self.upload.base + rows, self.spare + self._indices)

    @property
    def _indices(self) -> Tensor:
        return torch.arange(self.width, device=self.upload.base.device)

    @property
    def positions(self) -> Tensor:
        rows, depths = self.rows, self.upload.depths
        offsets = torch.where(rows < 0, rows, depths[rows.clamp(0, self.upload.rows - 1)])
        return (self.upload.base + offsets)[None]

    @property
    def rotary(self) -> Rotary:
        return self.layers.rotary(self.positions)

    def masks(self) -> Masks:
        base, depths = self.upload.base, self.upload.depths
        columns = torch.arange(self.keys, device=base.device)
        inside = columns - base
        round_rows = inside.clamp(0, self.upload.rows - 1)
        ancestors = self.upload.ancestors[: self.width].index_select(1, round_rows)
        ancestors = ancestors & (inside >= 0) & (inside < self.upload.rows)
        visible = ancestors | (columns < torch.minimum(base, self.slots + 1)[:, None])
        column_positions = torch.where(inside < 0, columns, base + depths[round_rows])
        built: dict[int | None, Mask] = {}
        for window in set(self.layers.windows):
            seen = visible
            if window is not None and window < self.keys:
                seen = visible & (column_positions > self.positions[0, :, None] - window)
            mask = torch.zeros(self.width, self.keys, dtype=self.layers.dtype, device=base.device)
            built[window] = mask.masked_fill(~seen, torch.finfo(mask.dtype).min)[None, None]
        return built

    def logit_rows(self, hidden: Tensor) -> Tensor:
        return hidden


def bucket(size: int, smallest: int) -> int:
    """The smallest `smallest` · 2^i that is at least `size`."""
    while smallest < size:
        smallest *= 2
    return smallest


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
        self._pool_and_stream: tuple[Any, Any] | None = None  # handle of the memory pool, stream

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
        if self._pool_and_stream is None:
            self._pool_and_stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        pool, stream = self._pool_and_stream
        graph = torch.cuda.CUDAGraph()
        # CUDA calls of other threads (a logger, a data loader) neither enter the graph nor invalidate it.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
        return graph
