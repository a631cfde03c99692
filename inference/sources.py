"""Draft sources: what proposes the next token, given the text so far and the nodes drafted in this round."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from draft_models.early_exit import EarlyExit
from inference.cache import KVCache
from inference.session import TargetSession


class DraftModel(Protocol):
    """A draft source for one sequence."""

    split: int  # target layers it shares: the session it works in is split there

    def begin(self, session: TargetSession) -> None:
        """Called once, with the prompt fed to the session's first half and not yet committed."""
        ...

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        """Feed rows (tokens [n], parents as in `TargetSession.feed`); returns next-token logits [n, V] after each."""
        ...

    def commit(self, rows: Sequence[int]) -> None:
        """The round ends with `rows` accepted; called before the session's own commit."""
        ...


class EarlyExitSource:
    """EESD's drafter: an exit layer on the hidden states of the target's first `split` layers (EESD eq. 1).

    The exit layer has a cache of its own. A row that was verified without having been extended (the last
    token of a draft) has no entry there yet; its hidden state waits in `_pending` and goes in with the next
    extension.
    """

    def __init__(self, drafter: EarlyExit):
        self.drafter = drafter
        self.split = drafter.exit_layer

    def begin(self, session: TargetSession) -> None:
        self.session = session
        self.cache = KVCache(range(self.split, self.split + 1), session.capacity)
        self._pending = session.hidden
        self._run(self._pending, start=0)
        self._pending = self._pending[:, :0]

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        start = self.session.rows
        hidden = self.session.feed(tokens, parents)
        waiting = self._pending.shape[1]
        if waiting:
            hidden = torch.cat([self._pending, hidden], dim=1)
            self._pending = self._pending[:, :0]
        hidden = self._run(hidden, start - waiting)
        return self.drafter.logits(hidden[:, waiting:])[0]

    def commit(self, rows: Sequence[int]) -> None:
        base = self.session.base
        extended = max(0, self.cache.length - base)
        known = [row for row in rows if row < extended]
        if len(known) < len(rows):
            fresh = self.session.hidden[:, list(rows[len(known) :])]
            self._pending = torch.cat([self._pending, fresh], dim=1)
        if self.cache.length > base:
            self.cache.keep(base, known)

    def _run(self, hidden: Tensor, start: int) -> Tensor:
        stop = start + hidden.shape[1]
        window = self.drafter.window
        masks = self.session.masks(start, stop)
        hidden = self.drafter.layer(
            hidden,
            attention_mask=masks[window],
            past_key_values=self.cache,
            position_embeddings=self.session.rotary(start, stop),
        )
        self.cache.advance(hidden.shape[1])
        return hidden
