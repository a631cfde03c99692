"""A text inside a target, as the decode loop and drafters see it: rows in, logits and hidden states out."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from draft_models.targets.target import Masks, Rotary, Target
from inference.core.rows import Rows
from inference.core.tree import ROOT, DraftTree, chain_parents

if TYPE_CHECKING:
    from inference.core.target_session import TargetSession


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


class Session(Protocol):
    """Runs a target over one text, round by round. A class of sessions inherits what is the same in all of them.

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
    caches, `context` the positions the text may reach. `taps` are boundaries (see `LayerStack.run_tapped`) at which a
    drafter wants the hidden states of every pass. `successors` is how many of the likeliest tokens after every row a
    drafter wants (see `recycled`).

    Of a round: `round` and `fed` are its rows and their tokens, `finished` the rows that `finish` ran last, `tree_rows`
    those of the nodes of the tree that ran last, and `beside_logits` what `finish` gave besides: at `taps`
    [1, n, taps · d], and `successors` [1, n, 2k], if wanted.
    """

    device: torch.device
    dtype: torch.dtype
    capacity: int
    context: int
    base: int
    target_hidden: Tensor
    taps: tuple[int, ...] = ()
    successors: int = 0
    round: Rows
    fed: list[Tensor]
    finished: Sequence[int]
    beside_logits: list[Tensor]
    tree_rows: list[int]

    @property
    def vocabulary(self) -> int:
        """How many tokens the target knows."""
        ...

    def feed(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        """Add rows: tokens [n] whose parents are row numbers (−1: no parent in this round).

        Returns their hidden states between the two halves of the target's layers [1, n, d], where it is split.
        """
        ...

    def finish(self, rows: Sequence[int] | None = None, *, last_only: bool = False) -> Tensor:
        """Run the target over `rows` (ascending, with all their ancestors; None: every row).

        Returns next-token logits of each of them [n, V], or of the last one [1, V]; they hold until the next call.
        Rows left out cannot be committed. May be called again, for other rows.
        """
        ...

    def commit(self, rows: Sequence[int]) -> None:
        """End the round: the tokens of `rows`, an ascending path from row 0, are part of the text; drop the others."""
        ...

    def layered(self) -> "TargetSession":
        """Itself, for drafters that use layers of the target. Raises `TypeError` where there are none to use."""
        raise TypeError(f"{type(self).__name__}: there are no layers of a target")

    def beside(self, model: Target) -> "Session":
        """A session of the same size for a drafter's own model, run by `extend`. Raises `TypeError` where none runs."""
        raise TypeError(f"{type(self).__name__}: no model runs beside it")

    def extend(self, tokens: Tensor, parents: Sequence[int], wanted: int) -> tuple[Tensor, Tensor]:
        """Add rows and run them through the whole model: hidden states [n, d], the last rows' logits [wanted, K].

        These are of its own tokens (see `Target.predicted`). They hold until the next call.
        """
        raise TypeError(f"{type(self).__name__}: it runs no model")

    def content(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Keys and values [1, heads, positions, head_dim] of every layer. Raises `TypeError` where there are none."""
        raise TypeError(f"{type(self).__name__}: it has no caches")

    @property
    def step(self) -> Callable[[Tensor], Tensor] | None:
        """A round of plain greedy decoding in one graph, where there is one.

        It commits a token [1] and returns the `likeliest` one after it [1], which holds until the next call;
        `target_hidden`, which is for those who draft, is undefined afterwards.
        """
        return None

    def close(self) -> None:
        """The generation is over: what it worked in may serve another one."""
        return

    def start_round(self) -> None:
        """No row is fed yet."""
        self.round, self.fed, self.finished, self.beside_logits = Rows(), [], (), []

    @property
    def rows(self) -> int:
        """How many rows this round has."""
        return len(self.round)

    @property
    def tokens(self) -> Tensor:
        """The rows' tokens [rows]."""
        return torch.cat(self.fed)

    def prefill(self, prompt: Sequence[int]) -> Tensor:
        """Run the prompt; returns the logits after it [1, V]. The round is left open, for a drafter to read."""
        self.feed(torch.tensor(prompt, device=self.device), chain_parents(0, len(prompt)))
        return self.finish(last_only=True)

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
        self.tree_rows = rows
        order = sorted([0, *rows])
        logits = self.finish(None if len(order) == self.rows else order)
        if order != [0, *rows]:
            place_of = {row: place for place, row in enumerate(order)}
            logits = logits[[0, *(place_of[row] for row in rows)]]
        return logits

    def path(self, nodes: Sequence[int]) -> list[int]:
        """The rows of the root and of `nodes` of the tree that ran last."""
        return [0, *(self.tree_rows[node] for node in nodes)]

    def tapped(self, rows: Sequence[int]) -> Tensor:
        """The hidden states of `rows` at the boundaries `taps`, side by side [1, n, taps · d]; a copy.

        rows: some of those that `finish` ran last.
        """
        return self.beside_logits[0][:, self.places_of(rows)]

    def recycled(self) -> tuple[Sequence[int], Tensor]:
        """The rows [n] that `finish` ran last, and `sampling.successors` of each, float32 [n, 2k].

        Holds until the next pass. It needs the logits of every row.
        """
        return self.finished, self.beside_logits[-1][0]

    def places_of(self, rows: Sequence[int]) -> list[int]:
        """Where `rows` stand among those that `finish` ran last."""
        place = {row: index for index, row in enumerate(self.finished)}
        return [place[row] for row in rows]
