# mypy: allow-untyped-defs
"""The n-gram mixture of a table and a text: sources, weights that are learnt online, and the search (`ngram_mixing`).

Importing it imports neither torch nor transformers, so that a serving engine's process can.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numpy as np

from outrider.draft_models.ngrams.kernels import compiled_for, lean, successors_of
from outrider.draft_models.ngrams.overlay import (
    LevelArrays,
    TextIndex,
    flat,
    index_text,
    new_recycled,
    recycled_rows,
    with_room,
)
from outrider.draft_models.ngrams.suffixes import LEAST, known_suffixes, no_suffixes, read_only, successors_at
from outrider.draft_models.ngrams.table import TrigramTable, make_level
from outrider.inference.drafters.ngram.ngram_mixing import (
    CORPUS_ORDERS,
    TAIL,
    class_of,
    level_context,
    mixed_best_first,
    new_scratch,
    new_weights,
    text_class,
    text_contexts,
)
from outrider.inference.drafters.ngram.ngram_search import Nodes
from outrider.inference.settings.method import NgramConfig

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


P = ParamSpec("P")
R = TypeVar("R")
_RECYCLED_CONTEXT = 2  # the target's rows are indexed by their last token and by their last two


class Mixture:
    """The orders 2 to 4 that the table has, its suffixes, and one text. `reset` begins a text."""

    def __init__(self, table: TrigramTable, config: NgramConfig):
        self.table, self.config = table, config
        two, three, four = (_level_or_empty(table, order) for order in CORPUS_ORDERS)
        self._levels = two, three, four
        self._scratch = new_scratch(config.longest)
        self._suffixes = read_only(table.suffixes or no_suffixes(table.vocabulary))

    def reset(self) -> None:
        """A new text begins."""
        self._compiled: dict[object, Callable[..., object]] = {}
        self.index = TextIndex(self.config.longest, self.config.decay)
        self.recycled = new_recycled(_RECYCLED_CONTEXT, self.config.recycle)
        self.weights = new_weights(self.config.longest, self.recycled.longest, self.table.suffixes is not None)

    def learn_prompt(self, ids: np.ndarray, stop: int) -> None:
        """Index the prompt ids[:stop] (int64). Its user's words teach no weights: these are for the target's text."""
        self.index.learn(ids, 0, stop)

    def learn(self, ids: np.ndarray, start: int, stop: int) -> None:
        """Learn from the target's ids[start : stop], which follow ids[:start]."""
        index, config = self.index, self.config
        index.known = with_room(index.known, config.longest * (stop - start))
        self._call(
            learn_text, self._levels, index.known, config.longest, config.decay, self.recycled, self._suffixes,
            self.weights, config.strength, self.table.vocabulary, ids, start, stop, self._scratch,
        )  # fmt: skip

    def search(self, ids: np.ndarray, stop: int, depth: int, nodes: Nodes) -> int:
        """Fill `nodes` with the likeliest tree under ids[:stop], no deeper than `depth`. Returns the number of
        nodes."""
        return self._call(
            mixed_best_first, self._levels, self.index.known, self.config.longest, self.recycled, self._suffixes,
            self.weights, self.table.vocabulary, ids, stop, depth, nodes, self._scratch,
        )  # fmt: skip

    def _call(self, function: Callable[P, R], *arguments: P.args, **_: P.kwargs) -> R:
        """All calls of a function for one text have arguments of the same types."""
        if function not in self._compiled:
            self._compiled[function] = compiled_for(function, arguments)
        return cast("R", self._compiled[function](*arguments))


def _level_or_empty(table: TrigramTable, order: int) -> LevelArrays:
    if order in table.levels:
        return flat(table.levels[order])
    nothing = np.empty(0, np.uint32)
    return flat(make_level(order, table.vocabulary, (np.empty(0, np.uint64), *[nothing] * 4)))
