"""Thompson sampling on the acceptance observed so far."""

import random

from inference.stopping.interface import Step


class BetaThompson:
    """Thompson sampling on "is the next draft token right?" with a Beta posterior (EESD, Algorithm 2).

    After each drafted token θ ~ Beta(α, β) and χ ~ Bernoulli(θ). χ = 0 ends the draft. Say |Q_d| tokens (of a tree:
    levels) were drafted and |Q_v| accepted. Then n = min(|Q_v| + 1, |Q_d|) were tested, α += r and β += n − r, and

    - update="natural": r = |Q_v|. Each tested token is one Bernoulli trial. Example: of 5 tokens 3 are accepted, so 4
      were tested, α += 3 and β += 1;
    - update="printed": r = max(|Q_v| − 1, 0) as in the paper, clamped because α must stay positive. It charges a
      failure even to a fully accepted draft, so it drafts shorter.

    discount: the factor by which a round reduces the weight of this generation's earlier trials. Acceptance varies
    along a text, so with many old trials the posterior is overconfident. The paper's value is 1.
    """

    def __init__(
        self, max_draft: int, alpha: float, beta: float, update: str, generator: random.Random, discount: float = 1.0
    ):
        self.max_draft = max_draft
        self.alpha, self.beta = alpha, beta
        self.update, self.discount = update, discount
        self._prior = alpha, beta
        self._random = generator

    def stop(self, step: Step) -> bool:
        theta = self._random.betavariate(self.alpha, self.beta)
        return step.drafted >= self.max_draft or self._random.random() >= theta

    def observe(self, drafted: int, accepted: int) -> None:
        tested = min(accepted + 1, drafted)
        right = accepted if self.update == "natural" else max(accepted - 1, 0)
        alpha, beta = self._prior
        self.alpha = alpha + self.discount * (self.alpha - alpha) + right
        self.beta = beta + self.discount * (self.beta - beta) + tested - right
