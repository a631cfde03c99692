# mypy: allow-untyped-defs
"""The tree of a fused draft, grown best-first by the n-grams' mixture, and by a model's q as well where that is known.

Every token that a round has looked at is a node of a pool. Its children come from the n-grams after its own context.
Where the drafter was fed the node, the children are the union of the n-grams' and of q's likeliest, and their
probability is joined: P = λ·q + (1 − λ)·(n + r·q), n being the n-grams' probability and r what they leave over. λ, the
share of q, depends on how sure both are of their likeliest token. It follows what came true in this generation, by one
step of expectation–maximisation a fed node, as the n-grams' own weights do.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from inference.drafters.ngram.fused_priors import SHARES
from inference.drafters.ngram.ngram_mixing import SUREST, Scratch, Sources, predict
from inference.sizing.feeding import BANDS
from outrider.compiled import kept

_LEAST = 1e-4  # path probability of a node that is kept at all
_UNSEEN = -2  # `first` of a node whose children nobody has asked for
_INTEGERS = "token parent depth row first following kind"
_NUMBERS = "prob path sure by_q by_n"
# A node that was looked at. parent: −1 of the root, which is node 0. row: under which the drafter was fed it, −1: it
# was not. first, following: the list of its children. kind: the class of its λ, where it was fed. prob: after its
# parent; path: with all above it. sure: the n-grams' probability of its likeliest child. by_q, by_n: what q says of
# it, and what the n-grams with the rest do.
_NODE = np.dtype([(name, np.int64) for name in _INTEGERS.split()] + [(name, np.float64) for name in _NUMBERS.split()])


class Join(NamedTuple):
    """λ by class: float64 [BANDS²], and with it the prior it began as, hits and trials seen, as expected numbers."""

    now: np.ndarray
    prior: np.ndarray
    hits: np.ndarray
    trials: np.ndarray


def new_join() -> Join:
    """λ as it is before a generation has said anything."""
    return Join(SHARES.copy(), SHARES, np.zeros_like(SHARES), np.zeros_like(SHARES))


class Ranked(NamedTuple):
    """The best B nodes by falling path probability: their numbers int64 [B], and those probabilities float64 [B]."""

    order: np.ndarray
    paths: np.ndarray


def new_ranked(budget: int) -> Ranked:
    """Room for `budget` nodes."""
    return Ranked(np.empty(budget, np.int64), np.empty(budget))


def new_pool(budget: int) -> np.ndarray:
    """Room for what is looked at where up to `budget` nodes are drafted."""
    return np.zeros(256 + 64 * budget, _NODE)


def new_candidates(budget: int) -> tuple[np.ndarray, ...]:
    """Room for what `frontier` finds where `budget` nodes are drafted."""
    size = budget + 1
    return np.empty(size, np.int64), np.empty(size), np.empty(size, np.int64), np.empty(size)


@partial(kept, inline="always")
def band(share):
    """0 … BANDS − 1 for 0 … 1, and for any other number too: arrays are indexed by it without a check."""
    return max(0, min(BANDS - 1, np.int64(min(1.0, share) * BANDS)))


@kept
def start(pool: np.ndarray, token: int) -> int:
    """Make the root node 0. Returns how many nodes there are."""
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
    """`predict` after a node: how many candidates, and the largest probability and the sum of theirs."""
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

    Returns how many, how many are in the pool, and the sum of path probabilities of the first `count` of those that
    were ranked before, by what is known now.

    Before that the drafter was fed the nodes `fed`, as its rows `row`, `row` + 1, …, and said `found` float32 [n, 2k]:
    k likeliest tokens and their q (see `sampling.successors`). shares: λ by class; maximum: P is the larger one of q
    and n instead, divided by the sum where that is more than 1.

    A child is never likelier than its parent, so the best nodes are settled in order, and any first ones are a tree.
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
    """`found` [2k] of `grow`, after `node`, which is the drafter's row `row`. Returns how many nodes there are.

    Where q is no number the children stay the n-grams'.
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
    while child >= 0:  # those that exist keep what is below them
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
                for i in range(found - 1, -1, -1):  # so that the list of children has their order
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
    """Adjust λ: after the root and after each of `nodes`, which were accepted, came what is next in `following`."""
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
    """The nodes that the drafter can be fed next, the root or children of what it was fed; returns how many.

    They are among the first `count` ranked and above `depth`. Of each, the most valuable first: its number, its worth
    (the path probability above `least`, which is what the last ranked node has, that a new one would displace), its
    band of how sure the n-grams are, and its value, gains[band] · worth.
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
    """What the best node of each later pass is expected to bring, as `frontier` values nodes; returns how many passes.

    A node under k − 1 others that the drafter was not fed either can be fed in the k-th pass from now. later[k − 2] is
    of that pass. parents: as `drafted` has them. unfed: int64 [nodes], scratch by place among the ranked: how many of
    those there are, the node itself included.
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
    """The first `count` ranked nodes as a draft: tokens, parents as places (−1: the root), rows."""
    tokens, parents, rows = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    places = np.full(len(pool), -1)
    for place in range(count):
        node = ranked.order[place]
        places[node] = place
        tokens[place], rows[place] = pool[node].token, pool[node].row
        parents[place] = places[pool[node].parent] if pool[node].parent > 0 else -1
    return tokens, parents, rows
