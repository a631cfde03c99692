"""Fused drafts: one tree from a model's q, at the nodes where it ran, and n-grams of text, corpus and logits.

A round begins with the n-grams' tree (see `fused_growth`). The draft model runs at some of its nodes: first at the
root, then level by level where its output has the largest expected value. After every pass the tree is grown again.
Drafting stops when another pass would cost more than its expected gain (see `inference.sizing.feeding`).

The tree is a function of the past only. So under sampling a drafted token is also accepted if the target samples it
(`verify.Matching`).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from draft_models.ngrams.table import TrigramTable
from inference.core.drafter import CHOSEN, Drafter, DraftModel
from inference.core.sampling import top_tokens
from inference.core.session import Session
from inference.core.stopwatch import Stopwatch
from inference.core.token_selector import TokenSelector
from inference.core.tree import ROOT, DraftTree
from inference.drafters.ngram.fused_growth import (
    drafted,
    frontier,
    grow,
    later_passes,
    learn,
    new_candidates,
    new_join,
    new_pool,
    new_ranked,
    start,
)
from inference.drafters.ngram.ngram_mixing import new_scratch
from inference.drafters.ngram.ngrams import MixedDrafter
from inference.drafters.shaped import TimedModel, rows_known
from inference.settings.method import AUTO, MethodConfig, number
from inference.sizing.feeding import Feeding, Gains
from inference.sizing.policy import Tuning
from inference.stopping.factory import required

_LIKELIEST = 16  # top tokens of q that may become children
_NOTHING, _SAID_NOTHING = np.empty(0, np.int64), np.empty((0, 2 * _LIKELIEST), np.float32)


class Fused(Drafter):
    """A drafter of a draft model and n-grams, for one generation.

    table: if None, n-grams come from the text and, with ngrams.recycle, the target's logits only.
    """

    def __init__(self, model: DraftModel, table: TrigramTable | None, method: MethodConfig, tuning: Tuning | None):
        shape = method.structure
        nodes, depth = (None if size == AUTO else number(size) for size in (shape.nodes, shape.max_depth))
        chosen_here = None in (nodes, depth)
        self.feeding = Feeding(required(tuning) if chosen_here else tuning, nodes, depth, shape.width)
        self.model, self.table, self.config = model, table, method.ngrams
        self.split, self.aux_layers, self.top_count = model.split, model.aux_layers, method.ngrams.recycle
        self.max_rows = self.feeding.max_nodes + self.feeding.max_fed
        self._maximum = shape.join == "maximum"
        self._totals: dict[str, float] = {}

    @property
    def totals(self) -> Mapping[str, float]:
        return self._totals

    def begin(self, session: Session, selector: TokenSelector, watch: Stopwatch) -> None:
        self._session = session
        self._source = TimedModel(self.model, selector, watch, session.vocabulary)
        self.model.begin(session)
        table = self.table or TrigramTable(session.vocabulary, "", {}, {})
        self._ngrams = MixedDrafter(table, self.config)
        self._ngrams.begin(session, selector, watch)
        self._scratch, self._weights, self._gains = new_scratch(self.config.longest), new_join(), Gains()
        nodes = self.feeding.max_nodes
        self._pool, self._ranked, self._candidates = new_pool(nodes), new_ranked(nodes), new_candidates(nodes)
        self._unfed, self._later = np.empty(nodes, np.int64), np.empty(self.feeding.max_depth)
        self._waiting = 0  # tokens of the text, without the root, that the model has not run yet
        self._path: tuple[list[int], list[int]] | None = None  # accepted in the last round: pool indices, tokens

    def draft(self, root: Tensor, limit: int) -> DraftTree:
        token = int(root)
        self._learn_from_last_round(token)
        self._ngrams.read(token)
        self._source.begin_round()
        self._rows, depth = 0, min(limit, self.config.depth)
        self._text = (self._ngrams.mixture.sources, *self._ngrams.text)
        if depth <= 0:
            self._places = _NOTHING, _NOTHING, _NOTHING
            return self._draft(root, 0)
        self.feeding.begin(self._waiting)
        self._made = start(self._pool, token)
        size, _ = self._grow(_NOTHING, _SAID_NOTHING, 0, depth)
        count = self._count(size)
        while True:
            nodes, worths, bands, values = self._candidates_for(size, count, depth)
            fed = self.feeding.feed(count, values, self._later[: self._passes].tolist())
            if not fed:
                break
            size, kept = self._grow(nodes[:fed], self._ask(root, nodes[:fed]), count, depth)
            count = self._count(size)
            self._gains.add(bands[:fed], worths[:fed], float(self._ranked.paths[:count].sum()) - kept)
        self.feeding.end()
        self._add("expected_tau", self.feeding.expected)
        for chosen in self.feeding.chosen(count):
            self._add(CHOSEN + chosen, 1)
        return self._draft(root, count)

    def _grow(self, fed: np.ndarray, said: np.ndarray, count: int, depth: int) -> tuple[int, float]:
        """Grow the tree after the model ran at the nodes `fed`; returns the number of nodes to choose from, and the
        updated sum of path probabilities of the previous best `count` nodes."""
        answer = (fed, self._rows - len(fed), said, self._weights.now, self._maximum)
        found = grow(self._pool, self._made, *answer, self._ranked, count, depth, *self._text, self._scratch)
        size, self._made, kept = found
        self._places = drafted(self._pool, self._ranked, size)
        return size, kept

    def _count(self, size: int) -> int:
        _, parents, _ = self._places
        return self.feeding.count(parents, self._ranked.paths[:size])

    def _candidates_for(
        self, size: int, count: int, depth: int
    ) -> tuple[np.ndarray, list[float], list[int], list[float]]:
        """The nodes at which the model can run next, with their worths, bands and values (see `frontier`)."""
        least = self._ranked.paths[count - 1] if count == len(self._ranked.order) else 0.0
        gains = np.array(self._gains.shares())  # numba takes ten times as long to read a list
        place = (self._pool, self._ranked, count, depth, gains, least)
        found = frontier(*place, *self._candidates)
        self._passes = later_passes(*place, self._places[1], self._unfed, self._later)
        nodes, *facts = (column[:found] for column in self._candidates)
        return nodes, *(fact.tolist() for fact in facts)

    def _ask(self, root: Tensor, nodes: np.ndarray) -> np.ndarray:
        """The model's top-k after the nodes, float32 [n, 2k]: one transfer."""
        tokens, parents = root, [ROOT]
        if self._rows:
            asked = self._pool[nodes]
            tokens = torch.from_numpy(asked["token"].copy()).to(root.device)
            parents = self._pool["row"][asked["parent"]].tolist()
        logits = self._source.extend(tokens, parents)
        if self._source.to_probs is not None:
            logits = self._source.to_probs(logits, range(self._rows, self._rows + len(nodes))).log()
        self._rows += len(nodes)
        self._add("drafter_passes", 1)
        return top_tokens(logits, _LIKELIEST).cpu().numpy()

    def _draft(self, root: Tensor, count: int) -> DraftTree:
        """The draft of the best `count` nodes."""
        tokens, parents, rows = (column[:count] for column in self._places)
        self._drafted = tokens, parents
        on_device = torch.from_numpy(tokens).to(root.device)
        probs = torch.from_numpy(self._ranked.paths[:count].copy())
        return DraftTree(on_device, tuple(parents.tolist()), tuple(rows.tolist()), probs)

    def commit(self, tree: DraftTree, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        self.model.commit(rows_known(self.model, self._session, tree, nodes), tokens)
        unknown = sum(tree.rows[node] < 0 for node in nodes)
        self._waiting = unknown if self._rows else self._waiting + 1 + unknown
        if self.top_count:
            self._ngrams.verified(*self._drafted, self._session.path(range(len(tree))))
        self._ngrams.append(tokens)
        self.feeding.observe(self._drafted[1], self._ranked.paths[: len(tree)], nodes)
        self._path = self._ranked.order[list(nodes)].tolist(), list(tokens[1:])

    def _learn_from_last_round(self, root: int) -> None:
        if self._path is not None:
            nodes, tokens = self._path
            following = np.array([*tokens, root], np.int64)
            learn(self._pool, np.array(nodes, np.int64), following, self._weights, self.config.strength)

    def _add(self, name: str, value: float) -> None:
        self._totals[name] = self._totals.get(name, 0.0) + value
