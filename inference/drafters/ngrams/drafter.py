"""Drafting from an n-gram table: ADED's tri-gram search with adaptation (arXiv 2407.12021), and a mixture of contexts.

A table counts what follows what in a corpus. No drafter runs a model. Of a `Drafter`'s fields, `max_rows` is the most
nodes of a draft, and `sizes` chooses the number of nodes by measured costs; None: the number is fixed.
"""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from outrider.base.streams import Streams
from outrider.draft_models.ngrams.overlay import Overlay, recycle
from outrider.draft_models.ngrams.table import TrigramTable, map_table, table_digest
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.inference.core.drafter import Drafter, Stopwatch
from outrider.inference.core.session import Session
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.core.tree import DraftTree
from outrider.inference.drafters.ngrams import KIND, ngram_search
from outrider.inference.drafters.ngrams.mixture import Mixture
from outrider.inference.drafters.plugin import DrafterPlugin, Methods, ModelOptions, TrainingRecord
from outrider.inference.settings.method import AUTO, MethodConfig, NgramConfig, known_size
from outrider.inference.sizing.node_sizes import SEARCH_SIZES, BestNodes
from outrider.inference.sizing.policy import Tuning

_Verified = tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # stop, tokens, parents, rows, continuations
_Draft = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # tokens, parents, path probabilities if known
_NOTHING: _Draft = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))


class TextDrafter(Drafter):
    """Keeps the text as an array of ids and learns every token once, in order.

    With nodes=auto it searches for as many nodes of the draft tree as `sizes` chooses; for the maximum if that is None.
    """

    def __init__(self, table: TrigramTable, config: NgramConfig):
        self.table, self.config = table, config
        node_budgets = SEARCH_SIZES if config.nodes == AUTO else (known_size(config.nodes),)  # most nodes of a search
        self._nodes = {node_budget: ngram_search.new_nodes(node_budget) for node_budget in node_budgets}
        self.max_rows = node_budgets[-1]
        self._draft = _NOTHING

    def begin(self, session: Session, selector: TokenSelector, watch: Stopwatch) -> None:
        self._session = session
        prompt = session.tokens.tolist()
        self._ids = np.zeros(2 * len(prompt) + 256, np.int64)
        self._length = self._learnt = 0  # tokens of the text in `_ids`, and those that were learnt
        self._reset()
        self._append(prompt)
        self._learn_prompt(self._ids, self._length)
        self._learnt = self._length

    def draft(self, root: Tensor, depth_limit: int) -> DraftTree:
        self._reserve(1)
        self._ids[self._length] = int(root)  # the session commits it at the end of this round
        self._learn(self._ids, self._learnt, self._length + 1)
        self._learnt = self._length + 1
        if depth_limit <= 0:
            return DraftTree(torch.empty(0, dtype=torch.long, device=root.device), (), ())
        tokens, parents, probs = _NOTHING
        node_budget = self.max_rows if self.sizes is None else self.sizes.search_size()
        if node_budget:
            tokens, parents, probs = self._search(self._ids, self._learnt, depth_limit, self._nodes[node_budget])
        if self.sizes is not None:
            assert probs is not None
            node_count = self.sizes.count(parents, probs)
            tokens, parents, probs = self._draft = tokens[:node_count], parents[:node_count], probs[:node_count]
        path_probs = None if probs is None else torch.from_numpy(probs)
        ids, rows = torch.from_numpy(tokens).to(root.device), (-1,) * len(tokens)  # −1: no draft model ran the node
        return DraftTree(ids, tuple(parents.tolist()), rows, path_probs, source="table")

    def commit(self, tree: DraftTree, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        if self.sizes is not None:
            _, parents, probs = self._draft
            assert probs is not None
            self.sizes.observe(parents[: len(tree)], probs[: len(tree)], nodes)
        self._append(tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        self._reserve(len(tokens))
        self._ids[self._length : self._length + len(tokens)] = tokens
        self._length += len(tokens)

    def _reserve(self, added_count: int) -> None:
        if self._length + added_count > len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(len(self._ids) + added_count, np.int64)])

    @abstractmethod
    def _reset(self) -> None:
        """Start a new text: forget the last one."""

    @abstractmethod
    def _learn(self, ids: np.ndarray, start: int, stop: int) -> None:
        """Learn from ids[start : stop], which follow what was learnt before."""

    def _learn_prompt(self, ids: np.ndarray, prompt_end: int) -> None:
        self._learn(ids, 0, prompt_end)

    @abstractmethod
    def _search(self, ids: np.ndarray, text_end: int, depth_limit: int, nodes: ngram_search.Nodes) -> _Draft:
        """The draft under ids[:text_end], at most `depth_limit` deep, with as many nodes as `nodes` can hold."""


class TrigramDrafter(TextDrafter):
    """ADED: one order n of the table's n-grams, adapted to prompt and output, searched by PUCT or best-first.

    The adaptation, `Overlay`, raises the probability of n-grams that occur in the text. It ends with the text.
    """

    def __init__(self, table: TrigramTable, config: NgramConfig, seed: int):
        super().__init__(table, config)
        self.seed = seed
        self.overlay = Overlay(table, config.order, config.increment, config.max_probability)
        if config.search == "puct":
            self._tree = ngram_search.new_search(config.iterations)  # scratch, like `_scratch` for sentences and scores
            self._explore = ngram_search.exploration_factors(config.iterations, config.c1, config.c2)
            self._scratch = (np.empty((config.iterations, config.depth), np.int64), np.empty(config.iterations))
        else:
            self._states = np.empty(self.max_rows, np.uint64)  # scratch: the packed context of each node

    def _reset(self) -> None:
        self._seed = np.array([self.seed % 2**64], np.uint64)
        self.overlay.reset()

    def _learn(self, ids: np.ndarray, start: int, stop: int) -> None:
        if self.config.adapt:
            self.overlay.learn(ids, start, stop)

    def _search(self, ids: np.ndarray, text_end: int, depth_limit: int, nodes: ngram_search.Nodes) -> _Draft:
        config, overlay = self.config, self.overlay  # level: the table's n-grams; contexts: raised probabilities
        args = (overlay.level, overlay.contexts, ids, text_end, self.table.vocabulary, min(depth_limit, config.depth))
        if config.search == "best_first":
            return _draft_of(nodes, ngram_search.search_best_first(*args, nodes, self._states))
        puct_args = (config.widest, self._explore, config.sentences)
        node_count = ngram_search.search_by_puct(*args, *puct_args, self._seed, self._tree, self._scratch, nodes)
        tokens, parents, _ = _draft_of(nodes, node_count)
        return tokens, parents, None  # scores of sentences are not path probabilities


class MixedDrafter(TextDrafter):
    """The `Mixture`, best-first.

    Uses the orders 2 to 4 that the table has, and its suffixes: a suffix array of the corpus, for longer contexts.
    top_count: likeliest tokens of the target after every verified row that become evidence, too (`recycle`).
    """

    def __init__(self, table: TrigramTable, config: NgramConfig):
        super().__init__(table, config)
        self.mixture = Mixture(table, config)
        self.top_count = config.recycle
        self._verified: _Verified | None = None  # the last round's arguments of `recycle`, until it runs

    def commit(self, tree: DraftTree, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        if self.top_count:  # the text with the root, which is not in `_length` yet, has `_length` + 1 tokens
            rows, top_tokens = self._session.top_tokens_of_rows()
            draft_arrays = tree.tokens.cpu().numpy(), np.array(tree.parents, np.int64)
            self._verified = (self._length + 1, *draft_arrays, np.array(rows, np.int64), top_tokens.cpu().numpy())
        super().commit(tree, nodes, tokens)

    def _reset(self) -> None:
        self._verified = None
        self.mixture.reset()

    def _learn_prompt(self, ids: np.ndarray, prompt_end: int) -> None:
        self.mixture.learn_prompt(ids, prompt_end)

    def _learn(self, ids: np.ndarray, start: int, stop: int) -> None:
        self.mixture.learn(ids, start, stop)
        if self._verified is not None:  # last: the weights above must not learn from rows that chose the tokens
            recycle(self.mixture.recycled, ids, *self._verified)
            self._verified = None

    def _search(self, ids: np.ndarray, text_end: int, depth_limit: int, nodes: ngram_search.Nodes) -> _Draft:
        return _draft_of(nodes, self.mixture.search(ids, text_end, min(depth_limit, self.config.depth), nodes))


def _draft_of(nodes: ngram_search.Nodes, node_count: int) -> _Draft:
    tokens, parents = nodes.tree[:, :node_count].copy()
    return tokens, parents, nodes.ranked[:node_count].copy()


def make_ngram_drafter(
    table: TrigramTable, config: NgramConfig, seed: int, tuning: Tuning | None = None
) -> TrigramDrafter | MixedDrafter:
    """A new drafter of `config` over `table`. Raises `UserError` if the table lacks orders that it needs.

    tuning: for nodes=auto; None: the most nodes that auto can choose.
    """
    drafter = MixedDrafter(table, config) if config.evidence == "mixed" else TrigramDrafter(table, config, seed)
    if config.nodes == AUTO and tuning is not None:
        drafter.sizes = BestNodes(tuning)
    return drafter


def open_table(table_path: str, tokenizer_digest: str, vocab_size: int | None = None) -> TrigramTable:
    """The n-gram table in `table_path`.

    tokenizer_digest: `vocabulary_digest` of the target's tokenizer; vocab_size: the target's size, which bounds every
    id. Raises `UserError` for a table of another tokenizer, or a damaged one.
    """
    table = TrigramTable.open(table_path)
    table.require_tokenizer(tokenizer_digest, f"table={table_path}")
    if vocab_size is not None:
        table.require_rows(vocab_size, f"table={table_path}")
    return table


class NgramPlugin(DrafterPlugin[TrigramTable | None]):
    """What is done with n-gram tables. where: a table's directory. A table is None if no method reads it."""

    def identity(self, where: str | None) -> dict[str, object]:
        return {"table": None if where is None else table_digest(Path(where))[:16]}

    def training_record(self, where: str) -> TrainingRecord:
        header, _ = map_table(Path(where))
        corpus_facts = TrainingRecord.of({"data": header.facts.get("corpus")}).data or {}
        data = {key: value for key, value in corpus_facts.items() if key not in ("text", "digest", "bytes")}
        return TrainingRecord(data=data or None)

    def load(self, where: str, target: OpenTarget, methods: Methods, **_: Unpack[ModelOptions]) -> TrigramTable | None:
        if all(method.source != KIND.name for method in methods.values()):
            return None
        return open_table(where, target.vocabulary_digest, target.vocabulary_size)

    def make(
        self, model: TrigramTable | None, method: MethodConfig, streams: Streams, *, drawn: bool, tuning: Tuning | None
    ) -> Drafter:
        assert model is not None  # a method reads it
        return make_ngram_drafter(model, method.ngrams, streams.number("search", bits=64), tuning)
