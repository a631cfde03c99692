"""Stop at an unlikely token: the rule of transformers' assisted generation, whose threshold is 0.4."""

import math
from dataclasses import dataclass

from inference.stopping.interface import Step


@dataclass
class Confidence:
    """Verify as soon as the drafter gave its token a probability below `threshold`. One transfer per token."""

    max_draft: int
    threshold: float

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.max_draft or math.exp(float(step.log_probability)) < self.threshold

    def observe(self, drafted: int, accepted: int) -> None:
        pass
