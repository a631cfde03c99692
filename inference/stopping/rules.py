"""The stop rules, which end a draft before its longest length, and `make_rule`, which makes one of its settings.

Some rules compare one number with a bound: a probability, an entropy or a risk. EESD's rules do Thompson sampling on
observed acceptance, alone or combined with the estimate of the drafter's calibration head. `FixedLength` and rules by
measured costs, such as `BestLength`, have modules of their own. A rule belongs to one generation. After every drafted
token `stop(step)` says whether to verify now; after every verification `observe(drafted, accepted)` has both counts.

AdaEDL and SVIP read the entropy H(q), in nats, of the drafter's distribution: a drafter with a broad one is rarely
right. Both bound the acceptance probability from below by 1 − √(c H(q)), and stop when the bound is low.
"""

import math
from collections.abc import Callable
from importlib import import_module

from outrider.base.streams import Streams
from outrider.draft_models.calibration_head import AcceptanceHead
from outrider.inference.settings.method import AUTO, StopConfig
from outrider.inference.settings.stop_rules import RULES
from outrider.inference.sizing.policy import Tuning
from outrider.inference.stopping.by_costs import BestLength
from outrider.inference.stopping.interface import RuleInputs, Step, StopRule, ask_head, sigmoid

# AdaEDL's threshold: the acceptance rate aimed at, the step, and the weights of the old rate and the old threshold. The
# scheme is Draft & Verify's (arXiv 2309.08168); these values are not checked against a paper.
AIM_RATE, STEP, KEPT_RATE, KEPT_THRESHOLD = 0.9, 0.01, 0.5, 0.9


class Thresholded(StopRule):
    """A rule that compares one number a token with the bound of its settings. One transfer from the device a token."""

    def __init__(self, max_draft: int, stop: StopConfig, inputs: RuleInputs):
        self.max_draft, self.threshold = max_draft, stop.bound  # a subclass reads `inputs`


class Confidence(Thresholded):
    """Stop as soon as the drafter gave its token a probability below `threshold`.

    This is the rule of transformers' assisted generation, whose threshold is 0.4.
    """

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.max_draft or math.exp(float(step.log_probability)) < self.threshold


class AdaEDL(Thresholded):
    """Stop when 1 − √(γ H(q)) is below a threshold λ that adapts to the acceptance (arXiv 2410.18351).

    After a round that accepted the share r of its draft, r̄ ← KEPT_RATE · r̄ + (1 − KEPT_RATE) · r, and λ moves by STEP
    towards longer drafts if r̄ is above AIM_RATE, else towards shorter ones, smoothed by KEPT_THRESHOLD.
    """

    def __init__(self, max_draft: int, stop: StopConfig, inputs: RuleInputs):
        super().__init__(max_draft, stop, inputs)  # the threshold is λ
        self.gamma, self.rate = stop.gamma, AIM_RATE  # the rate is r̄

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.max_draft or 1 - math.sqrt(self.gamma * float(step.entropy)) < self.threshold

    def observe(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self.rate = KEPT_RATE * self.rate + (1 - KEPT_RATE) * accepted / drafted
        new_threshold = self.threshold + (STEP if self.rate <= AIM_RATE else -STEP)
        self.threshold = KEPT_THRESHOLD * self.threshold + (1 - KEPT_THRESHOLD) * new_threshold


class SVIP(Thresholded):
    """Stop when √H(q) is above `threshold` (arXiv 2411.18462)."""

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.max_draft or math.sqrt(float(step.entropy)) > self.threshold


class RejectionRisk(Thresholded):
    """SpecDec++ (arXiv 2405.19715): stop when the draft probably contains a wrong token.

    That is when 1 − Π ĉ_j is above `threshold`, ĉ_j the head's probability that the draft's j-th token is right.

    The paper proves that a threshold on this probability is the optimal form, and trains a special head for ĉ. Here ĉ
    is the calibration head's.
    """

    def __init__(self, max_draft: int, stop: StopConfig, inputs: RuleInputs):
        super().__init__(max_draft, stop, inputs)
        self.head, self._survival = inputs.head, 1.0

    def stop(self, step: Step) -> bool:
        prev_survival = self._survival if step.drafted > 1 else 1.0  # a new draft begins
        self._survival = prev_survival * sigmoid(ask_head(self.head, step))
        return step.drafted >= self.max_draft or 1 - self._survival > self.threshold


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

    def __init__(self, max_draft: int, stop: StopConfig, inputs: RuleInputs):
        self.max_draft = max_draft
        self.alpha, self.beta = self._prior = stop.alpha, stop.beta
        self.update, self.discount = stop.update, stop.discount
        self._random = inputs.streams.of("stop")

    def stop(self, step: Step) -> bool:
        theta = self._random.betavariate(self.alpha, self.beta)
        return step.drafted >= self.max_draft or self._random.random() >= theta

    def observe(self, drafted: int, accepted: int) -> None:
        tested_count = min(accepted + 1, drafted)
        right_count = accepted if self.update == "natural" else max(accepted - 1, 0)
        prior_alpha, prior_beta = self._prior
        self.alpha = prior_alpha + self.discount * (self.alpha - prior_alpha) + right_count
        self.beta = prior_beta + self.discount * (self.beta - prior_beta) + tested_count - right_count


class PosteriorMean(StopRule):
    """Continue while the mean of θ is at least the threshold, θ the probability that the next draft token is right.

    The posterior is θ ~ N(μ, σ²) with μ = w θ_M + (1 − w) θ̂, w = σ_S²/(nσ_M² + σ_S²), σ² = σ_M²σ_S²/(σ_S² + nσ_M²)
    (EESD, Algorithm 3). θ_M is the calibration head's probability of this token, θ̂ the observed acceptance, n the
    number of verifications. So the head dominates at first (w = 1 at n = 0), observation later.

    mean="sample": θ̂ is the share of tested tokens that were right; θ̂_0 counts as one trial. mean="printed": the
    paper's running mean, which counts successes only and so rises to 1.

    evidence="model" keeps n at 0 (the head alone). evidence="sample" takes σ_M to infinity (observation alone).
    These are the paper's ablations.
    """

    def __init__(self, max_draft: int, stop: StopConfig, inputs: RuleInputs):
        self.max_draft, self.settings, self.head = max_draft, stop, inputs.head
        self.estimate = stop.prior
        self.verifications = 0
        self._tested = 1  # tokens that the estimate counts; at first the weight of the prior

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.max_draft or self.posterior(step)[0] < self.settings.bound

    def posterior(self, step: Step) -> tuple[float, float]:
        """Mean and variance of θ after `step`. The head is asked only if its answer counts: one transfer."""
        return self.posterior_of(0.0 if self.settings.evidence == "sample" else sigmoid(ask_head(self.head, step)))

    def posterior_of(self, head_prob: float) -> tuple[float, float]:
        """Mean and variance of θ if the head's probability is `head_prob`."""
        model_variance, sample_variance = self.settings.model_sigma**2, self.settings.sample_sigma**2
        if self.settings.evidence == "model":
            return head_prob, model_variance
        if self.settings.evidence == "sample":
            return self.estimate, sample_variance / self.verifications if self.verifications else 0.0
        denom = self.verifications * model_variance + sample_variance
        head_weight = sample_variance / denom
        return head_weight * head_prob + (1 - head_weight) * self.estimate, model_variance * sample_variance / denom

    def observe(self, drafted: int, accepted: int) -> None:
        self.verifications += 1
        if self.settings.mean == "sample":
            tested_count = min(accepted + 1, drafted)
            self.estimate = (self.estimate * self._tested + accepted) / (self._tested + tested_count)
            self._tested += tested_count
        else:  # the paper's count has accepted tokens only
            self._tested += accepted
            self.estimate = (self.estimate * (self._tested - accepted) + accepted) / self._tested


class CalibratedThompson(PosteriorMean):
    """Sample θ from the same posterior, clamp it to [0, 1], and continue with probability θ (EESD, Algorithm 3)."""

    def __init__(self, max_draft: int, stop: StopConfig, inputs: RuleInputs):
        super().__init__(max_draft, stop, inputs)
        self._random = inputs.streams.of("stop")

    def stop(self, step: Step) -> bool:
        mean, variance = self.posterior(step)
        theta = min(1.0, max(0.0, self._random.gauss(mean, variance**0.5)))
        return step.drafted >= self.max_draft or self._random.random() >= theta


def make_rule(
    stop: StopConfig,
    streams: Streams,
    head: AcceptanceHead | None = None,
    tuning: Tuning | None = None,
    *,
    levels: int | None = None,
    drawn: bool = False,
) -> StopRule:
    """A new stop rule of one generation.

    streams: of random numbers. head: the drafter's calibration head. tuning: measured costs. levels: of a tree without
    a stop rule; None: a chain. drawn: whether drafts are sampled from q.
    """
    inputs = RuleInputs(streams, head, tuning, drawn)
    if stop.max_draft == AUTO:
        return BestLength(inputs.tuning)
    module, _, symbol = RULES[stop.rule].factory.partition(":")
    factory: Callable[[int, StopConfig, RuleInputs], StopRule] = getattr(import_module(module, __package__), symbol)
    return factory(stop.longest(levels), stop, inputs)
