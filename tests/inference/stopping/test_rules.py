"""Every stop rule equals a slow computation of its formula, and reads one number a token from the device."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from outrider.base.settings import construct
from outrider.base.streams import Streams
from outrider.draft_models.calibration_head import POSITIONS, CalibrationHead, log_odds
from outrider.inference.settings import LONGEST_CHAIN
from outrider.inference.settings.method import StopConfig, settings_of
from outrider.inference.settings.stop_rules import RULES, RuleEntry
from outrider.inference.sizing.policy import DECAY, Tuning, best_length
from outrider.inference.stopping import rules
from outrider.inference.stopping.by_costs import DRIFT, PRIOR_ROUNDS, Belief, Survival, Trust
from outrider.inference.stopping.interface import RuleInputs, Step, StopRule
from tests.inference.priced import costs
from tests.inference.test_tree_stops import Transfers
from tests.refusals import refusal
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


def draft_length(rule: StopRule, most: int = 10**6) -> int:
    """The number of tokens that are drafted, at most `most`."""
    return next((place for place in range(1, most + 1) if rule.stop(step(place))), most)


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
            rule = rules.make_rule(StopConfig(rule=name, max_draft=3, threshold=cut), Streams(0))
            assert rule.stop(at) == ((value < bound) == below), name
            assert rule.stop(step(3, [1.0, 0.0]))


def test_adaedls_threshold_follows_the_acceptance() -> None:
    """r̄ ← (r̄ + r) / 2; λ ← 0.9 λ + 0.1 (λ ± 0.01), up where r̄ is at most 0.9."""
    rule, rate, threshold = rules.AdaEDL(9, StopConfig("adaedl"), RuleInputs(Streams(0))), rules.AIM_RATE, 0.5
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
            stop = StopConfig("rejection_risk", threshold=threshold)
            rule = rules.RejectionRisk(99, stop, RuleInputs(Streams(0), head(says)))
            expected = next((i for i, left in enumerate(survival, 1) if 1 - left > threshold), 4)
            for _ in range(2):  # a draft does not depend on the one before
                assert draft_length(rule, 4) == expected
            assert (expected == place + 1) == (threshold < 1 - alive)


# --- survival × cost -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=as_many(60))
@given(
    scores=st.lists(st.floats(-3, 5), min_size=4, max_size=4),
    history=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=8),
    price=st.floats(0.02, 0.8),
)
def test_survival_times_cost(scores: list[float], history: list[tuple[int, int]], price: float) -> None:
    """Against explicit sums: drafting goes on if for some m the expected tokens exceed rate × seconds."""
    seconds = costs(price, rest=0.1, plain=1.1)
    rule = Survival(Tuning(seconds), lambda s: ([*scores, 9.0] * 4)[s.drafted - 1], Trust(AT_ITS_WORD))
    length, rate = best_length([0.5] * LONGEST_CHAIN, seconds)
    spent = PRIOR_ROUNDS * (length * price + seconds.verify[length + 1] + 0.1)
    emitted = rate * spent
    for drafted, accepted in history:
        rule.observe(drafted, min(drafted, accepted))
        emitted = DECAY * emitted + min(drafted, accepted) + 1
        spent = DECAY * spent + drafted * price + seconds.verify[drafted + 1] + 0.1
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
        return lambda: rules.make_rule(stop, Streams(0), asked, tuning)

    by_name = {rule: made(StopConfig(rule=rule)) for rule in RULES}
    return {**by_name, "survival, head": made(StopConfig(rule="survival", score="head"))}


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


def beta(update: str = "natural", discount: float = 1.0) -> rules.BetaThompson:
    stop = StopConfig(rule="beta", alpha=2.0, beta=3.0, update=update, discount=discount)  # type: ignore[arg-type]
    return rules.BetaThompson(1000, stop, RuleInputs(Streams(1)))


@settings(deadline=None)
@given(
    outcomes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=30),
    update=st.sampled_from(["natural", "printed"]),
    discount=st.sampled_from([1.0, 0.9]),
)
def test_trials_of_the_beta_posterior(outcomes: list[tuple[int, int]], update: str, discount: float) -> None:
    """α += r, β += n − r with n = min(|Q_v| + 1, |Q_d|) (EESD Algorithm 2); discounted ones lose their weight.

    The prior keeps its own. The printed r = |Q_v| − 1 is clamped at 0.
    """
    rule, right, wrong = beta(update, discount), 0.0, 0.0
    for drafted, most in outcomes:
        accepted = min(drafted, most)
        rule.observe(drafted, accepted)
        hits = accepted if update == "natural" else max(0, accepted - 1)
        right, wrong = discount * right + hits, discount * wrong + min(accepted + 1, drafted) - hits
    assert (rule.alpha, rule.beta) == (pytest.approx(2 + right), pytest.approx(3 + wrong))


class EvenLength(StopRule):
    """Drafts an even number of tokens, at most `max_draft`."""

    def __init__(self, max_draft: int, stop: StopConfig, inputs: RuleInputs):
        self.max_draft = max_draft

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.max_draft or step.drafted % 2 == 0


def test_one_entry_adds_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an option's choice, drafts, and says what it needs; without the entry it is refused."""
    refusal("rule='even': expected one of survival, ", StopConfig, rule="even")
    monkeypatch.setitem(RULES, "even", RuleEntry(f"{__name__}:EvenLength", "…", needs_head=True))
    stop = StopConfig(rule="even", max_draft=5)
    assert (draft_length(rules.make_rule(stop, Streams(0))), stop.needs_head) == (2, True)
    assert TypeAdapter(StopConfig).json_schema()["properties"]["rule"]["enum"][-1] == "even"  # what --help shows


def test_every_rule_has_a_file_in_conf() -> None:
    """Where it has not: python docs/make_options.py."""
    for name, entry in RULES.items():
        stop = construct(StopConfig, settings_of(f"early_exit/{name}")["stop"])
        assert (stop.rule, stop.threshold, stop.needs_head) == (name, None, entry.needs_head)


@pytest.mark.parametrize("rule", ["beta", "calibrated"])
def test_a_draft_goes_on_with_a_drawn_probability(rule: Any) -> None:
    """θ ~ Beta(α, β), or N(μ, σ²) clamped to [0, 1], and then a coin (EESD, Algorithms 2 and 3), of one stream."""
    stop = StopConfig(rule=rule)
    made: Any = rules.make_rule(stop, Streams(7), head([2.0]))
    chance, outcomes = Streams(7).of("stop"), set()
    for _ in range(50):
        if rule == "beta":
            theta = chance.betavariate(stop.alpha, stop.beta)
        else:
            mean, variance = made.posterior(step(1))
            theta = min(1.0, max(0.0, chance.gauss(mean, math.sqrt(variance))))
        ends = made.stop(step(1))
        assert ends == (chance.random() >= theta)
        outcomes.add(ends)
    assert outcomes == {True, False}


def posterior(mean: str = "sample", bias: float = 0.0, evidence: str = "both", **changes: float) -> rules.PosteriorMean:
    known = {"model_sigma": 0.3, "sample_sigma": 0.6, "prior": 0.5} if evidence == "both" else {}
    stop = StopConfig(rule="calibrated", evidence=evidence, **{**known, **changes})  # type: ignore[arg-type]
    stop = replace(stop, mean=mean) if mean == "printed" else stop
    return rules.PosteriorMean(50, stop, RuleInputs(Streams(0), head([bias])))


def calibrated(**changes: Any) -> rules.CalibratedThompson:
    believed = posterior(**changes)
    return rules.CalibratedThompson(50, believed.settings, RuleInputs(Streams(0), believed.head))


def test_posterior_moves_from_the_model_to_the_sample() -> None:
    rule = posterior(prior=0.2)
    assert rule.posterior_of(0.9) == pytest.approx((0.9, 0.3**2))  # n = 0: the head alone
    for n in range(1, 200):
        rule.observe(4, 2)
        mean, variance = rule.posterior_of(0.9)
        weight = 0.6**2 / (n * 0.3**2 + 0.6**2)
        assert mean == pytest.approx(weight * 0.9 + (1 - weight) * rule.estimate)
        assert variance == pytest.approx(0.3**2 * 0.6**2 / (0.6**2 + n * 0.3**2))
    assert mean == pytest.approx(rule.estimate, abs=0.02)
    assert rule.estimate == pytest.approx(2 / 3, abs=0.01)  # two of three tested tokens right


def test_estimates_by_hand() -> None:
    """printed: θ̂_t = (θ̂_{t−|Q_v|} · (t − |Q_v| + 1) + |Q_v|) / (t + 1), t accepted tokens so far (EESD eq. 8);
    sample: the share of tested tokens that were right, the prior counting as one of them."""
    printed, sample = posterior("printed", prior=0.5), posterior("sample", prior=0.5)
    found = []
    for drafted, accepted in ((4, 0), (4, 3), (3, 3), (4, 1)):
        for rule in (printed, sample):
            rule.observe(drafted, accepted)
        found.append((printed.estimate, sample.estimate))
    expected = [(0.5, 0.5 / 2), (3.5 / 4, 3.5 / 6), (6.5 / 7, 6.5 / 9), (7.5 / 8, 7.5 / 11)]
    assert found == [pytest.approx(pair) for pair in expected]


def test_evidence_of_one_kind_alone() -> None:
    """The paper's ablations: the head alone never moves, the sample alone never asks the head."""
    model = posterior(evidence="model", model_sigma=0.3)
    sample = posterior(evidence="sample", sample_sigma=0.6, prior=0.2)
    assert sample.posterior_of(0.9) == (0.2, 0.0)
    for rule in (model, sample):
        for _ in range(30):
            rule.observe(4, 2)
    assert model.posterior_of(0.9) == pytest.approx((0.9, 0.3**2))
    assert sample.posterior_of(0.9) == sample.posterior_of(0.1) == pytest.approx((sample.estimate, 0.6**2 / 30))
    blind: Any = rules.CalibratedThompson(50, sample.settings, RuleInputs(Streams(0), sample.head))
    blind.head = None
    assert draft_length(blind) >= 1


def test_the_head_is_asked_about_the_token_just_drafted() -> None:
    rule, asked = calibrated(), []
    rule.head = lambda *given: asked.append(given) or torch.zeros(1)  # type: ignore[assignment]
    target, drafts = torch.tensor([[5.0, 6.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    source = SimpleNamespace(hidden=drafts, target_hidden=target)
    rule.stop(Step(7, torch.tensor([0]), torch.zeros(1, 2), source, row=1))
    found = [tensor.tolist() for tensor in asked[0]]
    assert found == [[[5.0, 6.0]], [[3.0, 4.0]], [7], [pytest.approx(math.log(0.5))]]


def test_the_mean_alone_decides_without_chance() -> None:
    """The first token at which μ is below the threshold is the last one, every time."""
    for bias, threshold in ((0.5, 0.6), (0.5, 0.65), (-1.0, 0.2)):
        stop = StopConfig(rule="posterior_mean", model_sigma=0.3, sample_sigma=0.6, prior=0.3, threshold=threshold)
        rule = rules.PosteriorMean(4, stop, RuleInputs(Streams(0), head([bias])))
        for _ in range(6):
            mean = rule.posterior_of(1 / (1 + math.exp(-bias)))[0]
            assert draft_length(rule) == (1 if mean < threshold else 4)
            rule.observe(4, 1)
    assert mean < 0.65  # both ends were there: the estimate falls to 0.5 of tested tokens


def test_calibration_head_is_the_formula() -> None:
    """θ_M's logit = W_p [W^i H^(T) ; H^(D)] and the draft's own log-odds, over the position's
    temperature: for any W_p, W^i, i capped at 10, no gradient to the inputs."""
    generator = torch.Generator().manual_seed(0)
    head = CalibrationHead(3, 2)
    matrices = torch.randn(POSITIONS, 3, 3, generator=generator)
    out = torch.randn(5, generator=generator)
    with torch.no_grad():
        head.target.copy_(out[:3] @ matrices)
        head.draft.copy_(out[3:])
        head.bias.fill_(0.25)
        head.odds.fill_(0.5)
        head.temperature.copy_(torch.linspace(1, 2, POSITIONS))
    target, draft = torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)
    target.requires_grad_()
    places = torch.tensor([1, 4, 10, 25])
    q = torch.tensor([0.1, 0.5, 0.9, 0.2])
    logits = head(target, draft, places, q.log())
    for n, place in enumerate(places.tolist()):
        matrix = matrices[min(place, POSITIONS) - 1]
        expected = out @ torch.cat([matrix @ target[n], draft[n]]) + 0.25 + 0.5 * q[n].logit()
        torch.testing.assert_close(logits[n], expected / head.temperature[min(place, POSITIONS) - 1])
    logits.sum().backward()
    assert target.grad is None
    assert head.target.grad is not None
