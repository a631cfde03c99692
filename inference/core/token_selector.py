"""The choice of tokens from the target's logits, greedy or sampled: of the next token, or along a draft tree."""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from outrider.inference.core.ops import likeliest
from outrider.inference.core.sampling import Sampler, branches
from outrider.inference.core.session import Session
from outrider.inference.core.tree import DraftTree
from outrider.inference.core.verify import (
    Matching,
    NodeRule,
    RandomChance,
    Rejection,
    verify_block,
    verify_greedy,
    verify_sampled,
)

if TYPE_CHECKING:
    from outrider.inference.settings.sampling import Verification


class VerifiedDraft(NamedTuple):
    """The outcome of a draft's verification."""

    tokens: list[int]  # of all nodes of the draft
    nodes: list[int]  # numbers of the accepted nodes, a path from the root
    next_root: Tensor  # [1]: the target's own token after the path
    bonus: int  # the same token on the host


class TokenSelector:
    """Selects the next token after the text, and verifies drafts, for one generation.

    sampler: logits → probabilities; None: plain greedy.
    generator: the source of random numbers; required if the sampler samples.
    rule: how sampled candidates are verified: "exact" (without or with replacement), "naive" or "block" (see `verify`).
    takes_argmax: tokens are the argmax of unprocessed logits.
    reads_context: the sampler's processors read the text, as penalties do; only then `text` [positions] is kept.
    reads_ids: drafts are drawn by probabilities that depend on the ids of tokens (see `Sampler`).

    For non-finite target logits the chosen id is outside the vocabulary.
    """

    def __init__(
        self, sampler: Sampler | None = None, generator: random.Random | None = None, rule: "Verification" = "exact"
    ):
        self.sampler = sampler
        self.takes_argmax = sampler is None
        self.greedy = sampler is None or sampler.greedy
        self.reads_context = sampler is not None and sampler.reads_context
        self.reads_ids = sampler is not None and not self.greedy and sampler.reads_ids
        self.rule = rule
        if not self.greedy:
            if generator is None:
                raise ValueError("sampling needs a generator")
            self.chance = RandomChance(generator)

    def begin(self, session: Session, prompt: Sequence[int]) -> None:
        self._device = session.device
        if self.reads_context:
            self.text = torch.tensor(prompt, device=self._device)

    def next_token(self, logits: Tensor) -> Tensor:
        """The token [1] after the text, from its logits [1, V]."""
        contexts = [self.text] if self.reads_context else None
        if self.greedy:
            token = likeliest(self._scores(logits, contexts))
        else:
            token = self._token(self.chance.choose(self.probabilities(logits, contexts)[0]))
        self._extend_text(token)
        return token

    def verify(self, tree: DraftTree, logits: Tensor) -> VerifiedDraft:
        """Verify a draft of n nodes under the last token of the text, the root, by the target's logits [n + 1, V].

        Greedy: one transfer from the device.
        """
        # The text up to the root and to each node.
        contexts = branches(self.text, tree.tokens, tree.parents) if self.reads_context else None
        if self.greedy:
            argmax_ids = likeliest(self._scores(logits, contexts))
            ids = (torch.cat([tree.tokens, argmax_ids]) if len(tree) else argmax_ids).tolist()
            tokens = ids[: len(tree)]
            accepted_nodes, bonus = verify_greedy(tokens, tree.parents, ids[len(tree) :])
            last_row = accepted_nodes[-1] + 1 if accepted_nodes else 0
            next_root = argmax_ids[last_row : last_row + 1]
        else:
            tokens = tree.tokens.tolist()
            p = self.probabilities(logits, contexts)
            if tree.q and self.rule == "block":
                accepted_nodes, bonus = verify_block(tokens, tree.q, p, self.chance)
            else:
                is_naive = self.rule == "naive"
                rule: NodeRule = Rejection(replace=bool(tree.draws)) if tree.q and not is_naive else Matching()
                draws = None if is_naive else tree.draws
                accepted_nodes, bonus = verify_sampled(tokens, tree.parents, tree.q, p, rule, self.chance, draws=draws)
            next_root = self._token(bonus)
        if self.reads_context and 0 <= bonus < logits.shape[-1]:  # else decoding ends with an error
            self._extend_text(tree.tokens[accepted_nodes], next_root)
        return VerifiedDraft(tokens, accepted_nodes, next_root, bonus)

    def probabilities(self, logits: Tensor, contexts: Sequence[Tensor] | None) -> Tensor:
        """The distribution [n, V] of the token after each row, for target and drafter alike."""
        assert self.sampler is not None
        return self.sampler.probabilities(logits, contexts)

    def _scores(self, logits: Tensor, contexts: Sequence[Tensor] | None) -> Tensor:
        return logits if self.sampler is None else self.sampler.scores(logits, contexts)

    def _token(self, token: int) -> Tensor:
        return torch.tensor([token], device=self._device)

    def _extend_text(self, *tokens: Tensor) -> None:
        if self.reads_context:
            self.text = torch.cat([self.text, *tokens])
