"""Verification in tensors, floats and generators decides as the fractions do whose distribution is in
test_verify_distributions.py."""

import random
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference.core.tree import ROOT
from inference.core.verify import NodeRule, RandomChance, Rows, verify_sampled
from tests.exact_distributions import Branch, emitted, paths, plain, random_model, sampled, ships
from tests.inference.core.test_verify_distributions import NAIVE, SAMPLED, WITH, WITHOUT
from tests.tiers import as_many


@dataclass
class Scripted:
    """Answers from a list of numbers in [0, 1)."""

    numbers: list[float]

    def accept(self, probability: float) -> bool:
        return self.numbers.pop() < probability

    def choose(self, weights: Rows) -> int:
        steps = np.cumsum([float(weight) for weight in weights])
        return int(np.searchsorted(steps, self.numbers.pop() * steps[-1], side="right"))


@given(seed=st.integers(0, 10**6), rule=st.sampled_from([WITH, WITHOUT, NAIVE]), at_once=st.booleans())
@example(seed=10496, rule=WITHOUT, at_once=False)  # the second of four candidates is certain to be accepted
@settings(deadline=None, max_examples=as_many(60))
def test_tensors_decide_as_fractions_do(seed: int, rule: NodeRule, at_once: bool) -> None:
    p, q = random_model(seed, 6), random_model(seed + 1, 6)
    config = random.Random(seed).choice([(4, 2, 2), (1, 1, 1, 1), (3, 3), (6,)])
    draft = sampled(q, config, replace=rule != WITHOUT, pad=True)
    tokens, parents, rows = draft(Branch(()))
    exact = np.stack([p(context) for context in paths(tokens, parents)])
    p64 = torch.tensor(exact.astype(float))
    q64 = {parent: torch.tensor(row.astype(float)) for parent, row in rows.items()}
    children: dict[int, list[int]] = {}
    for token, parent in zip(tokens, parents, strict=True):
        children.setdefault(parent, []).append(token)

    before = {parent: row.clone() for parent, row in q64.items()}
    fractions = rule.acceptance(list(children.items()), rows, exact)
    floats = rule.acceptance(list(children.items()), q64, p64)
    for parent, found in floats.items():
        # After a certain acceptance nothing is ever asked, and in floats nothing but rounding is left there.
        certain = [place for place, ratio in enumerate(fractions[parent]) if ratio >= 1]
        asked = certain[0] + 1 if certain else len(found)
        assert found[:asked] == pytest.approx([float(x) for x in fractions[parent][:asked]], abs=1e-12)
        if not certain:
            rest = rule.residual((parent, children[parent]), q64, p64)
            assert rest.tolist() == pytest.approx(
                rule.residual((parent, children[parent]), rows, exact).astype(float).tolist(), abs=1e-12
            )
    assert all(torch.equal(before[parent], q64[parent]) for parent in before)  # the draft is left as it was

    numbers = [random.Random(seed).random() for _ in range(50)]
    ours = verify_sampled(tokens, parents, q64, p64, rule, Scripted(list(numbers)), at_once=at_once)
    assert ours == verify_sampled(tokens, parents, rows, exact, rule, Scripted(list(numbers)))


def test_a_rejection_that_rounding_made_possible_still_emits() -> None:
    """p ≤ q in float32 with a ratio just below 1: the rejection leaves no residual, the token is p's."""
    q = torch.tensor([0.5, 0.5, 0.0])
    p = torch.stack([torch.tensor([0.5, float(torch.nextafter(q[1], q[2])), 0.0])] * 2)

    class Unlucky:
        def accept(self, probability: float) -> bool:
            assert probability < 1
            return False

        def choose(self, weights: torch.Tensor) -> int:
            assert torch.equal(weights, p[0])
            return 0

    assert verify_sampled([1], [ROOT], {ROOT: q}, p, WITH, Unlucky()) == ([], 0)


@pytest.mark.parametrize("rule", [WITH, WITHOUT])
def test_a_draft_that_was_not_sampled_is_refused(rule: NodeRule) -> None:
    with pytest.raises(ValueError, match="not sampled"):
        verify_sampled([1], [ROOT], {}, torch.full((2, 3), 1 / 3), rule, RandomChance(random.Random(0)))


@pytest.mark.parametrize("rule", SAMPLED)
def test_without_a_draft_the_next_token_is_sampled(rule: NodeRule) -> None:
    p = random_model(3, 4)
    for at_once in (False, True):
        assert emitted(p, lambda _: ([], [], {}), ships(rule, at_once=at_once), 1) == plain(p, 1)


def test_chance_follows_its_generator() -> None:
    def decisions(seed: int) -> list[int]:
        chance = RandomChance(random.Random(seed))
        return [x for _ in range(20) for x in (chance.accept(0.5), chance.choose(torch.ones(1000)))]

    assert decisions(1) == decisions(1) != decisions(2)


def test_acceptance_has_its_probability() -> None:
    """Within 4.5 σ. The distributions above are of exact coins, and whole texts show a false one only where it is far
    off."""
    chance, tosses = RandomChance(random.Random(0)), 100_000
    for probability in (0.1, 0.5, 0.9):
        accepted = sum(chance.accept(probability) for _ in range(tosses))
        sigma = (tosses * probability * (1 - probability)) ** 0.5
        assert accepted == pytest.approx(tosses * probability, abs=4.5 * sigma)


def test_impossible_and_certain_events() -> None:
    chance = RandomChance(random.Random(0))
    weights = torch.zeros(50)
    weights[[7, 30]] = torch.tensor([1e-6, 3e-6])
    seen = Counter(chance.choose(weights) for _ in range(4000))
    assert set(seen) == {7, 30}  # a weight of 0 is never chosen, at the ends neither
    assert seen[7] / 4000 == pytest.approx(0.25, abs=0.03)
    assert not any(chance.accept(0.0) for _ in range(1000))
    assert all(chance.accept(1.0) for _ in range(1000))
    chance._random = SimpleNamespace(random=lambda: 0.0)
    assert not chance.accept(0.0)  # u < ratio, not ≤
    assert chance.choose(weights) == 7
    chance._random = SimpleNamespace(random=lambda: 1 - 2.0**-53)
    assert chance.choose(weights) == 30


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.slow
def test_frequencies_in_production(rule: NodeRule) -> None:
    """float32, torch, the real generator: first tokens of 3000 rounds, each frequency within 4.5 σ."""
    p, q = (torch.tensor(row, dtype=torch.float32) for row in ([0.5, 0.0, 0.3, 0.2], [0.1, 0.4, 0.3, 0.2]))
    generator = torch.Generator().manual_seed(0)
    chance, rounds = RandomChance(random.Random(0)), 3000
    candidates = torch.multinomial(q.expand(rounds, 4), 2, replacement=rule != WITHOUT, generator=generator).tolist()
    rows, counts = torch.stack([p] * 3), Counter()
    for pair in candidates:
        accepted, token = verify_sampled(pair, [ROOT, ROOT], {ROOT: q}, rows, rule, chance)
        counts[pair[accepted[0]] if accepted else token] += 1
    for token, mass in enumerate(p.tolist()):
        assert counts[token] == pytest.approx(rounds * mass, abs=4.5 * (rounds * mass * (1 - mass)) ** 0.5)
