"""The better drafter's distribution: what followed the longest contexts, in the text so far and in the corpus.

Every context that is known is one source of evidence. First come those of 1 to K tokens in the text, longest first,
then those of 3, 2 and 1 tokens in the table. A source gives its share λ of the probability that is left, and leaves
the rest to the next:  P = λ₁P₁ + (1 − λ₁)(λ₂P₂ + (1 − λ₂)(…)).

λ depends on how often the context was seen (N) and on how sure it is (m, the share of its likeliest successor). A
priori λ = m^α · N / (N + κ), with one pair (α, κ) for the text and one for the corpus. Then λ follows what came true
in this generation, per source and class of (N, m). That is one step of expectation–maximisation per token, the prior
counting as `strength` tokens.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from draft_models.ngrams.kernels import find, mix, successors_of
from draft_models.ngrams.overlay import index_text, longer_key, slot_of
from inference.drafters.ngram_search import offer, tree_of

CORPUS_ORDERS = (2, 3, 4)  # sources 0 … 2; source 2 + n is the text's context of n tokens
TAIL = 48  # successors of a context that are looked at
CLASSES = 70  # of a source: 10 of N × 7 of m
CANDIDATES = 128  # tokens at a node at most
_SURENESS = np.array([0.15, 0.3, 0.5, 0.7, 0.85, 0.95])  # upper ends of the classes of m, but the last
_MIDDLES = np.array([0.1, 0.22, 0.4, 0.6, 0.78, 0.9, 0.98])  # what λ is computed for
_CORPUS, _TEXT = (0.45, 9.0), (1.3, 4.0)  # (α, κ)
SUREST = 0.9  # a child likelier than this is not looked for where only it could enter a full draft
_ELSEWHERE = 1e-5  # probability of a token that no source knows, to learn by


class Weights(NamedTuple):
    """λ by source and class: float64 [3 + K, CLASSES], and with it:

    the prior it began as; hits and trials seen, as expected numbers; scratch for one token (integers int64 [2, 3 + K],
    numbers float64 [2, 3 + K]).
    """

    now: np.ndarray
    prior: np.ndarray
    hits: np.ndarray
    trials: np.ndarray
    integers: np.ndarray
    numbers: np.ndarray


def new_weights(longest: int) -> Weights:
    """The prior of λ, for text contexts of up to `longest` tokens."""
    seen = 2.0 ** np.arange(10)  # class i of N is 2^i to 2^(i+1) − 1, the last open
    middle = np.where(seen > 1, 1.4 * seen, 1.0)
    prior = np.empty((3 + longest, CLASSES))
    prior[:3] = _prior(middle, *_CORPUS)
    prior[3:] = _prior(middle, *_TEXT)
    integers, numbers = np.empty((2, len(prior)), np.int64), np.empty((2, len(prior)))
    return Weights(prior.copy(), prior, np.zeros_like(prior), np.zeros_like(prior), integers, numbers)


def _prior(seen: np.ndarray, alpha: float, kappa: float) -> np.ndarray:
    return np.outer(seen / (seen + kappa), _MIDDLES**alpha).ravel()


@njit(cache=True, nogil=True, inline="always")
def class_of(seen, share):  # type: ignore[no-untyped-def]
    """The class of a context seen `seen` times whose likeliest successor has this share."""
    size, sure = 0, 0
    while size < 9 and seen >> (size + 1) > 0:
        size += 1
    while sure < len(_SURENESS) and share >= _SURENESS[sure]:
        sure += 1
    return size * (len(_SURENESS) + 1) + sure


@njit(cache=True, nogil=True, inline="always")
def level_context(level, recent, length, size, vocabulary):  # type: ignore[no-untyped-def]
    """(index in `level`, class) of the last `size` tokens, recent[0] being the latest; index −1 if unknown."""
    if size > length:
        return -1, 0
    packed = np.uint64(0)
    for i in range(size - 1, -1, -1):
        if recent[i] >= vocabulary:
            return -1, 0
        packed = (packed << np.uint64(level.bits)) | np.uint64(recent[i])
    index = find(level.buckets, level.shift, level.keys, mix(packed, size * level.bits))
    if index < 0:
        return -1, 0
    total = max(np.int64(level.totals[index]), 1)
    begin, end = successors_of(level.starts, level.tokens, index)
    return index, class_of(total, level.counts[begin] / total if begin < end else 0.0)


@njit(cache=True, nogil=True, inline="always")
def text_contexts(known, recent, length, longest, slots):  # type: ignore[no-untyped-def]
    """How many tokens back the text has seen the context; `slots` of the contexts of 1, 2, … tokens."""
    size, key = 0, np.uint64(0)
    while size < min(longest, length):
        key = longer_key(key, recent[size])
        slot = slot_of(known, key)
        if known.slots[slot].head < 0:
            break
        slots[size] = slot
        size += 1
    return size


@njit(cache=True, nogil=True, inline="always")
def text_class(known, slot):  # type: ignore[no-untyped-def]
    """Class of a context of the text."""
    return class_of(
        np.int64(known.slots[slot].seen), known.entries[known.slots[slot].head].weight / known.slots[slot].sum
    )


@njit(cache=True, nogil=True, inline="always")
def _add(tokens, probs, count, token, prob):  # type: ignore[no-untyped-def]
    for i in range(count):
        if tokens[i] == token:
            probs[i] += prob
            return count
    if count < len(tokens):
        tokens[count], probs[count] = token, prob
        count += 1
    return count


@njit(cache=True, nogil=True, inline="always")
def _add_level(level, size, weights, vocabulary, recent, length, left, floor, tokens, probs, count):  # type: ignore[no-untyped-def]
    index, kind = level_context(level, recent, length, size, vocabulary)
    if index < 0:
        return left, count
    share = weights.now[size - 1, kind]
    scale = left * share / max(level.totals[index], 1)
    begin, end = successors_of(level.starts, level.tokens, index)
    for at in range(begin, min(end, begin + TAIL)):
        prob = scale * level.counts[at]
        if prob < floor:
            break
        count = _add(tokens, probs, count, np.int64(level.tokens[at]), prob)
    return left * (1 - share), count


@njit(cache=True, nogil=True, inline="always")
def predict(levels, known, longest, weights, vocabulary, recent, length, floor, slots, tokens, probs):  # type: ignore[no-untyped-def]
    """Likely tokens after `recent` (latest first, `length` of them) and their P, in no order; returns how many.

    Contributions below `floor` are left out.
    """
    two, three, four = levels
    left, count = 1.0, 0
    for size in range(text_contexts(known, recent, length, longest, slots), 0, -1):
        slot = slots[size - 1]
        share = weights.now[2 + size, text_class(known, slot)]
        scale = left * share / known.slots[slot].sum
        entry, seen = known.slots[slot].head, 0
        while entry >= 0 and seen < TAIL and scale * known.entries[entry].weight >= floor:
            count = _add(
                tokens, probs, count, np.int64(known.entries[entry].token), scale * known.entries[entry].weight
            )
            entry, seen = known.entries[entry].following, seen + 1
        left *= 1 - share
    if left >= floor:
        left, count = _add_level(four, 3, weights, vocabulary, recent, length, left, floor, tokens, probs, count)
    if left >= floor:
        left, count = _add_level(three, 2, weights, vocabulary, recent, length, left, floor, tokens, probs, count)
    if left >= floor:
        left, count = _add_level(two, 1, weights, vocabulary, recent, length, left, floor, tokens, probs, count)
    return count


@njit(cache=True, nogil=True)
def mixed_best_first(levels, known, longest, weights, vocabulary, ids, stop, depth, nodes, scratch):  # type: ignore[no-untyped-def]
    """As `ngram_search.best_first`, by the mixed distribution. scratch: recent, slots, tokens int64, probs float64."""
    recent, slots, tokens, probs = scratch
    budget, reach = len(nodes.order), len(recent)
    size, done, made = 0, -1, 0
    while done < size:
        parent, path, below = np.int64(-1), 1.0, 1
        if done >= 0:
            parent, path = nodes.order[done], nodes.ranked[done]
            below = nodes.depths[parent] + 1
        done += 1
        worst = nodes.ranked[size - 1] if size == budget else 0.0
        if below > depth or path * SUREST <= worst:
            continue
        length, node = 0, parent
        while node >= 0 and length < reach:
            recent[length] = nodes.tokens[node]
            node, length = nodes.parents[node], length + 1
        for place in range(stop - 1, max(-1, stop - 1 - (reach - length)), -1):
            recent[length] = ids[place]
            length += 1
        floor = max(1e-6, worst / path / 4)  # four contributions may add up to a probability that counts
        found = predict(levels, known, longest, weights, vocabulary, recent, length, floor, slots, tokens, probs)
        for i in range(found):
            size, made, _ = offer(nodes, size, done, made, tokens[i], parent, below, path * probs[i])
    return tree_of(nodes, size)


# ---------------------------------------------------------------------------------------- learning what comes true


@njit(cache=True, nogil=True, inline="always")
def _level_evidence(level, size, source, m, vocabulary, recent, length, token, weights):  # type: ignore[no-untyped-def]
    index, kind = level_context(level, recent, length, size, vocabulary)
    if index < 0:
        return m
    prob = 0.0
    begin, end = successors_of(level.starts, level.tokens, index)
    for at in range(begin, min(end, begin + TAIL)):
        if level.tokens[at] == token:
            prob = level.counts[at] / max(level.totals[index], 1)
            break
    weights.integers[0, m], weights.integers[1, m], weights.numbers[0, m] = source, kind, prob
    return m + 1


@njit(cache=True, nogil=True, inline="always")
def learn_weights(levels, known, longest, weights, strength, vocabulary, recent, length, token, slots):  # type: ignore[no-untyped-def]
    """Adjust λ to `token` having come after `recent`, before the text index is told. Returns log P(token).

    A source is tried as far as the token was left to it, and hit by its share in P(token).
    """
    two, three, four = levels
    sources, probs, below = weights.integers, weights.numbers[0], weights.numbers[1]
    m = 0
    for size in range(text_contexts(known, recent, length, longest, slots), 0, -1):
        slot = slots[size - 1]
        prob, entry, seen = 0.0, known.slots[slot].head, 0
        while entry >= 0 and seen < TAIL:
            if known.entries[entry].token == token:
                prob = known.entries[entry].weight / known.slots[slot].sum
                break
            entry, seen = known.entries[entry].following, seen + 1
        sources[0, m], sources[1, m], probs[m] = 2 + size, text_class(known, slot), prob
        m += 1
    m = _level_evidence(four, 3, 2, m, vocabulary, recent, length, token, weights)
    m = _level_evidence(three, 2, 1, m, vocabulary, recent, length, token, weights)
    m = _level_evidence(two, 1, 0, m, vocabulary, recent, length, token, weights)
    chance = _ELSEWHERE
    for i in range(m - 1, -1, -1):
        share = weights.now[sources[0, i], sources[1, i]]
        chance = share * probs[i] + (1 - share) * chance
        below[i] = chance
    left = 1.0
    for i in range(m):
        source, kind = sources[0, i], sources[1, i]
        hit = left * weights.now[source, kind] * probs[i] / below[i]
        weights.hits[source, kind] += hit
        weights.trials[source, kind] += left
        left -= hit
    for i in range(m):
        source, kind = sources[0, i], sources[1, i]
        weights.now[source, kind] = (strength * weights.prior[source, kind] + weights.hits[source, kind]) / (
            strength + weights.trials[source, kind]
        )
    return np.log(chance)


@njit(cache=True, nogil=True)
def learn_text(levels, known, longest, decay, weights, strength, vocabulary, ids, start, stop, recent, slots):  # type: ignore[no-untyped-def]
    """Take in ids[start : stop] one by one: adjust λ to each, then index it. Returns Σ log P."""
    total = 0.0
    for end in range(start, stop):
        length = min(len(recent), end)
        for i in range(length):
            recent[i] = ids[end - 1 - i]
        total += learn_weights(levels, known, longest, weights, strength, vocabulary, recent, length, ids[end], slots)
        index_text(known, ids, end, end + 1, longest, decay)
    return total
