# mypy: allow-untyped-defs
"""Online learning: the weights of `inference.drafters.ngram.ngram_mixing`, and the text's index."""

import numpy as np

from draft_models.ngrams.kernels import lean, successors_of
from draft_models.ngrams.overlay import index_text
from draft_models.ngrams.recycled import recycled_rows
from draft_models.ngrams.suffixes import LEAST, known_suffixes, successors_at
from inference.drafters.ngram.ngram_mixing import TAIL, class_of, level_context, text_class, text_contexts

_ELSEWHERE = 1e-5  # probability of a token that no source knows, used in learning


@lean
def _level_evidence(level, size, source, m, vocabulary, recent, length, token, weights):
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


@lean
def _recycled_evidence(recycled, longest, m, recent, length, token, slots, weights):
    for size in range(recycled_rows(recycled, recent, length, slots), 0, -1):
        place = slots[size - 1]
        if place < 0:
            continue
        prob = 0.0
        for j in range(recycled.tokens.shape[1]):
            if recycled.tokens[place, j] == token:
                prob = np.float64(recycled.probs[place, j])
                break
        kind = class_of(recycled.seen[place], recycled.probs[place, 0])
        weights.integers[0, m], weights.integers[1, m], weights.numbers[0, m] = 2 + longest + size, kind, prob
        m += 1
    return m


@lean
def _suffix_evidence(suffixes, before, m, length, token, scratch, weights):
    places = scratch.places
    longest, narrow = known_suffixes(suffixes, scratch.recent, length, places)
    for size in range(longest, LEAST - 1, -1):
        found, largest, seen = successors_at(suffixes, size, narrow, places)
        prob = 0.0
        for i in range(found):
            if places.tokens[i] == token:
                prob = places.counts[i] / seen
        kind = class_of(places.number[size], largest / seen)
        weights.integers[0, m], weights.integers[1, m], weights.numbers[0, m] = before + size - LEAST, kind, prob
        m += 1
    return m


@lean
def learn_weights(levels, known, longest, recycled, suffixes, weights, strength, vocabulary, length, token, scratch):
    """Update λ for `token` after `scratch.recent`, before the text index learns it. Returns log P(token).

    A source's trials grow by the probability left to it, its hits by its share of P(token).
    """
    two, three, four = levels
    recent, slots = scratch.recent, scratch.slots
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
    m = _recycled_evidence(recycled, longest, m, recent, length, token, slots, weights)
    m = _suffix_evidence(suffixes, 3 + longest + recycled.longest, m, length, token, scratch, weights)
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
        # λ = 1, possible with little text and hardly any strength, leaves nothing to tokens that its source lacks.
        hit = left * weights.now[source, kind] * probs[i] / below[i] if below[i] > 0 else 0.0
        weights.hits[source, kind] += hit
        weights.trials[source, kind] += left
        left -= hit
    for i in range(m):
        source, kind = sources[0, i], sources[1, i]
        weights.now[source, kind] = (strength * weights.prior[source, kind] + weights.hits[source, kind]) / (
            strength + weights.trials[source, kind]
        )
    return np.log(chance)


@lean
def learn_text(
    levels, known, longest, decay, recycled, suffixes, weights, strength, vocabulary, ids, start, stop, scratch
):
    """Learn ids[start : stop] one by one: update λ, then index the token. Returns Σ log P."""
    total = 0.0
    for end in range(start, stop):
        length = min(len(scratch.recent), end)
        for i in range(length):
            scratch.recent[i] = ids[end - 1 - i]
        total += learn_weights(
            levels, known, longest, recycled, suffixes, weights, strength, vocabulary, length, ids[end], scratch
        )
        index_text(known, ids, end, end + 1, longest, decay)
    return total
