"""The choice whether another pass of the draft model pays when n-grams have already drafted."""

import math
from collections.abc import Sequence

import numpy as np

from inference.settings.limits import MOST_NODES
from inference.sizing.costs import WIDEST
from inference.sizing.node_sizes import best_nodes, trials_of
from inference.sizing.policy import BANDS as Q_BANDS
from inference.sizing.policy import DEEPEST, KEEP, TREE_NEIGHBOUR, TREE_OWN, Evidence, Tuning

BANDS = 8  # of the n-grams' confidence in the token after a node
# The prior gain, by band, of feeding one unit of path probability to the drafter. It was fitted with
# an EAGLE-3 head of a 135M chat model and drafts of 24 nodes (`git show 5a060c4:benchmarks/fit_fused.py`).
GAINS = (0.4, 0.2, 0.15, 0.1, 0.08, 0.06, 0.04, 0.02)
MOST_FED = 48  # most rows that a drafter is fed in a round, not counting the root
_OWN = 6.0  # weight of the prior, in path probability fed
_PATIENCE = (8, 128)  # rounds without a pass before one is forced, at first and at most


class Gains:
    """The expected gain of running the drafter at a node, per unit of the node's path probability.

    The gain is the increase of the best tree's summed path probability, both sums taken after the pass. It is estimated
    per band of the n-grams' confidence in the next token (`BANDS`), from a prior and the gains observed.
    """

    def __init__(self) -> None:
        self._gained, self._fed = [0.0] * BANDS, [0.0] * BANDS

    def shares(self) -> list[float]:
        """The estimate for every band."""
        return [
            (gained + _OWN * prior) / (fed + _OWN)
            for gained, fed, prior in zip(self._gained, self._fed, GAINS, strict=True)
        ]

    def add(self, bands: Sequence[int], worths: Sequence[float], gained: float) -> None:
        """Learn from one pass over nodes with these `bands` and `worths`, which gained `gained`."""
        total = math.fsum(worths)
        for counts in (self._gained, self._fed):
            counts[:] = [KEEP * count for count in counts]
        for band, worth in zip(bands, worths, strict=True):
            self._fed[band] += worth
            self._gained[band] += gained * worth / total if total else 0.0


class Feeding:
    """Chooses how many nodes a round submits, how many each step feeds, and when drafting stops.

    A node's worth is its path probability, with every step scaled by the observed reliability of such a q, as for
    n-grams alone with nodes=auto (see `inference.sizing.node_sizes`).

    nodes, depth: given numbers; None: chosen here, which needs `tuning`. width: most nodes fed in one step.
    """

    def __init__(self, tuning: Tuning | None, nodes: int | None, depth: int | None, width: int | None):
        self._costs = tuning.costs if tuning else None
        self._nodes, self._depth, self._width = nodes, depth, width or MOST_FED
        self.max_nodes, self.max_depth = nodes or MOST_NODES, depth or DEEPEST
        self.max_fed = min(MOST_FED, self._width * self.max_depth)
        self._idle, self._patience = 0, _PATIENCE[0]
        self._evidence, self._worths = None, np.empty(self.max_nodes)
        if tuning is not None:
            costs = tuning.costs
            self._evidence = Evidence(Q_BANDS, tuning, own=TREE_OWN, neighbour=TREE_NEIGHBOUR, start=1.0)
            self._trust = np.array(self._evidence.shares())
            self._after_draft = np.array([costs.verify[n + 1] + costs.rest for n in range(self.max_nodes + 1)])

    def begin(self, waiting: int) -> None:
        """Begin a round. waiting: pending tokens that the drafter must run first."""
        self._waiting, self._spent, self._steps, self._fed = waiting, 0.0, 0, 0
        self._forced = False

    def count(self, parents: np.ndarray, paths: np.ndarray) -> int:
        """The number of leading nodes to submit if drafting ended here.

        parents int64 [n], −1: the root; paths float64 [n]: path probabilities, descending.
        """
        if self._evidence is None:
            self.expected = 1.0 + float(paths.sum())
            return len(paths)
        seconds = self._spent + self._after_draft
        best = int(best_nodes(parents, paths, self._trust, seconds, self._worths))
        count = best if self._nodes is None else len(paths)
        self.expected = 1.0 + float(self._worths[:count].sum())
        return count

    def feed(self, count: int, values: Sequence[float], later: Sequence[float] = ()) -> int:
        """The number of nodes to feed next; 0: verify now. count: nodes that would be submitted now.

        values: the expected gain of feeding each candidate, descending. later: the gain of the best node that can be
        fed one pass later, two passes later and so on. A first pass may pay only through those.
        """
        room = min(self._width, MOST_FED - self._fed, len(values))
        if self._steps == self.max_depth or room <= 0:
            return 0
        feed = room if self._costs is None else self._best_feed(count, values[:room], later)
        if feed:
            self._spent += self._step(feed)
            self._fed += feed if self._steps else 0
            self._steps += 1
        return feed

    def observe(self, parents: np.ndarray, paths: np.ndarray, accepted: Sequence[int]) -> None:
        """Learn from a verified draft and its accepted nodes."""
        if self._evidence is not None:
            self._evidence.add(trials_of(parents, paths, accepted))
            self._trust = np.array(self._evidence.shares())

    def end(self) -> None:
        """End the round's draft."""
        if self._steps and not self._forced:
            self._idle, self._patience = 0, _PATIENCE[0]
        elif self._forced:
            self._idle, self._patience = 0, min(2 * self._patience, _PATIENCE[1])
        else:
            self._idle += 1

    def chosen(self, count: int) -> list[str]:
        """The sizes chosen in this round, which submits `count` nodes, for the report."""
        nodes = [f"nodes={count}"] if self._nodes is None else []
        return nodes + ([f"max_depth={self._steps}"] if self._depth is None else [])

    def _best_feed(self, count: int, values: Sequence[float], later: Sequence[float]) -> int:
        emitted, best = self.expected, 0.0
        if self._depth is None:
            best = emitted / (self._spent + self._after(count))
        if not self._steps and self._idle >= self._patience:
            self._forced, best = True, 0.0
        first, feed = 0.0, 0
        for rows, value in enumerate(values, start=1):
            emitted += value
            rate = emitted / (self._spent + self._step(rows) + self._after(count + rows))
            if rate > first:
                first, feed = rate, rows
        return feed if max(first, self._best_plan(count, values[0], later)) > best else 0

    def _best_plan(self, count: int, value: float, later: Sequence[float]) -> float:
        """Tokens per second with the best number of passes, each of one row."""
        emitted, spent, best = self.expected + value, self._spent + self._step(1), 0.0
        for passes, more in enumerate(later[: self.max_depth - self._steps - 1], start=2):
            emitted, spent = emitted + more, spent + self._costs_of(1)
            best = max(best, emitted / (spent + self._after(count + passes)))
        return best

    def _after(self, nodes: int) -> float:
        """Seconds of a round after `nodes` nodes were drafted."""
        assert self._costs is not None
        return self._costs.verify[min(nodes, self.max_nodes, MOST_NODES) + 1] + self._costs.rest

    def _step(self, rows: int) -> float:
        """Seconds of the next step."""
        return self._costs_of(rows + (0 if self._steps else self._waiting))

    def _costs_of(self, rows: int) -> float:
        return 0.0 if self._costs is None else self._costs.step[min(WIDEST, rows)]
