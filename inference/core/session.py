"""The session of one text in a target, for the decode loop and drafters: rows in, logits and hidden states out."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from outrider.draft_models.targets.target import LayerCache, Masks, Rotary, Target
from outrider.inference.core.rows import RoundRows
from outrider.inference.core.tree import ROOT, DraftTree, chain_parents

if TYPE_CHECKING:
    from outrider.inference.core.target_session import TargetSession


class View(Protocol):
    """A pass's view of its rows (the tokens that it runs), on the device."""

    @property
    def cache(self) -> LayerCache:
        """The cache of the layers that the pass runs."""

    @property
    def positions(self) -> Tensor:
        """[1, n]."""

    @property
    def rotary(self) -> Rotary:
        """The rotary tables at these positions."""

    def masks(self) -> Masks:
        """Masks by window size of the layers: additive tensors [1, 1, n, keys], or `Band`s."""

    def logit_rows(self, hidden: Tensor) -> Tensor:
        """The last rows of hidden [1, n, d], whose logits are requested; all rows if shapes are fixed."""


Pass = Callable[[Tensor, View], tuple[Tensor, ...]]  # from the rows' input to outputs, each with a row per input row


class Session(Protocol):
    """Runs a target over one text, round by round. Session classes inherit the shared methods.

    A *node* is a proposed token of a `DraftTree`, numbered in the tree's order. A *row* is a token that ran in
    this round, numbered in running order: row 0 is the root, the last committed token. A *slot* is a cache index: row r
    is in slot base + r, while its *position* for attention is base + its depth. A drafter that shares the first
    layers runs them on the nodes that it extends, here the root and node 1; `run_tree` runs the others:

        text … "the"   the draft     node  row  slot      position
                       (the)          –     0   base      base
                       ├─ cat         0     2   base + 2  base + 1
                       └─ dog         1     1   base + 1  base + 1
                          └─ barks    2     3   base + 3  base + 2

    If the target says "cat sat", nodes [0] are accepted and `path` is rows [0, 2]. `commit` moves row 2 to slot
    base + 1, drops the other rows, and base grows by 2.

    `base` counts the committed positions before row 0, which all caches hold between rounds. `target_hidden`
    [1, d] is the hidden state after the last layer at the last committed position. `capacity` counts the slots that
    caches may have, `context` the positions the text may reach. `aux_layers` are layer boundaries (see
    `LayerStack.run_with_aux`) at which a drafter reads the aux hidden states of every pass. `top_count` is the number
    of top-k continuations of every row that a drafter reads (see `top_tokens_of_rows`).

    During a round `round` and `fed` are its rows and their tokens, `finished` the rows of the last `finish`,
    `tree_rows` the rows of the last tree's nodes, and `extras` the other outputs of `finish`, if requested: the aux
    hidden states at `aux_layers` [1, n, layers · d] and `top_tokens` [1, n, 2k].
    """

    device: torch.device
    dtype: torch.dtype
    capacity: int
    context: int
    base: int
    target_hidden: Tensor
    aux_layers: tuple[int, ...] = ()
    top_count: int = 0
    round: RoundRows
    fed: list[Tensor]
    finished: Sequence[int]
    extras: list[Tensor]
    tree_rows: list[int]

    @property
    def vocabulary(self) -> int:
        """The size of the target's vocabulary."""

    def feed(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        """Add rows: tokens [n] whose parents are row numbers (−1: no parent in this round). Returns their hidden states
        [1, n, d] after the layers that a drafter shares, if the target runs layer by layer."""

    def finish(self, rows: Sequence[int] | None = None, *, last_only: bool = False) -> Tensor:
        """Run the target over `rows` (ascending, with all their ancestors; None: every row). Returns next-token logits
        of each row [n, V], or of the last row [1, V]; they are valid until the next call. Rows left out cannot be
        committed. `finish` may be called again, for other rows."""

    def commit(self, rows: Sequence[int]) -> None:
        """End the round: `rows`, an ascending path from row 0, become part of the text; the other rows are dropped."""

    def require_layers(self) -> "TargetSession":
        """This session, for drafters that use layers of the target. Raises `TypeError` if it exposes no layers."""
        raise TypeError(f"{type(self).__name__}: there are no layers of a target")

    def draft_session(self, model: Target) -> "Session":
        """A session of the same size for a drafter's own model, run by `extend`. Raises `TypeError` if unsupported."""
        raise TypeError(f"{type(self).__name__}: no model runs beside it")

    def extend(self, tokens: Tensor, parents: Sequence[int], logit_count: int) -> tuple[Tensor, Tensor]:
        """Add rows and run them through the whole model: hidden states [n, d], the last rows' logits [logit_count, K]
        over the draft vocabulary (see `Target.predicted`). Both are valid until the next call."""
        raise TypeError(f"{type(self).__name__}: it runs no model")

    def content(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Keys and values [1, heads, positions, head_dim] of every layer. Raises `TypeError` without a KV cache."""
        raise TypeError(f"{type(self).__name__}: it has no caches")

    @property
    def step(self) -> Callable[[Tensor], Tensor] | None:
        """A round of plain greedy decoding as one CUDA graph; None without graphs. `step` commits a token [1] and
        returns the argmax after it [1], valid until the next call. `target_hidden` is undefined afterwards."""
        return None

    def close(self) -> None:
        """End the generation: its buffers may be reused."""
        return

    def start_round(self) -> None:
        self.round, self.fed, self.finished, self.extras = RoundRows(), [], (), []

    @property
    def rows(self) -> int:
        """The number of rows of this round so far."""
        return len(self.round.parents)

    @property
    def tokens(self) -> Tensor:
        """The rows' tokens [rows]."""
        return torch.cat(self.fed)

    def prefill(self, prompt: Sequence[int]) -> Tensor:
        """Run the prompt; returns the logits after it [1, V]. The round stays open so that a drafter can read it."""
        self.feed(torch.tensor(prompt, device=self.device), chain_parents(0, len(prompt)))
        return self.finish(last_only=True)

    def run_tree(self, root: Tensor, tree: DraftTree) -> Tensor:
        """The target's next-token logits [n + 1, V] after the root [1] and after each node; `path` gives their rows.

        Feeds the tokens that this round has not fed yet: all, or the unextended nodes if the drafter shares layers.
        """
        if not self.rows:  # the drafter shares nothing
            tokens = torch.cat([root, tree.tokens]) if len(tree) else root
            self.feed(tokens, (ROOT, *(parent + 1 for parent in tree.parents)))
            self.tree_rows = list(range(1, self.rows))
            return self.finish()
        self.tree_rows = rows = list(tree.rows)
        unfed_nodes = [node for node, row in enumerate(rows) if row < 0]
        for row, node in enumerate(unfed_nodes, start=self.rows):
            rows[node] = row
        parents = [0 if tree.parents[node] == ROOT else rows[tree.parents[node]] for node in unfed_nodes]
        if unfed_nodes:
            self.feed(tree.tokens[unfed_nodes], parents)
        sorted_rows = sorted([0, *rows])
        logits = self.finish(None if len(sorted_rows) == self.rows else sorted_rows)
        if sorted_rows != [0, *rows]:
            index_by_row = {row: index for index, row in enumerate(sorted_rows)}
            logits = logits[[0, *(index_by_row[row] for row in rows)]]
        return logits

    def path(self, nodes: Sequence[int]) -> list[int]:
        """The rows of the root and of `nodes` of the last tree."""
        return [0, *(self.tree_rows[node] for node in nodes)]

    def aux_hidden(self, rows: Sequence[int]) -> Tensor:
        """The aux hidden states of `rows`, of the last `finish`, at `aux_layers`, joined [1, n, layers · d]; a copy."""
        return self.extras[0][:, self.indices_of(rows)]

    def top_tokens_of_rows(self) -> tuple[Sequence[int], Tensor]:
        """The rows [n] of the last `finish`, which must have computed the logits of every row; and
        `sampling.top_tokens` of each row, float32 [n, 2k]. Valid until the next pass."""
        return self.finished, self.extras[-1][0]

    def indices_of(self, rows: Sequence[int]) -> list[int]:
        """The indices of `rows` among the rows of the last `finish`."""
        index_by_row = {row: index for index, row in enumerate(self.finished)}
        return [index_by_row[row] for row in rows]
