"""What draft models share: they run beside the target's session, and some draft several tokens in one pass.

A session runs a model over one text. A row is a token that runs in a round of decoding; the first one is the root, the
last token of the text, whose parent is `ROOT`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.inference.core.drafter import DraftModel
from outrider.inference.core.session import Session
from outrider.inference.core.tree import ROOT


class BesideTarget:
    """The defaults of draft models: they share no layer of the target, and read no aux hidden states."""

    split = 0  # first layers of the target that the draft model runs
    aux_layers: tuple[int, ...] = ()  # subclasses also set `predicted`, the ids [K] of the draft vocabulary, or None
    target_session: Session  # of the text in the target
    hidden: Tensor  # [n, d], of the rows just extended

    @property
    def target_hidden(self) -> Tensor:
        return self.target_session.target_hidden


class PassModel(DraftModel, Protocol):
    """A draft model that was trained to predict after masks too."""

    def run_pass(self, tokens: Tensor) -> Tensor:
        """Run root and masks [n] and drop the masks; returns the logits after each [n, K], and sets `hidden` [n, d]."""


class OnePass:
    """The draft model that drafts `pass_tokens` tokens in one pass of `model` (PARD, arXiv 2504.18583).

    The pass of a round is over the root and, for each token after the first, the id `mask`. The logits after a row
    depend on its depth alone: the i-th token of every path is from the marginal distribution of the text's i-th next
    token. So no other row is run, and rows deeper than the pass have its last logits. The caches drop the masks.
    """

    hidden: Tensor

    def __init__(self, model: PassModel, mask: int, pass_tokens: int):
        self.model, self.mask, self.pass_tokens = model, mask, pass_tokens
        self.split, self.aux_layers, self.predicted = model.split, model.aux_layers, model.predicted

    @property
    def target_hidden(self) -> Tensor:
        return self.model.target_hidden

    @property
    def pass_rows(self) -> int:
        """The rows of a pass, the root included."""
        return self.pass_tokens

    def begin(self, session: Session) -> None:
        self._session = session
        self.model.begin(session)

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        if parents[0] == ROOT:
            free_count = self._session.context - self._session.base  # positions that the text may still reach
            mask_ids = tokens.new_full((max(0, min(self.pass_rows, free_count) - 1),), self.mask)  # [n − 1]
            self._logits = self.model.run_pass(torch.cat([tokens, mask_ids]))  # [n, K] by depth
            self._hidden = self.model.hidden  # [n, d] by depth
            self._depths: list[int] = []  # of the round's rows
        depths = [0 if parent == ROOT else self._depths[parent] + 1 for parent in parents]
        self._depths += depths
        row_indices = [min(depth, len(self._logits) - 1) for depth in depths]
        self.hidden = self._hidden[row_indices]
        return self._logits[row_indices]

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        self.model.commit(rows, tokens)
