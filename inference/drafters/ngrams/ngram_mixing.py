# mypy: allow-untyped-defs
"""The n-gram mixture: interpolated distributions after the longest contexts of the text so far and of the corpus.

Every known context is a source. First come contexts of K to 1 tokens in the text, then the target's recycled logits
after the last two tokens and the last one, then contexts of 12 to 4 tokens in the corpus (if the table has suffixes),
then those of 3, 2 and 1 tokens in the table. A source gets the share λ of the remaining probability and leaves the rest
to the next source:  P = λ₁P₁ + (1 − λ₁)(λ₂P₂ + (1 − λ₂)(…)).

λ depends on how often the context was seen (N) and on its confidence (m, the share of its most likely successor). Per
source and class of (N, m) it starts at its prior and adapts to the tokens of this generation by one
step of expectation–maximisation per token; the prior counts as `strength` tokens.
"""

from typing import NamedTuple

import numpy as np

from outrider.draft_models.ngrams.kernels import find_key, lean, mix, successors_of
from outrider.draft_models.ngrams.overlay import ContextMap, LevelArrays, longer_key, recycled_rows, slot_of
from outrider.draft_models.ngrams.suffixes import (
    LEAST,
    REACH,
    SuffixWorkspace,
    known_suffixes,
    new_suffix_workspace,
    successors_at,
)
from outrider.inference.drafters.ngrams.ngram_search import offer, tree_of

# The prior λ of every source by class, in percent: 10 classes of N, from once to 512 times or more, × 7 of m. They were
# fitted on one model's recorded answers, Vicuna-7B to MT-Bench, by three rounds of expectation–maximisation with
# depth=30 (`git show 5a060c4:benchmarks/ngram_sources.py`, command `fit`). The last row of contexts by length is used
# for all longer ones. A recording has no logits, so the prior of recycled rows is a chosen formula.
CLASSES = 70  # per source: 10 of N × 7 of m


def _shares(*percent: str) -> np.ndarray:
    return np.array([row.split() for row in percent], float) / 100


CORPUS = _shares(  # contexts of 1, 2 and 3 tokens, in a table without suffixes
    """06 09 12 14 15 16 17 13 19 24 29 33 35 36 19 27 35 27 47 56 52 25 49 45 50 60 57 66 26 41 55 62 73 74 77
    28 46 48 57 57 81 87 45 33 46 53 74 85 90 31 43 58 59 65 94 92 39 78 61 75 71 88 95 30 57 53 77 88 83 89""",
    """03 05 06 07 08 09 09 07 11 14 19 19 21 41 12 13 15 27 43 35 81 14 17 17 43 58 45 88 07 23 31 47 51 61 78
    20 36 43 18 61 68 89 24 44 45 54 71 76 77 37 44 61 68 78 70 91 46 52 55 57 61 79 90 26 54 58 79 81 88 94""",
    """03 04 06 07 08 08 09 07 10 14 16 19 20 43 12 03 15 23 33 48 61 09 12 23 36 43 55 76 03 21 35 40 24 55 79
    20 33 46 52 62 74 84 29 40 55 61 66 76 89 31 47 58 67 60 84 93 40 54 62 74 77 78 92 39 58 62 69 90 86 94""",
)
BELOW_SUFFIXES = _shares(  # the same in a table with suffixes, which are earlier sources
    """09 12 16 19 21 23 23 17 24 31 36 41 43 45 23 32 41 32 55 64 60 28 52 50 53 66 61 72 27 43 58 63 77 78 81
    29 47 50 57 59 83 87 45 33 46 50 74 85 90 32 43 58 58 63 94 92 38 78 64 74 69 88 94 30 57 53 77 88 83 89""",
    """03 04 06 07 08 09 09 07 10 14 18 19 21 39 11 13 14 26 41 33 80 13 16 16 42 58 46 87 06 21 29 46 47 61 77
    15 35 40 16 60 68 88 22 43 44 51 70 77 76 35 42 59 69 79 69 90 45 50 52 53 60 80 88 25 53 55 77 80 88 93""",
    """02 03 04 05 06 07 07 04 07 10 11 15 17 33 07 03 09 13 20 33 47 08 07 14 23 30 43 62 01 12 21 26 13 37 66
    10 21 29 32 42 53 68 19 23 36 43 41 56 76 16 29 35 47 39 64 78 25 34 41 54 55 59 77 24 37 35 42 74 66 79""",
)
TEXT = _shares(  # contexts of 1, 2, … tokens of the text so far
    """02 04 07 11 14 16 19 04 09 13 15 26 34 40 06 11 18 28 43 49 71 08 20 29 38 50 54 75 10 27 36 50 51 85 89
    11 41 51 49 76 85 89 11 48 53 37 60 91 84 11 24 41 61 77 88 96 12 24 42 61 78 89 97 12 24 42 62 79 90 97""",
    """01 03 07 12 17 20 24 02 06 10 18 25 39 47 03 08 19 31 36 48 63 04 15 24 49 54 57 73 04 43 35 52 78 73 80
    05 30 30 46 59 79 88 05 13 28 48 68 82 91 05 13 29 49 69 83 93 05 13 29 49 70 84 94 05 13 29 50 70 84 94""",
    """01 02 05 10 15 19 25 01 04 09 16 18 36 42 02 04 17 26 27 33 51 02 12 20 39 43 41 58 02 12 18 38 49 65 77
    02 13 20 37 55 69 78 02 08 20 38 57 71 81 02 08 21 39 58 72 82 02 08 21 39 58 73 83 02 08 21 39 58 73 83""",
    """01 02 05 09 13 15 18 01 04 07 10 19 30 30 02 06 16 28 20 29 43 02 07 26 32 31 43 48 02 08 25 31 45 55 62
    03 12 19 33 48 59 66 03 08 19 34 50 61 69 03 08 20 35 50 62 70 03 08 20 35 51 62 70 03 08 20 35 51 63 71""",
    """01 02 04 07 11 14 15 01 03 09 10 15 26 21 01 04 08 21 20 31 36 02 05 21 22 32 41 49 02 07 10 24 36 45 51
    02 06 14 26 38 48 54 02 06 14 27 39 49 56 02 06 15 27 40 50 56 02 06 15 27 40 50 57 02 06 15 27 40 50 57""",
    """01 02 04 07 11 14 15 01 03 05 08 09 26 22 01 10 04 14 19 27 35 02 08 09 22 32 41 49 02 05 16 24 36 45 51
    02 06 14 26 38 48 54 02 06 14 27 39 49 56 02 06 15 27 40 50 56 02 06 15 27 40 50 57 02 06 15 27 40 50 57""",
)
SUFFIXES = _shares(  # contexts of 4, 5, … tokens of the corpus
    """02 04 06 08 10 11 16 05 09 09 12 21 24 34 02 09 12 27 31 41 44 16 15 27 32 34 46 56 14 23 33 35 10 46 54
    17 19 30 36 44 65 60 24 35 26 37 52 65 63 15 22 39 42 40 49 74 20 26 23 52 57 62 69 24 21 15 44 59 45 73""",
    """01 02 04 05 06 07 08 03 05 04 07 15 17 24 04 04 11 15 27 28 31 06 08 17 21 33 32 39 05 11 22 23 05 55 52
    10 21 25 28 46 45 64 06 15 21 42 33 57 74 16 20 22 29 48 48 77 16 19 30 49 59 67 72 19 19 23 32 52 62 77""",
    """01 02 03 05 06 06 06 03 05 06 08 14 16 17 03 08 14 09 23 21 31 07 13 15 16 26 40 33 07 12 28 31 38 48 56
    06 17 22 40 49 58 66 12 30 29 45 57 44 82 23 38 29 50 59 73 87 09 17 40 44 73 85 81 15 24 38 57 60 75 92""",
    """01 02 03 05 06 06 07 03 05 05 06 14 16 16 08 03 11 10 14 20 25 05 10 16 18 26 32 37 06 19 25 26 35 41 42
    10 20 19 41 50 21 73 15 23 29 33 45 53 66 22 29 29 56 66 82 87 10 32 49 52 58 85 90 16 18 49 63 78 86 92""",
)


def recycled_shares() -> np.ndarray:
    """The prior [1, CLASSES] of recycled rows: m^½ · N / (N + 1)."""
    seen = 2.0 ** np.arange(10)
    sure = np.array([0.1, 0.22, 0.4, 0.6, 0.78, 0.9, 0.98])
    return np.outer(seen / (seen + 1), sure**0.5).reshape(1, CLASSES)


CORPUS_ORDERS = (2, 3, 4)  # sources 0 … 2; then the text's contexts of 1 to K tokens, the recycled ones of 1 to R, and
# the corpus's of `LEAST` to `REACH`
TAIL = 48  # most successors of a context that are read
CANDIDATES = 128  # most candidate tokens at a node
_SURENESS = np.array([0.15, 0.3, 0.5, 0.7, 0.85, 0.95])  # upper bounds of the classes of m, except for the last class
SUREST = 0.9  # if only a child likelier than this could enter a full draft, the node is not expanded


class MixtureWeights(NamedTuple):
    """shares: λ by source and class, float64 [S = 3 + K + R, CLASSES], and with it:

    its prior; expected numbers of hits and trials; scratch for one token (integers int64 [2, S], numbers float64
    [2, S]).
    """

    shares: np.ndarray
    prior: np.ndarray
    hits: np.ndarray
    trials: np.ndarray
    integers: np.ndarray
    numbers: np.ndarray


def new_weights(longest: int, recycled: int = 0, suffixes: bool = False) -> MixtureWeights:
    """The prior of λ, for text contexts of up to `longest` tokens, recycled ones of up to `recycled`, and suffixes."""
    groups = (
        (BELOW_SUFFIXES if suffixes else CORPUS, len(CORPUS_ORDERS)),
        (TEXT, longest),
        (recycled_shares(), recycled),
        (SUFFIXES, REACH - LEAST + 1 if suffixes else 0),
    )
    prior = np.array([shares[min(i, len(shares) - 1)] for shares, count in groups for i in range(count)])
    integers, numbers = np.empty((2, len(prior)), np.int64), np.empty((2, len(prior)))
    return MixtureWeights(prior.copy(), prior, np.zeros_like(prior), np.zeros_like(prior), integers, numbers)


class Scratch(NamedTuple):
    """A workspace. recent: the last tokens, latest first, as many as any source reads. slots: of contexts of 1, 2, …
    tokens. tokens, probs: candidates at a node. occurrences: the workspace for corpus suffixes."""

    recent: np.ndarray
    slots: np.ndarray
    tokens: np.ndarray
    probs: np.ndarray
    occurrences: SuffixWorkspace


def new_scratch(longest: int) -> Scratch:
    """A workspace for text contexts of up to `longest` tokens."""
    reach = max(longest, REACH)
    candidates = np.empty(CANDIDATES, np.int64), np.empty(CANDIDATES)
    return Scratch(np.empty(reach, np.int64), np.empty(reach, np.int64), *candidates, new_suffix_workspace())


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
    index = find_key(level.buckets, level.shift, level.keys, mix(packed, size * level.bits))
    if index < 0:
        return -1, 0
    total = max(np.int64(level.totals[index]), 1)
    begin, end = successors_of(level.starts, level.tokens, index)
    return index, class_of(total, level.counts[begin] / total if begin < end else 0.0)


@lean
def text_contexts(contexts: ContextMap, recent: np.ndarray, length: int, longest: int, slots: np.ndarray) -> int:
    """The length of the longest known context in the text; writes the `slots` of its contexts of 1, 2, … tokens."""
    size, key = 0, np.uint64(0)
    while size < min(longest, length):
        key = longer_key(key, recent[size])
        slot = slot_of(contexts, key)
        if contexts.slots[slot].head < 0:
            break
        slots[size] = slot
        size += 1
    return size


@lean
def text_class(contexts: ContextMap, slot: int) -> int:
    """The class of a context of the text."""
    context = contexts.slots[slot]
    return class_of(np.int64(context.seen), contexts.entries[context.head].weight / context.sum)


@lean
def _add_candidate(tokens: np.ndarray, probs: np.ndarray, count: int, token: int, prob: float) -> int:
    for i in range(count):
        if tokens[i] == token:
            probs[i] += prob
            return count
    if count < len(tokens):
        tokens[count], probs[count] = token, prob
        count += 1
    return count


@lean
def _add_level(sources, level, size, length, mass, floor, scratch, count):
    index, kind = level_context(level, scratch.recent, length, size, sources.vocabulary)
    if index < 0:
        return mass, count
    share = sources.weights.shares[size - 1, kind]
    scale = mass * share / max(level.totals[index], 1)
    begin, end = successors_of(level.starts, level.tokens, index)
    for at in range(begin, min(end, begin + TAIL)):
        prob = scale * level.counts[at]
        if prob < floor:
            break
        count = _add_candidate(scratch.tokens, scratch.probs, count, np.int64(level.tokens[at]), prob)
    return mass * (1 - share), count


@lean
def _add_recycled(sources, length, mass, floor, scratch, count):
    recycled, slots, shares = sources.recycled, scratch.slots, sources.weights.shares
    for size in range(recycled_rows(recycled, scratch.recent, length, slots), 0, -1):
        row = slots[size - 1]
        if row < 0:
            continue
        share = shares[2 + sources.longest + size, class_of(recycled.seen[row], recycled.probs[row, 0])]
        for j in range(recycled.tokens.shape[1]):
            prob = mass * share * recycled.probs[row, j]
            if prob < floor:
                break
            count = _add_candidate(scratch.tokens, scratch.probs, count, np.int64(recycled.tokens[row, j]), prob)
        mass *= 1 - share
    return mass, count


@lean
def _add_suffixes(sources, length, mass, floor, scratch, count):
    suffixes, occurrences = sources.suffixes, scratch.occurrences
    before = 3 + sources.longest + sources.recycled.longest
    longest, narrow = known_suffixes(suffixes, scratch.recent, length, occurrences)
    for size in range(longest, LEAST - 1, -1):
        distinct, largest, seen = successors_at(suffixes, size, narrow, occurrences)
        share = sources.weights.shares[before + size - LEAST, class_of(occurrences.number[size], largest / seen)]
        for i in range(distinct):
            prob = mass * share * occurrences.counts[i] / seen
            if prob >= floor:
                count = _add_candidate(scratch.tokens, scratch.probs, count, occurrences.tokens[i], prob)
        mass *= 1 - share
        if mass < floor:
            break
    return mass, count


@lean
def predict(sources, length, floor, scratch):
    """Write likely tokens after the `length` tokens in `scratch.recent` and their P, unordered; returns their number.

    Contributions below `floor` are left out.
    """
    contexts, slots = sources.contexts, scratch.slots
    mass, count = 1.0, 0
    for size in range(text_contexts(contexts, scratch.recent, length, sources.longest, slots), 0, -1):
        slot = slots[size - 1]
        share = sources.weights.shares[2 + size, text_class(contexts, slot)]
        scale = mass * share / contexts.slots[slot].sum
        entry, seen = contexts.slots[slot].head, 0
        while entry >= 0 and seen < TAIL and scale * contexts.entries[entry].weight >= floor:
            prob = scale * contexts.entries[entry].weight
            count = _add_candidate(scratch.tokens, scratch.probs, count, np.int64(contexts.entries[entry].token), prob)
            entry, seen = contexts.entries[entry].following, seen + 1
        mass *= 1 - share
    if mass >= floor:
        mass, count = _add_recycled(sources, length, mass, floor, scratch, count)
    if mass >= floor:
        mass, count = _add_suffixes(sources, length, mass, floor, scratch, count)
    if mass >= floor:
        mass, count = _add_level(sources, sources.levels[2], 3, length, mass, floor, scratch, count)
    if mass >= floor:
        mass, count = _add_level(sources, sources.levels[1], 2, length, mass, floor, scratch, count)
    if mass >= floor:
        mass, count = _add_level(sources, sources.levels[0], 1, length, mass, floor, scratch, count)
    return count


@lean
def mixed_best_first(sources, ids, stop, depth, nodes, scratch):
    """`ngram_search.best_first` with the mixture's probabilities."""
    recent, tokens, probs = scratch.recent, scratch.tokens, scratch.probs
    budget, reach = len(nodes.order), len(recent)
    size, final, node_count = 0, -1, 0
    while final < size:
        parent, path, below = np.int64(-1), 1.0, 1
        if final >= 0:
            parent, path = nodes.order[final], nodes.ranked[final]
            below = nodes.depths[parent] + 1
        final += 1
        worst = nodes.ranked[size - 1] if size == budget else 0.0
        if below > depth or path * SUREST <= worst:
            continue
        length, node = 0, parent
        while node >= 0 and length < reach:
            recent[length] = nodes.tokens[node]
            node, length = nodes.parents[node], length + 1
        for position in range(stop - 1, max(-1, stop - 1 - (reach - length)), -1):
            recent[length] = ids[position]
            length += 1
        floor = max(1e-6, worst / path / 4)  # four contributions may add up to a relevant probability
        count = predict(sources, length, floor, scratch)
        for i in range(count):
            size, node_count, _ = offer(nodes, size, final, node_count, tokens[i], parent, below, path * probs[i])
    return tree_of(nodes, size)
