"""Stop when the draft probably contains a wrong token: SpecDec++ (arXiv 2405.19715)."""

from draft_models.calibration.head import CalibrationHead
from inference.stopping.calibrated import ask
from inference.stopping.interface import Step, sigmoid


class RejectionRisk:
    """Stop when 1 − Π ĉ_j is above `threshold`, ĉ_j the head's probability that the draft's j-th token is right.

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

    def observe(self, drafted: int, accepted: int) -> None:
        pass
