"""Stop rules made of their settings."""

from collections.abc import Callable
from dataclasses import dataclass

from draft_models.calibration.head import CalibrationHead
from inference.settings.method import AUTO, LONGEST_CHAIN, THRESHOLDS, StopConfig
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

# A draft's own probabilities may be far off, each way: greedy targets take tokens of a low q nearly always.
DRAFT = Belief(offset=(0.0, 3.0), slope=(1.0, 0.5))
HEAD = Belief(offset=(0.0, 0.5), slope=(1.0, 0.0))  # it was calibrated; what it cannot know is the text's own effect
# A token drawn from q is accepted with the probability min(1, p/q). How likely it was says next to nothing of that.
DRAWN = Belief(offset=(1.0, 0.7), slope=(0.1, 0.1))


@dataclass(frozen=True)
class Given:
    """What rules are made with besides their settings (see `make_rule`)."""

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
    """The stop rule of `stop`, fresh: what it learns belongs to one generation, like its `streams`.

    head: for rules that ask one. tuning: for max_draft=auto and rule=survival. default: what a max_draft of null means.
    drawn: drafts are drawn from q, else they are the likeliest tokens.
    """
    if stop.max_draft == AUTO:
        return BestLength(required(tuning))
    return RULES[stop.rule](stop, stop.limit(default), Given(streams, head, tuning, drawn))


def required(tuning: Tuning | None) -> Tuning:
    """`tuning`, which must be there."""
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
    """Over the rules that need no training."""
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
