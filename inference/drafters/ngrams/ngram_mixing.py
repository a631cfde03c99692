# mypy: allow-untyped-defs
"""The n-gram mixture: interpolated distributions after the longest contexts of the text so far and of the corpus.

Every known context is a source. First come contexts of K to 1 tokens in the text, then the target's recycled logits
after the last two tokens and the last one, then contexts of 12 to 4 tokens in the corpus (if the table has suffixes),
then those of 3, 2 and 1 tokens in the table. A source gets the share λ of the remaining probability and leaves the rest
to the next source:  P = λ₁P₁ + (1 − λ₁)(λ₂P₂ + (1 − λ₂)(…)).

λ depends on how often the context was seen (N) and on its confidence (m, the share of its most likely successor). Per
source and class of (N, m) it starts at its prior and adapts to the tokens of this generation by one
step of expectation–maximisation per token; the prior counts as `strength` tokens. Functions under `lean` are compiled
by numba. mass: the remaining probability; floor: a smaller contribution is left out.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from outrider.draft_models.ngrams import suffixes as corpus_suffixes
from outrider.draft_models.ngrams.kernels import find_key, lean, mix, successors_of
from outrider.draft_models.ngrams.overlay import ContextMap, find_recycled, longer_key, slot_of
from outrider.draft_models.ngrams.suffixes import LEAST, REACH, count_successors, find_suffixes
from outrider.draft_models.ngrams.table import Level
from outrider.inference.drafters.ngrams.ngram_search import offer_node, write_tree

# The prior λ of every source by class, in a file that says how it was fitted. The last row of contexts by length is
# used for all longer ones. The recorded answers of the fit have no logits, so recycled rows have a chosen formula.
CLASSES = 70  # per source: 10 of N × 7 of m
_PRIORS = json.loads(Path(__file__).with_name("mixture_priors.json").read_text("utf-8"))
CORPUS_PRIOR, BELOW_PRIOR, TEXT_PRIOR, SUFFIX_PRIOR = (
    np.array(_PRIORS[group], float).reshape(-1, CLASSES) / 100  # [sources, CLASSES], from percent
    for group in ("corpus", "below_suffixes", "text", "suffixes")
)


def recycled_shares() -> np.ndarray:
    """The prior [1, CLASSES] of recycled rows: m^½ · N / (N + 1)."""
    seen_counts = 2.0 ** np.arange(10)
    confidences = np.array([0.1, 0.22, 0.4, 0.6, 0.78, 0.9, 0.98])
    return np.outer(seen_counts / (seen_counts + 1), confidences**0.5).reshape(1, CLASSES)


# Sources 0 … 2; then the text's contexts of 1 to K tokens, recycled ones of 1 to R = 2, suffixes of `LEAST` to `REACH`.
CORPUS_ORDERS = (2, 3, 4)
MAX_READ = 48  # most successors of a context that are read
MAX_CANDIDATES = 128  # most candidate tokens at a node
_SURENESS = np.array([0.15, 0.3, 0.5, 0.7, 0.85, 0.95])  # upper bounds of the classes of m, except for the last class
SUREST = 0.9  # if only a child likelier than this could enter a full draft, the node is not expanded


class MixtureWeights(NamedTuple):
    """The weights λ of all sources by class, float64 [S = 3 + K + R, CLASSES], and what they are learnt from.

    shares: λ now; prior_shares: λ before the first token. hits, trials: expected numbers of the tokens that a source
    predicted, and of those that it could have. integers int64 [2, S], numbers float64 [2, S]: scratch for one token.
    """

    shares: np.ndarray
    prior_shares: np.ndarray
    hits: np.ndarray
    trials: np.ndarray
    integers: np.ndarray
    numbers: np.ndarray


def new_weights(longest: int, recycled: int = 0, has_suffixes: bool = False) -> MixtureWeights:
    """The prior of λ, for text contexts of up to `longest` tokens, recycled ones of up to `recycled`, and suffixes."""
    priors = (
        (BELOW_PRIOR if has_suffixes else CORPUS_PRIOR, len(CORPUS_ORDERS)),
        (TEXT_PRIOR, longest),
        (recycled_shares(), recycled),
        (SUFFIX_PRIOR, REACH - LEAST + 1 if has_suffixes else 0),
    )
    prior_shares = np.array([shares[min(i, len(shares) - 1)] for shares, count in priors for i in range(count)])
    integers, numbers = np.empty((2, len(prior_shares)), np.int64), np.empty((2, len(prior_shares)))
    hits, trials = np.zeros_like(prior_shares), np.zeros_like(prior_shares)
    return MixtureWeights(prior_shares.copy(), prior_shares, hits, trials, integers, numbers)


class Scratch(NamedTuple):
    """A workspace. recent: the last tokens, latest first, as many as any source reads. slots: of contexts of 1, 2, …
    tokens. tokens, probs: candidates at a node. occurrences: the workspace for corpus suffixes."""

    recent: np.ndarray
    slots: np.ndarray
    tokens: np.ndarray
    probs: np.ndarray
    occurrences: corpus_suffixes.SuffixWorkspace


def new_scratch(max_context: int) -> Scratch:
    """A workspace for text contexts of up to `max_context` tokens."""
    recent, slots = np.empty((2, max(max_context, REACH)), np.int64)
    tokens, probs = np.empty(MAX_CANDIDATES, np.int64), np.empty(MAX_CANDIDATES)
    return Scratch(recent, slots, tokens, probs, corpus_suffixes.new_suffix_workspace())


@lean
def class_of(seen, top_share):
    """The class of a context seen `seen` times whose likeliest successor has this share."""
    log_seen, surety_class = 0, 0
    while log_seen < 9 and seen >> (log_seen + 1) > 0:
        log_seen += 1
    while surety_class < len(_SURENESS) and top_share >= _SURENESS[surety_class]:
        surety_class += 1
    return log_seen * (len(_SURENESS) + 1) + surety_class


@lean
def level_context(level: Level, recent: np.ndarray, length: int, size: int, vocabulary: int) -> tuple[int, int]:
    """(index in `level`, class) of the last `size` tokens, recent[0] being the latest; index −1 if unknown."""
    if size > length:
        return -1, 0
    packed_ids = np.uint64(0)
    for i in range(size - 1, -1, -1):
        if recent[i] >= vocabulary:
            return -1, 0
        packed_ids = (packed_ids << np.uint64(level.bits)) | np.uint64(recent[i])
    context_index = find_key(level.buckets, level.shift, level.keys, mix(packed_ids, size * level.bits))
    if context_index < 0:
        return -1, 0
    total_count = max(np.int64(level.totals[context_index]), 1)
    begin, end = successors_of(level.starts, level.tokens, context_index)
    return context_index, class_of(total_count, level.counts[begin] / total_count if begin < end else 0.0)


@lean
def text_contexts(contexts: ContextMap, recent: np.ndarray, length: int, longest: int, slots: np.ndarray) -> int:
    """The length of the longest known context in the text; writes the `slots` of its contexts of 1, 2, … tokens."""
    context_length, key = 0, np.uint64(0)
    while context_length < min(longest, length):
        key = longer_key(key, recent[context_length])
        slot = slot_of(contexts, key)
        if contexts.slots[slot].head < 0:
            break
        slots[context_length] = slot
        context_length += 1
    return context_length


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
    context_index, class_index = level_context(level, scratch.recent, length, size, sources.vocabulary)
    if context_index < 0:
        return mass, count
    share = sources.weights.shares[size - 1, class_index]
    count_scale = mass * share / max(level.totals[context_index], 1)
    begin, end = successors_of(level.starts, level.tokens, context_index)
    for successor in range(begin, min(end, begin + MAX_READ)):
        prob = count_scale * level.counts[successor]
        if prob < floor:
            break
        count = _add_candidate(scratch.tokens, scratch.probs, count, np.int64(level.tokens[successor]), prob)
    return mass * (1 - share), count


@lean
def _add_recycled(sources, length, mass, floor, scratch, count):
    recycled, slots, shares = sources.recycled, scratch.slots, sources.weights.shares
    for context_size in range(find_recycled(recycled, scratch.recent, length, slots), 0, -1):
        row = slots[context_size - 1]
        if row < 0:
            continue
        share = shares[2 + sources.longest + context_size, class_of(recycled.seen[row], recycled.probs[row, 0])]
        for j in range(recycled.tokens.shape[1]):
            prob = mass * share * recycled.probs[row, j]
            if prob < floor:
                break
            count = _add_candidate(scratch.tokens, scratch.probs, count, np.int64(recycled.tokens[row, j]), prob)
        mass *= 1 - share
    return mass, count


@lean
def _add_suffixes(sources, length, mass, floor, scratch, count):
    suffixes, work = sources.suffixes, scratch.occurrences
    first_source = 3 + sources.longest + sources.recycled.longest
    # Of a context's work.number[size] occurrences seen_count are read: all if size ≥ near_from, else a sample.
    longest_suffix, near_from = find_suffixes(suffixes, scratch.recent, length, work)
    for size in range(longest_suffix, LEAST - 1, -1):
        distinct_count, top_count, seen_count = count_successors(suffixes, size, near_from, work)
        share = sources.weights.shares[first_source + size - LEAST, class_of(work.number[size], top_count / seen_count)]
        for i in range(distinct_count):
            prob = mass * share * work.counts[i] / seen_count
            if prob >= floor:
                count = _add_candidate(scratch.tokens, scratch.probs, count, work.tokens[i], prob)
        mass *= 1 - share
        if mass < floor:
            break
    return mass, count


@lean
def predict_tokens(sources, length, floor, scratch):
    """Write likely tokens after the `length` tokens in `scratch.recent` and their P, unordered; returns their number.

    sources: `Sources` of mixture.py. Contributions below `floor` are left out.
    """
    contexts, slots = sources.contexts, scratch.slots
    prob_mass, count = 1.0, 0
    for context_size in range(text_contexts(contexts, scratch.recent, length, sources.longest, slots), 0, -1):
        slot = slots[context_size - 1]
        share = sources.weights.shares[2 + context_size, text_class(contexts, slot)]
        weight_scale = prob_mass * share / contexts.slots[slot].sum
        entry, read_count = contexts.slots[slot].head, 0
        while entry >= 0 and read_count < MAX_READ and weight_scale * contexts.entries[entry].weight >= floor:
            prob = weight_scale * contexts.entries[entry].weight
            count = _add_candidate(scratch.tokens, scratch.probs, count, np.int64(contexts.entries[entry].token), prob)
            entry, read_count = contexts.entries[entry].following, read_count + 1
        prob_mass *= 1 - share
    if prob_mass >= floor:
        prob_mass, count = _add_recycled(sources, length, prob_mass, floor, scratch, count)
    if prob_mass >= floor:
        prob_mass, count = _add_suffixes(sources, length, prob_mass, floor, scratch, count)
    if prob_mass >= floor:
        prob_mass, count = _add_level(sources, sources.levels[2], 3, length, prob_mass, floor, scratch, count)
    if prob_mass >= floor:
        prob_mass, count = _add_level(sources, sources.levels[1], 2, length, prob_mass, floor, scratch, count)
    if prob_mass >= floor:
        prob_mass, count = _add_level(sources, sources.levels[0], 1, length, prob_mass, floor, scratch, count)
    return count


@lean
def search_mixture(sources, ids, stop, depth, nodes, scratch):
    """`ngram_search.search_best_first` with the mixture's probabilities; writes and returns as `write_tree`.

    Nodes 0 … `final` of the ranking are final. Each step makes the best other node final and offers its children: what
    the mixture predicts after the text ids[:stop] and the node's path. Example: the root's children have 0.6 and 0.2,
    those of the first one 0.5 and 0.4. The ranking becomes 0.6, 0.3, 0.24, 0.2.
    """
    recent, tokens, probs = scratch.recent, scratch.tokens, scratch.probs
    budget, max_recent = len(nodes.order), len(recent)
    size, final, node_count = 0, -1, 0
    while final < size:
        parent, prob, below = np.int64(-1), 1.0, 1
        if final >= 0:
            parent, prob = nodes.order[final], nodes.ranked[final]
            below = nodes.depths[parent] + 1
        final += 1
        worst_prob = nodes.ranked[size - 1] if size == budget else 0.0
        if below > depth or prob * SUREST <= worst_prob:
            continue
        context_length, node = 0, parent
        while node >= 0 and context_length < max_recent:
            recent[context_length] = nodes.tokens[node]
            node, context_length = nodes.parents[node], context_length + 1
        for position in range(stop - 1, max(-1, stop - 1 - (max_recent - context_length)), -1):
            recent[context_length] = ids[position]
            context_length += 1
        min_prob = max(1e-6, worst_prob / prob / 4)  # four contributions may add up to a relevant probability
        token_count = predict_tokens(sources, context_length, min_prob, scratch)
        for i in range(token_count):
            size, node_count, _ = offer_node(nodes, size, final, node_count, tokens[i], parent, below, prob * probs[i])
    return write_tree(nodes, size)
