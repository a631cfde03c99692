# mypy: allow-untyped-defs
"""The tree of a fused draft, grown best-first by the n-grams' mixture and, where the draft model ran, by its q.

Every token that a round considers is a node of a pool. Its children come from the n-grams after its context. If the
draft model ran at the node, the children are the union of the n-grams' and q's most likely tokens, with the probability
P = λ·q + (1 − λ)·(n + r·q), n being the n-grams' probability and r their remaining mass. λ, the weight of q, depends on
the confidence of both in their most likely token. It adapts to the tokens of this generation by one step of
expectation–maximisation per fed node, as the n-grams' own weights do.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from inference.drafters.ngram.fused_priors import SHARES
from inference.drafters.ngram.ngram_mixing import SUREST, Scratch, Sources, predict
from inference.sizing.feeding import BANDS
from outrider.compiled import kept

_LEAST = 1e-4  # smallest path probability of a node
_UNSEEN = -2  # `first` of a node whose children are not computed yet
_INTEGERS = "token parent depth row first following kind"
_NUMBERS = "prob path sure by_q by_n"
# A node. parent: −1 for the root, which is node 0. row: its row in the draft model, −1 if it was not fed. first,
# following: its first child and its next sibling, a linked list. kind: the class of its λ, if it was fed. prob: its
# probability given its parent; path: their product along its path. sure: the n-grams' probability of its likeliest
# child. by_q, by_n: its probability under q, and under the n-grams with q for the remaining mass.
_NODE = np.dtype([(name, np.int64) for name in _INTEGERS.split()] + [(name, np.float64) for name in _NUMBERS.split()])


class Join(NamedTuple):
    """λ by class, float64 [BANDS²]; its prior; the expected numbers of hits and trials."""

    now: np.ndarray
    prior: np.ndarray
    hits: np.ndarray
    trials: np.ndarray


def new_join() -> Join:
    """λ at the start of a generation: the prior."""
    return Join(SHARES.copy(), SHARES, np.zeros_like(SHARES), np.zeros_like(SHARES))


class Ranked(NamedTuple):
    """The best B nodes by descending path probability: node numbers int64 [B], and path probabilities float64 [B]."""

    order: np.ndarray
    paths: np.ndarray


def new_ranked(budget: int) -> Ranked:
    """A workspace for `budget` nodes."""
    return Ranked(np.empty(budget, np.int64), np.empty(budget))


def new_pool(budget: int) -> np.ndarray:
    """A pool for drafts of up to `budget` nodes."""
    return np.zeros(256 + 64 * budget, _NODE)


def new_candidates(budget: int) -> tuple[np.ndarray, ...]:
    """A workspace for `frontier` with drafts of `budget` nodes."""
    size = budget + 1
    return np.empty(size, np.int64), np.empty(size), np.empty(size, np.int64), np.empty(size)


@partial(kept, inline="always")
def band(share):
    """The band 0 … BANDS − 1 of a share in 0 … 1; clipped for any other number, as it is an unchecked array index."""
    return max(0, min(BANDS - 1, np.int64(min(1.0, share) * BANDS)))


@kept
def start(pool: np.ndarray, token: int) -> int:
    """Make the root node 0. Returns the number of nodes."""
    pool[0].token, pool[0].parent, pool[0].depth, pool[0].row = token, -1, 0, -1
    pool[0].first, pool[0].prob, pool[0].path, pool[0].sure = _UNSEEN, 1.0, 1.0, 0.0
    return 1


@kept
def _add_child(pool: np.ndarray, made: int, node: int, token: int, prob: float, by_q: float, by_n: float) -> int:
    if made == len(pool) or prob * pool[node].path < _LEAST:
        return made
    pool[made].token, pool[made].parent, pool[made].depth, pool[made].row = token, node, pool[node].depth + 1, -1
    pool[made].first, pool[made].following = _UNSEEN, pool[node].first
    pool[made].prob, pool[made].by_q, pool[made].by_n, pool[made].sure = prob, by_q, by_n, 0.0
    pool[node].first = made
    return made + 1


@kept
def _ngrams_after(
    pool: np.ndarray, node: int, sources: Sources, ids: np.ndarray, stop: int, scratch: Scratch
) -> tuple[int, float, float]:
    """`predict` after a node: the number of candidates, their largest probability, and the sum of probabilities."""
    levels, known, longest, recycled, suffixes, weights, vocabulary = sources
    recent, length, above = scratch.recent, 0, node
    while above > 0 and length < len(recent):
        recent[length] = pool[above].token
        above, length = pool[above].parent, length + 1
    for place in range(stop - 1, max(-1, stop - 1 - (len(recent) - length)), -1):
        recent[length] = ids[place]
        length += 1
    floor = max(1e-6, _LEAST / pool[node].path / 4)
    found = predict(levels, known, longest, recycled, suffixes, weights, vocabulary, length, floor, scratch)
    largest, total = 0.0, 0.0
    for i in range(found):
        largest, total = max(largest, scratch.probs[i]), total + scratch.probs[i]
    return found, largest, total


@kept
def _rank(ranked: Ranked, size: int, done: int, node: int, path: float) -> int:
    order, paths = ranked.order, ranked.paths
    if size == len(order):
        if path <= paths[size - 1]:
            return size
        size -= 1
    place = size
    while place > done and paths[place - 1] < path:
        order[place], paths[place] = order[place - 1], paths[place - 1]
        place -= 1
    order[place], paths[place] = node, path
    return size + 1


@kept
def grow(pool, made, fed, row, found, shares, maximum, ranked, count, depth, sources, ids, stop, scratch):
    """Rank the likeliest nodes under ids[:stop], no deeper than `depth`.

    Returns the number of ranked nodes, the number of nodes in the pool, and the updated sum of path probabilities of
    the first `count` nodes of the previous ranking.

    Before the call, the draft model ran at the nodes `fed`, as its rows `row`, `row` + 1, …, and returned `found`
    float32 [n, 2k]: the k likeliest tokens and their q (see `sampling.top_tokens`). shares: λ by class; maximum:
    P = max(q, n) instead, divided by its sum if that exceeds 1.

    A child is never likelier than its parent, so the best nodes become final in order, and every prefix is a tree.
    """
    for i in range(len(fed)):
        made = _join(pool, made, fed[i], row + i, found[i], shares, maximum, sources, ids, stop, scratch)
    kept = 0.0
    for place in range(count):
        node = ranked.order[place]
        pool[node].path = pool[pool[node].parent].path * pool[node].prob
        kept += pool[node].path
    size, made = _grow(pool, made, ranked, depth, sources, ids, stop, scratch)
    return size, made, kept


@kept
def _join(pool, made, node, row, found, shares, maximum, sources, ids, stop, scratch):
    """Merge `found` [2k] of `grow` into the children of `node`, the draft model's row `row`. Returns the pool's size.

    If q is NaN, the children remain the n-grams'.
    """
    pool[node].row, pool[node].kind = row, -1
    width = len(found) // 2
    if not found[width] > 0:
        return made
    count, largest, total = _ngrams_after(pool, node, sources, ids, stop, scratch)
    kind = band(found[width]) * BANDS + band(largest)
    pool[node].kind, pool[node].sure = kind, largest
    tokens, by_n, share, rest = scratch.tokens, scratch.probs, shares[kind], max(0.0, 1.0 - total)
    by_q = np.zeros(count + width)
    several = min(len(tokens), count + width)
    for j in range(width):
        token, place = np.int64(found[j]), 0
        while place < count and tokens[place] != token:
            place += 1
        if place == count:
            if count == several:
                break
            tokens[place], by_n[place] = token, 0.0
            count += 1
        by_q[place] = found[width + j]
    scale = 0.0
    for i in range(count):
        scale += max(by_q[i], by_n[i])
    scale = max(1.0, scale)
    child = np.int64(-1) if pool[node].first == _UNSEEN else pool[node].first
    pool[node].first = child
    while child >= 0:  # existing children keep their subtrees
        place = 0
        while place < count and tokens[place] != pool[child].token:
            place += 1
        if place < count:
            _weigh(pool, child, by_q[place], by_n[place], rest, share, maximum, scale)
            tokens[place] = -1
        else:
            pool[child].prob = 0.0
        child = pool[child].following
    for i in range(count - 1, -1, -1):
        if tokens[i] >= 0:
            before = made
            made = _add_child(pool, made, node, tokens[i], 1.0, 0.0, 0.0)
            if made > before:
                _weigh(pool, before, by_q[i], by_n[i], rest, share, maximum, scale)
    return made


@kept
def _weigh(
    pool: np.ndarray, child: int, q: float, n: float, rest: float, share: float, maximum: bool, scale: float
) -> None:
    pool[child].by_q, pool[child].by_n = q, n + rest * q
    pool[child].prob = max(q, n) / scale if maximum else share * q + (1 - share) * (n + rest * q)


@kept
def _grow(pool, made, ranked, depth, sources, ids, stop, scratch):
    size, done, budget = 0, 0, len(ranked.order)
    node = 0
    while True:
        path = pool[node].path
        full = size == budget
        if pool[node].depth < depth and not (full and path <= ranked.paths[size - 1]):
            unseen = pool[node].first == _UNSEEN
            if unseen and not (full and path * SUREST <= ranked.paths[size - 1]):
                found, largest, _ = _ngrams_after(pool, node, sources, ids, stop, scratch)
                pool[node].first, pool[node].sure = -1, largest
                for i in range(found - 1, -1, -1):  # reversed, so that the linked list has the candidates' order
                    prob = scratch.probs[i]
                    made = _add_child(pool, made, node, scratch.tokens[i], prob, 0.0, prob)
            child = pool[node].first
            while child >= 0:
                pool[child].path = path * pool[child].prob
                if pool[child].path > 0:
                    size = _rank(ranked, size, done, child, pool[child].path)
                child = pool[child].following
        if done == size:
            return size, made
        node, done = ranked.order[done], done + 1


@kept
def learn(pool: np.ndarray, nodes: np.ndarray, following: np.ndarray, weights: Join, strength: float) -> None:
    """Update λ; `following`: the tokens after the root and after each of the accepted `nodes`."""
    for i in range(len(following)):
        node = nodes[i - 1] if i else 0
        if pool[node].row < 0 or pool[node].kind < 0:
            continue
        kind, child = pool[node].kind, pool[node].first
        while child >= 0 and pool[child].token != following[i]:
            child = pool[child].following
        if child < 0 or pool[child].by_q + pool[child].by_n <= 0:
            continue
        by_q = weights.now[kind] * pool[child].by_q
        weights.hits[kind] += by_q / (by_q + (1 - weights.now[kind]) * pool[child].by_n)
        weights.trials[kind] += 1
        weights.now[kind] = (strength * weights.prior[kind] + weights.hits[kind]) / (strength + weights.trials[kind])


@kept
def frontier(pool, ranked, count, depth, gains, least, nodes, worths, bands, values):
    """The nodes that can be fed next, the root or children of fed nodes, by descending value; returns their number.

    They are among the first `count` ranked and shallower than `depth`. Written for each: its number; its worth, the
    path probability minus `least` (that of the last ranked node, which a new one would displace); its band of the
    n-grams' confidence; and its value, gains[band] · worth.
    """
    found = 0
    for place in range(-1, count):
        node = 0 if place < 0 else ranked.order[place]
        known = place < 0 or pool[pool[node].parent].row >= 0
        if pool[node].row >= 0 or not known or pool[node].depth >= depth:
            continue
        kind, worth = band(pool[node].sure), pool[node].path - least
        at = found
        while at > 0 and values[at - 1] < gains[kind] * worth:
            nodes[at], worths[at], bands[at], values[at] = nodes[at - 1], worths[at - 1], bands[at - 1], values[at - 1]
            at -= 1
        nodes[at], worths[at], bands[at], values[at] = node, worth, kind, gains[kind] * worth
        found += 1
    return found


@kept
def later_passes(pool, ranked, count, depth, gains, least, parents, unfed, later):
    """The value, as in `frontier`, of the best node of each later pass; returns the number of such passes.

    A node with k − 1 unfed ancestors can be fed in the k-th pass from now, whose value is later[k − 2]. parents: as
    returned by `drafted`. unfed: int64 [nodes], scratch by rank: the number of unfed nodes on the path, including the
    node itself.
    """
    passes = 0
    for place in range(count):
        node = ranked.order[place]
        before = (0 if pool[0].row >= 0 else 1) if parents[place] < 0 else unfed[parents[place]]
        unfed[place] = before + (0 if pool[node].row >= 0 else 1)
        if pool[node].row >= 0 or before == 0 or before > len(later) or pool[node].depth >= depth:
            continue
        while passes < before:
            later[passes] = 0.0
            passes += 1
        value = gains[band(pool[node].sure)] * (pool[node].path - least)
        later[before - 1] = max(later[before - 1], value)
    return passes


@kept
def drafted(pool: np.ndarray, ranked: Ranked, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first `count` ranked nodes as a draft: tokens, parents as ranks (−1: the root), rows."""
    tokens, parents, rows = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    places = np.full(len(pool), -1)
    for place in range(count):
        node = ranked.order[place]
        places[node] = place
        tokens[place], rows[place] = pool[node].token, pool[node].row
        parents[place] = places[pool[node].parent] if pool[node].parent > 0 else -1
    return tokens, parents, rows
