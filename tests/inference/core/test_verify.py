"""What verification emits: sampled, exactly, by every random branch with rational weights; in floats; and greedily.

The branches include the draws of the candidates. The code under test is the shipped one, with numpy arrays of
fractions instead of tensors, and then in tensors, floats and generators.
"""

import functools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from outrider.inference.core import verify
from outrider.inference.core.tree import ROOT
from outrider.inference.core.verify import (
    Chance,
    Matching,
    NodeRule,
    RandomChance,
    Rejection,
    Rows,
    verify_block,
    verify_greedy,
    verify_sampled,
)
from tests.exact_distributions import (
    Branch,
    Distribution,
    Draft,
    Drafter,
    Model,
    Verify,
    distribution,
    distribution_of,
    emitted,
    everywhere,
    likeliest,
    paths,
    plain,
    random_model,
    sampled,
    ships,
)
from tests.faults import plant
from tests.tiers import as_many

WITH, WITHOUT, NAIVE = Rejection(replace=True), Rejection(replace=False), Matching()


SAMPLED = [pytest.param(WITH, id="with"), pytest.param(WITHOUT, id="without"), pytest.param(NAIVE, id="naive")]
weights = st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(any)
CASES = {
    "ordinary": ([3, 2, 1, 4], [1, 1, 5, 2]),
    "zeros": ([3, 0, 1, 0], [0, 2, 1, 1]),
    "equal": ([3, 2, 0, 4], [3, 2, 0, 4]),
    "disjoint": ([3, 2, 0, 0], [0, 0, 1, 5]),
    "support smaller than k": ([1, 2, 3, 4], [0, 3, 1, 0]),
    "p a point": ([0, 1, 0, 0], [1, 2, 1, 1]),
    "q a point": ([1, 2, 1, 1], [0, 0, 1, 0]),
    "both the same point": ([0, 0, 1, 0], [0, 0, 1, 0]),
    "both points": ([0, 1, 0, 0], [0, 0, 1, 0]),
    "p below q but for one token": ([1, 1, 1, 7], [2, 2, 2, 4]),
}


def node_distribution(
    rule: NodeRule, p: Rows, q: Rows, k: int, *, replace: bool | None = None, **options: bool
) -> Distribution:
    if replace is None:
        replace = rule != WITHOUT
    draft = sampled(everywhere(q), (k,), replace=replace, **options)
    return emitted(everywhere(p), draft, ships(rule), 1)


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_distribution_of_a_node(rule: NodeRule, k: int, case: str) -> None:
    p, q = map(distribution, CASES[case])
    assert node_distribution(rule, p, q, k) == plain(everywhere(p), 1)


@given(p=weights, q=weights, rule=st.sampled_from([WITHOUT, NAIVE]))
@settings(deadline=None, max_examples=as_many(30))
@pytest.mark.slow
def test_candidates_beyond_the_support_change_nothing(p: list[int], q: list[int], rule: NodeRule) -> None:
    """A draft padded to four children has q_i = 0 at the padding, and token 0 twice: no crash and no bias."""
    padded = node_distribution(rule, distribution(p), distribution(q), 4, replace=False, pad=True)
    assert padded == plain(everywhere(distribution(p)), 1)


@given(p=weights, q=weights, k=st.integers(2, 3))
@settings(deadline=None, max_examples=as_many(30))
@pytest.mark.slow
def test_independent_draws_may_drop_their_repeats(p: list[int], q: list[int], k: int) -> None:
    """The without-replacement rule skips repeats, and the remaining draws are draws without replacement."""
    found = node_distribution(WITHOUT, distribution(p), distribution(q), k, replace=True)
    assert found == plain(everywhere(distribution(p)), 1)


@settings(deadline=None)
@given(p=weights, candidates=st.lists(st.integers(0, 3), max_size=5))
def test_naive_verification_is_one_sample_from_p(p: list[int], candidates: list[int]) -> None:
    """A candidate is accepted exactly when the one sample from p equals it; its first copy, if it is repeated."""
    row = distribution(p)
    rows = np.stack([row] * (len(candidates) + 1))
    parents = [ROOT] * len(candidates)

    def run(chance: Chance) -> tuple[int | None, int | None]:
        accepted, token = verify_sampled(candidates, parents, {}, rows, NAIVE, chance)
        return (accepted[0], None) if accepted else (None, token)

    expected: Counter = Counter()
    for token, mass in enumerate(row):
        expected[(candidates.index(token), None) if token in candidates else (None, token)] += mass
    assert distribution_of(run) == {outcome: mass for outcome, mass in expected.items() if mass}


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize(
    ("config", "at_once"),
    [((1, 1), True), ((1, 1, 1), False), ((1, 1, 1), True), ((2, 2), True), ((3, 2), False), ((2, 1, 1), True)],
    ids=str,
)
@pytest.mark.slow
def test_joint_distribution_of_a_sampled_tree(rule: NodeRule, config: tuple[int, ...], at_once: bool) -> None:
    """Every prefix of a round and the token after it: p(x_1) p(x_2 | x_1) … A chain is Leviathan's method."""
    size = (
        3 if (rule == WITHOUT and config != (2, 1, 1)) or len(config) == sum(config) else 2
    )  # a chain has few branches
    seed = sum(config)
    p, q = random_model(seed, size), random_model(seed + 1, size)
    draft = sampled(q, config, replace=rule != WITHOUT)
    length = len(config) + 1
    assert emitted(p, draft, ships(rule, at_once=at_once), length) == plain(p, length)


def verify_shared(
    tokens: Sequence[int], parents: Sequence[int], q: Mapping[int, Rows], p: Rows, chance: Chance, *, at_once: bool
) -> tuple[list[int], int]:
    """The with-replacement rule on the shipped tree: equal draws are one node, repeated in `draws`."""
    kept: list[int] = []
    shared: dict[int, int] = {ROOT: ROOT}
    places: dict[tuple[int, int], int] = {}
    draws: dict[int, list[int]] = {}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent in shared:  # nothing is drafted below a repeated draw
            place = places.setdefault((shared[parent], token), len(kept))
            draws.setdefault(shared[parent], []).append(place)
            if place == len(kept):
                kept.append(node)
                shared[node] = place
    accepted, token = verify_sampled(
        [tokens[node] for node in kept],
        [shared[parents[node]] for node in kept],
        {shared[parent]: row for parent, row in q.items() if parent in shared},
        p[[0, *(node + 1 for node in kept)]],
        WITH,
        chance,
        draws=draws,
        at_once=at_once,
    )
    return [kept[node] for node in accepted], token


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("config", [(2,), (3,), (2, 1)], ids=str)
def test_distribution_of_draws_that_share_a_node(config: tuple[int, ...], at_once: bool) -> None:
    p, q = everywhere(distribution([1, 5, 4])), everywhere(distribution([8, 1, 1]))
    verify = functools.partial(verify_shared, at_once=at_once)
    length = len(config) + 1
    assert emitted(p, sampled(q, config, replace=True), verify, length) == plain(p, length)


@pytest.mark.parametrize("at_once", [False, True])
def test_distribution_of_families_of_different_sizes(at_once: bool) -> None:
    """A node with one child, because q has one token, before and after nodes with two."""
    p = everywhere(distribution([1, 4, 3]))

    def q(text: tuple[int, ...]) -> Rows:
        return distribution([0, 1, 0] if text == (0,) else [6, 1, 1])

    assert emitted(p, sampled(q, (2, 2), replace=False), ships(WITHOUT, at_once=at_once), 3) == plain(p, 3)


@given(
    seed=st.integers(0, 99),
    nodes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=10),
    at_once=st.booleans(),
)
@settings(deadline=None, max_examples=as_many(40))
def test_sample_and_match_is_exact_for_any_tree(seed: int, nodes: list[tuple[int, int]], at_once: bool) -> None:
    """Any shape and any tokens, siblings repeated or not: the draft is not random."""
    parents = [place % (i + 1) - 1 for i, (place, _) in enumerate(nodes)]
    tokens = [token for _, token in nodes]
    length = max(map(len, paths(tokens, parents))) + 1
    assume(length <= 5)
    p = random_model(seed, 3)
    distribution_of_tree = emitted(p, lambda _: (tokens, parents, {}), ships(NAIVE, at_once=at_once), length)
    assert distribution_of_tree == plain(p, length)


WRONG = {
    "no residual": (ships(WITH), sampled),
    "no residual, without replacement": (ships(WITHOUT), functools.partial(sampled, replace=False)),
    "chosen candidates under the with-replacement rule": (ships(WITH), likeliest),
    "chosen candidates under the without-replacement rule": (ships(WITHOUT), likeliest),
    "draws without replacement under the other rule": (ships(WITH), functools.partial(sampled, replace=False)),
}


@pytest.mark.parametrize("config", [(2,), (2, 1)], ids=str)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rules_are_found_out(monkeypatch: pytest.MonkeyPatch, wrong: str, config: tuple[int, ...]) -> None:
    verify, structure = WRONG[wrong]
    if wrong.startswith("no residual"):
        plant(monkeypatch, Rejection, "residual", "return r[0]", "return p[parent + 1]")
    p, q = everywhere(distribution([1, 5, 2])), everywhere(distribution([4, 1, 1]))
    if structure is sampled:
        structure = functools.partial(sampled, replace=True)
    length = len(config) + 1
    found = emitted(p, structure(q, config), verify, length)
    assert found != plain(p, length)
    distance = sum(abs(found.get(t, 0) - w) for t, w in plain(p, length).items()) / 2
    assert distance > Fraction(1, 100)


BLOCK_FAULTS = {  # by what stands in the source
    "ratios not bounded": ("min(1, previous * ratio)", "previous * ratio"),
    "ratios of tokens, not of prefixes": ("min(1, previous * ratio)", "min(1, ratio)"),
    "a prefix accepted as the whole is": ("mass / (mass + 1 - c[prefix_len])", "c[prefix_len]"),
    "all or nothing": ("prefix_len -= 1", "prefix_len = 0"),
    "residual of another prefix": ("chance.choose(residual +", "chance.choose((p[0] - q[ROOT]).clip(min=0) +"),
    "residual as token by token": ("(c[prefix_len] * p[prefix_len] -", "(p[prefix_len] -"),
    "whole rejected too often": ("chance.accept(c[prefix_len])", "chance.accept(c[prefix_len] ** 2)"),
}


def block(rule: Callable = verify_block) -> Verify:
    return lambda tokens, parents, q, p, chance: rule(tokens, q, p, chance)


def by_the_paper(tokens: Sequence[int], q: Mapping[int, Rows], p: Rows, chance: Chance) -> tuple[list[int], int]:
    """Algorithm 2 as it is printed: a coin for every prefix; the longest one that it falls for is accepted."""
    c, count, rest = Fraction(1), 0, (p[0] - q[ROOT]).clip(min=0)
    for i, token in enumerate(tokens, 1):
        c = min(Fraction(1), c * p[i - 1][token] / q[i - 2][token])
        left = p[i] if i == len(tokens) else (c * p[i] - q[i - 1]).clip(min=0)
        mass = left.sum()
        if chance.accept(c if i == len(tokens) or mass + 1 == c else mass / (mass + 1 - c) if mass else mass):
            count, rest = i, left
    return [*range(count)], chance.choose(rest if rest.sum() else p[0])


def ended(q: Model, most: int) -> Drafter:
    """Chains drawn from q which end with the first token 0, as a stop rule ends them."""

    def draft(chance: Chance) -> Draft:
        tokens: list[int] = []
        while len(tokens) < most and 0 not in tokens:
            tokens.append(chance.choose(q((*tokens,))))
        return tokens, [*range(ROOT, len(tokens) - 1)], {n - 1: q((*tokens[:n],)) for n in range(len(tokens))}

    return draft


def rounds(p: Model, draft: Drafter, verify: Verify) -> Distribution:
    """The distribution of what was drafted, how much of it was accepted, and the token after it."""

    def run(chance: Chance) -> tuple:
        tokens, parents, q = draft(chance)
        accepted, token = verify(tokens, parents, q, np.stack([p(text) for text in paths(tokens, parents)]), chance)
        return tuple(tokens), len(accepted), token

    return distribution_of(run)


def accepted_tokens(p: Model, draft: Drafter, verify: Verify) -> Fraction:
    return sum((count * mass for (_, count, _), mass in rounds(p, draft, verify).items()), Fraction(0))


@given(seed=st.integers(0, 10**6), n=st.integers(1, 3), stops=st.booleans())
@settings(deadline=None, max_examples=as_many(40))
def test_blocks_emit_p_and_accept_no_less_than_token_by_token(seed: int, n: int, stops: bool) -> None:
    """Theorems 1 and 2 of the paper, also where a stop rule ends the chain."""
    p, q = random_model(seed, 3), random_model(seed + 1, 3)
    draft = ended(q, n) if stops else sampled(q, (1,) * n, replace=False)
    assert emitted(p, draft, block(), n + 1) == plain(p, n + 1)
    assert rounds(p, draft, block()) == rounds(p, draft, block(by_the_paper))
    assert accepted_tokens(p, draft, block()) >= accepted_tokens(p, draft, ships(WITHOUT))


def test_blocks_accept_more_where_they_can() -> None:
    """The paper's example: p = (1/3, 2/3), q = (2/3, 1/3), two tokens."""
    p, draft = everywhere(distribution([1, 2])), sampled(everywhere(distribution([2, 1])), (1, 1), replace=False)
    assert accepted_tokens(p, draft, block()) == Fraction(11, 9)
    assert accepted_tokens(p, draft, ships(WITHOUT)) == Fraction(10, 9)


@pytest.mark.parametrize("fault", BLOCK_FAULTS)
def test_wrong_blocks_are_found_out(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    plant(monkeypatch, verify, "verify_block", *BLOCK_FAULTS[fault])
    p, q = everywhere(distribution([1, 5, 2])), everywhere(distribution([4, 1, 1]))
    assert emitted(p, sampled(q, (1, 1, 1), replace=False), block(verify.verify_block), 4) != plain(p, 4)


def acceptance(rule: NodeRule, p: Rows, q: Rows, k: int) -> Fraction:
    """The exact probability that one of k candidates is accepted."""
    draft = sampled(everywhere(q), (k,), replace=rule != WITHOUT)

    def run(chance: Chance) -> bool:
        tokens, parents, rows = draft(chance)
        return bool(verify_sampled(tokens, parents, rows, np.stack([p] * (len(tokens) + 1)), rule, chance)[0])

    return distribution_of(run).get(True, Fraction(0))


@given(p=weights, q=weights, k=st.integers(1, 3))
@example(p=[3, 2, 0, 4], q=[3, 2, 0, 4], k=1)  # every ratio is 1, and the residual's mass of 0 is never a divisor
@settings(deadline=None, max_examples=as_many(40))
@pytest.mark.slow
def test_acceptance_without_beats_with_beats_naive(p: list[int], q: list[int], k: int) -> None:
    without, with_, naive = (acceptance(rule, distribution(p), distribution(q), k) for rule in (WITHOUT, WITH, NAIVE))
    assert without >= with_ >= naive
    if k == 1:
        assert without == with_ == sum(min(a, b) for a, b in zip(distribution(p), distribution(q), strict=True))


def test_the_ordering_is_strict_where_it_can_be() -> None:
    p, q = distribution([5, 3, 2, 1]), distribution([3, 4, 1, 2])
    rates = [acceptance(rule, p, q, 2) for rule in (WITHOUT, WITH, NAIVE)]
    assert rates[0] > rates[1] > rates[2]
    assert acceptance(WITHOUT, p, q, 4) == 1  # all tokens are candidates
    for rule in (WITHOUT, WITH, NAIVE):
        assert acceptance(rule, p, q, 1) < acceptance(rule, p, q, 2) < acceptance(rule, p, q, 3)


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
    if config == (1, 1, 1, 1):
        blocks = (verify_block(tokens, *one, Scripted(list(numbers))) for one in ((q64, p64), (rows, exact)))
        assert next(blocks) == next(blocks)


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


@settings(deadline=None)
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
