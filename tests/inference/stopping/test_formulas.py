"""Every stop rule equals a slow computation of its formula, and reads one number a token from the device."""

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_models.calibration_head import CalibrationHead, log_odds
from inference.settings.limits import LONGEST_CHAIN
from inference.settings.method import StopConfig
from inference.sizing.costs import WIDEST, Costs
from inference.sizing.policy import KEEP, Tuning, best_length
from inference.stopping.factory import RULES, UCB, make_rule
from inference.stopping.interface import Step, StopRule
from inference.stopping.plain import AIM, AdaEDL, FixedLength, RejectionRisk
from inference.stopping.survival import DRIFT, PRIOR_ROUNDS, Belief, Survival, Trust
from outrider.streams import Streams
from tests.inference.test_tree_stops import Transfers
from tests.tiers import as_many

AT_ITS_WORD = Belief((0.0, 0.0), (1.0, 0.0))


def step(drafted: int, probabilities: Sequence[float] = (0.5, 0.5), token: int = 0) -> Step:
    hidden = torch.full((1, 2), float(drafted))
    source = SimpleNamespace(hidden=hidden, target_hidden=hidden)
    return Step(drafted, torch.tensor([token]), torch.tensor([probabilities]).log(), source)


def head(bias: Sequence[float]) -> CalibrationHead:
    """Predicts `bias`[i − 1] for the i-th token, for any hidden states."""
    made = CalibrationHead(2, 2).requires_grad_(False)
    made.bias.copy_(torch.tensor([*bias, *[bias[-1]] * (len(made.bias) - len(bias))]))
    return made


def draft_with(rule: StopRule, steps: Sequence[Step]) -> int:
    """The number of `steps` that are drafted."""
    return next((s.drafted for s in steps if rule.stop(s)), len(steps))


@settings(deadline=None)
@given(k=st.integers(1, 20))
def test_fixed_length(k: int) -> None:
    assert [FixedLength(k).stop(step(i)) for i in range(1, k + 1)] == [False] * (k - 1) + [True]


@settings(deadline=None)
@given(weights=st.lists(st.integers(0, 9), min_size=2, max_size=6), token=st.integers(0, 1), cut=st.floats(0.05, 0.95))
def test_rules_of_the_drafts_own_distribution(weights: list[int], token: int, cut: float) -> None:
    """Confidence: q(x) < h; AdaEDL: 1 − √(γ H) < λ; SVIP: √H > h."""
    total = sum(weights) or 1
    distribution = [weight / total for weight in weights] if sum(weights) else [1.0, *[0.0] * (len(weights) - 1)]
    entropy = -sum(q * math.log(q) for q in distribution if q)
    at = step(1, distribution, token)
    expected = {
        "confidence": (distribution[token], cut, True),
        "adaedl": (1 - math.sqrt(0.2 * entropy), cut, True),
        "svip": (math.sqrt(entropy), cut, False),
    }
    for name, (value, bound, below) in expected.items():
        if abs(value - bound) > 1e-4:
            rule = make_rule(StopConfig(rule=name, max_draft=3, threshold=cut), Streams(0))  # type: ignore[arg-type]
            assert rule.stop(at) == ((value < bound) == below), name
            assert rule.stop(step(3, [1.0, 0.0]))


def test_adaedls_threshold_follows_the_acceptance() -> None:
    """r̄ ← (r̄ + r) / 2; λ ← 0.9 λ + 0.1 (λ ± 0.01), up where r̄ is at most 0.9."""
    rule, rate, threshold = AdaEDL(9, 0.5, 0.2), AIM, 0.5
    for drafted, accepted in ((4, 4), (4, 4), (5, 0), (0, 0), (2, 1), *[(3, 3)] * 6):
        rule.observe(drafted, accepted)
        if drafted:
            rate = (rate + accepted / drafted) / 2
            threshold += 0.001 if rate <= 0.9 else -0.001
        assert (rule.rate, rule.threshold) == pytest.approx((rate, threshold))
    assert rule.threshold < 0.5 + 0.001 * 3


def test_rejection_risk_is_of_any_token_of_this_draft() -> None:
    says = [1.5, 1.0, 0.5, 2.0]
    survival = np.cumprod([1 / (1 + math.exp(-logit)) for logit in says])
    for place, alive in enumerate(survival[:-1]):
        for threshold in (1 - alive - 0.01, 1 - alive + 0.01):
            rule = RejectionRisk(head(says), 99, threshold)
            expected = next((i for i, left in enumerate(survival, 1) if 1 - left > threshold), 4)
            for _ in range(2):  # a draft does not depend on the one before
                assert draft_with(rule, [step(i) for i in range(1, 5)]) == expected
            assert (expected == place + 1) == (threshold < 1 - alive)


def test_the_bandit_is_ucb1() -> None:
    rule, chance = UCB([FixedLength(k) for k in (2, 4, 8)]), random.Random(0)
    counts, rewards = [0, 0, 0], [0.0, 0.0, 0.0]
    for t in range(60):
        bounds = [
            math.inf if not n else total / n + math.sqrt(2 * math.log(t) / n)
            for n, total in zip(counts, rewards, strict=True)
        ]
        expected = bounds.index(max(bounds))
        drafted = draft_with(rule, [step(i) for i in range(1, 9)])
        assert drafted == (2, 4, 8)[expected]
        accepted = min(drafted, int(chance.expovariate(0.3)))
        rule.observe(drafted, accepted)
        counts[expected] += 1
        rewards[expected] += (accepted / 8 + accepted / drafted) / 2
    assert min(counts) > 3


# --- survival × cost -------------------------------------------------------------------------------------------------


def costs(step_seconds: float = 0.2, row: float = 0.02) -> Costs:
    curve = tuple(1.0 + row * width for width in range(WIDEST + 1))
    return Costs((step_seconds,) * (WIDEST + 1), curve, 0.1, 1.1)


@settings(deadline=None, max_examples=as_many(60))
@given(
    scores=st.lists(st.floats(-3, 5), min_size=4, max_size=4),
    history=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=8),
    price=st.floats(0.02, 0.8),
)
def test_survival_times_cost(scores: list[float], history: list[tuple[int, int]], price: float) -> None:
    """Against explicit sums: drafting goes on if for some m the expected tokens exceed rate × seconds."""
    seconds = costs(price)
    rule = Survival(Tuning(seconds), lambda s: ([*scores, 9.0] * 4)[s.drafted - 1], Trust(AT_ITS_WORD))
    length, rate = best_length([0.5] * LONGEST_CHAIN, seconds)
    spent = PRIOR_ROUNDS * (length * price + seconds.verify[length + 1] + 0.1)
    emitted = rate * spent
    for drafted, accepted in history:
        rule.observe(drafted, min(drafted, accepted))
        emitted = KEEP * emitted + min(drafted, accepted) + 1
        spent = KEEP * spent + drafted * price + seconds.verify[drafted + 1] + 0.1
    assert rule.rate == pytest.approx(emitted / spent)
    shares = rule._shares
    for drafted in range(1, 5):
        alive = math.prod(1 / (1 + math.exp(-score)) for score in scores[:drafted])
        ahead = [math.prod(shares[drafted : drafted + i]) for i in range(1, LONGEST_CHAIN - drafted + 1)]
        gains = np.cumsum(ahead) * alive
        before = seconds.verify[drafted + 1]
        prices = [m * price + seconds.verify[drafted + m + 1] - before for m in range(1, len(ahead) + 1)]
        margins = gains - rule.rate * np.array(prices)
        assert rule.stop(step(drafted)) == (not (margins > 0).any())
    assert rule.stop(step(LONGEST_CHAIN))


@settings(deadline=None)
@given(
    tokens=st.lists(st.tuples(st.floats(-4, 4), st.booleans()), max_size=12),
    belief=st.builds(
        Belief,
        st.tuples(st.floats(-2.0, 2.0), st.floats(0.0, 2.0)),
        st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
    ),
)
def test_trust_is_an_extended_kalman_filter(tokens: list[tuple[float, bool]], belief: Belief) -> None:
    """Against matrices; the rule itself keeps the three numbers of its covariance."""
    trust = Trust(belief)
    (offset, first), (slope, second) = belief.offset, belief.slope
    mean, prior = np.array([offset, slope]), np.diag([first**2, second**2])
    spread = prior.copy()
    for score, right in tokens:
        x = np.array([1.0, score])
        c = 1 / (1 + math.exp(-(mean @ x)))
        assert trust.probability(score) == pytest.approx(c)
        trust.drift()
        trust.learn(score, right)
        spread = spread + DRIFT * prior
        after = spread - np.outer(spread @ x, x @ spread) * c * (1 - c) / (1 + c * (1 - c) * (x @ spread @ x))
        mean = mean + after @ x * (right - c)
        spread = after
        assert (trust.offset, trust.slope) == pytest.approx(tuple(mean))


@settings(deadline=None)
@given(q=st.fractions(Fraction(1, 1000), Fraction(999, 1000)))
def test_the_log_odds_of_a_log_probability(q: Fraction) -> None:
    assert float(log_odds(torch.tensor(math.log(q)))) == pytest.approx(math.log(q / (1 - q)), abs=1e-3)
    assert log_odds(torch.tensor([0.0, -1e9, -math.inf])).tolist() == [12, -12, -12]


# --- all of them -----------------------------------------------------------------------------------------------------


def all_rules() -> dict[str, Callable[[], Any]]:
    tuning, asked = Tuning(costs()), head([0.5])

    def made(stop: StopConfig) -> Callable[[], Any]:
        return lambda: make_rule(stop, Streams(0), asked, tuning)

    found = {rule: made(StopConfig(rule=rule)) for rule in RULES}  # type: ignore[arg-type]
    return {**found, "survival, head": made(StopConfig(rule="survival", score="head"))}


@pytest.mark.parametrize("name", all_rules())
def test_a_rule_transfers_one_number_a_token_and_keeps_its_bound(name: str) -> None:
    rule = all_rules()[name]()
    for _ in range(3):
        drafted = 1
        while True:
            with Transfers() as counted:
                stopped = rule.stop(step(drafted, (0.9, 0.1)))
            assert counted.count <= 1
            if stopped:
                break
            drafted += 1
        assert drafted <= rule.max_draft == (LONGEST_CHAIN if "survival" in name else 8)
        rule.observe(drafted, drafted)
    rule.observe(0, 0)  # the budget was used up
