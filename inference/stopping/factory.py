"""Stop rules built from their settings, and the bandit that chooses among rules."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outrider.base.streams import Streams
from outrider.draft_models.calibration_head import CalibrationHead
from outrider.inference.settings.method import AUTO, THRESHOLDS, Rule, StopConfig
from outrider.inference.sizing.policy import Tuning
from outrider.inference.stopping.interface import Step, StopRule, ask
from outrider.inference.stopping.plain import SVIP, AdaEDL, BestLength, Confidence, FixedLength, RejectionRisk
from outrider.inference.stopping.survival import Belief, Survival, Trust
from outrider.inference.stopping.thompson import BetaThompson, CalibratedThompson, Posterior, PosteriorMean

# A drafter's q may be miscalibrated either way: a greedy target accepts tokens of low q nearly always.
DRAFT = Belief(offset=(0.0, 3.0), slope=(1.0, 0.5))
HEAD = Belief(offset=(0.0, 0.5), slope=(1.0, 0.0))  # calibrated on average, but not for this text
# A token sampled from q is accepted with probability min(1, p/q), which q alone hardly predicts.
DRAWN = Belief(offset=(1.0, 0.7), slope=(0.1, 0.1))


class UCB(StopRule):
    """A bandit over stop rules: UCB1 chooses one for every round (as in TapOut, arXiv 2511.02017).

    It uses every rule once, then the rule with the largest mean reward + √(2 ln t / n); t: all rounds, n: the rule's.
    The reward of a round is the mean of accepted / longest draft, which rewards tokens, and accepted / drafted, which
    punishes waste. Only the chosen rule decides in a round and observes its outcome.
    """

    def __init__(self, rules: Sequence[StopRule]):
        self.rules = rules
        self.max_draft = max(rule.max_draft for rule in rules)
        self.rounds, self.rewards = [0] * len(rules), [0.0] * len(rules)
        self.chosen = 0

    def stop(self, step: Step) -> bool:
        return self.rules[self.chosen].stop(step)

    def observe(self, drafted: int, accepted: int) -> None:
        self.rules[self.chosen].observe(drafted, accepted)
        if drafted:
            self.rounds[self.chosen] += 1
            self.rewards[self.chosen] += (accepted / self.max_draft + accepted / drafted) / 2
        self.chosen = max(range(len(self.rules)), key=self._bound)

    def _bound(self, rule: int) -> float:
        """The upper confidence bound of a rule's reward; infinite if it was never tried."""
        count = self.rounds[rule]
        if not count:
            return math.inf
        return self.rewards[rule] / count + math.sqrt(2 * math.log(sum(self.rounds)) / count)


def make_rule(
    stop: StopConfig,
    streams: Streams,
    head: CalibrationHead | None = None,
    tuning: Tuning | None = None,
    *,
    levels: int | None = None,
    drawn: bool = False,
) -> StopRule:
    """A new stop rule for one generation, from which it learns; `streams` are that generation's.

    head: for rules that use one. tuning: for max_draft=auto and rule=survival. levels: those that a tree has by itself;
    None for a chain. drawn: whether drafts are sampled from q; otherwise they are the most likely tokens.
    """
    if stop.max_draft == AUTO:
        return BestLength(required(tuning))
    return RULES[stop.rule](_Given(stop, stop.longest(levels), streams, head, tuning, drawn))


def required(tuning: Tuning | None) -> Tuning:
    """`tuning`; raises `ValueError` if it is None."""
    if tuning is None:
        raise ValueError("what is chosen by costs needs measured ones (inference.measure.probe)")
    return tuning


@dataclass(frozen=True)
class _Given:
    """The inputs of rules (see `make_rule`)."""

    stop: StopConfig
    longest: int
    streams: Streams
    given_head: CalibrationHead | None
    tuning: Tuning | None
    drawn: bool

    @property
    def head(self) -> CalibrationHead:
        if self.given_head is None:
            raise ValueError("this stop rule needs the drafter's calibration head")
        return self.given_head

    @property
    def posterior(self) -> Posterior:
        stop = self.stop
        return Posterior(self.head, stop.model_sigma, stop.sample_sigma, stop.prior, stop.mean, stop.evidence)


def _survival(of: _Given) -> StopRule:
    tuning = required(of.tuning)
    if of.stop.score == "head":
        head = of.head
        return Survival(tuning, lambda step: ask(head, step), Trust(DRAWN if of.drawn else HEAD), of.longest)
    return Survival(tuning, lambda step: float(step.log_odds), Trust(DRAWN if of.drawn else DRAFT), of.longest)


def _bandit(of: _Given) -> StopRule:
    """A bandit over the rules that need no training."""
    confidence, adaedl, svip = (THRESHOLDS[rule] for rule in ("confidence", "adaedl", "svip"))
    longest, gamma = of.longest, of.stop.gamma
    rules = Confidence(longest, confidence), AdaEDL(longest, adaedl, gamma), SVIP(longest, svip), FixedLength(longest)
    return UCB(rules)


RULES: Mapping[Rule, Callable[[_Given], StopRule]] = {
    "fixed": lambda of: FixedLength(of.longest),
    "confidence": lambda of: Confidence(of.longest, of.stop.bound),
    "adaedl": lambda of: AdaEDL(of.longest, of.stop.bound, of.stop.gamma),
    "svip": lambda of: SVIP(of.longest, of.stop.bound),
    "rejection_risk": lambda of: RejectionRisk(of.head, of.longest, of.stop.bound),
    "beta": lambda of: BetaThompson(
        of.longest, of.stop.alpha, of.stop.beta, of.stop.update, of.streams.of("stop"), of.stop.discount
    ),
    "calibrated": lambda of: CalibratedThompson(of.longest, of.posterior, of.streams.of("stop")),
    "posterior_mean": lambda of: PosteriorMean(of.longest, of.posterior, of.stop.bound),
    "survival": _survival,
    "bandit": _bandit,
}
