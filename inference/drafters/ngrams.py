"""Drafting from an n-gram table: ADED's tri-gram search with adaptation, and a mixture of longer contexts.

Neither runs a model, and both see nothing but tokens.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draft_models.ngrams.overlay import LevelArrays, Overlay, TextIndex, flat, with_room
from draft_models.ngrams.recycled import new_recycled, recycle
from draft_models.ngrams.suffixes import no_suffixes, read_only
from draft_models.ngrams.table import TrigramTable, make_level
from draft_models.ngrams.table_files import read_header, table_digest
from draft_models.target.open_target import OpenTarget
from inference.acceptance import Chooser
from inference.auto.policy import Tuning
from inference.drafters.interface import Drafter
from inference.drafters.ngram_learning import learn_text
from inference.drafters.ngram_mixing import CORPUS_ORDERS, mixed_best_first, new_scratch, new_weights
from inference.drafters.ngram_search import best_first, exploration, new_nodes, new_search, puct
from inference.drafters.registry import Maker, recorded_data
from inference.session import TargetSession
from inference.settings import MethodConfig, NgramConfig
from inference.stopwatch import Stopwatch
from inference.tree import DraftTree
from outrider.errors import require
from outrider.streams import Streams

_RECYCLED_CONTEXT = 2  # a row of the target's is known by its last token and by its last two

_Found = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # tokens, parents, path probabilities where they are known


class _OverText(Drafter):
    """Keeps the text as an array of ids and has every token of it learnt once, in order."""

    def __init__(self, max_rows: int):
        self.max_rows = max_rows

    def begin(self, session: TargetSession, chooser: Chooser, watch: Stopwatch) -> None:
        prompt = session.tokens.tolist()
        self._ids = np.zeros(2 * len(prompt) + 256, np.int64)
        self._length = self._learnt = 0
        self._reset()
        self._append(prompt)
        self._learn_prompt(self._ids, self._length)
        self._learnt = self._length

    def draft(self, root: Tensor, limit: int) -> DraftTree:
        self._reserve(1)
        self._ids[self._length] = int(root)  # committed, but only with the round it opens
        self._learn(self._ids, self._learnt, self._length + 1)
        self._learnt = self._length + 1
        if limit <= 0:
            return DraftTree(torch.empty(0, dtype=torch.long, device=root.device), (), ())
        tokens, parents, probs = self._search(self._ids, self._length + 1, limit)
        return DraftTree(
            torch.from_numpy(tokens).to(root.device),
            tuple(parents.tolist()),
            (-1,) * len(tokens),
            None if probs is None else torch.from_numpy(probs),
        )

    def commit(self, tree: DraftTree, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        self._append(tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        self._reserve(len(tokens))
        self._ids[self._length : self._length + len(tokens)] = tokens
        self._length += len(tokens)

    def _reserve(self, more: int) -> None:
        if self._length + more > len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(len(self._ids) + more, np.int64)])

    @abstractmethod
    def _reset(self) -> None:
        """A new text begins."""

    @abstractmethod
    def _learn(self, ids: np.ndarray, start: int, stop: int) -> None:
        """Learn from ids[start : stop], which follow what was learnt before."""

    def _learn_prompt(self, ids: np.ndarray, stop: int) -> None:
        self._learn(ids, 0, stop)

    @abstractmethod
    def _search(self, ids: np.ndarray, stop: int, limit: int) -> _Found:
        """The draft under ids[:stop], no deeper than `limit`."""


class TrigramDrafter(_OverText):
    """ADED: one order of the table, adapted by Algorithm 2 to prompt and output, searched by PUCT or best-first.

    What it learns from a text it forgets with it.
    """

    def __init__(self, table: TrigramTable, config: NgramConfig, seed: int):
        super().__init__(config.nodes)
        self.table, self.config, self.seed = table, config, seed
        self.overlay = Overlay(table, config.order, config.increment, config.max_probability)
        self._nodes = new_nodes(config.nodes)
        if config.search == "puct":
            self._tree = new_search(config.iterations)
            self._explore = exploration(config.iterations, config.c1, config.c2)
            self._found = (np.empty((config.iterations, config.depth), np.int64), np.empty(config.iterations))
        else:
            self._states = np.empty(config.nodes, np.uint64)

    def _reset(self) -> None:
        self._seed = np.array([self.seed % 2**64], np.uint64)
        self.overlay.reset()

    def _learn(self, ids: np.ndarray, start: int, stop: int) -> None:
        if self.config.adapt:
            self.overlay.learn(ids, start, stop)

    def _search(self, ids: np.ndarray, stop: int, limit: int) -> _Found:
        config, overlay = self.config, self.overlay
        place = (overlay.level, overlay.known, ids, stop, self.table.vocabulary, min(limit, config.depth))
        if config.search == "best_first":
            return best_first(*place, self._nodes, self._states)
        size = (config.widest, self._explore, config.sentences)
        tokens, parents, _ = puct(*place, *size, self._seed, self._tree, self._found, self._nodes)
        return tokens, parents, None  # scores of sentences are no path probabilities


class MixedDrafter(_OverText):
    """The mixture of `inference.drafters.ngram_mixing`, best-first. Uses the orders 2 to 4 that the table
    has, and its suffixes.

    Its rows of a round are the root and the nodes in their order: it shares nothing with the target.
    """

    def __init__(self, table: TrigramTable, config: NgramConfig):
        super().__init__(config.nodes)
        self.table, self.config = table, config
        self._levels = tuple(_level_or_empty(table, order) for order in CORPUS_ORDERS)
        self._nodes = new_nodes(config.nodes)
        self._scratch = new_scratch(config.longest)
        self._suffixes = read_only(table.suffixes or no_suffixes(table.vocabulary))
        self.successors = config.recycle
        self._verified: tuple[Any, ...] | None = None  # the last round's rows, as `recycle` takes them, until it does

    def begin(self, session: TargetSession, chooser: Chooser, watch: Stopwatch) -> None:
        self._session = session
        super().begin(session, chooser, watch)

    def commit(self, tree: DraftTree, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        if self.successors:
            rows, found = self._session.recycled()
            drafted = (tree.tokens.cpu().numpy(), np.array(tree.parents, np.int64))
            self._verified = (self._length + 1, *drafted, np.array(rows, np.int64), found.cpu().numpy())
        super().commit(tree, nodes, tokens)

    def _reset(self) -> None:
        self._verified = None
        self.index = TextIndex(self.config.longest, self.config.decay)
        self.recycled = new_recycled(_RECYCLED_CONTEXT, self.config.recycle)
        self.weights = new_weights(self.config.longest, self.recycled.longest, self.table.suffixes is not None)

    def _learn_prompt(self, ids: np.ndarray, stop: int) -> None:
        self.index.learn(ids, 0, stop)  # what a user wrote says little about how the target follows its sources

    def _learn(self, ids: np.ndarray, start: int, stop: int) -> None:
        index, config = self.index, self.config
        index.known = with_room(index.known, config.longest * (stop - start))
        learn_text(
            self._levels, index.known, config.longest, config.decay, self.recycled, self._suffixes, self.weights,
            config.strength, self.table.vocabulary, ids, start, stop, self._scratch,
        )  # fmt: skip
        if self._verified is not None:  # only now: its rows are what these very tokens were chosen by
            recycle(self.recycled, ids, *self._verified)
            self._verified = None

    def _search(self, ids: np.ndarray, stop: int, limit: int) -> _Found:
        config = self.config
        return mixed_best_first(
            self._levels, self.index.known, config.longest, self.recycled, self._suffixes, self.weights,
            self.table.vocabulary, ids, stop, min(limit, config.depth), self._nodes, self._scratch,
        )  # fmt: skip


def make_ngram_drafter(table: TrigramTable, config: NgramConfig, seed: int) -> TrigramDrafter | MixedDrafter:
    """The drafter of `config` over `table`, fresh. Raises `UserError` where the table lacks what it needs."""
    if config.evidence == "mixed":
        return MixedDrafter(table, config)
    return TrigramDrafter(table, config, seed)


def _level_or_empty(table: TrigramTable, order: int) -> LevelArrays:
    if order in table.levels:
        return flat(table.levels[order])
    nothing = np.empty(0, np.uint32)
    return flat(make_level(order, table.vocabulary, (np.empty(0, np.uint64), *[nothing] * 4)))


def open_table(where: str, digest: str, vocabulary: int | None = None) -> TrigramTable:
    """The n-gram table in `where`.

    digest: `vocabulary_digest` of the target's tokenizer; vocabulary: the target's, which every id must be in. Raises
    `UserError` for a table of another tokenizer, or a damaged one.
    """
    table = TrigramTable.open(where)
    table.require_tokenizer(digest, f"table={where}")
    limit = table.vocabulary if vocabulary is None else vocabulary
    require(table.vocabulary <= limit, "table", where, f"ids below the target's {limit}, not {table.vocabulary}")
    return table


class NgramMaker(Maker):
    """The model is a `TrigramTable`."""

    def identity(self, where: str | None) -> dict[str, Any]:
        return {"table": None if where is None else table_digest(Path(where))[:16]}

    def data_of(self, where: str) -> dict[str, Any] | None:
        corpus = recorded_data({"data": read_header(Path(where)).facts.get("corpus")})
        return corpus and {key: value for key, value in corpus.items() if key not in ("text", "digest")}

    def load(
        self, where: str, target: OpenTarget, methods: Mapping[str, MethodConfig], **_: Any
    ) -> TrigramTable | None:
        if all(method.source != "ngrams" for method in methods.values()):
            return None
        return open_table(where, target.vocabulary_digest, target.vocabulary_size)

    def make(
        self, model: TrigramTable, method: MethodConfig, streams: Streams, *, drawn: bool, tuning: Tuning | None
    ) -> Drafter:
        return make_ngram_drafter(model, method.ngrams, streams.number("search", bits=64))


MAKER = NgramMaker()
