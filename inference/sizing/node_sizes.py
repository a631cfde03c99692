"""The number of nodes of a best-first draft to submit, for drafters that run no model and shape their drafts.

A round calls `BestNodes.search_size`, then `count` for the draft that the search found, and after verification
`observe`. Example: a draft of three nodes in a line, each with q = 0.5 given its parent, has the path probabilities
(0.5, 0.25, 0.125). If such a q came true 1.2 times as often as it promises, a node is worth 0.6 times its parent: 0.6,
0.36 and 0.22 tokens. So rounds that submit 0 to 3 nodes emit 1, 1.6, 1.96 and 2.18 tokens. With costs of 1, 1.2, 1.4
and 1.8 seconds their rates are 1, 1.33, 1.4 and 1.21, and `count` is 2.

This is the choice of an OPT-Tree with nodes=auto (see `inference.sizing.policy`), except that no draft is a choice too.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from outrider.inference.core.drafter import CHOSEN
from outrider.inference.settings import MOST_NODES
from outrider.inference.sizing.costs import LOSS
from outrider.inference.sizing.policy import (
    BANDS,
    TREE_NEIGHBOUR,
    TREE_OWN,
    Evidence,
    Trials,
    Tuning,
    band,
    best_prefix,
    trials_by_band,
)

_TRIAL = 2  # nodes at most of a draft that is not expected to pay
PATIENCE = 4  # rounds without a draft after which only one of so many begins with a search
SEARCH_SIZES = (8, 16, 32, MOST_NODES)  # sizes of a search, in nodes


class BestNodes:
    """nodes=auto: the count with the most tokens per second, from measured costs and observed acceptance.

    prior, neighbour: see `Evidence`; loss: see `Allowance`, which also decides when a draft that does not pay is tried.
    A search takes time that texts do not share. So in a batch a text whose last drafts did not pay searches seldom.
    """

    max_nodes = MOST_NODES

    def __init__(
        self, tuning: Tuning, *, prior: float = TREE_OWN, neighbour: float = TREE_NEIGHBOUR, loss: float = LOSS
    ):
        self._tuning, self._allowance = tuning, tuning.allowance(loss)
        self._evidence = Evidence(BANDS, tuning, prior=prior, neighbour=neighbour, start=1.0)
        self._last_count = self._rounds_without_draft = 0
        self.totals: Counter[str] = Counter()

    def search_size(self) -> int:
        """The smallest search that finds more nodes than the last choice, to limit wasted work; 0: there is none."""
        self._rounds_without_draft = 0 if self._last_count else self._rounds_without_draft + 1
        in_batch = self._tuning.costs_now is not self._tuning.costs
        waits = self._rounds_without_draft > PATIENCE and self._rounds_without_draft % PATIENCE > 0
        if self._allowance.is_spent() or (in_batch and waits):
            return 0
        return next((size for size in SEARCH_SIZES if size > self._last_count), MOST_NODES)

    def count(self, parents: np.ndarray, probs: np.ndarray) -> int:
        count, trial = 0, min(_TRIAL, len(parents))
        if trial and not self._allowance.is_spent():
            seconds = self._tuning.costs_now.of_nodes
            worths = worths_of(parents, probs, self._evidence.shares())
            count, _ = best_prefix(worths, seconds[1:], 1 / seconds[0])
            if not count:
                loss = seconds[trial] / seconds[0] - 1.0 - sum(worths[:trial])
                count = trial if self._allowance.takes_trial(loss) else 0
        self._last_count = count
        self.totals[f"{CHOSEN}nodes={count}"] += 1
        return count

    def observe(self, parents: np.ndarray, probs: np.ndarray, accepted: Sequence[int]) -> None:
        nodes = len(parents)
        self._allowance.observe([nodes] * (nodes > 0), nodes, len(accepted) + 1)
        self._evidence.add(trials_of(parents, probs, accepted))


def trials_of(parents: np.ndarray, probs: np.ndarray, accepted: Sequence[int]) -> Trials:
    """`trials_by_band` of a draft with the path probabilities `probs` [n]."""
    return trials_by_band(parents.tolist(), branch_probs(parents, probs), accepted)


def branch_probs(parents: np.ndarray, probs: np.ndarray) -> list[float]:
    """Each node's q given its parent, from path probabilities; 0 if the parent's underflows to 0 in float64."""
    paths = [*probs.tolist(), 1.0]  # the root, whose number is −1, is the last
    pairs = zip(paths, parents.tolist(), strict=False)
    return [path / paths[parent] if paths[parent] > 0 else 0.0 for path, parent in pairs]


def worths_of(parents: np.ndarray, probs: np.ndarray, trust: Sequence[float]) -> list[float]:
    """The expected accepted tokens of each node. trust: by band of q, how often a token is right for each q of it."""
    worths: list[float] = []
    for parent, q in zip(parents.tolist(), branch_probs(parents, probs), strict=True):
        above = worths[parent] if parent >= 0 else 1.0
        worths.append(above * min(1.0, q * trust[band(q)]))
    return worths
