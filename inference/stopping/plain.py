"""Stop rules that compare one number with a bound: a length, a probability, an entropy, or a risk.

AdaEDL and SVIP read the entropy H(q), in nats, of the drafter's distribution: a drafter with a broad one is rarely
right. Both bound the acceptance probability from below by 1 − √(c H(q)), and stop when the bound is low.
"""

import math
from dataclasses import dataclass

from outrider.draft_models.calibration_head import CalibrationHead
from outrider.inference.settings.limits import LONGEST_CHAIN
from outrider.inference.sizing.policy import Evidence, Tuning, best_length, trials_in_chain
from outrider.inference.stopping.interface import Step, StopRule, ask, sigmoid

# The threshold's update: the target acceptance rate, the step, and the smoothing of rate and threshold. It follows
# Draft & Verify (arXiv 2309.08168); these values are not checked against a paper.
AIM, STEP, KEPT_RATE, KEPT_THRESHOLD = 0.9, 0.01, 0.5, 0.9


@dataclass
class FixedLength(StopRule):
    """Always draft `max_draft` tokens, or levels: the K of plain speculative decoding."""

    max_draft: int

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.max_draft


class BestLength(StopRule):
    """max_draft=auto: the chain length with the most tokens per second, chosen again before every round.

    It follows from measured costs and the acceptance of each position so far.
    """

    max_draft = LONGEST_CHAIN

    def __init__(self, tuning: Tuning):
        self._costs = tuning.costs
        self._evidence = Evidence(self.max_draft, tuning)
        self.length = best_length(self._evidence.shares(), self._costs)[0]

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.length

    def observe(self, drafted: int, accepted: int) -> None:
        self._evidence.add(trials_in_chain(drafted, accepted))
        self.length = best_length(self._evidence.shares(), self._costs)[0]


@dataclass
class Confidence(StopRule):
    """Stop as soon as the drafter gave its token a probability below `threshold`. One transfer per token.

    This is the rule of transformers' assisted generation, whose threshold is 0.4.
    """

    max_draft: int
    threshold: float

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.max_draft or math.exp(float(step.log_probability)) < self.threshold


@dataclass
class AdaEDL(StopRule):
    """Stop when 1 − √(γ H(q)) is below a threshold λ that adapts to the acceptance (arXiv 2410.18351).

    After a round that accepted the share r of its draft, r̄ ← KEPT_RATE · r̄ + (1 − KEPT_RATE) · r, and λ moves by STEP
    towards longer drafts if r̄ is above AIM, else towards shorter ones, smoothed by KEPT_THRESHOLD.
    """

    max_draft: int
    threshold: float  # λ
    gamma: float
    rate: float = AIM  # r̄

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.max_draft or 1 - math.sqrt(self.gamma * float(step.entropy)) < self.threshold

    def observe(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self.rate = KEPT_RATE * self.rate + (1 - KEPT_RATE) * accepted / drafted
        moved = self.threshold + (STEP if self.rate <= AIM else -STEP)
        self.threshold = KEPT_THRESHOLD * self.threshold + (1 - KEPT_THRESHOLD) * moved


@dataclass
class SVIP(StopRule):
    """Stop when √H(q) is above `threshold` (arXiv 2411.18462)."""

    max_draft: int
    threshold: float

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.max_draft or math.sqrt(float(step.entropy)) > self.threshold


class RejectionRisk(StopRule):
    """SpecDec++ (arXiv 2405.19715): stop when the draft probably contains a wrong token.

    That is when 1 − Π ĉ_j is above `threshold`, ĉ_j the head's probability that the draft's j-th token is right.

    The paper proves that a threshold on this probability is the optimal form, and trains a special head for ĉ. Here ĉ
    is the calibration head's. One transfer per token.
    """

    def __init__(self, head: CalibrationHead, max_draft: int, threshold: float):
        self.head = head
        self.max_draft = max_draft
        self.threshold = threshold
        self._survival = 1.0

    def stop(self, step: Step) -> bool:
        before = self._survival if step.drafted > 1 else 1.0
        self._survival = before * sigmoid(ask(self.head, step))
        return step.drafted >= self.max_draft or 1 - self._survival > self.threshold
