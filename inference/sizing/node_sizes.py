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
from outrider.inference.sizing.policy import BANDS, TREE_NEIGHBOUR, TREE_OWN, Evidence, Trials, Tuning

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
    """`policy.trials_by_band` of a draft with path probabilities, summed by band: Σ q, and the number right."""
    counts = np.zeros((2, BANDS))
    count_trials(parents, probs, np.array(accepted, np.int64), counts)
    for index in np.flatnonzero(counts[0]).tolist():
        yield index, float(counts[0, index]), float(counts[1, index])


@lean
def band_of(q: float) -> int:
    """`policy.band`."""
    index = 0
    while index < len(_HALVES) and q <= _HALVES[index]:
        index += 1
    return index


@lean
def share_of(prob: float, above: float) -> float:
    """A node's probability given its parent; 0 if the parent's path probability underflows to 0 in float64."""
    return prob / above if above > 0 else 0.0


@lean
def best_nodes(
    parents: np.ndarray, probs: np.ndarray, trust: np.ndarray, seconds: np.ndarray, worths: np.ndarray
) -> int:
    """The number of leading nodes with the most tokens per second. seconds: float64, for rounds with 0, 1, … nodes."""
    best, count, emitted = 1.0 / seconds[0], 0, 1.0
    for n in range(min(len(probs), len(seconds) - 1)):
        above, prob, worth = parents[n], probs[n], 1.0
        if above >= 0:
            prob, worth = share_of(prob, probs[above]), worths[above]
        worths[n] = worth * min(1.0, prob * trust[band_of(prob)])
        emitted += worths[n]
        if emitted / seconds[n + 1] > best:
            best, count = emitted / seconds[n + 1], n + 1
    return count


@lean
def count_trials(parents: np.ndarray, probs: np.ndarray, accepted: np.ndarray, counts: np.ndarray) -> None:
    """Add, per band of q: Σ q over the children of nodes on the target's path, and how many of them were right."""
    step = -1  # the root, then the accepted nodes in path order: all nodes on the target's path
    while step < len(accepted):
        node = accepted[step] if step >= 0 else -1
        right = accepted[step + 1] if step + 1 < len(accepted) else -1
        for child in range(len(parents)):
            if parents[child] == node:
                q = share_of(probs[child], probs[node]) if node >= 0 else probs[child]
                index = band_of(q)
                counts[0, index] += q
                counts[1, index] += child == right
        step += 1
