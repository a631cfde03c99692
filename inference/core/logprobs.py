"""The target's log-probabilities of the tokens of a text, from the logits by which they are selected or verified.

The log-probabilities are at temperature 1, before any penalty, top_k, top_p or min_p. A selector chooses tokens from
the target's logits, of the next token or along a draft tree.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from outrider.inference.core.rounds import Round
from outrider.inference.core.sampling import Sampler
from outrider.inference.core.token_selector import TokenSelector, VerifiedDraft
from outrider.inference.core.tree import DraftTree
from outrider.inference.settings.sampling import Verification


class TokenScores(NamedTuple):
    """The log-probability of a token, and those of the likeliest tokens in its place by id, likeliest first."""

    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class ScoredRound(Round):
    """A round with the scores of its `tokens`."""

    scores: tuple[TokenScores, ...] = ()


class ScoringSelector(TokenSelector):
    """A `TokenSelector` that also records log-probabilities, of its tokens and of the `top` likeliest ones."""

    def __init__(self, sampler: Sampler | None, generator: random.Random | None, rule: Verification, *, top: int):
        super().__init__(sampler, generator, rule)
        self.takes_argmax = False  # else plain decoding would bypass the selector
        self._top = top
        self._queue = deque[TokenScores]()  # of tokens in the order of the text, until `score_rounds` takes them

    def next_token(self, logits: Tensor) -> Tensor:
        token = super().next_token(logits)
        self._score(logits, [int(token)])
        return token

    def verify(self, tree: DraftTree, logits: Tensor) -> VerifiedDraft:
        verified = super().verify(tree, logits)
        tokens = [*(verified.tokens[node] for node in verified.nodes), verified.bonus]
        self._score(logits[[0, *(node + 1 for node in verified.nodes)]], tokens)  # row 0 is the root's, then the nodes'
        return verified

    def score_rounds(self, rounds: Iterator[Round]) -> Iterator[ScoredRound]:
        """The rounds that this selector decides, with the scores of their tokens."""
        for r in rounds:
            yield ScoredRound(**vars(r), scores=tuple(self._queue.popleft() for _ in r.tokens))

    def _score(self, logits: Tensor, tokens: Sequence[int]) -> None:
        """Queue the scores of `tokens` [n], each by its row of logits [n, V]; nothing if the logits are not finite."""
        if not 0 <= tokens[-1] < logits.shape[-1]:  # logits not finite: the loop verifies the root alone, or raises
            return
        logprobs = logits.float().log_softmax(-1)
        top, ids = logprobs.topk(self._top, -1)
        for logprob, row, top_ids in zip(logprobs[range(len(tokens)), tokens], top.tolist(), ids.tolist(), strict=True):
            self._queue.append(TokenScores(float(logprob), dict(zip(top_ids, row, strict=True))))
