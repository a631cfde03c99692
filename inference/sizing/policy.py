"""Draft sizes chosen from measured costs and observed acceptance, for the most tokens per second.

A node is a drafted token; to submit a node is to verify it by the target. A row is a token of a pass.
A round with draft seconds T that submits n nodes takes T + c(n + 1) + r seconds (`Costs`: c is `verify`, r `overhead`).
It emits 1 + A tokens, A of them drafted. Every choice here maximises (1 + E[A]) / (T + c(n + 1) + r). E[A] is estimated
from the acceptance in this generation (`Evidence`) and a prior measured together with the costs. All computation is on
the host: nothing here uses the device.

A choice never depends on the tokens sampled in this round. It depends on earlier rounds, or on q if candidates are the
most likely tokens, so the distribution of sampled text stays exact. Greedy text does not depend on these choices.
"""

import itertools
import math
import operator
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from outrider.inference.core.tree import ROOT, OptimalTree
from outrider.inference.settings import LONGEST_CHAIN, MOST_NODES
from outrider.inference.sizing.costs import MAX_LOSS, TRIAL_SHARE, Allowance, Costs, Sharing

DEEPEST = 16  # levels of the deepest tree that max_depth=auto considers
# Weights, in trials, of the prior (OWN) and of the previous index's estimate (NEIGHBOUR), for chains and for trees. The
# acceptance of a chain depends on the text; the reliability of a q depends more on the drafter.
OWN, NEIGHBOUR = 1.0, 10.0
TREE_OWN, TREE_NEIGHBOUR = 10.0, 4.0
BANDS = 14  # of q, two for each factor of 2
_LOWER_BOUNDS = [2.0 ** (-index / 2) for index in range(BANDS - 1, 0, -1)]  # of all bands but the last, ascending
SPARE, MIN_NODES, WINDOW = 2, 4, 16  # see `TreeSizes`
INDICES = max(LONGEST_CHAIN, BANDS)  # most indices of trials
TUNED_TOKENS = 192  # maximum length of a generation that is measured for a `Tuning`
DECAY = 0.97  # factor on the weight of old trials per round: text has easy and hard stretches

Trials = Iterator[tuple[int, float, float]]  # index, number of trials, number of right trials


@dataclass(frozen=True)
class Tuning:
    """Measured costs, and a prior: per index, the number of trials and of right trials, which the target accepted.

    An index is a position in a chain, or a band of q. The trials of a band are Σ q over the candidates at nodes on the
    target's path: the number of acceptances that q predicts.
    """

    costs: Costs
    trials: tuple[float, ...] = ()  # trials by index
    hits: tuple[float, ...] = ()  # right ones of them by index
    shared: Callable[[], Allowance] | None = None  # by all texts of a batch, whose number decides what passes cost

    @property
    def costs_now(self) -> Costs:
        """The costs of a round of one text now."""
        return self.costs if self.shared is None else self.shared().costs

    def of_all(self, sharing: Sharing) -> "Tuning":
        """For texts that share passes: one `Allowance` and one prior for all of them, and costs by their number."""
        allowance = Allowance(self.costs, loss=TRIAL_SHARE, sharing=sharing)
        allowance.trials = [*self.trials], [*self.hits]
        return replace(self, shared=lambda: allowance)

    def allowance(self, loss: float = MAX_LOSS) -> Allowance:
        """What decides whether rounds draft: the `Allowance` of the batch, or for a text alone a new `Allowance`."""
        return Allowance(self.costs, loss) if self.shared is None else self.shared()


class Evidence:
    """The estimated share of right trials per index 0 … index_count − 1, from this generation's trials and a prior.

    The estimate of an index weighs its own trials, `prior` trials at the prior's share, and `neighbour` trials at the
    previous index's estimate: an untried index follows the last tried one. start: the share of the first index without
    a prior. Texts that share passes share the prior, which learns from each of them.
    """

    def __init__(
        self, index_count: int, tuning: Tuning, *, prior: float = OWN, neighbour: float = NEIGHBOUR, start: float = 0.5
    ):
        self.trials, self.hits = [0.0] * index_count, [0.0] * index_count
        self._weights, self._neighbour, self._start = [prior] * index_count, neighbour, [start] * index_count
        self._shared = tuning.shared is not None
        self._prior_trials = tuning.shared().trials if tuning.shared else ([*tuning.trials], [*tuning.hits])
        for counts in self._prior_trials:
            counts += [0.0] * (index_count - len(counts))

    def add(self, trials: Trials) -> None:
        """Learn from a round's trials; an old trial loses weight with every round."""
        outcomes = [*trials]
        for tried, right in [(self.trials, self.hits), *([self._prior_trials] if outcomes and self._shared else ())]:
            tried[:], right[:] = [DECAY * count for count in tried], [DECAY * count for count in right]
            for index, trial_count, right_count in outcomes:
                tried[index] += trial_count
                right[index] += right_count

    def shares(self) -> list[float]:
        """The estimate for every index."""
        start_weights = [1.0] + [0.0] * (len(self._start) - 1)  # one trial at `start`, of the first index alone
        prior_shares = self._smooth(*self._prior_trials, self._start, start_weights)
        return self._smooth(self.trials, self.hits, prior_shares, self._weights)

    def _smooth(
        self, tried: Sequence[float], right: Sequence[float], prior_shares: Sequence[float], weights: Sequence[float]
    ) -> list[float]:
        """By index `right` / `tried`, with `weights` trials at `prior_shares` and some at the previous estimate."""
        estimates: list[float] = []
        for trials, hits, prior_share, weight in zip(tried, right, prior_shares, weights, strict=False):
            last_weight, last_share = (self._neighbour, estimates[-1]) if estimates else (0.0, 0.0)
            estimates.append((hits + weight * prior_share + last_weight * last_share) / (trials + weight + last_weight))
        return estimates


def best_prefix(worths: Iterable[float], round_seconds: Iterable[float], best_rate: float = 0.0) -> tuple[int, float]:
    """How many of the tokens to submit for the most tokens per second, and that rate.

    worths: the probability that each token is accepted. round_seconds: of rounds that submit 1, 2, … tokens. best_rate:
    the tokens per second to exceed, else none is submitted.
    """
    best_count, expected_tokens = 0, 1.0
    for token_count, (worth, duration) in enumerate(zip(worths, round_seconds, strict=False), start=1):
        expected_tokens += worth
        if expected_tokens / duration > best_rate:
            best_count, best_rate = token_count, expected_tokens / duration
    return best_count, best_rate


def best_length(acceptance: Sequence[float], costs: Costs) -> tuple[int, float]:
    """The length ≥ 1 of a chain with the most tokens per second, and that rate.

    acceptance[k]: how often token k + 1 is right if all earlier tokens are.
    """
    return best_prefix(itertools.accumulate(acceptance, operator.mul), map(costs.chain_seconds, itertools.count(1)))


def trials_in_chain(draft_length: int, accepted_count: int) -> Trials:
    """One trial per tested position; positions after a wrong token are not tested."""
    return ((index, 1.0, index < accepted_count) for index in range(min(accepted_count + 1, draft_length)))


class TreeSizes:
    """nodes=auto and max_depth=auto of an OPT-Tree: how many nodes to submit, and when to stop adding levels.

    nodes, depth: given numbers; None: chosen here.
    Every candidate node costs time, and most are too unlikely to be submitted. So a round considers `SPARE` times the
    nodes of the largest tree in the last `WINDOW` rounds, or of `MIN_NODES` if that is more.
    """

    def __init__(self, tuning: Tuning, nodes: int | None, depth: int | None):
        self._tuning, self.nodes, self.depth = tuning, nodes, depth
        self.max_nodes, self.max_depth = nodes or MOST_NODES, depth or DEEPEST
        self._submitted = deque([self.max_nodes], WINDOW)
        self._evidence = Evidence(BANDS, tuning, prior=TREE_OWN, neighbour=TREE_NEIGHBOUR, start=1.0)

    def begin(self) -> "TreeGrowth":
        """The choices of one round."""
        node_count = SPARE * max(MIN_NODES, *self._submitted) if self.nodes is None else self.nodes
        return TreeGrowth(self, self._evidence.shares(), min(node_count, self.max_nodes), self._tuning.costs_now)

    def observe(self, tree: OptimalTree, accepted_nodes: Sequence[int]) -> None:
        self._evidence.add(trials_by_band(tree.parents, tree.branch_probs, accepted_nodes))
        self._submitted.append(len(tree))

    def describe(self, tree: OptimalTree) -> list[str]:
        """The sizes chosen for `tree`, for the report."""
        labels = [f"nodes={len(tree)}"] if self.nodes is None else []
        return labels + ([f"max_depth={len(tree.masses)}"] if self.depth is None else [])


def band(q: float) -> int:
    """The band of q: 0 above 0.71, 1 above 0.5, 2 above 0.35, …"""
    return BANDS - 1 - bisect_left(_LOWER_BOUNDS, q)


def trials_by_band(parents: Sequence[int], branch_probs: Sequence[float], accepted_nodes: Sequence[int]) -> Trials:
    """One entry of q trials per candidate at nodes on the target's path: a calibrated q is right that often.

    branch_probs: q of every node given its parent. Example: the root has two candidates with q = 0.8 and 0.2, and the
    second is accepted. Then band 0 has 0.8 trials, none right, and band 4 has 0.2 trials, one right.
    """
    target_path = {ROOT, *accepted_nodes}
    for node, (parent, q) in enumerate(zip(parents, branch_probs, strict=True)):
        if parent in target_path:
            yield band(q), q, node in target_path


class TreeGrowth:
    """The choices of one round, updated after every drafted level.

    A node's worth is the product of q along its path, every q scaled by the observed reliability of its band (accepted
    / Σ q). Example: a greedy target accepts a q of 0.8 more often than that, and a q of 0.1 less often. The next level
    is expected to hold one child per fed node, with its parent's worth times this level's mass over the last level's.
    nodes: the number of most likely nodes that are considered. band_reliability: by band of q, P(right) / q.
    """

    def __init__(self, sizes: TreeSizes, band_reliability: Sequence[float], nodes: int, costs: Costs):
        self._sizes, self._band_reliability, self.nodes, self._costs = sizes, band_reliability, nodes, costs
        self._spent, self._mass = 0.0, 1.0  # seconds of drafting; summed worth of the last level's submitted nodes
        self._worths: list[list[float]] = []  # of the nodes of every level

    def after_level(
        self, fed_count: int, branch_probs: Sequence[float], parents: Sequence[int], best: Sequence[tuple[float, int]]
    ) -> tuple[int, int]:
        """Add a level that feeding `fed_count` rows produced, its most likely nodes first.

        branch_probs, parents: each node's q given its parent, and the parent's index in the previous level.
        best: (−p̂, depth from 0) of the most likely nodes so far, ascending, p̂ the product of q along the path. They are
        a prefix of every level.
        Returns how many of `best` to submit if drafting ended here, and how many of this level's nodes to feed for the
        next level, most likely first; 0: verify now.
        """
        sizes, costs = self._sizes, self._costs
        self._spent += costs.step[fed_count]
        self._add_level(branch_probs, parents)
        worth_iters = [iter(level_worths) for level_worths in self._worths]
        worths = [next(worth_iters[depth]) for _, depth in best]
        count, rate = len(best), 0.0
        if sizes.nodes is None:  # item 2 of `verify` is for the root and one node
            round_seconds = (self._spent + verify_seconds + costs.overhead for verify_seconds in costs.verify[2:])
            count, rate = best_prefix(worths, round_seconds)
        emitted = 1.0 + math.fsum(worths[:count])
        rate = rate or emitted / (self._spent + costs.verify[count + 1] + costs.overhead)
        last_depth = len(self._worths) - 1
        level_worths = [worth for worth, (_, depth) in zip(worths[:count], best, strict=False) if depth == last_depth]
        worth_sum = math.fsum(level_worths)
        if not worth_sum or last_depth + 1 == sizes.max_depth:
            return count, 0
        scale, self._mass = worth_sum / self._mass, worth_sum
        feed_count, deeper_rate = self._best_feed([scale * worth for worth in level_worths], worths[:count], emitted)
        return count, feed_count if sizes.depth is not None or deeper_rate > rate else 0

    def _add_level(self, branch_probs: Sequence[float], parents: Sequence[int]) -> None:
        """Add the worths of a level's nodes."""
        worths_above = self._worths[-1] if self._worths else [1.0]
        shares = (min(1.0, q * self._band_reliability[band(q)]) for q in branch_probs)
        self._worths.append([worths_above[parent] * share for parent, share in zip(parents, shares, strict=True)])

    def _best_feed(self, child_worths: Sequence[float], worths: Sequence[float], emitted: float) -> tuple[int, float]:
        """The number of rows to feed next, and the tokens per second then expected. child_worths: of a child per row.

        worths: of the nodes to submit, the likeliest first. emitted: the tokens expected of them and the target.
        """
        costs, free = self._costs, self.nodes - len(worths)
        best_rate, feed_count = 0.0, 0
        for rows, gain in enumerate(child_worths, start=1):
            emitted += max(0.0, gain - (worths[free - rows] if rows > free else 0.0))  # displaces the least likely node
            pass_rows = len(worths) + min(rows, free) + 1
            rate = emitted / (self._spent + costs.step[rows] + costs.verify[pass_rows] + costs.overhead)
            if rate > best_rate:
                best_rate, feed_count = rate, rows
        return feed_count, best_rate
