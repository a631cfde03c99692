"""What the decoding loop asks of a drafter."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from inference.core.session import Session
from inference.core.stopwatch import Stopwatch
from inference.core.tree import DraftTree

if TYPE_CHECKING:
    from inference.core.acceptance import Chooser

TRIED, CANDIDATE, CHOSEN = "nodes_tried", "accepted_candidate_", "chosen_"  # names in `Structure.totals`


class Sizes(Protocol):
    """Chooses how many nodes to submit, round by round.

    most: the largest choice there is. A draft is its tokens' parents (−1: the root), int64 [n], before children, and
    path probabilities, float64 [n], which fall. totals: see `Structure.totals`.
    """

    most: int
    totals: Counter[str]

    def room(self) -> int:
        """How many nodes to look for in this round."""
        ...

    def count(self, parents: np.ndarray, probs: np.ndarray) -> int:
        """How many of the draft's nodes to submit, the first ones."""
        ...

    def observe(self, parents: np.ndarray, probs: np.ndarray, accepted: Sequence[int]) -> None:
        """What was submitted, and the nodes of it that were accepted."""
        ...


class Drafter(ABC):
    """Drafts a tree a round and is told what came of it; of one generation.

    split: how many of the target's first layers it shares. The session is split there.
    taps: the boundaries of the target's layers at which it reads hidden states (see `Session.tapped`).
    successors: how many likeliest tokens after every row it reads (see `Session.recycled`).
    max_rows: how many rows a round may add to the caches, besides the root.
    sizes: chooses how many nodes it submits, where it shapes its drafts itself and their size is "auto".
    """

    split: int = 0
    taps: tuple[int, ...] = ()
    successors: int = 0
    max_rows: int
    sizes: Sizes | None = None

    @property
    def totals(self) -> Mapping[str, float]:
        """Sums over rounds, for the report (see `Structure.totals`)."""
        return {}

    @abstractmethod
    def begin(self, session: Session, chooser: "Chooser", watch: Stopwatch) -> None:
        """Called once, with the prompt fed to the session's first half and not yet committed.

        chooser: says how tokens are chosen, for drafts that are drawn likewise; watch: to be told of the drafter's
        forward passes, as `watch.part("draft")`.
        """

    @abstractmethod
    def draft(self, root: Tensor, limit: int) -> DraftTree:
        """A draft under `root` [1], the last token of the text: paths have at most `limit` nodes; at 0 it is empty."""

    @abstractmethod
    def commit(self, tree: DraftTree, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """The round ends: of `tree` the path `nodes` was accepted; the root and its tokens are `tokens`.

        Called before the session's own commit.
        """


class DraftModel(Protocol):
    """An autoregressive drafter: gives next-token distributions after any node of the round's tree.

    `inference.drafters.shaped.Shaped` makes a `Drafter` of it.
    """

    split: int  # see `Drafter`
    taps: tuple[int, ...]  # likewise

    @property
    def predicted(self) -> Tensor | None:
        """The ids [K], ascending, of the tokens that it has logits of; None: all of the target's."""
        ...

    @property
    def hidden(self) -> Tensor:
        """The drafter's last hidden states [n, d] of the rows that were just extended."""
        ...

    @property
    def target_hidden(self) -> Tensor:
        """The target's last hidden state [1, d] at the last verified position."""
        ...

    def begin(self, session: Session) -> None:
        """As `Drafter.begin`."""
        ...

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        """Feed rows (tokens [n], parents as in `Session.feed`); returns next-token logits [n, K] after each.

        `hidden` and the logits hold until the next call.
        """
        ...

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """The round ends with the path `tokens` committed, root first; called before the session's own commit.

        rows: the row of each, in the session where the model shares or taps it, else as the model was fed them, with −1
        (or a row it never had) for a token it was not fed.
        """
        ...
