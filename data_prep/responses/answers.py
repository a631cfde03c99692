"""What a target says: an answer's tokens, and its distribution at each of them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TopK:
    """The target's own distribution (temperature 1) at each of n tokens that it emitted: the likeliest k, and the rest.

    tokens int64 [n]: what was emitted. ids int64 [n, k], logprobs float32 [n, k]: the k likeliest tokens, likeliest
    first. tail float32 [n]: the probability of all others together.
    """

    tokens: Tensor
    ids: Tensor
    logprobs: Tensor
    tail: Tensor

    def first(self, count: int) -> "TopK":
        """The same of the first `count` tokens."""
        return TopK(*(part[:count] for part in self._parts()))

    def then(self, other: "TopK") -> "TopK":
        """These tokens, and the other's after them."""
        return TopK(*(torch.cat(pair) for pair in zip(self._parts(), other._parts(), strict=True)))

    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.tokens, self.ids, self.logprobs, self.tail


@dataclass(frozen=True)
class Answer:
    """What continued one prompt. tokens: an end token included; failure: why there are none, else empty."""

    tokens: tuple[int, ...] = ()
    ended: bool = False  # by an end token, not by the budget
    top: TopK | None = None
    failure: str = ""  # memory | not_a_number | server | retokenised

    @property
    def said(self) -> tuple[int, ...]:
        """The tokens without the end token."""
        return self.tokens[:-1] if self.ended else self.tokens
