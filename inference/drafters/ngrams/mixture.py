# mypy: allow-untyped-defs
"""The n-gram mixture of a table and a text: sources, weights that are learnt online, and the search (`ngram_mixing`).

A source is contexts of one length in one place: the text, the recycled top k tokens of the target's logits, the
corpus's suffixes, or a level of the table (its n-grams of one order). Its λ is the share of the remaining probability
that it gets, by the class of a context: how often it was seen, and how sure its likeliest successor is.

`Mixture` learns the target's tokens (`learn_text`), and then drafts (`search`). A token is learnt in two steps. Every
known context that ends the text adds its evidence: its source, its class, and its P(token). Then the λ of these sources
are updated. The numbers of sources: table 0 to 2, text from 3 on, then recycled, then suffixes, each by length.

Example: a context of the text has λ = 0.5 and P(token) = 0.6. The next source, of the table, has λ = 0.8 and P(token) =
0.1. Together P(token) = 0.5 · 0.6 + 0.5 · 0.8 · 0.1 = 0.34. The first source gets 1 trial and 0.3 / 0.34 = 0.88 hits,
the second one 0.12 trials and 0.12 hits.

Functions under `lean` are compiled by numba. Importing this module imports neither torch nor transformers, so that a
serving engine's process can.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import numpy as np

from outrider.draft_models.ngrams import overlay
from outrider.draft_models.ngrams.kernels import compiled_for, lean, read_only, successors_of
from outrider.draft_models.ngrams.suffixes import LEAST, Suffixes, count_successors, find_suffixes, no_suffixes
from outrider.draft_models.ngrams.table import Level, TrigramTable, make_level
from outrider.inference.drafters.ngrams import ngram_mixing
from outrider.inference.drafters.ngrams.ngram_mixing import MAX_READ, class_of, level_context, text_class, text_contexts
from outrider.inference.drafters.ngrams.ngram_search import Nodes
from outrider.inference.settings.method import NgramConfig

_ELSEWHERE = 1e-5  # probability of a token that no source knows, used in learning


class Sources(NamedTuple):
    """The sources of a mixture and their weights.

    levels: by order 2, 3, 4. contexts: of the text, `longest` tokens at most. recycled, suffixes: see the module.
    strength: the tokens that the prior of λ counts as.
    """

    levels: tuple[Level, Level, Level]
    contexts: overlay.ContextMap
    longest: int
    recycled: overlay.Recycled
    suffixes: Suffixes
    weights: ngram_mixing.MixtureWeights
    strength: float
    vocabulary: int


@lean
def _add_evidence(weights, count, source, class_index, prob):
    """Write number `count` of the evidence of a token: a source, its class, its P(token). Returns count + 1."""
    weights.integers[0, count], weights.integers[1, count], weights.numbers[0, count] = source, class_index, prob
    return count + 1


@lean
def _add_text_evidence(sources, count, length, token, scratch):
    contexts, slots = sources.contexts, scratch.slots
    for context_size in range(text_contexts(contexts, scratch.recent, length, sources.longest, slots), 0, -1):
        slot = slots[context_size - 1]
        prob, entry_index, read_count = 0.0, contexts.slots[slot].head, 0
        while entry_index >= 0 and read_count < MAX_READ:
            if contexts.entries[entry_index].token == token:
                prob = contexts.entries[entry_index].weight / contexts.slots[slot].sum
                break
            entry_index, read_count = contexts.entries[entry_index].following, read_count + 1
        count = _add_evidence(sources.weights, count, 2 + context_size, text_class(contexts, slot), prob)
    return count


@lean
def _add_recycled_evidence(sources, count, length, token, scratch):
    recycled, slots = sources.recycled, scratch.slots
    for context_size in range(overlay.find_recycled(recycled, scratch.recent, length, slots), 0, -1):
        recycled_row = slots[context_size - 1]
        if recycled_row < 0:
            continue
        prob = 0.0
        for j in range(recycled.tokens.shape[1]):
            if recycled.tokens[recycled_row, j] == token:
                prob = np.float64(recycled.probs[recycled_row, j])
                break
        class_index = class_of(recycled.seen[recycled_row], recycled.probs[recycled_row, 0])
        count = _add_evidence(sources.weights, count, 2 + sources.longest + context_size, class_index, prob)
    return count


@lean
def _add_suffix_evidence(sources, count, length, token, scratch):
    suffixes, work = sources.suffixes, scratch.occurrences
    first_source = 3 + sources.longest + sources.recycled.longest
    longest_suffix, near_from = find_suffixes(suffixes, scratch.recent, length, work)  # near_from: see there
    for context_size in range(longest_suffix, LEAST - 1, -1):
        distinct_count, top_count, sampled_count = count_successors(suffixes, context_size, near_from, work)
        prob = 0.0
        for i in range(distinct_count):
            if work.tokens[i] == token:
                prob = work.counts[i] / sampled_count
        class_index = class_of(work.number[context_size], top_count / sampled_count)
        count = _add_evidence(sources.weights, count, first_source + context_size - LEAST, class_index, prob)
    return count


@lean
def _add_level_evidence(sources, level, size, count, length, token, scratch):
    context_index, class_index = level_context(level, scratch.recent, length, size, sources.vocabulary)
    if context_index < 0:
        return count
    prob = 0.0
    begin, end = successors_of(level.starts, level.tokens, context_index)
    for successor in range(begin, min(end, begin + MAX_READ)):
        if level.tokens[successor] == token:
            prob = level.counts[successor] / max(level.totals[context_index], 1)
            break
    return _add_evidence(sources.weights, count, size - 1, class_index, prob)


@lean
def learn_weights(sources, length, token, scratch):
    """Update λ for `token` after `scratch.recent`, before the text index learns it. Returns log P(token)."""
    evidence_count = _add_text_evidence(sources, 0, length, token, scratch)
    evidence_count = _add_recycled_evidence(sources, evidence_count, length, token, scratch)
    evidence_count = _add_suffix_evidence(sources, evidence_count, length, token, scratch)
    evidence_count = _add_level_evidence(sources, sources.levels[2], 3, evidence_count, length, token, scratch)
    evidence_count = _add_level_evidence(sources, sources.levels[1], 2, evidence_count, length, token, scratch)
    evidence_count = _add_level_evidence(sources, sources.levels[0], 1, evidence_count, length, token, scratch)
    return _update_shares(sources.weights, evidence_count, sources.strength)


@lean
def _update_shares(weights, count, strength):
    """One step of expectation–maximisation by `count` pieces of evidence, longest context first.

    Returns log P(token). A source's trials grow by the probability that is left to it, its hits by its share of
    P(token). mix_probs: P(token) by a source and all later ones.
    """
    source_and_class, probs, mix_probs = weights.integers, weights.numbers[0], weights.numbers[1]
    prob = _ELSEWHERE
    for i in range(count - 1, -1, -1):
        share = weights.shares[source_and_class[0, i], source_and_class[1, i]]
        prob = share * probs[i] + (1 - share) * prob
        mix_probs[i] = prob
    remaining_mass = 1.0
    for i in range(count):
        source, kind = source_and_class[0, i], source_and_class[1, i]
        # λ = 1, possible with little text and hardly any strength, leaves nothing to tokens that its source lacks.
        hit = remaining_mass * weights.shares[source, kind] * probs[i] / mix_probs[i] if mix_probs[i] > 0 else 0.0
        weights.hits[source, kind] += hit
        weights.trials[source, kind] += remaining_mass
        remaining_mass -= hit
        hits, trials = weights.hits[source, kind], weights.trials[source, kind]
        weights.shares[source, kind] = (strength * weights.prior_shares[source, kind] + hits) / (strength + trials)
    return np.log(prob)


@lean
def learn_text(sources, decay, ids, start, stop, scratch):
    """Learn ids[start : stop] one by one: update λ, then index the token. Returns Σ log P."""
    log_prob_sum = 0.0
    for position in range(start, stop):
        text_length = min(len(scratch.recent), position)
        for i in range(text_length):
            scratch.recent[i] = ids[position - 1 - i]
        log_prob_sum += learn_weights(sources, text_length, ids[position], scratch)
        overlay.index_text(sources.contexts, ids, position, position + 1, sources.longest, decay)
    return log_prob_sum


R = TypeVar("R")
_RECYCLED_CONTEXT = 2  # the target's rows are indexed by their last token and by their last two


class Mixture:
    """The orders 2 to 4 that the table has, its suffixes, and one text. `reset` begins a text."""

    def __init__(self, table: TrigramTable, config: NgramConfig):
        self.table, self.config = table, config
        bigrams, trigrams, fourgrams = (_level_or_empty(table, order) for order in ngram_mixing.CORPUS_ORDERS)
        self._levels = bigrams, trigrams, fourgrams
        self._scratch = ngram_mixing.new_scratch(config.longest)
        self._suffixes = read_only(table.suffixes or no_suffixes(table.vocabulary))

    def reset(self) -> None:
        """A new text begins."""
        self._compiled: dict[object, Callable[..., object]] = {}
        self.index = overlay.TextIndex(self.config.longest, self.config.decay)
        self.recycled = overlay.new_recycled(_RECYCLED_CONTEXT, self.config.recycle)
        has_suffixes = self.table.suffixes is not None
        self.weights = ngram_mixing.new_weights(self.config.longest, self.recycled.longest, has_suffixes)

    def learn_prompt(self, ids: np.ndarray, prompt_end: int) -> None:
        """Index the prompt ids[:prompt_end] (int64). It teaches no weights: these are for the target's text."""
        self.index.learn(ids, 0, prompt_end)

    def learn(self, ids: np.ndarray, start: int, stop: int) -> None:
        """Learn from the target's ids[start : stop], which follow ids[:start]."""
        index, config = self.index, self.config
        index.contexts = overlay.with_capacity(index.contexts, config.longest * (stop - start))
        self._call(learn_text, config.decay, ids, start, stop, self._scratch)

    def search(self, ids: np.ndarray, text_end: int, max_depth: int, nodes: Nodes) -> int:
        """Fill `nodes` with the likeliest tree under ids[:text_end], at most `max_depth` deep; returns its size."""
        return self._call(ngram_mixing.search_mixture, ids, text_end, max_depth, nodes, self._scratch)

    def _call(self, function: Callable[..., R], *arguments: object) -> R:
        """`function` of the sources and `arguments`, compiled once for their types, which stay the same for a text."""
        source_fields = (self._suffixes, self.weights, self.config.strength, self.table.vocabulary)
        sources = Sources(self._levels, self.index.contexts, self.config.longest, self.recycled, *source_fields)
        if function not in self._compiled:
            self._compiled[function] = compiled_for(function, (sources, *arguments))
        return cast("R", self._compiled[function](sources, *arguments))


def _level_or_empty(table: TrigramTable, order: int) -> Level:
    if order in table.levels:
        return read_only(table.levels[order])
    empty_array = np.empty(0, np.uint32)  # each field of `Grouped` but its keys
    return read_only(make_level(order, table.vocabulary, (np.empty(0, np.uint64), *[empty_array] * 4)))
