"""Ways of drafting a round: a structure with its settings and, where it has one, its stop rule."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from inference.stop_rules import Step, StopRule
from inference.tree import DraftTree, chain_parents


class Extends(Protocol):
    """What drafting needs of a source (see `inference.sources.DraftModel`)."""

    @property
    def hidden(self) -> Tensor: ...
    @property
    def target_hidden(self) -> Tensor: ...
    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor: ...


class Structure(Protocol):
    """Shapes one round's draft."""

    max_rows: int  # rows a round may add to the caches, besides the root

    def draft(self, source: Extends, root: Tensor, limit: int) -> DraftTree:
        """A draft under `root` [1] whose paths have at most `limit` nodes; empty at limit 0."""
        ...

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """The round's draft and the nodes of it that were accepted."""
        ...


class Chain:
    """One token after the other until the stop rule says so."""

    def __init__(self, rule: StopRule):
        self.rule = rule
        self.max_rows = rule.max_draft

    def draft(self, source: Extends, root: Tensor, limit: int) -> DraftTree:
        tokens = [root]
        while len(tokens) <= min(limit, self.rule.max_draft):
            logits = source.extend(tokens[-1], (len(tokens) - 2,))
            tokens.append(logits.argmax(-1))
            step = Step(len(tokens) - 1, tokens[-1], logits, source.hidden, source.target_hidden)
            if self.rule.stop(step):
                break
        n = len(tokens) - 1
        fed = (*range(1, n), -1)[:n]  # the last token never is
        return DraftTree(torch.cat(tokens)[1:], chain_parents(0, n), fed)

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        self.rule.observe(len(tree), len(accepted))
