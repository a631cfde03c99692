"""EESD's stop rules: Thompson sampling on observed acceptance, alone or combined with a calibration head's estimate."""

import random

from outrider.draft_models.calibration_head import CalibrationHead
from outrider.inference.stopping.interface import Step, StopRule, ask, sigmoid


class BetaThompson(StopRule):
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


class Posterior:
    """The posterior of θ, the probability that the next draft token is right (EESD, Algorithm 3).

    θ ~ N(μ, σ²) with μ = w θ_M + (1 − w) θ̂, w = σ_S²/(nσ_M² + σ_S²), σ² = σ_M²σ_S²/(σ_S² + nσ_M²). θ_M is the
    calibration head's probability of this token, θ̂ the observed acceptance, n the number of verifications. So the head
    dominates at first (w = 1 at n = 0), observation later.

    mean="sample": θ̂ is the share of tested tokens that were right; θ̂_0 counts as one trial. mean="printed": the
    paper's running mean, which counts successes only and so rises to 1.

    evidence="model" keeps n at 0 (the head alone). evidence="sample" takes σ_M to infinity (observation alone).
    These are the paper's ablations.
    """

    def __init__(
        self,
        head: CalibrationHead,
        model_sigma: float,
        sample_sigma: float,
        prior: float,
        mean: str,
        evidence: str = "both",
    ):
        self.head = head
        self.model_variance, self.sample_variance = model_sigma**2, sample_sigma**2
        self.estimate = prior
        self.mean = mean
        self.evidence = evidence
        self.verifications = 0
        self._tested = 1  # the prior's weight

    def of(self, step: Step) -> tuple[float, float]:
        """Mean and variance of θ after `step`. One transfer if the head is used."""
        return self.given(0.0 if self.evidence == "sample" else sigmoid(ask(self.head, step)))

    def given(self, model: float) -> tuple[float, float]:
        """Mean and variance of θ if the head's probability is `model`."""
        if self.evidence == "model":
            return model, self.model_variance
        if self.evidence == "sample":
            return self.estimate, self.sample_variance / self.verifications if self.verifications else 0.0
        total = self.verifications * self.model_variance + self.sample_variance
        weight = self.sample_variance / total
        return weight * model + (1 - weight) * self.estimate, self.model_variance * self.sample_variance / total

    def observe(self, drafted: int, accepted: int) -> None:
        """As `StopRule.observe`."""
        self.verifications += 1
        if self.mean == "sample":
            tested = min(accepted + 1, drafted)
            self.estimate = (self.estimate * self._tested + accepted) / (self._tested + tested)
            self._tested += tested
        else:  # t counts accepted tokens only
            self._tested += accepted
            self.estimate = (self.estimate * (self._tested - accepted) + accepted) / self._tested


class CalibratedThompson(StopRule):
    """Sample θ from the posterior, clamp it to [0, 1], and continue with probability θ (EESD, Algorithm 3)."""

    def __init__(self, max_draft: int, posterior: Posterior, generator: random.Random):
        self.max_draft = max_draft
        self.posterior = posterior
        self._random = generator

    def stop(self, step: Step) -> bool:
        mean, variance = self.posterior.of(step)
        theta = min(1.0, max(0.0, self._random.gauss(mean, variance**0.5)))
        return step.drafted >= self.max_draft or self._random.random() >= theta

    def observe(self, drafted: int, accepted: int) -> None:
        self.posterior.observe(drafted, accepted)


class PosteriorMean(StopRule):
    """The same posterior without sampling: continue while its mean is at least `threshold`."""

    def __init__(self, max_draft: int, posterior: Posterior, threshold: float):
        self.max_draft = max_draft
        self.posterior = posterior
        self.threshold = threshold

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.max_draft or self.posterior.of(step)[0] < self.threshold

    def observe(self, drafted: int, accepted: int) -> None:
        self.posterior.observe(drafted, accepted)
