"""What a stop rule is asked, and what it is told."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draft_models.calibration.head import log_odds


class HasHidden(Protocol):
    """hidden [n, d_D]: the drafter's last hidden states of the rows fed last; target_hidden [1, d_T]: the target's last
    one, at the last verified position."""

    @property
    def hidden(self) -> Tensor: ...
    @property
    def target_hidden(self) -> Tensor: ...


@dataclass(frozen=True)
class Step:
    """One drafted token as a stop rule sees it. Tensors stay on the device until a rule looks at them.

    Of a tree's level it is the node that the target will most likely go through, as far as the structure knows. In an
    OPT-Tree or token graph that is the largest p̂. Where no p̂ is computed it is the level's first node, which is what
    a chain would have drafted. In a fixed shape that is the likeliest child of the likeliest child …. In a drawn
    k-config tree it is the first draw under the first draw ….

    drafted: how many tokens the path to it has, this one included, which is the draft's depth so far.
    token [1]; logits [1, V] that it was taken from.
    source: has the hidden states that the logits were computed from, at `row` of those it was fed last.
    """

    drafted: int
    token: Tensor
    logits: Tensor
    source: HasHidden
    row: int = 0

    @property
    def hidden(self) -> Tensor:
        """The drafter's hidden state [1, d_D] that the token was predicted from."""
        return self.source.hidden[self.row : self.row + 1]

    @property
    def log_probability(self) -> Tensor:
        """log q of the token, [1]: of the logits as they are."""
        return self.logits.float().log_softmax(-1)[0, self.token]

    @property
    def log_odds(self) -> Tensor:
        """log(q / (1 − q)) of the token, [1]."""
        return log_odds(self.log_probability)

    @property
    def entropy(self) -> Tensor:
        """H(q) in nats, [1]: of the logits as they are. A token that is impossible adds nothing."""
        return torch.special.entr(self.logits.float().softmax(-1)).sum(-1)


class StopRule(Protocol):
    """Asked after every drafted token, or level of a tree, told the outcome of every round.

    What was just drafted is always submitted for verification: a rule that could withdraw it would bias the
    emitted law under sampling.
    """

    max_draft: int  # tokens a path of the draft may have at most

    def stop(self, step: Step) -> bool:
        """Whether to verify now."""
        ...

    def observe(self, drafted: int, accepted: int) -> None:
        """The round submitted a draft of depth `drafted`, of which a path of `accepted` tokens was right."""
        ...


def sigmoid(logit: float) -> float:
    """1 / (1 + e^−logit), for any number."""
    return 0.5 * (1.0 + math.tanh(0.5 * logit))
