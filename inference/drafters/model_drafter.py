"""`ModelDrafter`, the drafter of a draft model and a structure, which gives drafts their shape (chain, tree)."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.draft_models.targets.model_spec import UNLIMITED
from outrider.draft_models.targets.narrowed import spread_logits
from outrider.inference.core.drafter import Drafter, DraftModel, Stopwatch
from outrider.inference.core.session import Session
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.core.tree import DraftTree
from outrider.inference.drafters.draft_model import OnePass
from outrider.inference.shapes.factory import Chain, Structure
from outrider.inference.sizing.costs import Allowance


class ModelDrafter(Drafter):
    """A drafter that combines a draft model and a structure.

    allowance: skips drafting in rounds whose drafts would not pay, by the gain that the stop rule expects; None: never.
    The model catches up with the tokens of such rounds when it drafts again. copies: drafts first. A round with its
    draft skips the model, and structure and allowance learn nothing from such a round.
    """

    def __init__(
        self, model: DraftModel, structure: Structure, allowance: Allowance | None = None, copies: Drafter | None = None
    ):
        self.model, self.structure, self.allowance, self.copies = model, structure, allowance, copies
        self.split, self.aux_layers, self.max_rows = model.split, model.aux_layers, structure.max_rows
        if isinstance(model, OnePass):
            structure.max_depth = min(structure.max_depth, model.pass_tokens)
            # Shorten the pass to the drafted tokens; of a tree only an unlimited pass, as else all rows cost little.
            if isinstance(structure, Chain) or model.pass_tokens == UNLIMITED:
                model.pass_tokens = structure.steps(model.pass_tokens)

    @property
    def totals(self) -> Mapping[str, float]:
        return self.structure.totals

    def begin(self, session: Session, selector: TokenSelector, watch: Stopwatch) -> None:
        self._session = session
        by_index = not (selector.reads_ids or self.structure.reads_root)  # both need ids of tokens
        self._source = TimedModel(self.model, selector, watch, session.vocabulary, by_index=by_index)
        self.model.begin(session)
        if self.copies is not None:
            self.copies.begin(session, selector, watch)

    def draft(self, root: Tensor, limit: int) -> DraftTree:
        self._source.begin_round()
        if self.copies is not None:
            copied_tree = self.copies.draft(root, self.structure.steps(limit))  # no deeper than the model drafts
            if len(copied_tree):
                return copied_tree
        if self.allowance is not None and not self.allowance.opens_round(self.structure.rule.gain()):
            return DraftTree(root[:0], (), ())
        return self._source.with_ids(self.structure.draft(self._source, root, limit))

    def commit(self, tree: DraftTree, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        uses_target = self.model.split or self.model.aux_layers  # its rows are the session's then, else its own
        rows = self._session.path(nodes) if uses_target else [0, *(tree.rows[node] for node in nodes)]
        self.model.commit(rows, tokens)
        if self.copies is not None:
            self.copies.commit(tree, nodes, tokens)
        pass_sizes = self._source.fed
        if len(tree) and not pass_sizes:  # it was copied
            return
        if pass_sizes or self.allowance is None:  # not after a round that skipped drafting
            self.structure.observe(tree, nodes)
        if self.allowance is not None:
            self.allowance.observe(pass_sizes, len(tree), len(nodes) + 1)  # + 1: the target's own token


class TimedModel:
    """A draft model as a structure sees it: times passes, and tracks the text up to each row, a token that it ran.

    by_index: for a model with a draft vocabulary, logits are [n, K] over that vocabulary, and the drafted tokens that
    it is fed are indices into it: choosing among a sixth of the tokens takes a sixth of the time. `with_ids` converts
    such a draft to token ids, and its q to [V]. Otherwise logits are [n, V] over the target's `vocabulary`, very low
    for other tokens.
    """

    def __init__(self, model: DraftModel, selector: TokenSelector, watch: Stopwatch, vocabulary: int, by_index: bool):
        self._draft_model, self._vocabulary = model, vocabulary
        self._ids = model.predicted if by_index else None
        self._selector, self._watch = selector, watch
        self.to_probs = None if selector.greedy else self._probabilities  # None: q is the softmax of the logits

    @property
    def hidden(self) -> Tensor:
        return self._draft_model.hidden

    @property
    def target_hidden(self) -> Tensor:
        return self._draft_model.target_hidden

    def begin_round(self) -> None:
        self._contexts: list[Tensor] = []  # the text up to each row, of this round
        self.fed: list[int] = []  # the number of rows of every pass
        self._starts: list[float] = []  # of every pass, in seconds since the round began

    def laps(self) -> list[tuple[int, float]]:
        """The rows of every pass of this round, and the seconds from it to the next one, or until now."""
        pass_spans = itertools.pairwise([*self._starts, self._watch.seconds])
        return [(row_count, end - start) for row_count, (start, end) in zip(self.fed, pass_spans, strict=True)]

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        if self._ids is not None and self.fed:  # the root, fed first, is a token id
            tokens = self._ids[tokens]
        if self._selector.reads_context:
            for index, parent in enumerate(parents):  # the root, without a parent, is the text's last token
                parent_context = self._contexts[parent] if parent >= 0 else self._selector.text[:-1]
                self._contexts.append(torch.cat([parent_context, tokens[index : index + 1]]))
        self.fed.append(len(tokens))
        previous_part = self._watch.begin("draft")
        self._starts.append(self._watch.seconds)
        logits, draft_vocab = self._draft_model.extend(tokens, parents), self._draft_model.predicted
        if draft_vocab is not None and self._ids is None:
            logits = spread_logits(logits, draft_vocab, self._vocabulary)
        self._watch.begin(previous_part)
        return logits

    def with_ids(self, tree: DraftTree) -> DraftTree:
        """`tree`, which was drafted with this source, with token ids and with q over the target's vocabulary."""
        id_map = self._ids
        if id_map is None:
            return replace(tree, source="model")
        q = {node: row.new_zeros(self._vocabulary).index_copy_(0, id_map, row) for node, row in tree.q.items()}  # [V]
        return replace(tree, tokens=id_map[tree.tokens], q=q, source="model")

    def _probabilities(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        contexts = [self._contexts[row] for row in rows] if self._selector.reads_context else None
        probs = self._selector.probabilities(logits, contexts)
        return probs.nan_to_num_(1 / logits.shape[-1])  # rows of NaN become uniform, so that tokens can be drawn
