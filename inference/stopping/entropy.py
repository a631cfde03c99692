"""Stop when the drafter's distribution is broad: AdaEDL and SVIP. Both transfer one entropy per token.

A drafter with a broad distribution is rarely right. Both rules bound the acceptance probability from below by
1 − √(c H(q)), H the entropy in nats, and stop when the bound is low.
"""

import math
from dataclasses import dataclass

from inference.stopping.interface import Step

# The threshold's update: the target acceptance rate, the step, and the smoothing of rate and threshold. It follows
# Draft & Verify (arXiv 2309.08168); these values are not checked against a paper.
AIM, STEP, KEPT_RATE, KEPT_THRESHOLD = 0.9, 0.01, 0.5, 0.9


@dataclass
class AdaEDL:
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
class SVIP:
    """Stop when √H(q) is above `threshold` (arXiv 2411.18462)."""

    max_draft: int
    threshold: float

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.max_draft or math.sqrt(float(step.entropy)) > self.threshold

    def observe(self, drafted: int, accepted: int) -> None:
        pass
