"""Passes of fixed shape, as a CUDA graph can replay them: their widths, the data about their rows, and the capture.

A graph always runs the same kernels at the same addresses and shapes. So a pass is padded to a width of `WIDTHS` and
reads a fixed number of cache slots, its keys. `Upload.send` copies what differs between passes to the device, and
`FixedView` computes positions, slots and masks from the copy inside the graph. In a round a draft is made and
verified. A row is a token that runs in the round; row 0 is the last committed token, the root of the draft. A row's
slot is its index in the cache, and its depth the distance from the root.

Example: the text has 10 committed positions. A round has the rows "the", "cat" and "dog", both under "the". They run as
a pass of width 4 over 16 keys. The upload is base = 10, start = 0, stop = 3, depths = (0, 1, 1, 0, …) and a row of
ancestors for each row of the pass:

    row          position   slot         sees the slots   ancestors
    0  the       10         10           0 … 10           1000…
    1  cat       11         11           0 … 11           1100…
    2  dog       11         12           0 … 10, 12       1010…
    3  padding   10         spare + 3    0 … 9            0000…
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.base.errors import reason, warn_once
from outrider.draft_models.targets.target import Mask, Masks, Rotary, RunnableLayers
from outrider.inference.core.cache import KVCache
from outrider.inference.core.rows import RowLayout, unpack

WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # wider passes, and prompts, run without graphs
UPLOADS = 64  # pinned buffers used in turn, so that the host hardly ever waits for the device
_HEAD = 3  # numbers before the depths: base, start, stop


class Upload:
    """The data of a pass on the device: base, first row, end, depths of all rows, ancestors of each row of the pass.

    base: the committed positions before row 0. rows: the most rows of a round.
    The data are packed for a single copy: 8 · (3 + rows) bytes of int64, then 64 · rows bytes of bool. A graph
    reads the views `base`, `start` and `stop` int64 [], `depths` int64 [rows] and `ancestors` bool [64, rows].
    """

    def __init__(self, rows: int, device: torch.device):
        self.rows = rows
        self._number_bytes = 8 * (_HEAD + rows)
        size = self._number_bytes + WIDTHS[-1] * rows
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(UPLOADS if pinned else 1)]
        self._copy_events = [torch.cuda.Event() for _ in self._hosts] if pinned else []  # each when its host was copied
        self._turn = 0
        numbers = self._device[: self._number_bytes].view(torch.int64)
        self.base, self.start, self.stop = numbers[0], numbers[1], numbers[2]
        self.depths = numbers[_HEAD:]
        self.ancestors = self._device[self._number_bytes :].view(torch.bool).view(WIDTHS[-1], rows)
        self.alone_at: int | None = None  # if the data are of a round of one row, the positions before it

    def send(self, layout: RowLayout, width: int) -> None:
        """Upload `layout`, padded to `width` rows; padding rows see no row of this round."""
        self.alone_at = layout.base if (layout.start, layout.stop, width) == (0, 1, 1) else None
        host_buffer = self._hosts[self._turn]
        copy_event = self._copy_events[self._turn] if self._copy_events else None
        self._turn = (self._turn + 1) % len(self._hosts)
        if copy_event is not None:  # the device may still read this buffer, used `UPLOADS` passes ago
            copy_event.synchronize()
        nbytes = self._number_bytes + width * self.rows
        self._write(host_buffer[:nbytes], layout, width)
        self._device[:nbytes].copy_(host_buffer[:nbytes], non_blocking=True)
        if copy_event is not None:
            copy_event.record()

    def _write(self, buffer: Tensor, layout: RowLayout, width: int) -> None:
        """Write the numbers and ancestors of `layout` to a host buffer, uint8 [8 · (3 + rows) + width · rows]."""
        content = buffer.numpy()
        content[:] = 0
        numbers = content[: self._number_bytes].view("int64")
        numbers[:_HEAD] = layout.base, layout.start, layout.stop
        numbers[_HEAD : _HEAD + layout.stop] = layout.depths
        begin = max(layout.start, 0)  # rows before it are committed: they see no row of this round
        if layout.stop > begin:
            ancestors = content[self._number_bytes :].reshape(width, self.rows)
            ancestors[begin - layout.start : layout.stop - layout.start] = unpack(layout.ancestors[begin:], self.rows)


@dataclass(frozen=True)
class FixedView:
    """Positions, slots and masks of `width` rows over `key_count` cache positions, made on the device from `Upload`.

    spare: the first of `width` cache slots that no pass reads.
    """

    upload: Upload
    width: int
    key_count: int
    spare: int
    layers: RunnableLayers
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
        """Positions [1, width]: base + depth; of committed rows, which have negative numbers, base + row."""
        rows, depths = self.rows, self.upload.depths
        offsets = torch.where(rows < 0, rows, depths[rows.clamp(0, self.upload.rows - 1)])
        return (self.upload.base + offsets)[None]

    @property
    def rotary(self) -> Rotary:
        return self.layers.rotary(self.positions)

    def masks(self) -> Masks:
        """Additive masks [1, 1, width, key_count] by the layers' window sizes; by None of layers without a window."""
        base, depths = self.upload.base, self.upload.depths
        columns = torch.arange(self.key_count, device=base.device)  # [keys], cache slots
        columns_in_round = columns - base  # the row in each slot; negative for committed positions
        rows = columns_in_round.clamp(0, self.upload.rows - 1)
        ancestors = self.upload.ancestors[: self.width].index_select(1, rows)  # [width, keys]
        ancestors = ancestors & (columns_in_round >= 0) & (columns_in_round < self.upload.rows)
        # All committed positions; a row that is committed already sees those up to itself.
        visible = ancestors | (columns < torch.minimum(base, self.slots + 1)[:, None])
        column_positions = torch.where(columns_in_round < 0, columns, base + depths[rows])
        masks: dict[int | None, Mask] = {}
        for window in set(self.layers.windows):
            visible_in_window = visible
            if window is not None and window < self.key_count:
                visible_in_window = visible & (column_positions > self.positions[0, :, None] - window)
            mask = torch.zeros(self.width, self.key_count, dtype=self.layers.dtype, device=base.device)
            masks[window] = mask.masked_fill(~visible_in_window, torch.finfo(mask.dtype).min)[None, None]
        return masks

    def logit_rows(self, hidden: Tensor) -> Tensor:
        """All rows: a graph cannot select the rows whose logits are requested."""
        return hidden


def bucket(minimum: int, smallest: int) -> int:
    """The smallest `smallest` · 2^i that is at least `minimum`."""
    while smallest < minimum:
        smallest *= 2
    return smallest


def can_capture(device: torch.device) -> bool:
    """Whether passes on `device` are captured as graphs; on others they run directly."""
    return device.type == "cuda"


class GraphPool:
    """CUDA graphs that share a stream and scratch memory. They run one at a time, and live as long as the pool: PyTorch
    frees cuBLAS's workspace of a stream when the first graph of that stream is freed."""

    def __init__(self) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool_and_stream: tuple[torch.cuda._POOL_HANDLE, torch.cuda.Stream] | None = None

    def capture(self, run: Callable[[], None], changed: Sequence[Tensor] = ()) -> torch.cuda.CUDAGraph:
        """`run` captured as a graph. changed: tensors that `run` updates; they are restored before this returns."""
        old_values = [tensor.clone() for tensor in changed]

        def restore() -> None:
            for tensor, value in zip(changed, old_values, strict=True):
                tensor.copy_(value)

        for _ in range(2):  # uncaptured warm-up, in which libraries initialise
            run()
            restore()
        self._graphs.append(self._capture(run))
        restore()
        return self._graphs[-1]

    def try_capture(self, run: Callable[[], None], changed: Sequence[Tensor] = ()) -> torch.cuda.CUDAGraph | None:
        """As `capture`; None, with a warning, for what cannot be captured, as a choice of experts on the host."""
        try:
            return self.capture(run, changed)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            warn_once(f"no CUDA graph can be made of this model, so passes are slower: {reason(error)}")
            return None

    def _capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if self._pool_and_stream is None:
            self._pool_and_stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        pool, stream = self._pool_and_stream
        graph, outer_stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # CUDA calls of other threads (a logger, a data loader) neither enter the graph nor invalidate it.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                run()
        finally:
            torch.cuda.set_stream(outer_stream)  # in which PyTorch does not leave a capture that failed
        return graph
