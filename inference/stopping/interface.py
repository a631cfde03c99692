"""The interface of a stop rule, what it may ask of a drafted token and of its generation, and the plainest rule.

In a round a drafter drafts a chain or a tree of tokens, and one pass of the target verifies the draft. After every
drafted token, or level of a tree, the stop rule decides whether to verify now. q: the drafter's distribution.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from outrider.base.streams import Streams
from outrider.draft_models.calibration_head import AcceptanceHead, log_odds
from outrider.inference.sizing.policy import Tuning

# (logits [n, V], the numbers of the n fed tokens that the logits follow) -> draft distributions q [n, V].
ToProbs = Callable[[Tensor, Sequence[int]], Tensor]
Value = TypeVar("Value")


class Source(Protocol):
    """A draft model in one round: a structure feeds it, a stop rule reads it. A row: a token that is fed to the model.

    hidden [n, d_D]: the drafter's last hidden states at the n rows fed last; target_hidden [1, d_T]: the target's last
    hidden state at the last verified position. to_probs: turns logits into draft distributions; None under greedy
    decoding. extend: feeds tokens [n], each after the row `parents[i]` of this round (−1: none); returns the next
    token's logits after each [n, V].
    """

    @property
    def hidden(self) -> Tensor: ...
    @property
    def target_hidden(self) -> Tensor: ...
    @property
    def to_probs(self) -> ToProbs | None: ...
    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor: ...


@dataclass(frozen=True)
class Step:
    """One drafted token, the input of a stop rule. Tensors stay on the device until a rule reads them.

    A level of a tree is represented by the node with the largest p̂, the estimated probability that the target reaches
    a node. If the tree has no p̂, it is the level's first node, which a chain would have drafted: the most likely child
    of the most likely child … in a fixed shape, the first draw under the first draw … in a tree of sampled tokens.
    """

    drafted: int  # tokens on the path to the token, including itself: the draft's depth so far
    token: Tensor  # [1], its id
    logits: Tensor  # [1, V], which predicted the token
    source: Source  # holds the hidden states of these logits
    row: int = 0  # their index among the rows that `source` was fed last

    @property
    def hidden(self) -> Tensor:
        """The drafter's hidden state [1, d_D] from which the token was predicted."""
        return self.source.hidden[self.row : self.row + 1]

    @property
    def log_probability(self) -> Tensor:
        """log q of the token, [1], from the unprocessed logits."""
        return self.logits.float().log_softmax(-1)[0, self.token]

    @property
    def log_odds(self) -> Tensor:
        """log(q / (1 − q)) of the token, [1]."""
        return log_odds(self.log_probability)

    @property
    def entropy(self) -> Tensor:
        """H(q) in nats, [1], from the unprocessed logits. Impossible tokens add nothing."""
        return torch.special.entr(self.logits.float().softmax(-1)).sum(-1)


class StopRule(Protocol):
    """Decides after every drafted token or tree level, and observes the outcome of every round.

    The token just drafted is always submitted for verification: a rule that could withdraw it would bias the
    distribution of sampled text.
    """

    max_draft: int  # most tokens on a path of the draft

    def stop(self, step: Step) -> bool:
        """Whether to verify now."""
        ...

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn from a round: its draft had depth `drafted`, and `accepted` of its tokens were accepted."""
        return

    def gain(self) -> float | None:
        """Tokens expected of the next draft, less those of plain decoding in its time; None unless the rule has costs
        and drafts a chain."""
        return None


def sigmoid(logit: float) -> float:
    """1 / (1 + e^−logit), for any number."""
    return 0.5 * (1.0 + math.tanh(0.5 * logit))


def ask_head(head: AcceptanceHead, step: Step) -> float:
    """The logit of `head` for the token just drafted. One transfer from the device."""
    position = torch.tensor([step.drafted], device=step.hidden.device)
    return float(head(step.source.target_hidden, step.hidden, position, step.log_probability))


@dataclass(frozen=True)
class RuleInputs:
    """What a rule may ask besides its settings. A rule is made for one generation, and learns from its rounds."""

    streams: Streams  # the generation's random streams
    calibration_head: AcceptanceHead | None = None  # the drafter's, if it has one: estimates acceptance
    measured: Tuning | None = None  # the times of drafting and of the target's passes, if they were measured
    drawn: bool = False  # whether drafts are sampled from q; otherwise they are the most likely tokens

    @property
    def head(self) -> AcceptanceHead:
        """The calibration head. Raises `ValueError` if there is none."""
        return require_value(self.calibration_head, "this stop rule needs the drafter's calibration head")

    @property
    def tuning(self) -> Tuning:
        """The measured costs. Raises `ValueError` without them."""
        return require_value(self.measured)


class FixedLength(StopRule):
    """Always draft `max_draft` tokens, or levels: the K of plain speculative decoding."""

    def __init__(self, max_draft: int, *_: object):  # every rule is made of (max_draft, settings, inputs)
        self.max_draft = max_draft

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.max_draft


def require_value(
    optional: Value | None, message: str = "what is chosen by costs needs measured ones (inference.measure.probe)"
) -> Value:
    """`optional`; raises `ValueError` with `message` for None."""
    if optional is None:
        raise ValueError(message)
    return optional
