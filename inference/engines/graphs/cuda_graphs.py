"""Decoding in fixed-shape passes over buffers at fixed addresses, captured as CUDA graphs.

A pass of a few rows is hundreds of kernels of microseconds each: if they are launched one by one, launches cost more
than the work. A CUDA graph launches them at once, with the shapes of `fixed_shapes`. A pass reads a bucket of the
cache, a power of two of positions, and all its buffers are in an `Arena` that outlives generations.

Masked values that a pass reads must be finite, since 0 · NaN is NaN. So a cache is zero after its text: it is cleared
for every generation, dropped rows are cleared, and padding rows write to slots that no pass reads.

Without CUDA the same passes run uncaptured: slower than `TargetSession`, for tests.

A session decodes one text. In a round a drafter proposes a tree of tokens and the target verifies it. A row is a token
that runs in the round, and its slot is its index in the cache. The layers are split at one layer: drafters that share
the target's first layers run the first half (pass "first") while they draft, the rest of the target runs afterwards.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.draft_models.targets.attention import KernelChoice
from outrider.draft_models.targets.target import RunnableLayers, Target
from outrider.inference.core.cache import KVCache
from outrider.inference.core.ops import likeliest
from outrider.inference.core.rows import RoundRows, RowLayout
from outrider.inference.core.session import Pass, Session
from outrider.inference.core.target_session import Runtime, TargetSession, WholeSession
from outrider.inference.engines.graphs.attention_kernels import kernel_for, measure_kernels, use_kernel_on
from outrider.inference.engines.graphs.fixed_shapes import WIDTHS, FixedView, GraphPool, Upload, bucket, can_capture

SMALLEST_BUCKET = 128  # cache positions
Key = tuple[str, int, int]  # of a graph: the name of the pass, its rows, the cache positions it sees


class Graphed(Runtime):
    """Makes sessions whose buffers and graphs are reused by later generations. An arena serves one generation at a
    time; a concurrent one gets another arena."""

    name = "graphed"

    def __init__(self, smallest: int = SMALLEST_BUCKET) -> None:
        """smallest: the fewest cache positions that a pass reads."""
        self.smallest = smallest
        self._arenas: dict[tuple[int, int], Arena] = {}  # by id of the layers, and split
        self.captures = 0
        self.positions: int | None = None  # of the longest text, if `prepare` was called
        self.kernels: tuple[KernelChoice, ...] = ()

    def choose_kernels(self, targets: Sequence[Target], positions: int) -> tuple[KernelChoice, ...]:
        layer_stacks = [target.layered for target in targets if can_capture(target.device)]
        return measure_kernels([stack for stack in layer_stacks if stack is not None], positions)

    def prepare(self, positions: int, kernels: Sequence[KernelChoice]) -> None:
        """Expect texts of up to `positions` tokens, and use `kernels`. Longer texts get separate buffers and graphs."""
        self.positions, self.kernels = positions, tuple(kernels)

    def forget_idle(self) -> None:
        """Free the arenas that no session uses."""
        self._arenas = {layers_and_split: arena for layers_and_split, arena in self._arenas.items() if arena.busy}

    def session(self, target: Target, split: int | None, capacity: int, context: int | None = None) -> Session:
        """A session with up to `capacity` cache slots, for a text of up to `context` tokens (None: `capacity`).

        split: the number of layers in the first half; None: all. A target that runs as a whole has no fixed shapes.
        """
        if target.layered is None:
            return WholeSession(target, capacity, context)
        return self.layer_session(target.layered, split, capacity, context)

    def layer_session(
        self, layers: RunnableLayers, split: int | None, capacity: int, context: int | None = None
    ) -> "GraphedSession":
        """As `session`, for layers. Slots beyond the context are for the rows of a round."""
        split = len(layers.layers) if split is None else split
        round_rows = capacity - (capacity if context is None else context)
        arena = self._arenas.get((id(layers), split))
        if arena is None or not arena.serves(layers, capacity, round_rows):
            is_busy = arena is not None and arena.busy
            arena = Arena(self, layers, split, capacity, round_rows)
            if not is_busy:
                self._arenas[id(layers), split] = arena
        return GraphedSession(arena, capacity, context)


class Arena:
    """The caches, buffers and graphs of fixed-shape passes over one model's layers, which are split at one layer.

    limit: the most cache slots that passes read; padding rows write to the slots after them.
    """

    def __init__(self, runtime: Graphed, layers: RunnableLayers, split: int, capacity: int, rows: int):
        self.runtime = runtime
        self.layers = layers
        self.split = split
        self.rows = bucket(max(rows, WIDTHS[-1]), WIDTHS[-1])  # the most rows of a round
        max_text_length = runtime.positions
        if max_text_length is not None and capacity - rows <= max_text_length:
            self.limit = -(-(max_text_length + self.rows) // WIDTHS[-1]) * WIDTHS[-1]  # rounded up
        else:
            self.limit = bucket(capacity, runtime.smallest)
        self.capacity = self.limit + WIDTHS[-1]
        self.first_cache = KVCache(range(split), self.capacity, clean=True)
        self.second_cache = KVCache(range(split, len(layers.layers)), self.capacity, clean=True)
        self.draft_caches: dict[int, tuple[object, KVCache]] = {}  # of other layers, by id of the owner: (owner, cache)
        self.upload = Upload(self.rows, layers.device)
        self.buffers: dict[tuple[str, int], Tensor] = {}
        self.outputs: dict[str, int] = {}  # number of outputs of each pass
        self.graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        layers.reserve(self.capacity)
        self.tables: dict[Key, tuple[tuple[Tensor, Tensor], ...]] = {}  # read by each graph
        self.pool, self.capturable = GraphPool(), True
        self._user: weakref.ref[Session] | None = None

    @property
    def busy(self) -> bool:
        """Whether a live session that is not closed uses this arena."""
        return self._user is not None and self._user() is not None

    def serves(self, layers: RunnableLayers, capacity: int, round_rows: int) -> bool:
        """Whether a session of this size can use this arena now."""
        return layers is self.layers and capacity <= self.limit and round_rows <= self.rows and not self.busy

    def enter(self, session: Session) -> None:
        """Lend the arena to the session `session`, with empty caches."""
        self._user = weakref.ref(session)
        for cache in (self.first_cache, self.second_cache, *(cache for _, cache in self.draft_caches.values())):
            cache.clear()

    def leave(self, session: Session) -> None:
        if self._user is not None and self._user() is session:
            self._user = None

    def draft_cache(self, owner: object, layers: range) -> KVCache:
        """The cache for a drafter's own layers, which belong to `owner`."""
        if id(owner) not in self.draft_caches:
            self.draft_caches[id(owner)] = (owner, KVCache(layers, self.capacity, clean=True))
        return self.draft_caches[id(owner)][1]

    def buffer(self, name: str, output_index: int, like: Tensor, row_count: int) -> Tensor:
        """A pass's input (index −1) or output, made at first use: like `like` [1, n, …] or [n], of `row_count` rows."""
        if (name, output_index) not in self.buffers:
            shape = (row_count,) if like.dim() == 1 else (1, row_count, *like.shape[2:])
            self.buffers[name, output_index] = like.new_zeros(shape)
        return self.buffers[name, output_index]

    def view(self, row_count: int, text_length: int, cache: KVCache) -> FixedView:
        """The view of `row_count` rows for texts of up to `text_length` positions, including these rows."""
        key_count = min(bucket(text_length, self.runtime.smallest), self.limit)
        return FixedView(self.upload, row_count, key_count, self.limit, self.layers, cache)

    def run_pass(self, name: str, pass_: Pass, x: Tensor, view: FixedView, by_row: bool) -> list[Tensor]:
        """Run `pass_`, which its name must identify uniquely; returns its output buffers. by_row: output rows are
        stored at their row numbers, and stay valid until the round ends."""

        def run() -> None:
            with view.cache.at(view.slots, view.key_count):
                outputs = pass_(x, view)
            for index, output in enumerate(outputs):
                buffer = self.buffer(name, index, output, self.rows + WIDTHS[-1] if by_row else WIDTHS[-1])
                if by_row:
                    buffer.index_copy_(1, view.rows, output)
                else:
                    buffer[:, : view.width].copy_(output)
            self.outputs[name] = len(outputs)

        self.run((name, view.width, view.key_count), run)
        return [self.buffers[name, index] for index in range(self.outputs[name])]

    def run(self, graph_key: Key, run: Callable[[], None], changed: Sequence[Tensor] = ()) -> None:
        """Replay `run`, captured at the first call with this `graph_key`. changed: see `GraphPool.capture`."""
        if not self.capturable or not can_capture(self.layers.device):
            run()
            return
        if graph_key not in self.graphs:
            with use_kernel_on(self.layers, kernel_for(self.runtime.kernels, self.layers, *graph_key[1:])):
                graph = self.pool.try_capture(run, changed)
            if graph is None:
                self.capturable = False
                run()
                return
            self.graphs[graph_key] = graph
            self.tables[graph_key] = self.layers.tables  # `reserve` may replace them by longer ones
            self.runtime.captures += 1
        self.graphs[graph_key].replay()


class GraphedSession(TargetSession):
    """A session whose passes have fixed shapes, except prompts and passes of more than 64 rows."""

    def __init__(self, arena: Arena, capacity: int, context: int | None):
        super().__init__(arena.layers, arena.split, capacity, context)
        self._arena = arena
        self._beside: list[Session] = []  # of drafters' models and layers, which end with it
        self.first_cache, self.second_cache = arena.first_cache, arena.second_cache
        arena.enter(self)

    def draft_session(self, model: Target) -> Session:
        session = self._arena.runtime.session(model, None, self.capacity, self.context)
        self._beside.append(session)
        return session

    def draft_layers_session(self, layers: RunnableLayers) -> "GraphedSession":
        session = self._arena.runtime.layer_session(layers, None, self.capacity, self.context)
        self._beside.append(session)
        return session

    def close(self) -> None:
        self._arena.leave(self)
        for session in self._beside:
            session.close()

    def draft_cache(self, owner: object, layers: range) -> KVCache:
        return self._arena.draft_cache(owner, layers)

    @property
    def step(self) -> Callable[[Tensor], Tensor] | None:
        return None if self.split else self._step  # its graph needs all layers in one cache

    def _step(self, token: Tensor) -> Tensor:
        """The token after `token` [1] in plain decoding: the host only launches a graph and reads the result."""
        arena, stack = self._arena, self.stack
        upload, token_buffer = arena.upload, arena.buffer("step", -1, token, 1)
        if token.data_ptr() != token_buffer.data_ptr():
            token_buffer.copy_(token)
        if upload.alone_at != self.base:  # else the last step left the data of this row on the device
            upload.send(RoundRows((-1,)).layout(self.base, 0, 1), 1)  # one row, which has no parent
        view = arena.view(1, self.base + 1, self.second_cache)

        def run() -> None:
            hidden = stack.embed(token_buffer[None], view.positions)
            with view.cache.at(view.slots, view.key_count):
                hidden = stack.run(hidden, 0, len(stack.layers), view.rotary, view.masks(), view.cache)
            token_buffer.copy_(likeliest(stack.logits(hidden)[0]))
            upload.base.add_(1)

        arena.run(("step", 1, view.key_count), run, changed=(token_buffer, upload.base))
        for cache in (self.first_cache, self.second_cache):
            cache.length += 1
        self.base += 1
        upload.alone_at = self.base
        return token_buffer

    @property
    def hidden(self) -> Tensor:
        """The hidden states [1, rows, d] of the round's rows between the two halves."""
        if self._hidden:  # the prompt's
            return super().hidden
        return self._arena.buffers["first", 0][:, : self.rows]

    def _remember(self, hidden: Tensor, first_row: int) -> None:
        """Keep the hidden states of rows first_row, first_row + 1, … for the property `hidden`."""
        if not self.base:  # the prompt's
            super()._remember(hidden, first_row)
        else:
            hidden_buffer = self._arena.buffer("first", 0, hidden, self._arena.rows + WIDTHS[-1])
            hidden_buffer = hidden_buffer[:, first_row : first_row + hidden.shape[1]]
            if hidden_buffer.data_ptr() != hidden.data_ptr():  # of a pass without a graph
                hidden_buffer.copy_(hidden)

    def _run(
        self, name: str, pass_: Pass, x: Tensor, layout: RowLayout, cache: KVCache, logit_count: int | None = None
    ) -> tuple[Tensor, ...]:
        """Run rows start … stop − 1 of `layout`; the pass's outputs [1, n, …]. logit_count: see `run_draft_layers`."""
        row_count = layout.stop - layout.start
        # Graphs do not help prompts, passes wider than any bucket, and passes of an embedding alone.
        if not self.base or row_count > WIDTHS[-1] or layout.stop > self._arena.rows or not cache.layers:
            return super()._run(name, pass_, x, layout, cache, logit_count)
        arena, by_row = self._arena, name == "first"
        view = arena.view(next(width for width in WIDTHS if width >= row_count), layout.base + layout.stop, cache)
        arena.upload.send(layout, view.width)
        input_buffer = arena.buffer(name, -1, x, WIDTHS[-1])
        axis = min(x.dim() - 1, 1)  # of the rows: tokens [n], hidden states [1, n, d]
        input_buffer.narrow(axis, 0, row_count).copy_(x)
        outputs = arena.run_pass(name, pass_, input_buffer.narrow(axis, 0, view.width), view, by_row)
        cache.length += row_count
        first_row = layout.start if by_row else 0
        return tuple(output[:, first_row : first_row + row_count] for output in outputs)
