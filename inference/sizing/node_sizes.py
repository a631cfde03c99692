"""The number of nodes of a best-first draft to submit, for drafters that run no model and shape their drafts.

A node's worth is the product of q along its path, every q scaled by the observed reliability of such a q, as for an
OPT-Tree with nodes=auto (see `inference.sizing.policy`). The counts compared start at 0, a round without a draft.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from outrider.draft_models.ngrams.kernels import lean
from outrider.inference.core.drafter import CHOSEN
from outrider.inference.settings import MOST_NODES
from outrider.inference.sizing.costs import LOSS
from outrider.inference.sizing.policy import BANDS, TREE_NEIGHBOUR, TREE_OWN, Evidence, Trials, Tuning, trials_by_band

_TRIAL = 2  # nodes at most of a draft that is not expected to pay
PATIENCE = 4  # rounds without a draft after which only one of so many begins with a search
SEARCH_SIZES = (8, 16, 32, MOST_NODES)  # sizes of a search, in nodes
_HALVES = 2.0 ** (-np.arange(1, BANDS) / 2)  # lower bounds of all bands of q except the last


class BestNodes:
    """nodes=auto: the count with the most tokens per second, from measured costs and observed acceptance.

    prior, neighbour: see `Evidence`; loss: see `Allowance`, which also decides when a draft that does not pay is tried.
    A search takes time that texts do not share. So beside others a text whose last drafts did not pay searches seldom.
    """

    most = MOST_NODES

    def __init__(
        self, tuning: Tuning, *, prior: float = TREE_OWN, neighbour: float = TREE_NEIGHBOUR, loss: float = LOSS
    ):
        self._tuning, self._allowance = tuning, tuning.allowance(loss)
        self._evidence = Evidence(BANDS, tuning, prior=prior, neighbour=neighbour, start=1.0)
        self._worths = np.empty(MOST_NODES)
        self._chosen = self._idle = 0  # _idle: rounds since a draft
        self.totals: Counter[str] = Counter()

    def search_size(self) -> int:
        """The smallest search that finds more nodes than the last choice, to limit wasted work; 0: there is none."""
        self._idle = 0 if self._chosen else self._idle + 1
        beside = self._tuning.costs_now is not self._tuning.costs
        if self._allowance.spent() or (beside and self._idle > PATIENCE and self._idle % PATIENCE):
            return 0
        return next((size for size in SEARCH_SIZES if size > self._chosen), MOST_NODES)

    def count(self, parents: np.ndarray, probs: np.ndarray) -> int:
        chosen, most = 0, min(_TRIAL, len(parents))
        if most and not self._allowance.spent():
            seconds, trust = self._tuning.costs_now.of_nodes, np.array(self._evidence.shares())
            chosen = int(best_nodes(parents, probs, trust, seconds, self._worths))
            loss = seconds[most] / seconds[0] - 1.0 - self._worths[:most].sum()
            chosen = chosen or most * self._allowance.tries(float(loss))
        self._chosen = chosen
        self.totals[f"{CHOSEN}nodes={self._chosen}"] += 1
        return self._chosen

    def observe(self, parents: np.ndarray, probs: np.ndarray, accepted: Sequence[int]) -> None:
        nodes = len(parents)
        self._allowance.observe([nodes] * (nodes > 0), nodes, len(accepted) + 1)
        self._evidence.add(trials_of(parents, probs, accepted) if nodes else iter(()))


def trials_of(parents: np.ndarray, probs: np.ndarray, accepted: Sequence[int]) -> Trials:
    """`policy.trials_by_band` of a draft whose nodes' paths have the probabilities `probs`, float [n].

    A node's q is 0 if its parent's path probability underflows to 0.
    """
    above = np.where(parents >= 0, probs[parents], 1.0)  # of the parents' paths [n]
    steps = np.divide(probs, above, out=np.zeros_like(above), where=above > 0)
    return trials_by_band(parents.tolist(), steps.tolist(), accepted)


@lean
def band_of(q: float) -> int:
    """`policy.band`."""
    index = 0
    while index < len(_HALVES) and q <= _HALVES[index]:
        index += 1
    return index


@lean
def best_nodes(
    parents: np.ndarray, probs: np.ndarray, trust: np.ndarray, seconds: np.ndarray, worths: np.ndarray
) -> int:
    """The number of leading nodes with the most tokens per second, from 0 on.

    seconds: float64, of rounds with 0, 1, … nodes. trust: by band, how often a q comes true. worths: overwritten by the
    expected accepted tokens of each node. Compiled, since every draft of a text is sized by it.
    """
    best, count, emitted = 1.0 / seconds[0], 0, 1.0
    for n in range(min(len(probs), len(seconds) - 1)):
        parent, q, worth = parents[n], probs[n], 1.0
        if parent >= 0:
            q, worth = q / probs[parent] if probs[parent] > 0 else 0.0, worths[parent]
        worths[n] = worth * min(1.0, q * trust[band_of(q)])
        emitted += worths[n]
        if emitted / seconds[n + 1] > best:
            best, count = emitted / seconds[n + 1], n + 1
    return count
