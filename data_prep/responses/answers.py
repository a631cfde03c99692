"""A target's answers: their tokens, its distribution at each token, and the numbers that they are drawn by."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.streams import Streams


@dataclass(frozen=True)
class TopK:
    """The target's own distribution (temperature 1) at each of n emitted tokens: the top k, and the rest.

    tokens int64 [n]: the emitted tokens. ids int64 [n, k], logprobs float32 [n, k]: the k most likely tokens, most
    likely first. tail float32 [n]: the total probability of all others.
    """

    tokens: Tensor
    ids: Tensor
    logprobs: Tensor
    tail: Tensor

    def at(self, places: slice | Tensor) -> "TopK":
        """The same for the tokens at `places`."""
        return TopK(*(part[places] for part in self._parts()))

    def then(self, other: "TopK") -> "TopK":
        """These tokens, followed by those of `other`."""
        return TopK(*(torch.cat(pair) for pair in zip(self._parts(), other._parts(), strict=True)))

    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.tokens, self.ids, self.logprobs, self.tail


@dataclass(frozen=True)
class Answer:
    """The continuation of one prompt. tokens: with the end token; failure: why there are none, else empty."""

    tokens: tuple[int, ...] = ()
    ended: bool = False  # by an end token, not by the budget
    top: TopK | None = None
    retokenised: bool = False  # from a text of a server that gave no ids
    failure: str = ""  # memory | not_a_number | server | retokenised

    @property
    def said(self) -> tuple[int, ...]:
        """The tokens without the end token."""
        return self.tokens[:-1] if self.ended else self.tokens


def uniforms(seed: int, identity: str, turn: int, count: int) -> Tensor:
    """`count` uniform float64 numbers in [0, 1): fixed by the other arguments; a smaller count gives a prefix."""
    return torch.from_numpy(Streams(seed, identity).arrays("response", turn).random(count))
