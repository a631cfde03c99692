"""Stop rules built from their settings."""

from collections.abc import Callable
from dataclasses import dataclass

from draft_models.calibration.head import CalibrationHead
from inference.settings.limits import LONGEST_CHAIN
from inference.settings.method import AUTO, THRESHOLDS, StopConfig
from inference.sizing.policy import Tuning
from inference.stopping.bandit import UCB
from inference.stopping.best_length import BestLength
from inference.stopping.beta import BetaThompson
from inference.stopping.calibrated import CalibratedThompson, Posterior, PosteriorMean, ask
from inference.stopping.confidence import Confidence
from inference.stopping.entropy import SVIP, AdaEDL
from inference.stopping.fixed import FixedLength
from inference.stopping.interface import StopRule
from inference.stopping.rejection_risk import RejectionRisk
from inference.stopping.survival import Survival
from inference.stopping.trust import Belief, Trust
from outrider.streams import Streams

# A drafter's q may be miscalibrated either way: a greedy target accepts tokens of low q nearly always.
DRAFT = Belief(offset=(0.0, 3.0), slope=(1.0, 0.5))
HEAD = Belief(offset=(0.0, 0.5), slope=(1.0, 0.0))  # calibrated on average, but not for this text
# A token sampled from q is accepted with probability min(1, p/q), which q alone hardly predicts.
DRAWN = Belief(offset=(1.0, 0.7), slope=(0.1, 0.1))


@dataclass(frozen=True)
class Given:
    """The inputs of rules in addition to their settings (see `make_rule`)."""

    streams: Streams
    head: CalibrationHead | None
    tuning: Tuning | None
    drawn: bool


def make_rule(
    stop: StopConfig,
    streams: Streams,
    head: CalibrationHead | None = None,
    tuning: Tuning | None = None,
    *,
    default: int,
    drawn: bool = False,
) -> StopRule:
    """A new stop rule for one generation, from which it learns; `streams` are that generation's.

    head: for rules that use one. tuning: for max_draft=auto and rule=survival. default: the value of max_draft=null.
    drawn: whether drafts are sampled from q; otherwise they are the most likely tokens.
    """
    if stop.max_draft == AUTO:
        return BestLength(required(tuning))
    return RULES[stop.rule](stop, stop.limit(default), Given(streams, head, tuning, drawn))


def required(tuning: Tuning | None) -> Tuning:
    """`tuning`; raises `ValueError` if it is None."""
    if tuning is None:
        raise ValueError("what is chosen by costs needs measured ones (inference.measure.probe)")
    return tuning


def _required_head(head: CalibrationHead | None) -> CalibrationHead:
    if head is None:
        raise ValueError("this stop rule needs the drafter's calibration head")
    return head


def _threshold(stop: StopConfig) -> float:
    return THRESHOLDS[stop.rule] if stop.threshold is None else stop.threshold


def _posterior(stop: StopConfig, head: CalibrationHead | None) -> Posterior:
    return Posterior(_required_head(head), stop.model_sigma, stop.sample_sigma, stop.prior, stop.mean, stop.evidence)


def _bandit(longest: int, gamma: float) -> StopRule:
    """A bandit over the rules that need no training."""
    confidence, adaedl, svip = (THRESHOLDS[rule] for rule in ("confidence", "adaedl", "svip"))
    rules = (Confidence(longest, confidence), AdaEDL(longest, adaedl, gamma), SVIP(longest, svip), FixedLength(longest))
    return UCB(rules)


def _survival(stop: StopConfig, longest: int, given: Given) -> StopRule:
    longest, tuning = stop.limit(LONGEST_CHAIN), required(given.tuning)
    if stop.score == "head":
        head = _required_head(given.head)
        return Survival(tuning, lambda step: ask(head, step), Trust(DRAWN if given.drawn else HEAD), longest)
    return Survival(tuning, lambda step: float(step.log_odds), Trust(DRAWN if given.drawn else DRAFT), longest)


RULES: dict[str, Callable[[StopConfig, int, Given], StopRule]] = {
    "fixed": lambda stop, longest, _: FixedLength(longest),
    "confidence": lambda stop, longest, _: Confidence(longest, _threshold(stop)),
    "adaedl": lambda stop, longest, _: AdaEDL(longest, _threshold(stop), stop.gamma),
    "svip": lambda stop, longest, _: SVIP(longest, _threshold(stop)),
    "rejection_risk": lambda stop, longest, given: RejectionRisk(_required_head(given.head), longest, _threshold(stop)),
    "beta": lambda stop, longest, given: BetaThompson(
        longest, stop.alpha, stop.beta, stop.update, given.streams.of("stop"), stop.discount
    ),
    "calibrated": lambda stop, longest, given: CalibratedThompson(
        longest, _posterior(stop, given.head), given.streams.of("stop")
    ),
    "posterior_mean": lambda stop, longest, given: PosteriorMean(
        longest, _posterior(stop, given.head), _threshold(stop)
    ),
    "survival": _survival,
    "bandit": lambda stop, longest, _: _bandit(longest, stop.gamma),
}
