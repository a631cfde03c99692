"""When to stop drafting and verify. A rule sees what was drafted, and after each round what was accepted.

A rule decides how long a chain gets and how deep a tree: it is asked after every token of the one, and after every
level of the other.
"""

import random
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draft_models.calibration import CalibrationHead


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


@dataclass
class FixedLength:
    """Always draft `max_draft` tokens (the K of plain speculative decoding), or levels."""

    max_draft: int

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.max_draft

    def observe(self, drafted: int, accepted: int) -> None:
        pass


@dataclass
class Confidence:
    """Verify as soon as the drafter gave its token a probability below `threshold`. One transfer per token."""

    max_draft: int
    threshold: float

    def stop(self, step: Step) -> bool:
        if step.drafted >= self.max_draft:
            return True
        return float(step.logits.float().softmax(-1)[0, step.token]) < self.threshold

    def observe(self, drafted: int, accepted: int) -> None:
        pass


class BetaThompson:
    """Thompson sampling on "is the next draft token right?" with a Beta posterior (EESD, Algorithm 2).

    After each drafted token θ ~ Beta(α, β) and χ ~ Bernoulli(θ). χ = 0 ends the draft. Say |Q_d| tokens (of a tree:
    levels) were drafted and |Q_v| accepted. Then n = min(|Q_v| + 1, |Q_d|) were tested, α += r and β += n − r, and

    - update="natural": r = |Q_v|. Each tested token is one Bernoulli trial. Example: of 5 tokens 3 are accepted, so 4
      were tested, α += 3 and β += 1;
    - update="printed": r = max(|Q_v| − 1, 0) as in the paper, clamped because α must stay positive. It charges a
      failure even to a fully accepted draft, so it drafts shorter.
    """

    def __init__(self, max_draft: int, alpha: float, beta: float, update: str, generator: random.Random):
        self.max_draft = max_draft
        self.alpha, self.beta = alpha, beta
        self.update = update
        self._random = generator

    def stop(self, step: Step) -> bool:
        theta = self._random.betavariate(self.alpha, self.beta)
        return step.drafted >= self.max_draft or self._random.random() >= theta

    def observe(self, drafted: int, accepted: int) -> None:
        tested = min(accepted + 1, drafted)
        right = accepted if self.update == "natural" else max(accepted - 1, 0)
        self.alpha += right
        self.beta += tested - right


class CalibratedThompson:
    """Thompson sampling with a model's word and the sample's (EESD, Algorithm 3).

    θ ~ N(μ, σ²) clamped to [0, 1], with μ = w θ_M + (1 − w) θ̂, w = σ_S²/(nσ_M² + σ_S²), σ² = σ_M²σ_S²/(σ_S² + nσ_M²).
    θ_M is the calibration head's probability for this very token, θ̂ what has been observed, n the number of
    verifications. So the head rules at first and experience later: w = 1 at n = 0.

    mean="sample": θ̂ is the share of tested tokens that were right, θ̂_0 counting as one. mean="printed": the paper's
    running mean, which only ever sees successes and so rises to 1.

    evidence="model" keeps n at 0 (the head alone). evidence="sample" takes σ_M to infinity (what was observed alone).
    These are the paper's ablations. There is one transfer per drafted token.
    """

    def __init__(
        self,
        head: CalibrationHead,
        max_draft: int,
        model_sigma: float,
        sample_sigma: float,
        prior: float,
        mean: str,
        generator: random.Random,
        evidence: str = "both",
    ):
        self.head = head
        self.max_draft = max_draft
        self.model_variance, self.sample_variance = model_sigma**2, sample_sigma**2
        self.estimate = prior
        self.mean = mean
        self.evidence = evidence
        self.verifications = 0
        self._tested = 1  # the prior's own weight
        self._random = generator

    def stop(self, step: Step) -> bool:
        mean, variance = self.posterior(0.0 if self.evidence == "sample" else self._model_says(step))
        theta = min(1.0, max(0.0, self._random.gauss(mean, variance**0.5)))
        return step.drafted >= self.max_draft or self._random.random() >= theta

    def posterior(self, model: float) -> tuple[float, float]:
        """Mean and variance of θ when the head says `model`."""
        if self.evidence == "model":
            return model, self.model_variance
        if self.evidence == "sample":
            return self.estimate, self.sample_variance / self.verifications if self.verifications else 0.0
        total = self.verifications * self.model_variance + self.sample_variance
        weight = self.sample_variance / total
        return weight * model + (1 - weight) * self.estimate, self.model_variance * self.sample_variance / total

    def _model_says(self, step: Step) -> float:
        position = torch.tensor([step.drafted], device=step.hidden.device)
        return float(self.head(step.source.target_hidden, step.hidden, position).sigmoid())

    def observe(self, drafted: int, accepted: int) -> None:
        self.verifications += 1
        if self.mean == "sample":
            tested = min(accepted + 1, drafted)
            self.estimate = (self.estimate * self._tested + accepted) / (self._tested + tested)
            self._tested += tested
        else:  # t counts accepted tokens only
            self._tested += accepted
            self.estimate = (self.estimate * (self._tested - accepted) + accepted) / self._tested
