"""Draft sources: what proposes the next token, given the text so far and the nodes drafted in this round."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_models.early_exit import EarlyExit
from draft_models.target import LayerStack
from inference.cache import KVCache
from inference.session import TargetSession
from inference.tree import chain_parents


class Drafter(Protocol):
    """Whatever drafts follow the text with: told the prompt, then every round's outcome."""

    split: int  # target layers it shares: the session it works in is split there

    def begin(self, session: TargetSession) -> None:
        """Called once, with the prompt fed to the session's first half and not yet committed."""
        ...

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """The round ends with the path `tokens` committed, root first; called before the session's own commit.

        rows: the row of each, in the session where the source shares it, else as the source was fed them, with
        −1 (or a row it never had) for a token it was not fed.
        """
        ...


class DraftModel(Drafter, Protocol):
    """An autoregressive drafter: gives next-token distributions after any node of the round's tree."""

    @property
    def hidden(self) -> Tensor:
        """The drafter's last hidden states [n, d] of the rows that were just extended."""
        ...

    @property
    def target_hidden(self) -> Tensor:
        """The target's last hidden state [1, d] at the last verified position."""
        ...

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        """Feed rows (tokens [n], parents as in `TargetSession.feed`); returns next-token logits [n, V] after each."""
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

    hidden: Tensor

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
        hidden = self._run(hidden, start - waiting)[:, waiting:]
        self.hidden = hidden[0]
        return self.drafter.logits(hidden)[0]

    @property
    def target_hidden(self) -> Tensor:
        return self.session.target_hidden

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
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


class SmallLMSource:
    """A small LM that shares nothing with the target but the vocabulary.

    It runs as a session of its own whose first half is the whole model. A row that was verified without
    having been extended is unknown to it; its token waits in `_pending` and goes in, in front of the root, with
    the next extension. Logits are cut or padded with −∞ to the target's vocabulary size.
    """

    split = 0
    hidden: Tensor

    def __init__(self, stack: LayerStack):
        self.stack = stack

    def begin(self, session: TargetSession) -> None:
        self.target = session
        self.vocabulary = session.stack.config.vocab_size
        self.session = TargetSession(self.stack, len(self.stack.layers), session.capacity)
        prompt = session.tokens.to(self.stack.device)
        self.session.feed(prompt, chain_parents(0, len(prompt)))
        self.session.commit(range(len(prompt)))
        self._pending = prompt[:0]

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        waiting = len(self._pending)
        first = self.session.rows == 0
        if first and waiting:
            tokens, parents = torch.cat([self._pending, tokens]), chain_parents(0, waiting + len(parents))
        elif waiting:
            parents = [parent + waiting for parent in parents]
        hidden = self.session.feed(tokens, parents)[:, waiting if first else 0 :]
        self.hidden = hidden[0]
        return fit_vocabulary(self.stack.logits(hidden)[0], self.vocabulary)

    @property
    def target_hidden(self) -> Tensor:
        return self.target.target_hidden

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        waiting = len(self._pending)
        extended = self.session.rows - waiting  # not positive: nothing was, and the pending ones go on waiting
        known = [row for row in rows if 0 <= row < extended]
        unknown = torch.tensor(tokens[len(known) :], dtype=torch.long, device=self.stack.device)
        if extended > 0:
            self.session.commit([*range(waiting), *(row + waiting for row in known)])
            self._pending = unknown
        else:
            self._pending = torch.cat([self._pending, unknown])


def fit_vocabulary(logits: Tensor, size: int) -> Tensor:
    """logits [n, V'] with the vocabulary axis cut to `size`, or padded to it with −∞."""
    if logits.shape[-1] >= size:
        return logits[..., :size]
    return F.pad(logits, (0, size - logits.shape[-1]), value=-torch.inf)
