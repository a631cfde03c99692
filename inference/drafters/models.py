"""Draft sources: what proposes the next token, given the text so far and the nodes drafted in this round."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_models.early_exit import EarlyExit
from draft_models.small_lm import SmallLM
from draft_models.target.architectures import position_limit
from draft_models.target.attention import Band
from draft_models.target.whole_model import PlainLM, RowCache
from inference.rows import Rows, unpack
from inference.session import TargetSession
from inference.tree import chain_parents
from outrider.errors import UserError


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
        """Feed rows (tokens [n], parents as in `TargetSession.feed`); returns next-token logits [n, V] after each.

        `hidden` and the logits hold until the next call.
        """
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
        self.cache = session.exit_cache(self.drafter)
        prompt = session.hidden
        session.run_exit(self.drafter, prompt, 0, self.cache, wanted=0)
        self._pending = prompt[:, :0]

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        start = self.session.rows
        hidden = self.session.feed(tokens, parents)
        waiting = self._pending.shape[1]
        if waiting:
            hidden = torch.cat([self._pending, hidden], dim=1)
            self._pending = self._pending[:, :0]
        hidden, logits = self.session.run_exit(self.drafter, hidden, start - waiting, self.cache, len(parents))
        self.hidden = hidden[0, waiting:]
        return logits[0]

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


class SmallLMSource:
    """A small LM that shares nothing with the target but the vocabulary.

    It runs as a session of its own, over all its layers or by its own forward. A row that was verified without
    having been extended is unknown to it; its token waits in `_pending` and goes in, in front of the root, with
    the next extension. Logits are cut or padded with −∞ to the target's vocabulary size.
    """

    split = 0
    hidden: Tensor

    def __init__(self, lm: SmallLM):
        self.lm = lm

    def begin(self, session: TargetSession) -> None:
        """Raises `UserError` where the text may grow beyond the positions that the model has learned."""
        limit = position_limit(self.lm.config)
        if limit is not None and session.context > limit:
            raise UserError(
                f"prompt + max_new_tokens = {session.context} positions, but the drafter has learned only {limit}; "
                "shorten one of them, or use a drafter with a longer context"
            )
        self.target = session
        self.vocabulary = session.stack.config.vocab_size
        prompt = session.tokens.to(self.lm.device)
        self.session: TargetSession | PlainSession
        if isinstance(self.lm, PlainLM):
            self.session = PlainSession(self.lm, prompt, session.capacity)
        else:
            self.session = session.beside(self.lm)
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
        skip = waiting if first else 0
        hidden, logits = self.session.extend(tokens, parents, len(parents) - skip)
        self.hidden = hidden[skip:]
        return fit_vocabulary(logits, self.vocabulary)

    @property
    def target_hidden(self) -> Tensor:
        return self.target.target_hidden

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        waiting = len(self._pending)
        extended = self.session.rows - waiting  # not positive: nothing was, and the pending ones go on waiting
        known = [row for row in rows if 0 <= row < extended]
        unknown = torch.tensor(tokens[len(known) :], dtype=torch.long, device=self.lm.device)
        if extended > 0:
            self.session.commit([*range(waiting), *(row + waiting for row in known)])
            self._pending = unknown
        else:
            self._pending = torch.cat([self._pending, unknown])


class PlainSession:
    """What `SmallLMSource` needs of a `TargetSession`, over a model that is run by its own forward."""

    def __init__(self, lm: PlainLM, prompt: Tensor, capacity: int):
        self.lm = lm
        self.cache = RowCache(capacity)
        self.base = len(prompt)
        self._round = Rows()
        places = torch.arange(len(prompt), device=lm.device)
        for start in range(0, len(prompt), Band.BLOCK):  # a mask of all of a long text would be its square
            part, seen = slice(start, start + Band.BLOCK), places[: start + Band.BLOCK]
            lm.rows(prompt[part], places[part], seen <= places[part, None], self.cache, last_only=True)

    @property
    def rows(self) -> int:
        """Rows of this round that have been fed."""
        return len(self._round)

    def extend(self, tokens: Tensor, parents: Sequence[int], wanted: int) -> tuple[Tensor, Tensor]:
        """Add rows as `TargetSession.extend` does, with the same results."""
        start, device = self.rows, self.lm.device
        self._round.add(parents)
        lineages, depths = self._round.lineages[start:], self._round.depths[start:]
        closure = torch.from_numpy(unpack(lineages, self.rows)).to(device)
        visible = torch.cat([closure.new_ones(len(parents), self.base), closure], dim=1)
        positions = self.base + torch.tensor(depths, device=device)
        hidden, logits = self.lm.rows(tokens, positions, visible, self.cache)
        return hidden, logits[-wanted:]

    def commit(self, rows: Sequence[int]) -> None:
        """End the round: keep `rows`, an ascending path from row 0, and drop the others."""
        self.cache.keep(self.base, rows)
        self.base += len(rows)
        self._round = Rows()


def fit_vocabulary(logits: Tensor, size: int) -> Tensor:
    """logits [n, V'] with the vocabulary axis cut to `size`, or padded to it with −∞."""
    if logits.shape[-1] >= size:
        return logits[..., :size]
    return F.pad(logits, (0, size - logits.shape[-1]), value=-torch.inf)
