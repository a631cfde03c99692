"""What a table and a text say of the next token, learnt as the text grows: the sources of `ngram_mixing` in one place.

Importing it imports neither torch nor transformers, so that a serving engine's process can.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numpy as np

from draft_models.ngrams.kernels import compiled_for
from draft_models.ngrams.overlay import LevelArrays, TextIndex, flat, with_room
from draft_models.ngrams.recycled import new_recycled
from draft_models.ngrams.suffixes import no_suffixes, read_only
from draft_models.ngrams.table import TrigramTable, make_level
from inference.drafters.ngram.ngram_learning import learn_text
from inference.drafters.ngram.ngram_mixing import CORPUS_ORDERS, mixed_best_first, new_scratch, new_weights
from inference.drafters.ngram.ngram_search import Nodes
from inference.settings.method import NgramConfig

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
        """Take in the prompt ids[:stop] (int64): what a user wrote says little about how the target follows sources."""
        self.index.learn(ids, 0, stop)

    def learn(self, ids: np.ndarray, start: int, stop: int) -> None:
        """Take in the target's ids[start : stop], which follow ids[:start]."""
        index, config = self.index, self.config
        index.known = with_room(index.known, config.longest * (stop - start))
        self._call(
            learn_text, self._levels, index.known, config.longest, config.decay, self.recycled, self._suffixes,
            self.weights, config.strength, self.table.vocabulary, ids, start, stop, self._scratch,
        )  # fmt: skip

    def search(self, ids: np.ndarray, stop: int, depth: int, nodes: Nodes) -> int:
        """Fill `nodes` with the likeliest tree under ids[:stop], no deeper than `depth`; how many there are."""
        return self._call(
            mixed_best_first, self._levels, self.index.known, self.config.longest, self.recycled, self._suffixes,
            self.weights, self.table.vocabulary, ids, stop, depth, nodes, self._scratch,
        )  # fmt: skip

    def _call(self, function: Callable[P, R], *arguments: P.args, **_: P.kwargs) -> R:
        """Of a text, all calls of a function have arguments of the same types."""
        if function not in self._compiled:
            self._compiled[function] = compiled_for(function, arguments)
        return cast("R", self._compiled[function](*arguments))


def _level_or_empty(table: TrigramTable, order: int) -> LevelArrays:
    if order in table.levels:
        return flat(table.levels[order])
    nothing = np.empty(0, np.uint32)
    return flat(make_level(order, table.vocabulary, (np.empty(0, np.uint64), *[nothing] * 4)))
