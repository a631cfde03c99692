"""Decoding in passes of fixed shape over buffers that stay where they are, captured as CUDA graphs.

A pass of a few rows is hundreds of kernels that each take microseconds: launched one by one, the launches cost more
than the work. A CUDA graph launches them all at once, but only ever with the same shapes and addresses. So a pass is
padded to a width of `WIDTHS` and reads a bucket of the cache (a power of two of positions), and everything it touches
lives in an `Arena` that outlives generations. What differs from pass to pass (where the rows stand and what they see)
is a few hundred bytes, uploaded by one copy; positions, slots and masks are made from them inside the graph.

Without CUDA the same passes run uncaptured: slower than `TargetSession`, for tests.
"""

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draft_models.attention import KERNELS, grouped_attention, use_kernel
from draft_models.early_exit import EarlyExit
from draft_models.target import LayerStack
from inference.cache import KVCache
from inference.layout import Layout, Masks, unpack
from inference.session import Pass, TargetSession

WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # wider passes, and prompts, run as they are
SMALLEST_BUCKET = 128  # cache positions
UPLOADS = 64  # pinned buffers in turn, so that the host hardly ever waits until the device has read one
TRIALS = 20  # replays that choose between attention kernels


class Graphed:
    """Makes sessions whose buffers and graphs are used again by later generations.

    One generation at a time uses an arena; a second one beside it gets an arena of its own.
    """

    name = "graphed"

    def __init__(self) -> None:
        self._arenas: dict[tuple[int, int], Arena] = {}
        self.captures = 0

    def session(self, stack: LayerStack, split: int, capacity: int, context: int | None = None) -> TargetSession:
        """As `TargetSession(stack, split, capacity, context)`."""
        rows = capacity - (capacity if context is None else context)
        arena = self._arenas.get((id(stack), split))
        if arena is None or not arena.serves(stack, capacity, rows):
            busy = arena is not None and arena.busy
            arena = Arena(self, stack, split, capacity, rows)
            if not busy:
                self._arenas[id(stack), split] = arena
        return GraphedSession(arena, capacity, context)


class Arena:
    """What passes of fixed shape over one stack, split at one layer, read and write: caches, buffers, graphs."""

    def __init__(self, runtime: Graphed, stack: LayerStack, split: int, capacity: int, rows: int):
        self.runtime = runtime
        self.stack = stack
        self.split = split
        self.rows = bucket(max(rows, WIDTHS[-1]), WIDTHS[-1])
        # Padding rows write behind the real ones.
        self.capacity = bucket(capacity, SMALLEST_BUCKET) + self.rows + WIDTHS[-1]
        self.first = KVCache(range(split), self.capacity)
        self.rest = KVCache(range(split, len(stack.layers)), self.capacity)
        self.exits: dict[int, tuple[EarlyExit, KVCache]] = {}
        self.upload = Upload(self.rows, stack.device)
        self.buffers: dict[tuple[str, int], Tensor] = {}
        self.outputs: dict[str, int] = {}  # how many each pass has
        self.graphs: dict[tuple[str, int, int], torch.cuda.CUDAGraph] = {}
        self.kernels: dict[tuple[int, int], str] = {}  # for attention, by width and bucket
        stack.reserve(self.capacity)
        self.tables: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}  # that a graph reads
        # Where graphs are captured. PyTorch frees cuBLAS's workspace of a stream with the first graph of that stream
        # that goes, so no other arena uses this one, and all of its graphs live as long as it does.
        self.stream: Any = None
        self.made: list[torch.cuda.CUDAGraph] = []
        self.graph_pool: Any = None
        self._user: weakref.ref[TargetSession] | None = None

    @property
    def busy(self) -> bool:
        """Whether a session works in here that is neither closed nor gone."""
        return self._user is not None and self._user() is not None

    @property
    def captures(self) -> bool:
        """Whether passes become graphs; without CUDA they run as they are."""
        return self.stack.device.type == "cuda"

    def serves(self, stack: LayerStack, capacity: int, rows: int) -> bool:
        """Whether a session of this size could work in here now."""
        room = capacity <= self.capacity - self.rows - WIDTHS[-1] and rows <= self.rows
        return stack is self.stack and room and not self.busy

    def enter(self, user: TargetSession) -> None:
        """`user` works in here from now on: its caches are empty."""
        self._user = weakref.ref(user)
        for cache in (self.first, self.rest, *(cache for _, cache in self.exits.values())):
            cache.length = 0

    def leave(self, user: TargetSession) -> None:
        """`user` is done."""
        if self._user is not None and self._user() is user:
            self._user = None

    def exit_cache(self, drafter: EarlyExit) -> KVCache:
        """The cache of the exit layer of `drafter`."""
        if id(drafter) not in self.exits:
            self.exits[id(drafter)] = (drafter, KVCache(range(self.split, self.split + 1), self.capacity))
        return self.exits[id(drafter)][1]

    def buffer(self, name: str, place: int, like: Tensor, rows: int) -> Tensor:
        """The input (place −1) or output of a pass: as `like` [1, n, …] or [n], but with `rows` rows."""
        if (name, place) not in self.buffers:
            shape = (rows,) if like.dim() == 1 else (1, rows, *like.shape[2:])
            self.buffers[name, place] = like.new_zeros(shape)
        return self.buffers[name, place]

    def run(
        self, key: tuple[str, int, int], pass_: Pass, given: Tensor, view: "FixedView", cache: KVCache, by_row: bool
    ) -> list[Tensor]:
        """The pass called `key`, captured at its first call; returns its output buffers.

        by_row: an output's rows go to the places of their row numbers, and so stay until the round ends.
        """
        name = key[0]

        def run() -> None:
            with cache.at(view.slots, view.keys):
                outputs = pass_(given, view)
            for place, output in enumerate(outputs):
                kept = self.buffer(name, place, output, self.rows + WIDTHS[-1] if by_row else WIDTHS[-1])
                if by_row:
                    kept.index_copy_(1, view.rows, output)
                else:
                    kept[:, : view.width].copy_(output)
            self.outputs[name] = len(outputs)

        if not self.captures:
            run()
        else:
            if key not in self.graphs:
                with use_kernel(self._fastest_kernel(view.width, view.keys)):
                    self.graphs[key] = self._graph(run)
                self.tables[key] = (self.stack.cos, self.stack.sin)  # `reserve` may put longer ones in their place
                self.runtime.captures += 1
            self.graphs[key].replay()
        return [self.buffers[name, place] for place in range(self.outputs[name])]

    def _fastest_kernel(self, width: int, keys: int) -> str:
        """The attention kernel for passes of this shape: the one that gets through all layers of the cache first."""
        if (width, keys) not in self.kernels:
            cache = self.rest if self.rest.layers else self.first
            layers = cache.content(keys)
            key = layers[0][0]
            heads = self.stack.config.num_attention_heads
            query = torch.randn(1, heads, width, key.shape[3], dtype=key.dtype, device=key.device)
            mask = torch.zeros(1, 1, width, keys, dtype=key.dtype, device=key.device)

            def attend() -> None:
                for keys_, values in layers:
                    grouped_attention(self.stack, query, keys_, values, mask)

            seconds = {}
            for kernel in KERNELS:
                with use_kernel(kernel):
                    seconds[kernel] = _seconds(self._graph(attend))
            self.kernels[width, keys] = min(seconds, key=seconds.__getitem__)
        return self.kernels[width, keys]

    def _graph(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        for _ in range(2):  # lets libraries choose what they need, uncaptured
            run()
        self.made.append(self._capture(run))
        return self.made[-1]

    def _capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        # All graphs share their scratch memory: they run one after the other, and what they leave is in `buffers`.
        if self.graph_pool is None:
            self.graph_pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.graph_pool, stream=self.stream):
            run()
        return graph


class Upload:
    """The facts of a pass on their way to the device: base, first row, depths of all rows and, by row, its lineage.

    As bytes, so that one copy takes all. A graph reads `facts` int64 [2 + rows] and `lineages` bool [64, rows].
    """

    def __init__(self, rows: int, device: torch.device):
        self.rows = rows
        self._head = 8 * (2 + rows)
        size = self._head + WIDTHS[-1] * rows
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(UPLOADS if pinned else 1)]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if pinned else []
        self._turn = 0
        self.facts = self._device[: self._head].view(torch.int64)
        self.lineages = self._device[self._head :].view(torch.bool).view(WIDTHS[-1], rows)

    def send(self, layout: Layout, width: int) -> None:
        """`layout`, padded to `width` rows that see no row of this round."""
        host = self._hosts[self._turn]
        copied = self._copied[self._turn] if self._copied else None
        self._turn = (self._turn + 1) % len(self._hosts)
        if copied is not None:
            copied.synchronize()
        stop = self._head + width * self.rows
        content = host[:stop].numpy()
        content[:] = 0
        facts = content[: self._head].view("int64")
        facts[0], facts[1] = layout.base, layout.start
        facts[2 : 2 + layout.stop] = layout.depths
        first = max(layout.start, 0)
        if layout.stop > first:
            bits = content[self._head :].reshape(width, self.rows)
            place = first - layout.start
            bits[place : place + layout.stop - first] = unpack(layout.lineages[first:], self.rows)
        self._device[:stop].copy_(host[:stop], non_blocking=True)
        if copied is not None:
            copied.record()


@dataclass(frozen=True)
class FixedView:
    """Positions, slots and masks of `width` rows over `keys` cache positions, made on the device from what was sent."""

    upload: Upload
    width: int
    keys: int
    stack: LayerStack

    @property
    def rows(self) -> Tensor:
        """Row numbers [width]."""
        return self.upload.facts[1] + torch.arange(self.width, device=self.upload.facts.device)

    @property
    def slots(self) -> Tensor:
        """Cache slots [width]."""
        return self.upload.facts[0] + self.rows

    @property
    def positions(self) -> Tensor:
        rows, depths = self.rows, self.upload.facts[2:]
        offsets = torch.where(rows < 0, rows, depths[rows.clamp(0, self.upload.rows - 1)])
        return (self.upload.facts[0] + offsets)[None]

    @property
    def rotary(self) -> tuple[Tensor, Tensor]:
        return self.stack.rotary(self.positions)

    def masks(self) -> Masks:
        base, depths = self.upload.facts[0], self.upload.facts[2:]
        columns = torch.arange(self.keys, device=base.device)
        inside = columns - base
        place = inside.clamp(0, self.upload.rows - 1)
        own = self.upload.lineages[: self.width].index_select(1, place)
        own = own & (inside >= 0) & (inside < self.upload.rows)
        visible = own | (columns < torch.minimum(base, self.slots + 1)[:, None])
        places = torch.where(inside < 0, columns, base + depths[place])
        built: Masks = {}
        for window in set(self.stack.windows):
            seen = visible
            if window is not None and window < self.keys:
                seen = visible & (places > self.positions[0, :, None] - window)
            mask = torch.zeros(self.width, self.keys, dtype=self.stack.dtype, device=base.device)
            built[window] = mask.masked_fill(~seen, torch.finfo(mask.dtype).min)[None, None]
        return built

    def last(self, hidden: Tensor, count: int) -> Tensor:
        return hidden


class GraphedSession(TargetSession):
    """A session whose passes have fixed shapes, all but prompts and those of more than 64 rows."""

    def __init__(self, arena: Arena, capacity: int, context: int | None):
        super().__init__(arena.stack, arena.split, capacity, context)
        self._arena = arena
        self._beside: list[TargetSession] = []
        self.first, self.rest = arena.first, arena.rest
        arena.enter(self)

    def beside(self, stack: LayerStack) -> TargetSession:
        session = self._arena.runtime.session(stack, len(stack.layers), self.capacity, self.context)
        self._beside.append(session)
        return session

    def close(self) -> None:
        self._arena.leave(self)
        for session in self._beside:
            session.close()

    def exit_cache(self, drafter: EarlyExit) -> KVCache:
        return self._arena.exit_cache(drafter)

    @property
    def hidden(self) -> Tensor:
        if self._hidden:  # the prompt's
            return super().hidden
        return self._arena.buffers["first", 0][:, : self.rows]

    def _remember(self, hidden: Tensor, start: int) -> None:
        if not self.base:
            super()._remember(hidden, start)
        else:
            kept = self._arena.buffer("first", 0, hidden, self._arena.rows + WIDTHS[-1])
            kept = kept[:, start : start + hidden.shape[1]]
            if kept.data_ptr() != hidden.data_ptr():  # of a pass that ran as it is
                kept.copy_(hidden)

    def _run(self, name: str, pass_: Pass, x: Tensor, layout: Layout, cache: KVCache) -> tuple[Tensor, ...]:
        rows = layout.stop - layout.start
        # A prompt, a pass wider than any bucket, and one that is but an embedding gain nothing.
        if not self.base or rows > WIDTHS[-1] or layout.stop > self._arena.rows or not cache.layers:
            return super()._run(name, pass_, x, layout, cache)
        arena, by_row = self._arena, name == "first"
        width = next(width for width in WIDTHS if width >= rows)
        keys = bucket(layout.base + layout.stop, SMALLEST_BUCKET)
        arena.upload.send(layout, width)
        given = arena.buffer(name, -1, x, WIDTHS[-1])
        axis = min(x.dim() - 1, 1)  # of the rows: tokens [n], hidden states [1, n, d]
        given.narrow(axis, 0, rows).copy_(x)
        view = FixedView(arena.upload, width, keys, self.stack)
        outputs = arena.run((name, width, keys), pass_, given.narrow(axis, 0, width), view, cache, by_row)
        cache.advance(rows)
        start = layout.start if by_row else 0
        return tuple(output[:, start : start + rows] for output in outputs)


def bucket(size: int, smallest: int) -> int:
    """The least power of two times `smallest` that holds `size`."""
    while smallest < size:
        smallest *= 2
    return smallest


def _seconds(graph: torch.cuda.CUDAGraph) -> float:
    graph.replay()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(TRIALS):
        graph.replay()
    torch.cuda.synchronize()
    return time.perf_counter() - started
