"""Stop rules made of their settings."""

from collections.abc import Callable

from draft_models.calibration import CalibrationHead
from inference.auto.policy import Tuning
from inference.method_settings import AUTO, LONGEST_CHAIN, THRESHOLDS, StopConfig
from inference.stopping.bandit import UCB
from inference.stopping.best_length import BestLength
from inference.stopping.beta import BetaThompson
from inference.stopping.calibrated import CalibratedThompson, Posterior, PosteriorMean
from inference.stopping.confidence import Confidence
from inference.stopping.entropy import SVIP, AdaEDL
from inference.stopping.fixed import FixedLength
from inference.stopping.interface import StopRule, ask
from inference.stopping.rejection_risk import RejectionRisk
from inference.stopping.survival import Survival
from inference.stopping.trust import Doubt, Trust
from outrider.streams import Streams

# A draft's own probabilities may be far off, each way: greedy targets take tokens of a low q nearly always.
DRAFT_DOUBT = Doubt(offset=3.0, slope=0.5)
HEAD_DOUBT = Doubt(offset=0.5, slope=0.0)  # a head was calibrated; what it cannot know is the text's own effect

Make = Callable[[StopConfig, int, Streams, CalibrationHead | None, Tuning | None], StopRule]


def make_rule(
    stop: StopConfig,
    streams: Streams,
    head: CalibrationHead | None = None,
    tuning: Tuning | None = None,
    *,
    default: int,
) -> StopRule:
    """The stop rule of `stop`, fresh: what it learns belongs to one generation, like its `streams`.

    head: for rules that ask one. tuning: for max_draft=auto and rule=survival. default: what a max_draft of null means.
    """
    if stop.max_draft == AUTO:
        return BestLength(required(tuning))
    return RULES[stop.rule](stop, stop.limit(default), streams, head, tuning)


def required(tuning: Tuning | None) -> Tuning:
    """`tuning`, which must be there."""
    if tuning is None:
        raise ValueError("what is chosen by costs needs measured ones (inference.auto.probe)")
    return tuning


def _given(head: CalibrationHead | None) -> CalibrationHead:
    if head is None:
        raise ValueError("this stop rule needs the drafter's calibration head")
    return head


def _threshold(stop: StopConfig) -> float:
    return THRESHOLDS[stop.rule] if stop.threshold is None else stop.threshold


def _posterior(stop: StopConfig, head: CalibrationHead | None) -> Posterior:
    return Posterior(_given(head), stop.model_sigma, stop.sample_sigma, stop.prior, stop.mean, stop.evidence)


def _bandit(longest: int, gamma: float) -> StopRule:
    """Over the rules that need no training."""
    confidence, adaedl, svip = (THRESHOLDS[rule] for rule in ("confidence", "adaedl", "svip"))
    rules = (Confidence(longest, confidence), AdaEDL(longest, adaedl, gamma), SVIP(longest, svip), FixedLength(longest))
    return UCB(rules)


def _survival(
    stop: StopConfig, longest: int, streams: Streams, head: CalibrationHead | None, tuning: Tuning | None
) -> StopRule:
    longest = stop.limit(LONGEST_CHAIN)
    if stop.score == "head":
        asked = _given(head)
        return Survival(required(tuning), lambda step: ask(asked, step), Trust(HEAD_DOUBT), longest)
    return Survival(required(tuning), lambda step: float(step.log_odds), Trust(DRAFT_DOUBT), longest)


RULES: dict[str, Make] = {
    "fixed": lambda stop, longest, *_: FixedLength(longest),
    "confidence": lambda stop, longest, *_: Confidence(longest, _threshold(stop)),
    "adaedl": lambda stop, longest, *_: AdaEDL(longest, _threshold(stop), stop.gamma),
    "svip": lambda stop, longest, *_: SVIP(longest, _threshold(stop)),
    "rejection_risk": lambda stop, longest, _, head, __: RejectionRisk(_given(head), longest, _threshold(stop)),
    "beta": lambda stop, longest, streams, *_: BetaThompson(
        longest, stop.alpha, stop.beta, stop.update, streams.of("stop"), stop.discount
    ),
    "calibrated": lambda stop, longest, streams, head, _: CalibratedThompson(
        longest, _posterior(stop, head), streams.of("stop")
    ),
    "posterior_mean": lambda stop, longest, _, head, __: PosteriorMean(
        longest, _posterior(stop, head), _threshold(stop)
    ),
    "survival": _survival,
    "bandit": lambda stop, longest, *_: _bandit(longest, stop.gamma),
}
