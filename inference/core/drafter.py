"""The interface between the decoding loop and drafters.

A node is a token of a draft tree under the root, the last token of the text. A row is a token that ran in this round.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from outrider.inference.core.session import Session
from outrider.inference.core.tree import DraftTree

if TYPE_CHECKING:
    from outrider.inference.core.token_selector import TokenSelector

# The names of totals, or the beginnings of these names (see `inference.shapes.structure.Structure`).
TRIED, CANDIDATE, CHOSEN, OBSERVED = "nodes_tried", "accepted_candidate_", "chosen_", "observed"


class Sizes(Protocol):
    """Chooses how many nodes to submit, round by round. A draft is given as parents (−1: the root), int64 [n], parents
    before children, and path probabilities, float64 [n], descending."""

    max_nodes: int  # the largest choice
    totals: Counter[str]  # sums over rounds by name, for the report

    def search_size(self) -> int:
        """The number of nodes to search for in this round; 0: none, as none would be submitted."""

    def count(self, parents: np.ndarray, path_probs: np.ndarray) -> int:
        """The number of nodes to submit: the first ones of the draft."""

    def observe(self, parents: np.ndarray, path_probs: np.ndarray, accepted_nodes: Sequence[int]) -> None:
        """Learn from a submitted draft and its accepted nodes."""


class Stopwatch:
    """Seconds since the last `restart`, in all and for each part of a round; one part runs at a time: "draft" (the
    drafter's forward passes), "structure" (its other work), "verify" (the target's pass) or "other", not summed."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self.restart("other")

    def restart(self, part_name: str) -> None:
        self._started = self._since = self._clock()
        self._part = part_name
        self.parts = {"draft": 0.0, "structure": 0.0, "verify": 0.0}

    @property
    def seconds(self) -> float:
        return self._clock() - self._started

    def begin(self, part: str) -> str:
        """Begin `part`, which ends the running part; returns the name of the ended part."""
        current_time, ended_part = self._clock(), self._part
        if ended_part in self.parts:
            self.parts[ended_part] += current_time - self._since
        self._since, self._part = current_time, part
        return ended_part


class Drafter(ABC):
    """Drafts one tree per round and receives its outcome, for one generation."""

    split: int = 0  # the target's first layers that it shares; the session is split after them
    aux_layers: tuple[int, ...] = ()  # boundaries of the target's layers whose hidden states it reads (`aux_hidden`)
    top_count: int = 0  # top-k continuations of every row that it reads (`Session.top_tokens_of_rows`)
    max_rows: int  # the most rows that a round adds to the caches, not counting the root
    sizes: Sizes | None = None  # if the number is "auto", and no structure (a rule for chains or trees) shapes drafts

    @property
    def totals(self) -> Mapping[str, float]:
        """Sums over rounds by name, such as `TRIED`, for the report."""
        return {} if self.sizes is None else self.sizes.totals

    @abstractmethod
    def begin(self, session: Session, selector: "TokenSelector", watch: Stopwatch) -> None:
        """Called once, after the session ran the prompt and before it commits the prompt. selector: the token selector,
        for drafts that are sampled in the same way; watch: times the drafter's forward passes, as the part "draft"."""

    @abstractmethod
    def draft(self, root: Tensor, limit: int) -> DraftTree:
        """A draft under `root` [1], the last token of the text, with at most `limit` nodes on a path; empty for 0."""

    @abstractmethod
    def commit(self, tree: DraftTree, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """End the round: the path `nodes` of `tree` was accepted; `tokens` are the root and the path's tokens. Called
        before the session's own commit."""


class DraftModel(Protocol):
    """An autoregressive draft model: gives next-token distributions after any node of the round's tree. A
    `ModelDrafter` makes a `Drafter` of a draft model."""

    split: int  # see `Drafter`
    aux_layers: tuple[int, ...]  # see `Drafter`

    @property
    def predicted(self) -> Tensor | None:
        """The draft vocabulary: ids [K], ascending; None: the target's whole vocabulary."""

    @property
    def hidden(self) -> Tensor:
        """The draft model's last hidden states [n, d] of the rows just extended."""

    @property
    def target_hidden(self) -> Tensor:
        """The target's last hidden state [1, d] at the last verified position."""

    def begin(self, session: Session) -> None:
        """As `Drafter.begin`."""

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        """Feed rows (tokens [n], parents as in `Session.feed`); returns next-token logits [n, K] after each row.

        `hidden` and the logits are valid until the next call.
        """

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """End the round with the path `tokens` committed, root first; called before the session's own commit.

        rows: each token's row in the session if the model shares its layers or reads its hidden states, else its index
        in the order of feeding. A token that was not fed to the model has −1, or an index beyond the last row.
        """
