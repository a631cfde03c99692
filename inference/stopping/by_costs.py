"""Stop rules by measured costs: survival × cost, which drafts while further tokens are worth their time, and the best
length of a chain.

A rule is asked after every drafted token whether to stop (`stop`), and learns from the verified draft (`observe`).
Survival calibrates the scores of tokens for the current text as the text grows. A score is the logit of q, or of the
calibration head, a network that estimates whether a token is accepted. A token is right if the target accepts it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from outrider.inference.settings import LONGEST_CHAIN
from outrider.inference.settings.method import StopConfig
from outrider.inference.sizing.policy import DECAY, Evidence, Tuning, best_length, trials_in_chain
from outrider.inference.stopping.interface import RuleInputs, Step, StopRule, ask_head, sigmoid

PRIOR_ROUNDS = 4.0  # weight of the rate expected at the start, in rounds of this generation
DRIFT = 0.03  # share of the prior's variances added per round: text has easy and hard stretches


@dataclass(frozen=True)
class Belief:
    """The prior of the offset a and of the slope b (see `Trust`), each as (mean, standard deviation)."""

    offset: tuple[float, float]
    slope: tuple[float, float]


# A drafter's q may be miscalibrated either way: a greedy target accepts tokens of low q nearly always.
DRAFT_PRIOR = Belief(offset=(0.0, 3.0), slope=(1.0, 0.5))
HEAD_PRIOR = Belief(offset=(0.0, 0.5), slope=(1.0, 0.0))  # calibrated on average, but not for this text
# A token sampled from q is accepted with probability min(1, p/q), which q alone hardly predicts.
DRAWN_PRIOR = Belief(offset=(1.0, 0.7), slope=(0.1, 0.1))


class Trust:
    """c = sigmoid(a + b z): the probability that a token of score z is right, z a logit.

    With a = 0 and b = 1 the score is used unchanged; with b = 0 it is ignored. Every tested token updates both by one
    Newton step on the posterior of a logistic regression (an extended Kalman filter). The offset models the text:
    tokens of one text are correlated, unlike independent trials with one probability.
    """

    def __init__(self, prior: Belief):
        (self.offset, offset_deviation), (self.slope, slope_deviation) = prior.offset, prior.slope
        self._prior = offset_deviation**2, slope_deviation**2
        self._variance = (*self._prior, 0.0)  # of the offset, of the slope, and their covariance

    def probability(self, score: float) -> float:
        """The probability c of a token with this score."""
        return sigmoid(self.offset + self.slope * score)

    def drift(self) -> None:
        """Increase the variances for another round."""
        (offset_var, slope_var, covariance), (prior_offset_var, prior_slope_var) = self._variance, self._prior
        self._variance = (offset_var + DRIFT * prior_offset_var, slope_var + DRIFT * prior_slope_var, covariance)

    def learn(self, score: float, was_right: bool) -> None:
        """Learn from a tested token with this score."""
        var_a, var_b, covariance = self._variance
        prob = self.probability(score)
        outcome_var = prob * (1 - prob)
        u, v = var_a + covariance * score, covariance + var_b * score  # the covariances of a + b z with a and with b
        normaliser = 1 + outcome_var * (u + v * score)
        shrinkage = outcome_var / normaliser
        self._variance = (var_a - shrinkage * u * u, var_b - shrinkage * v * v, covariance - shrinkage * u * v)
        self.offset += u / normaliser * (was_right - prob)
        self.slope += v / normaliser * (was_right - prob)


class Survival(StopRule):
    """Continue while the expected gain exceeds the tokens that the running rate would produce in the same time.

    After k drafted tokens all are right with probability S_k = Π_{j≤k} c_j; `trust` turns the `score` of token j into
    c_j. The expected gain of m further tokens is Σ_{i≤m} S_k Π_{j≤i} s_{k+j}, s_j the share of tokens at position j
    that were right (`Evidence`). They cost m draft steps and a wider target pass. Drafting continues if any m pays. The
    running rate is this generation's tokens per second by the measured costs, so no clock decides. This is the
    stopping rule of a renewal process: its rate is largest if no round continues below it.
    score: the logit of a drafted token; one transfer from the device.
    """

    def __init__(self, tuning: Tuning, score: Callable[[Step], float], trust: Trust, max_draft: int = LONGEST_CHAIN):
        self.max_draft, self.trust, self._score = max_draft, trust, score
        self._tuning, self._costs = tuning, tuning.costs_now
        self._evidence = Evidence(LONGEST_CHAIN, tuning)
        self._shares = self._evidence.shares()
        self._reset_rate(*best_length(self._shares, self._costs))
        self._scores: list[float] = []
        self._survival = 1.0

    def _reset_rate(self, length: int, rate: float) -> None:
        """Begin the running rate at `rate`, expected of chains of the best length, as after `PRIOR_ROUNDS` of them."""
        self._seconds = PRIOR_ROUNDS * self._costs.chain_seconds(length)
        self._emitted = rate * self._seconds

    @property
    def rate(self) -> float:
        """Tokens per second so far."""
        return self._emitted / self._seconds

    def gain(self) -> float:
        """The tokens of a chain of the best length beyond those of plain decoding in its time; they decide whether a
        round drafts (`Allowance`). The larger of its expected rate and the running rate counts: the running rate also
        knows what the scores are good for. If the number of texts that share passes has changed, the costs have too,
        and the running rate begins anew."""
        costs = self._tuning.costs_now
        length, rate = best_length(self._shares, costs)
        if costs is not self._costs:
            self._costs = costs
            self._reset_rate(length, rate)
        return (max(rate, self.rate) - 1 / costs.autoregressive) * costs.chain_seconds(length)

    def stop(self, step: Step) -> bool:
        score = self._score(step)
        if step.drafted == 1:
            self._scores, self._survival = [], 1.0
        self._scores.append(score)
        self._survival *= self.trust.probability(score)
        return step.drafted >= self.max_draft or not self.pays(step.drafted, self._survival)

    def pays(self, drafted: int, survival: float) -> bool:
        """Whether some number of further tokens is worth its time."""
        costs, expected_gain = self._costs, 0.0
        for n_extra in range(1, self.max_draft - drafted + 1):
            survival *= self._shares[drafted + n_extra - 1]
            expected_gain += survival
            seconds = n_extra * costs.step[1] + costs.verify[drafted + n_extra + 1] - costs.verify[drafted + 1]
            if expected_gain > self.rate * seconds:
                return True
        return False

    def observe(self, drafted: int, accepted: int) -> None:
        self.trust.drift()
        for index, score in enumerate(self._scores[: min(accepted + 1, drafted)]):
            self.trust.learn(score, index < accepted)
        self._evidence.add(trials_in_chain(drafted, accepted))
        self._shares = self._evidence.shares()
        self._emitted = DECAY * self._emitted + accepted + 1
        self._seconds = DECAY * self._seconds + self._costs.chain_seconds(drafted)


def make_survival(max_draft: int, stop: StopConfig, inputs: RuleInputs) -> Survival:
    """The rule by the scores of the draft itself, or of the calibration head."""
    if stop.score == "draft":
        trust = Trust(DRAWN_PRIOR if inputs.drawn else DRAFT_PRIOR)
        return Survival(inputs.tuning, lambda step: float(step.log_odds), trust, max_draft)
    head, trust = inputs.head, Trust(DRAWN_PRIOR if inputs.drawn else HEAD_PRIOR)
    return Survival(inputs.tuning, lambda step: ask_head(head, step), trust, max_draft)


class BestLength(StopRule):
    """max_draft=auto: the chain length with the most tokens per second, by measured costs and the acceptance so far.

    length: chosen again after every round (`observe`), and when a round begins (`gain`), as costs depend on how many
    texts share passes.
    """

    max_draft = LONGEST_CHAIN

    def __init__(self, tuning: Tuning):
        self._tuning = tuning
        self._evidence = Evidence(self.max_draft, tuning)
        self._choose_length()

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.length

    def observe(self, drafted: int, accepted: int) -> None:
        self._evidence.add(trials_in_chain(drafted, accepted))
        self._choose_length()

    def _choose_length(self) -> float:
        """Update `length`; returns the tokens per second expected of it."""
        self.length, rate = best_length(self._evidence.shares(), self._tuning.costs_now)
        return rate

    def gain(self) -> float:
        """As `Survival.gain`, but by the expected rate alone, of the best length, which this updates."""
        costs, rate = self._tuning.costs_now, self._choose_length()
        return (rate - 1 / costs.autoregressive) * costs.chain_seconds(self.length)
