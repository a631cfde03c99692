# mypy: allow-untyped-defs
"""The n-gram mixture: interpolated distributions after the longest contexts of the text so far and of the corpus.

Every known context is a source. First come contexts of K to 1 tokens in the text, then the target's recycled logits
after the last two tokens and the last one, then contexts of 12 to 4 tokens in the corpus (if the table has suffixes),
then those of 3, 2 and 1 tokens in the table. A source gets the share λ of the remaining probability and leaves the rest
to the next source:  P = λ₁P₁ + (1 − λ₁)(λ₂P₂ + (1 − λ₂)(…)).

λ depends on how often the context was seen (N) and on its confidence (m, the share of its most likely successor). Per
source and class of (N, m) it starts at the prior of `ngram_priors` and adapts to the tokens of this generation by one
step of expectation–maximisation per token; the prior counts as `strength` tokens.
"""

from typing import NamedTuple

import numpy as np

from draft_models.ngrams.kernels import find, lean, mix, successors_of
from draft_models.ngrams.overlay import ContextMap, LevelArrays, longer_key, slot_of
from draft_models.ngrams.recycled import recycled_rows
from draft_models.ngrams.suffixes import LEAST, REACH, Places, known_suffixes, new_places, successors_at
from inference.drafters.ngram.ngram_priors import BELOW_SUFFIXES, CORPUS, SUFFIXES, TEXT, recycled_shares
from inference.drafters.ngram.ngram_search import offer, tree_of

CORPUS_ORDERS = (2, 3, 4)  # sources 0 … 2; then the text's contexts of 1 to K tokens, the recycled ones of 1 to R, and
# the corpus's of `LEAST` to `REACH`
TAIL = 48  # most successors of a context that are read
CANDIDATES = 128  # most candidate tokens at a node
_SURENESS = np.array([0.15, 0.3, 0.5, 0.7, 0.85, 0.95])  # upper bounds of the classes of m, except for the last class
SUREST = 0.9  # if only a child likelier than this could enter a full draft, the node is not expanded


class Weights(NamedTuple):
    """λ by source and class: float64 [S = 3 + K + R, CLASSES], and with it:

    its prior; expected numbers of hits and trials; scratch for one token (integers int64 [2, S], numbers float64
    [2, S]).
    """

    now: np.ndarray
    prior: np.ndarray
    hits: np.ndarray
    trials: np.ndarray
    integers: np.ndarray
    numbers: np.ndarray


def new_weights(longest: int, recycled: int = 0, suffixes: bool = False) -> Weights:
    """The prior of λ, for text contexts of up to `longest` tokens, recycled ones of up to `recycled`, and suffixes."""
    groups = (
        (BELOW_SUFFIXES if suffixes else CORPUS, len(CORPUS_ORDERS)),
        (TEXT, longest),
        (recycled_shares(), recycled),
        (SUFFIXES, REACH - LEAST + 1 if suffixes else 0),
    )
    prior = np.array([shares[min(i, len(shares) - 1)] for shares, count in groups for i in range(count)])
    integers, numbers = np.empty((2, len(prior)), np.int64), np.empty((2, len(prior)))
    return Weights(prior.copy(), prior, np.zeros_like(prior), np.zeros_like(prior), integers, numbers)


class Scratch(NamedTuple):
    """A workspace. recent: the last tokens, latest first, as many as any source reads. slots: of contexts of 1, 2, …
    tokens. tokens, probs: candidates at a node. places: the workspace for corpus suffixes."""

    recent: np.ndarray
    slots: np.ndarray
    tokens: np.ndarray
    probs: np.ndarray
    places: Places


def new_scratch(longest: int) -> Scratch:
    """A workspace for text contexts of up to `longest` tokens."""
    reach = max(longest, REACH)
    candidates = np.empty(CANDIDATES, np.int64), np.empty(CANDIDATES)
    return Scratch(np.empty(reach, np.int64), np.empty(reach, np.int64), *candidates, new_places())


@lean
def class_of(seen, share):
    """The class of a context seen `seen` times whose likeliest successor has this share."""
    size, sure = 0, 0
    while size < 9 and seen >> (size + 1) > 0:
        size += 1
    while sure < len(_SURENESS) and share >= _SURENESS[sure]:
        sure += 1
    return size * (len(_SURENESS) + 1) + sure


@lean
def level_context(level: LevelArrays, recent: np.ndarray, length: int, size: int, vocabulary: int) -> tuple[int, int]:
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


@lean
def text_contexts(known: ContextMap, recent: np.ndarray, length: int, longest: int, slots: np.ndarray) -> int:
    """The length of the longest known context in the text; writes the `slots` of its contexts of 1, 2, … tokens."""
    size, key = 0, np.uint64(0)
    while size < min(longest, length):
        key = longer_key(key, recent[size])
        slot = slot_of(known, key)
        if known.slots[slot].head < 0:
            break
        slots[size] = slot
        size += 1
    return size


@lean
def text_class(known: ContextMap, slot: int) -> int:
    """The class of a context of the text."""
    return class_of(
        np.int64(known.slots[slot].seen), known.entries[known.slots[slot].head].weight / known.slots[slot].sum
    )


@lean
def _add(tokens: np.ndarray, probs: np.ndarray, count: int, token: int, prob: float) -> int:
    for i in range(count):
        if tokens[i] == token:
            probs[i] += prob
            return count
    if count < len(tokens):
        tokens[count], probs[count] = token, prob
        count += 1
    return count


@lean
def _add_level(level, size, weights, vocabulary, recent, length, left, floor, tokens, probs, count):
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


@lean
def _add_recycled(recycled, longest, weights, recent, length, left, floor, slots, tokens, probs, count):
    for size in range(recycled_rows(recycled, recent, length, slots), 0, -1):
        place = slots[size - 1]
        if place < 0:
            continue
        share = weights.now[2 + longest + size, class_of(recycled.seen[place], recycled.probs[place, 0])]
        for j in range(recycled.tokens.shape[1]):
            prob = left * share * recycled.probs[place, j]
            if prob < floor:
                break
            count = _add(tokens, probs, count, np.int64(recycled.tokens[place, j]), prob)
        left *= 1 - share
    return left, count


@lean
def _add_suffixes(suffixes, before, weights, length, left, floor, scratch, count):
    """before: the number of sources before those of suffixes."""
    places = scratch.places
    longest, narrow = known_suffixes(suffixes, scratch.recent, length, places)
    for size in range(longest, LEAST - 1, -1):
        found, largest, seen = successors_at(suffixes, size, narrow, places)
        share = weights.now[before + size - LEAST, class_of(places.number[size], largest / seen)]
        for i in range(found):
            prob = left * share * places.counts[i] / seen
            if prob >= floor:
                count = _add(scratch.tokens, scratch.probs, count, places.tokens[i], prob)
        left *= 1 - share
        if left < floor:
            break
    return left, count


@lean
def predict(levels, known, longest, recycled, suffixes, weights, vocabulary, length, floor, scratch):
    """Write likely tokens after the `length` tokens in `scratch.recent` and their P, unordered; returns their number.

    Contributions below `floor` are left out.
    """
    two, three, four = levels
    recent, slots, tokens, probs = scratch.recent, scratch.slots, scratch.tokens, scratch.probs
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
        left, count = _add_recycled(
            recycled, longest, weights, recent, length, left, floor, slots, tokens, probs, count
        )
    if left >= floor:
        before = 3 + longest + recycled.longest
        left, count = _add_suffixes(suffixes, before, weights, length, left, floor, scratch, count)
    if left >= floor:
        left, count = _add_level(four, 3, weights, vocabulary, recent, length, left, floor, tokens, probs, count)
    if left >= floor:
        left, count = _add_level(three, 2, weights, vocabulary, recent, length, left, floor, tokens, probs, count)
    if left >= floor:
        left, count = _add_level(two, 1, weights, vocabulary, recent, length, left, floor, tokens, probs, count)
    return count


@lean
def mixed_best_first(levels, known, longest, recycled, suffixes, weights, vocabulary, ids, stop, depth, nodes, scratch):
    """`ngram_search.best_first` with the mixture's probabilities."""
    recent, tokens, probs = scratch.recent, scratch.tokens, scratch.probs
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
        floor = max(1e-6, worst / path / 4)  # four contributions may add up to a relevant probability
        found = predict(levels, known, longest, recycled, suffixes, weights, vocabulary, length, floor, scratch)
        for i in range(found):
            size, made, _ = offer(nodes, size, done, made, tokens[i], parent, below, path * probs[i])
    return tree_of(nodes, size)
