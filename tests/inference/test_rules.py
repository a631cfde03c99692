"""Stop rules and verification rules on their own."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference.stop_rules import BetaThompson, FixedLength
from inference.tree import ROOT
from inference.verify import verify_greedy


def beta(update: str, alpha: float = 1.0, other: float = 1.0, seed: int = 0, max_draft: int = 1000) -> BetaThompson:
    return BetaThompson(max_draft, alpha, other, update, torch.Generator().manual_seed(seed))


def draft_length(rule: BetaThompson) -> int:
    drafted = 1
    while not rule.stop(drafted):
        drafted += 1
    return drafted


@given(k=st.integers(1, 20))
def test_fixed_length(k: int) -> None:
    assert [FixedLength(k).stop(i) for i in range(1, k + 1)] == [False] * (k - 1) + [True]


@pytest.mark.parametrize(
    ("drafted", "accepted", "natural", "printed"),
    [
        (5, 0, (0, 1), (0, 1)),  # printed r = |Q_v| − 1 would be −1: clamped
        (5, 1, (1, 1), (0, 2)),
        (5, 3, (3, 1), (2, 2)),
        (5, 5, (5, 0), (4, 1)),  # printed charges a failure to a draft that was right throughout
        (1, 1, (1, 0), (0, 1)),
    ],
)
def test_posterior_updates(drafted: int, accepted: int, natural: tuple, printed: tuple) -> None:
    """α += r, β += n − r with n = min(|Q_v| + 1, |Q_d|) (EESD Algorithm 2)."""
    for update, (right, wrong) in (("natural", natural), ("printed", printed)):
        rule = beta(update, 2.0, 3.0)
        rule.observe(drafted, accepted)
        assert (rule.alpha, rule.beta) == (2.0 + right, 3.0 + wrong)


@given(
    outcomes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=30),
    update=st.sampled_from(["natural", "printed"]),
)
def test_the_posterior_stays_proper(outcomes: list[tuple[int, int]], update: str) -> None:
    rule = beta(update)
    for drafted, accepted in outcomes:
        before = rule.alpha + rule.beta
        rule.observe(drafted, min(accepted, drafted))
        assert rule.alpha >= 1
        assert rule.beta >= 1
        assert rule.alpha + rule.beta == before + min(min(accepted, drafted) + 1, drafted)  # one trial per tested token


def test_draft_length_follows_the_acceptance_rate() -> None:
    """With acceptance a, the length settles near 1/(1 − a): longer drafts for better drafters."""
    means = []
    for rate in (0.2, 0.5, 0.8):
        rule, chance = beta("natural", seed=1), random.Random(0)
        lengths = []
        for _ in range(2000):
            drafted = draft_length(rule)
            accepted = next((i for i in range(drafted) if chance.random() >= rate), drafted)
            rule.observe(drafted, accepted)
            lengths.append(drafted)
        settled = lengths[500:]
        means.append(sum(settled) / len(settled))
        assert means[-1] == pytest.approx(1 / (1 - rate), rel=0.1)
    assert means == sorted(means)


def test_seed_decides_and_max_draft_bounds() -> None:
    assert [draft_length(beta("natural", 5, 1, seed=3)) for _ in range(3)] == [
        draft_length(beta("natural", 5, 1, seed=3))
    ] * 3
    assert len({draft_length(beta("natural", 5, 1, seed=s)) for s in range(20)}) > 3
    assert max(draft_length(beta("natural", 1e6, 1e-6, seed=s, max_draft=7)) for s in range(20)) == 7


@st.composite
def drafts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A tree without equal siblings over three tokens, and the target's choice after every node."""
    parents, tokens = [], []
    for i in range(draw(st.integers(0, 12))):
        parent, token = draw(st.integers(ROOT, i - 1)), draw(st.integers(0, 2))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
        if len(parents) < i + 1:
            break
    choices = draw(st.lists(st.integers(0, 2), min_size=len(tokens) + 1, max_size=len(tokens) + 1))
    return tokens, parents, choices


@given(drafts())
def test_greedy_walks_the_targets_own_path(draft: tuple[list[int], list[int], list[int]]) -> None:
    tokens, parents, choices = draft
    accepted, bonus = verify_greedy(tokens, parents, choices)
    last = ROOT
    for node in accepted:
        assert parents[node] == last
        assert tokens[node] == choices[last + 1]
        last = node
    assert bonus == choices[last + 1]
    assert not any(p == last and t == bonus for p, t in zip(parents, tokens, strict=True))  # as long as possible
