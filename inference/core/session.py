"""One sequence inside a target: its caches, split at a layer, and the rows of the current round."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from draft_models.targets.stack import LayerStack, Rotary
from inference.core.cache import KVCache
from inference.core.rows import Layout, Masks, Rows
from inference.core.sampling import successors
from inference.core.tree import ROOT, DraftTree, chain_parents


class View(Protocol):
    """What a pass knows of its rows, on the device."""

    @property
    def positions(self) -> Tensor:
        """[1, n]."""
        ...

    @property
    def rotary(self) -> Rotary:
        """What layers are told of the positions."""
        ...

    def masks(self) -> Masks:
        """Additive masks [1, 1, n, keys], or bands, by window size of the layers."""
        ...

    def last(self, hidden: Tensor, count: int) -> Tensor:
        """The last `count` rows of hidden [1, n, d], to spare the head the others; all, where shapes are fixed."""
        ...


Pass = Callable[[Tensor, View], tuple[Tensor, ...]]  # of the rows' input; the outputs have a row for each of them too


class TargetSession:
    """Runs the target over one sequence in two halves, layers [0, split) and [split, L).

    A drafter that lives on the target's first layers feeds rows through the first half while it drafts;
    `finish` then runs only the second half over all rows, so no layer ever computes a row twice. Any other
    drafter uses split = 0, where the first half is the embedding.

    A *node* is a proposed token of a `DraftTree`, numbered as the structure lists them. A *row* is a token that ran in
    this round, numbered in the order of running: row 0 is the root, which is the last committed token. A *slot* is a
    place in a cache: row r stands in slot base + r, while its *position*, which attention is told, is base + its depth.
    A drafter that shares the first half runs what it extends, here the root and node 1; `run_tree` runs the rest:

        text … "the"   the draft     node  row  slot      position
                       (the)          –     0   base      base
                       ├─ cat         0     2   base + 2  base + 1
                       └─ dog         1     1   base + 1  base + 1
                          └─ barks    2     3   base + 3  base + 2

    If the target says "cat sat", nodes [0] are accepted and `path` is rows [0, 2]. `commit` moves row 2 to slot
    base + 1, drops the other rows, and base grows by 2.

    `base` counts the committed positions before row 0; all caches hold exactly those between rounds. `target_hidden`
    [1, d] is the hidden state after the last layer at the last committed position. `capacity` counts the slots of the
    caches, `context` (by default as many) the positions the text may reach. `taps` are boundaries (see
    `LayerStack.run_tapped`) at which a drafter wants the hidden states of every pass; they need split = 0. `successors`
    is how many of the likeliest tokens after every row a drafter wants (see `recycled`).
    """

    target_hidden: Tensor
    taps: tuple[int, ...] = ()
    successors: int = 0

    def __init__(self, stack: LayerStack, split: int, capacity: int, context: int | None = None):
        self.stack = stack
        self.split = split
        self.capacity = capacity
        self.context = capacity if context is None else context
        self.first = KVCache(range(split), capacity)
        self.rest = KVCache(range(split, len(stack.layers)), capacity)
        self.base = 0
        self.places = torch.arange(capacity, device=stack.device)
        stack.reserve(capacity)
        self._start_round()

    def _start_round(self) -> None:
        self.round = Rows()
        self._tokens: list[Tensor] = []
        self._hidden: list[Tensor] = []
        self._view: _EagerView | None = None  # of the last pass
        self._finished: Sequence[int] = ()  # the rows that have been through the second half
        self._beside_logits: list[Tensor] = []  # at `taps` [1, n, taps · d], and `successors` [1, n, 2k], if wanted

    def beside(self, stack: LayerStack) -> "TargetSession":
        """A session of the same kind and size for another model, run through by `extend`."""
        return TargetSession(stack, len(stack.layers), self.capacity, self.context)

    @property
    def step(self) -> Callable[[Tensor], Tensor] | None:
        """A round of plain greedy decoding in one graph, where there is one.

        It commits a token [1] and returns the `likeliest` one after it [1], which holds until the next call;
        `target_hidden`, which is for those who draft, is undefined afterwards.
        """
        return None

    def close(self) -> None:
        """The generation is over: what it worked in may serve another one."""

    @property
    def vocabulary(self) -> int:
        """How many tokens the target knows."""
        return int(self.stack.config.vocab_size)

    @property
    def rows(self) -> int:
        """Rows of this round that have been through the first half."""
        return len(self.round)

    @property
    def hidden(self) -> Tensor:
        """The rows' hidden states between the halves [1, rows, d]."""
        if len(self._hidden) > 1:
            self._hidden = [torch.cat(self._hidden, dim=1)]
        return self._hidden[0]

    @property
    def tokens(self) -> Tensor:
        """The rows' tokens [rows]."""
        return torch.cat(self._tokens)

    def feed(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        """Add rows: tokens [n] whose parents are row numbers (−1: no parent in this round), through the first half.

        Returns their hidden states [1, n, d].
        """
        layout = self._add(parents)
        (hidden,) = self._run("first", self._first_half, tokens, layout, self.first)
        self._tokens.append(tokens)
        self._remember(hidden, layout.start)
        return hidden

    def prefill(self, prompt: Sequence[int]) -> Tensor:
        """Run the prompt; returns the logits after it [1, V]. The round is left open, for a drafter to read."""
        tokens = torch.tensor(prompt, device=self.stack.device)
        self.feed(tokens, chain_parents(0, len(prompt)))
        return self.finish(last_only=True)

    def extend(self, tokens: Tensor, parents: Sequence[int], wanted: int) -> tuple[Tensor, Tensor]:
        """`feed` where the first half is the whole model: hidden states [n, d] and the last rows' logits [wanted, K].

        These are of its own tokens (see `LayerStack.own_logits`). They hold until the next call.
        """

        def whole(tokens: Tensor, view: View) -> tuple[Tensor, Tensor]:
            (hidden,) = self._first_half(tokens, view)
            return hidden, self.stack.own_logits(view.last(hidden, wanted))

        hidden, logits = self._run("whole", whole, tokens, self._add(parents), self.first)
        return hidden[0], logits[0, -wanted:]

    def finish(self, rows: Sequence[int] | None = None, *, last_only: bool = False) -> Tensor:
        """Run the second half over `rows` (ascending, with all their ancestors; None: every row).

        Returns next-token logits of each of them [n, V], or of the last one [1, V]; they hold until the next call.
        Rows left out stay out of the second half, and cannot be committed. May be called again, for other rows.
        """
        self.rest.keep(self.base, ())
        self._finished = range(self.rows) if rows is None else rows
        count = len(self._finished)
        everything = count == self.rows
        hidden = self.hidden if everything else self.hidden[:, list(self._finished)]
        chosen = self.round if everything else self.round.select(self._finished)
        wanted = 1 if last_only else count

        def second_half(hidden: Tensor, view: View) -> tuple[Tensor, ...]:
            given = (hidden, self.split, len(self.stack.layers), view.rotary, view.masks())
            beside = []
            if self.taps:
                hidden, tapped = self.stack.run_tapped(*given, self.taps, self.rest)
                beside.append(torch.cat(tapped, dim=-1))
            else:
                hidden = self.stack.run(*given, self.rest)
            logits = self.stack.logits(view.last(hidden, wanted))
            if self.successors:
                beside.append(successors(logits, self.successors))
            return hidden, logits, *beside

        name = "rest" + (f", tapped at {self.taps}" if self.taps else "")
        name += f", {self.successors} successors" if self.successors else ""
        layout = chosen.layout(self.base, 0, count)
        hidden, logits, *self._beside_logits = self._run(name, second_half, hidden, layout, self.rest)
        self._last_hidden = hidden[0]
        return logits[0, -wanted:]

    def tapped(self, rows: Sequence[int]) -> Tensor:
        """The hidden states of `rows` at the boundaries `taps`, side by side [1, n, taps · d]; a copy.

        rows: some of those that `finish` ran last.
        """
        place = {row: index for index, row in enumerate(self._finished)}
        return self._beside_logits[0][:, [place[row] for row in rows]]

    def recycled(self) -> tuple[Sequence[int], Tensor]:
        """The rows [n] that `finish` ran last, and `sampling.successors` of each, float32 [n, 2k].

        Holds until the next pass. It needs the logits of every row.
        """
        return self._finished, self._beside_logits[-1][0]

    def run_rows(self, name: str, pass_: Pass, x: Tensor, parents: Sequence[int]) -> tuple[Tensor, ...]:
        """Add rows as `feed` does and run a pass over x [1, n, …] of them, where all layers are in the first half.

        For a drafter's own model, in a session beside the target's. name: as in `run_beside`.
        """
        return self._run(name, pass_, x, self._add(parents), self.first)

    def run_beside(self, name: str, pass_: Pass, x: Tensor, start: int, cache: KVCache) -> tuple[Tensor, ...]:
        """A pass of a drafter's own layers over x [1, n, …], of rows start, start + 1, …, where start may be negative.

        name: of this pass, always the same one. Its keys and values go after what `cache` has. Its outputs hold until
        the next call.
        """
        return self._run(name, pass_, x, self._layout(start, start + x.shape[1]), cache)

    def cache_beside(self, owner: object, layers: range) -> KVCache:
        """An empty cache for layers of a drafter's own, which `owner` has."""
        return KVCache(layers, self.capacity)

    def run_tree(self, root: Tensor, tree: DraftTree) -> Tensor:
        """The target's next-token logits after the root [1] and after each node [n + 1, V]; `path` knows their rows.

        Feeds what this round has not fed yet: all of it, or, where a drafter shares the first half, the leaves.
        """
        shared = self.rows > 0
        rows = list(tree.rows) if shared else [-1] * len(tree)
        missing = [node for node, row in enumerate(rows) if row < 0]
        following = max(1, self.rows)
        for place, node in enumerate(missing):
            rows[node] = following + place
        parents = [0 if tree.parents[node] == ROOT else rows[tree.parents[node]] for node in missing]
        tokens = tree.tokens if len(missing) == len(tree) else tree.tokens[missing]
        if not shared:
            self.feed(torch.cat([root, tokens]), (ROOT, *parents))
        elif missing:
            self.feed(tokens, parents)
        self._tree_rows = rows
        order = sorted([0, *rows])
        logits = self.finish(None if len(order) == self.rows else order)
        if order != [0, *rows]:
            place_of = {row: place for place, row in enumerate(order)}
            logits = logits[[0, *(place_of[row] for row in rows)]]
        return logits

    def path(self, nodes: Sequence[int]) -> list[int]:
        """The rows of the root and of `nodes` of the tree that ran last."""
        return [0, *(self._tree_rows[node] for node in nodes)]

    def commit(self, rows: Sequence[int]) -> None:
        """End the round: the tokens of `rows`, an ascending path from row 0, are part of the text; drop the others."""
        self.first.keep(self.base, rows)
        if self.rest.layers:
            place = {row: index for index, row in enumerate(self._finished)}
            self.rest.keep(self.base, [place[row] for row in rows])
            last = place[rows[-1]]
            self.target_hidden = self._last_hidden[last : last + 1]
        self.base += len(rows)
        self._start_round()

    def _add(self, parents: Sequence[int]) -> Layout:
        start = self.rows
        self.round.add(parents)
        return self._layout(start, self.rows)

    def _layout(self, start: int, stop: int) -> Layout:
        """Of rows start..stop−1 of this round; that of the last pass where they are the same."""
        last = None if self._view is None else self._view.layout
        if last is not None and (last.start, last.stop) == (start, stop) and last.base == self.base:
            return last
        return self.round.layout(self.base, start, stop)

    def _remember(self, hidden: Tensor, start: int) -> None:
        """Keep the hidden states of rows start, start + 1, … for `hidden`."""
        self._hidden.append(hidden)

    def _run(self, name: str, pass_: Pass, x: Tensor, layout: Layout, cache: KVCache) -> tuple[Tensor, ...]:
        """Run a pass over the rows of `layout`, whose keys and values go behind what `cache` has."""
        # An exit layer runs over the rows that were just fed to the first half, as a rule.
        if self._view is None or self._view.layout is not layout:
            self._view = _EagerView(self, layout)
        outputs = pass_(x, self._view)
        cache.advance(layout.stop - layout.start)
        return outputs

    def _first_half(self, tokens: Tensor, view: View) -> tuple[Tensor]:
        hidden = self.stack.embed(tokens[None], view.positions)
        if self.split:
            hidden = self.stack.run(hidden, 0, self.split, view.rotary, view.masks(), self.first)
        return (hidden,)


class _EagerView:
    """Positions, rotary tables and masks of a layout, made when asked for."""

    def __init__(self, session: TargetSession, layout: Layout):
        self.layout = layout
        self._stack, self._places = session.stack, session.places
        self._masks: Masks | None = None
        self._rotary: Rotary | None = None

    @cached_property
    def positions(self) -> Tensor:
        return self.layout.positions(self._places)

    @property
    def rotary(self) -> Rotary:
        if self._rotary is None:
            span, positions = self.layout.span, self.positions
            if span is None:
                self._rotary = self._stack.rotary(positions)
            else:  # views of the tables: a round of a chain asks for nothing else
                views = ((cos[None, span], sin[None, span]) for cos, sin in self._stack.tables)
                self._rotary = Rotary(positions, tuple(views))
        return self._rotary

    def masks(self) -> Masks:
        if self._masks is None:
            self._masks = self.layout.masks(self._stack.windows, self._places, self._stack.dtype)
        return self._masks

    def last(self, hidden: Tensor, count: int) -> Tensor:
        return hidden[:, -count:] if count < hidden.shape[1] else hidden
