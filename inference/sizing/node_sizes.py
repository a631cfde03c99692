"""The number of nodes of a best-first draft to submit, for drafters that run no model and shape their drafts.

A draft is a tree of tokens under the last token of the text, the likeliest path first. A round calls
`BestNodes.search_size`, then `count` for the draft that the search found, and after verification `observe`. Example: a
draft of three nodes in a line, each with q = 0.5 given its parent, has the path probabilities (0.5, 0.25, 0.125). If
such a q came true 1.2 times as often as it promises, a node is worth 0.6 times its parent: 0.6, 0.36 and 0.22 tokens.
So rounds that submit 0 to 3 nodes emit 1, 1.6, 1.96 and 2.18 tokens. With costs of 1, 1.2, 1.4 and 1.8 seconds their
rates are 1, 1.33, 1.4 and 1.21, and `count` is 2.

This is the choice of an OPT-Tree with nodes=auto (see `inference.sizing.policy`), except that no draft is a choice too.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from outrider.inference.core.drafter import CHOSEN
from outrider.inference.settings import MOST_NODES
from outrider.inference.sizing import policy
from outrider.inference.sizing.costs import MAX_LOSS
from outrider.inference.sizing.policy import TREE_NEIGHBOUR, TREE_OWN, Trials, Tuning

_TRIAL_NODES = 2  # nodes at most of a draft that is not expected to pay
PATIENCE = 4  # rounds without a draft, after which only one of so many rounds begins with a search
SEARCH_SIZES = (8, 16, 32, MOST_NODES)  # sizes of a search, in nodes


class BestNodes:
    """nodes=auto: the count with the most tokens per second, from measured costs and observed acceptance.

    prior, neighbour: see `Evidence`; loss: see `Allowance`, which also decides when a draft that does not pay is tried.
    A search takes time that texts do not share. So in a batch a text whose last drafts did not pay searches seldom.
    """

    max_nodes = MOST_NODES

    def __init__(
        self, tuning: Tuning, *, prior: float = TREE_OWN, neighbour: float = TREE_NEIGHBOUR, loss: float = MAX_LOSS
    ):
        self._tuning, self._allowance = tuning, tuning.allowance(loss)
        self._evidence = policy.Evidence(policy.BANDS, tuning, prior=prior, neighbour=neighbour, start=1.0)
        self._last_count = self._rounds_without_draft = 0
        self.totals: Counter[str] = Counter()  # rounds by chosen count, for the report

    def search_size(self) -> int:
        """The smallest search that finds more nodes than the last choice, to limit wasted work; 0: there is none."""
        self._rounds_without_draft = 0 if self._last_count else self._rounds_without_draft + 1
        in_batch = self._tuning.costs_now is not self._tuning.costs  # a text alone has the costs that were measured
        skips_search = self._rounds_without_draft > PATIENCE and self._rounds_without_draft % PATIENCE > 0
        if self._allowance.blocks_drafts() or (in_batch and skips_search):
            return 0
        return next((size for size in SEARCH_SIZES if size > self._last_count), MOST_NODES)

    def count(self, parents: np.ndarray, path_probs: np.ndarray) -> int:
        """How many first nodes to submit of a draft with `parents` [n] (−1: the root) and `path_probs` [n]."""
        node_count, trial_size = 0, min(_TRIAL_NODES, len(parents))
        if trial_size and not self._allowance.blocks_drafts():
            round_seconds = self._tuning.costs_now.round_seconds
            worths = worths_of(parents, path_probs, self._evidence.shares())
            node_count, _ = policy.best_prefix(worths, round_seconds[1:], 1 / round_seconds[0])
            if not node_count:
                token_loss = round_seconds[trial_size] / round_seconds[0] - 1.0 - sum(worths[:trial_size])
                node_count = trial_size if self._allowance.takes_trial(token_loss) else 0
        self._last_count = node_count
        self.totals[f"{CHOSEN}nodes={node_count}"] += 1
        return node_count

    def observe(self, parents: np.ndarray, path_probs: np.ndarray, accepted_nodes: Sequence[int]) -> None:
        """Learn from the submitted draft and its accepted nodes."""
        node_count = len(parents)
        # A draft counts as one pass over its nodes; without nodes there was none.
        self._allowance.observe([node_count] * (node_count > 0), node_count, len(accepted_nodes) + 1)
        self._evidence.add(trials_of(parents, path_probs, accepted_nodes))


def trials_of(parents: np.ndarray, path_probs: np.ndarray, accepted_nodes: Sequence[int]) -> Trials:
    """`trials_by_band` of a draft with the path probabilities `path_probs` [n]."""
    return policy.trials_by_band(parents.tolist(), branch_probs(parents, path_probs), accepted_nodes)


def branch_probs(parents: np.ndarray, node_path_probs: np.ndarray) -> list[float]:
    """Each node's q given its parent, from path probabilities; 0 if the parent's underflows to 0 in float64."""
    path_probs = [*node_path_probs.tolist(), 1.0]  # the root, whose number is −1, is the last
    pairs = zip(path_probs, parents.tolist(), strict=False)
    return [path_prob / path_probs[parent] if path_probs[parent] > 0 else 0.0 for path_prob, parent in pairs]


def worths_of(parents: np.ndarray, path_probs: np.ndarray, band_reliability: Sequence[float]) -> list[float]:
    """The expected accepted tokens of each node. band_reliability: by band of q, P(right) / q."""
    worths: list[float] = []
    for parent, q in zip(parents.tolist(), branch_probs(parents, path_probs), strict=True):
        parent_worth = worths[parent] if parent >= 0 else 1.0
        worths.append(parent_worth * min(1.0, q * band_reliability[policy.band(q)]))
    return worths
