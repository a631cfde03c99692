"""Choices of size against brute force; evidence by hand; what drafting may lose; distributions under chosen sizes."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.base.streams import Streams
from outrider.inference.core.tree import ROOT, DraftTree, OptimalTree
from outrider.inference.drafters.model_plugin import make_prompt_lookup
from outrider.inference.settings import MOST_NODES
from outrider.inference.settings.method import MethodConfig, StopConfig, StructureConfig
from outrider.inference.shapes.factory import make_structure, make_tree
from outrider.inference.shapes.shapes import outcomes_at_nodes
from outrider.inference.sizing.costs import MAX_LOSS, MEMORY, TRIAL_SHARE, WIDEST, Allowance, Costs, curve
from outrider.inference.sizing.node_sizes import SEARCH_SIZES, BestNodes, trials_of
from outrider.inference.sizing.policy import (
    BANDS,
    TREE_NEIGHBOUR,
    TREE_OWN,
    Evidence,
    TreeSizes,
    Tuning,
    band,
    best_length,
    best_prefix,
    trials_by_band,
    trials_in_chain,
)
from outrider.inference.stopping.by_costs import BestLength
from outrider.inference.stopping.interface import Source, Step
from outrider.inference.stopping.rules import make_rule
from tests.inference.known_source import KnownSource, Path_, check, random_q, root, weight
from tests.inference.priced import costs
from tests.tiers import as_many

shares = st.lists(st.floats(0, 1), min_size=1, max_size=15)
some_costs = st.builds(
    costs, step=st.floats(0.01, 1), row=st.floats(0, 0.2), node=st.floats(0, 0.3), rest=st.floats(0, 0.1)
)


# --- costs -----------------------------------------------------------------------------------------------------------


def test_curve_by_hand() -> None:
    found = curve([(1, 9.0), (1, 1.0), (1, 2.0), (1, 9.0), (1, 9.0), (2, 5.0), (4, 3.0), (8, 8.0)])
    assert found[0] == found[1] == 2.0  # the lower quartile, and nothing is cheaper than what was measured
    assert found[2] == found[3] == found[4] == 4.0  # a larger width is never cheaper
    assert found[5:9] == pytest.approx((5.0, 6.0, 7.0, 8.0))
    assert found[WIDEST] == pytest.approx(8.0 + WIDEST - 8)  # as steep as before
    assert curve([(3, 1.0), (4, 3.0), (8, 2.5)])[3] == 1.0  # pooled with 4
    assert curve([(1, 3.0), (2, 2.0), (4, 1.0), (8, 7.0)])[1:5] == (2.0,) * 4
    assert set(curve([(7, 1.5)])) == {1.5}
    with pytest.raises(ValueError, match="no samples"):
        curve([])


# --- evidence --------------------------------------------------------------------------------------------------------


def test_evidence_starts_at_the_prior_and_ends_at_the_counts() -> None:
    evidence = Evidence(3, Tuning(costs(), (200.0, 100.0), (160.0, 20.0)))
    first = evidence.shares()
    assert first[0] == pytest.approx(0.8, abs=0.02)
    assert first[1] < 0.8
    for _ in range(300):
        evidence.add(iter([(0, 10.0, True), (1, 10.0, False)]))
    assert evidence.shares()[0] == pytest.approx(0.1, abs=0.02)  # one of ten
    assert evidence.shares()[1] < 0.05
    assert evidence.shares()[2] == pytest.approx(evidence.shares()[1], abs=0.05)  # never tried: follows its neighbour


def test_evidence_forgets_slowly() -> None:
    evidence = Evidence(1, Tuning(costs()))
    for right in (False, True):
        for _ in range(200):
            evidence.add(iter([(0, 1.0, right)]))
    assert evidence.shares()[0] > 0.9  # what was wrong long ago counts no more


def test_texts_that_share_passes_share_what_they_learn() -> None:
    """A text that has tried nothing expects what the others have seen; rounds without trials take nothing away."""
    known = Tuning(costs(), (50.0,) * 3, (50.0,) * 3)
    for tuning, expected in ((known, 1.0), (known.of_all(lambda: (2, 0)), 0.1), (known, 1.0)):
        own, other = Evidence(3, tuning), Evidence(3, tuning)
        for trials in 90 * [[(0, 1.0, 0.0)]] + 90 * [[]]:
            own.add(iter(trials))
        assert other.shares()[0] == pytest.approx(expected, abs=0.05)


def test_trials_by_hand() -> None:
    assert list(trials_in_chain(4, 2)) == [(0, 1, True), (1, 1, True), (2, 1, False)]
    assert list(trials_in_chain(2, 2)) == [(0, 1, True), (1, 1, True)]
    tree = DraftTree(torch.arange(5), (ROOT, ROOT, 0, 0, 0), (-1,) * 5)
    assert list(outcomes_at_nodes(tree, [0, 3])) == [(2, 0), (3, 1)]
    assert list(outcomes_at_nodes(tree, [])) == [(2, None)]
    repeated = DraftTree(torch.arange(2), (ROOT, ROOT), (-1, -1), draws={ROOT: (0, 0, 1)})
    assert list(outcomes_at_nodes(repeated, [1])) == [(3, 2)]
    by_band = trials_by_band((ROOT, ROOT, 0, 1), (0.8, 0.2, 0.6, 0.4), [1])
    assert list(by_band) == [(0, 0.8, False), (4, 0.2, True), (2, 0.4, False)]
    assert [band(q) for q in (1.0, 0.72, 0.7, 0.49, 1e-9, 0.0)] == [0, 0, 1, 2, BANDS - 1, BANDS - 1]


def rate_of_length(shares: Sequence[float], seconds: Costs, length: int) -> float:
    emitted = 1 + sum(math.prod(shares[:k]) for k in range(1, length + 1))
    return emitted / (length * seconds.step[1] + seconds.verify[length + 1] + seconds.overhead)


@settings(deadline=None)
@given(shares=shares, seconds=some_costs)
def test_best_length_is_the_best(shares: list[float], seconds: Costs) -> None:
    found, rate = best_length(shares, seconds)
    rates = [rate_of_length(shares, seconds, length) for length in range(1, len(shares) + 1)]
    assert 1 <= found <= len(shares)
    assert rates[found - 1] == pytest.approx(max(rates)) == pytest.approx(rate)


# --- OPT-Trees -------------------------------------------------------------------------------------------------------


def tree_of(sizes: TreeSizes, source: KnownSource) -> OptimalTree:
    structure = make_tree(StructureConfig("opt_tree", nodes="auto", max_depth="auto"), tuning=Tuning(costs()))
    structure.sizes = sizes
    tree = structure.draft(source, root(), 99)
    assert isinstance(tree, OptimalTree)
    return tree


@given(seed=st.integers(0, 10**6), seconds=some_costs, nodes=st.sampled_from([None, 1, 6]), depth=st.integers(1, 4))
@settings(deadline=None, max_examples=as_many(60))
def test_the_tree_is_the_most_rewarding_prefix(seed: int, seconds: Costs, nodes: int | None, depth: int) -> None:
    """Among the prefixes of the drafted nodes by p̂: nothing nodes=auto could submit has more tokens a second."""
    q = random_q(seed)
    source = KnownSource(q)
    tuning = Tuning(seconds, (30.0, 20.0, 10.0), (36.0, 15.0, 2.0))
    sizes = TreeSizes(tuning, nodes, depth)
    tree = tree_of(sizes, source)
    check(tree, source, depth)
    spent = seconds.overhead + sum(seconds.step[width] for width in source.calls)
    trust = Evidence(BANDS, tuning, prior=TREE_OWN, neighbour=TREE_NEIGHBOUR, start=1.0).shares()

    def worth(path: Path_) -> float:
        if not path:
            return 1.0
        step = weight(q, path) / weight(q, path[:-1])
        return worth(path[:-1]) * min(1.0, step * trust[band(step)])

    drafted = sorted(
        ((*path, token) for path in source.paths for token in range(6)), key=lambda path: (-weight(q, path), len(path))
    )
    drafted = [path for path in drafted[: sizes.max_nodes] if weight(q, path) > 0]
    worths = [worth(path) for path in drafted]
    if nodes is None:
        rates = [(1 + sum(worths[:n])) / (spent + seconds.verify[n + 1]) for n in range(len(worths) + 1)]
        assert rates[len(tree)] == pytest.approx(max(rates[1:]), rel=1e-4)
    else:
        assert len(tree) == min(nodes, len(drafted))
    assert sum(tree.masses) == pytest.approx(sum(weight(q, path) for path in drafted[: len(tree)]), rel=1e-4)


@given(
    gains=shares.map(lambda values: sorted(values, reverse=True)),
    worths=shares.map(lambda values: sorted(values, reverse=True)),
    spare=st.integers(0, 5),
    seconds=some_costs,
)
@settings(deadline=None)
def test_how_much_of_a_level_is_fed(gains: list[float], worths: list[float], spare: int, seconds: Costs) -> None:
    """Against merging the expected children with the nodes that are there and keeping the likeliest."""
    sizes = TreeSizes(Tuning(seconds), len(worths) + spare, None)
    gains = gains[: len(worths)]
    feed, rate = sizes.begin()._best_feed(gains, worths, 1 + sum(worths))
    rates = []
    for rows in range(1, len(gains) + 1):
        merged = sorted([*worths, *gains[:rows]], reverse=True)[: sizes.max_nodes]
        width = min(len(worths) + rows, sizes.max_nodes) + 1
        rates.append((1 + sum(merged)) / (seconds.step[rows] + seconds.verify[width] + seconds.overhead))
    assert rate == pytest.approx(max(rates))
    assert rates[feed - 1] == pytest.approx(rate)


def test_a_round_looks_at_more_nodes_than_the_last_ones_submitted() -> None:
    """And at all of them where all are submitted, a few rounds later; a given number is looked at as it is."""

    def after(rounds: int, seconds: Costs, sizes: TreeSizes) -> int:
        sizes._tuning, q = Tuning(seconds), random_q(3, vocabulary=40, sharp=4.0)
        for _ in range(rounds):
            most = sizes.begin().nodes
            tree = tree_of(sizes, KnownSource(q))
            sizes.observe(tree, [])
        assert len(tree) <= most
        return sizes.begin().nodes

    sizes, given = (TreeSizes(Tuning(costs(), (50.0,), (50.0,)), nodes, None) for nodes in (None, 5))
    dear, free = costs(step=0.001, node=1.0), costs(step=0.001, node=0.0)
    assert sizes.begin().nodes == MOST_NODES
    assert after(20, dear, sizes) < MOST_NODES // 2
    assert after(8, free, sizes) == MOST_NODES
    assert after(20, dear, given) == 5


def test_the_next_level_is_expected_to_be_worth_as_much_less() -> None:
    """One node, worth 0.5, and so its child 0.25: fed if 1.75 tokens in 1 + 2 s seconds beat 1.5 in 1 + s."""
    for step, fed in ((0.19, 1), (0.21, 0)):
        grown = TreeSizes(Tuning(costs(step=step, node=0.0, rest=0.0)), None, None).begin()
        assert grown.after_level(1, [0.5], [0], [(-0.5, 0)]) == (1, fed)
    # What four rows cost is spent: 1.75 tokens in 1 + 0.51 + 0.21 seconds beat 1.5 in 1 + 0.51.
    grown = TreeSizes(Tuning(costs(step=0.11, row=0.1, node=0.0, rest=0.0)), None, None).begin()
    assert grown.after_level(4, [0.5], [0], [(-0.5, 0)]) == (1, 1)


def test_sizes_follow_acceptance() -> None:
    """An OPT-Tree and a chain, told of chains that were right or wrong throughout."""
    tuning = Tuning(costs())
    sizes, rule = TreeSizes(tuning, None, None), BestLength(tuning)
    parents, probs = (ROOT, 0, 1, 2, *[ROOT] * 28), (0.9,) * 4 + (0.0,) * 28
    wide = OptimalTree(torch.arange(32), parents, (-1,) * 32, branch_probs=probs)
    drafted, lengths = [], []
    for accepted in ([0, 1, 2, 3], [], [0, 1, 2, 3]):
        for _ in range(60):
            sizes.observe(wide, accepted)
            rule.observe(rule.length, rule.length if accepted else 0)
        lengths.append(rule.length)
        source = KnownSource(random_q(3, vocabulary=40, sharp=4.0))
        drafted.append(len(tree_of(sizes, source)))
    assert min(drafted[0], drafted[2]) > drafted[1]
    assert lengths == [BestLength.max_draft, 1, BestLength.max_draft]


FLAT = costs(node=0.0, rest=0.2)


@st.composite
def drafts(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Parents and falling path probabilities of a draft, and q of every node."""
    found: list[tuple[float, int, float]] = []  # path probability, parent in this list, q
    for _ in range(draw(st.integers(0, 30))):
        above = draw(st.integers(-1, len(found) - 1))
        q = draw(st.floats(0.01, 1.0))
        found.append((q * (found[above][0] if above >= 0 else 1.0), above, q))
    order = sorted(range(len(found)), key=lambda i: (-found[i][0], i))
    parents = [order.index(found[i][1]) if found[i][1] >= 0 else -1 for i in order]
    return np.array(parents, np.int64), np.array([found[i][0] for i in order]), [found[i][2] for i in order]


@settings(deadline=None, max_examples=as_many(60))
@given(draft=drafts(), row=st.floats(0.0, 0.5), seed=st.integers(0, 99))
def test_it_is_the_count_that_opt_tree_chooses(draft: tuple, row: float, seed: int) -> None:
    """But for 0 nodes, which it may choose where none pays."""
    parents, probs, steps = draft
    numbers = np.random.default_rng(seed)
    tried, right = (tuple(numbers.uniform(0, 20, BANDS)) for _ in range(2))
    tuning = Tuning(costs(node=row, rest=0.2), tried, right)
    sizes = BestNodes(tuning)
    sizes._allowance.takes_trial(1.0)  # the first trial's tokens
    trust = sizes._evidence.shares()
    worths: list[float] = []
    for above, q in zip(parents, steps, strict=True):
        worths.append(min(1.0, q * trust[band(q)]) * (worths[above] if above >= 0 else 1.0))
    count, rate = best_prefix(worths, [0.1 + verify + tuning.costs.overhead for verify in tuning.costs.verify[2:]])
    none = 1 / (0.1 + tuning.costs.verify[1] + tuning.costs.overhead)
    assert sizes.count(parents, probs) == (count if rate > none else 0)


def test_a_path_too_deep_for_a_float_is_worth_nothing() -> None:
    """Below a node of probability 0 nothing is divided by it."""
    parents, probs = np.array([-1, 0, 1, 2]), np.array([0.9, 1e-320, 0.0, 0.0])
    tuning = Tuning(FLAT, (0.0,) * BANDS, (0.0,) * BANDS)
    assert BestNodes(tuning).count(parents, probs) <= 2
    BestNodes(tuning).observe(parents, probs, [0, 1, 2, 3])


@settings(deadline=None, max_examples=as_many(60))
@given(draft=drafts(), data=st.data())
def test_trials_are_those_of_an_opt_tree(draft: tuple, data: st.DataObject) -> None:
    parents, probs, steps = draft
    accepted: list[int] = []
    while children := [i for i, parent in enumerate(parents) if parent == (accepted or [-1])[-1]]:
        child = data.draw(st.sampled_from([*children, None]))
        if child is None:
            break
        accepted.append(child)
    expected = list(trials_by_band(parents.tolist(), steps, accepted))
    np.testing.assert_allclose(list(trials_of(parents, probs, accepted)), expected, rtol=1e-6)


def test_counts_follow_costs_and_what_comes_true() -> None:
    """Everything where rows are free; little where they are dear; less, and at last nothing, where drafts are wrong."""
    parents, probs = np.arange(-1, 40, dtype=np.int64), 0.8 ** np.arange(1.0, 42)
    prior = ((20.0,) * BANDS, (20.0,) * BANDS)
    assert BestNodes(Tuning(FLAT, *prior)).count(parents, probs) == 41
    sizes = BestNodes(Tuning(costs(node=0.5, rest=0.2), *prior))
    first = sizes.count(parents, probs)
    assert 0 < first < 10
    for _ in range(60):
        sizes.observe(parents[:8], probs[:8], [])
    assert sizes.count(parents, probs) == 0
    for _ in range(700):  # without a draft nothing is learnt, and what was is forgotten
        sizes.observe(parents[:0], probs[:0], [])
    assert sizes.count(parents, probs) == first
    assert sizes.totals == {f"chosen_nodes={first}": 2, "chosen_nodes=0": 1}


def test_the_search_is_for_more_than_was_chosen() -> None:
    sizes = BestNodes(Tuning(FLAT, (9.0,) * BANDS, (9.0,) * BANDS))
    sizes_searched = []
    for _ in range(5):
        sizes_searched.append(sizes.search_size())
        parents = np.arange(-1, sizes_searched[-1] - 1, dtype=np.int64)
        sizes.count(parents, 0.99 ** np.arange(1.0, len(parents) + 1))
    assert sizes_searched == [*SEARCH_SIZES, MOST_NODES]


CHEAP, DEAR = 0.05, 0.6  # of a pass over one row


def steps_cost(step: float) -> Costs:
    return costs(step=step, verify=0.95, node=0.05, rest=0.01)


def test_seconds_are_those_of_the_passes() -> None:
    """Against the sum written out; a pass wider than any measured counts as the widest."""
    prices = costs(step=0.0, row=0.1, verify=1.0, node=1.0, rest=0.5, plain=2.0)
    allowance = Allowance(prices)
    allowance.observe([1, 3, WIDEST + 9], 4, 2)
    spent = 0.99 * MEMORY + ((0.1 + 0.3 + 0.1 * WIDEST) + 6.0 + 0.5) / 2.0
    assert allowance.rate == pytest.approx((0.99 * MEMORY + 2) / spent)
    allowance.observe([], 0, 1)
    assert allowance.rate == pytest.approx((0.99 * (0.99 * MEMORY + 2) + 1) / (0.99 * spent + 1.0))


# --- texts that share passes -----------------------------------------------------------------------------------------

# In a pass rows are free up to 16, or always.
FULL = replace(steps_cost(0.02), verify=tuple(max(1.0, row / 16) for row in range(WIDEST + 1)))
FREE = replace(FULL, verify=(1.0,) * (WIDEST + 1))
KINDS_OF_RULES = ("length", "survival", "unknown gain")


def together(
    kind: str, count: int, seconds: Costs, share: float, *, rounds: int = 300, seed: int = 0
) -> tuple[float, float, float]:
    """Of `count` texts: tokens a second over plain decoding's, the share of rounds with a draft, and its length."""
    luck, batch, emitted, lengths, spent = random.Random(seed), [count, 0], 0, [], 0.0
    shared = Allowance(seconds, MAX_LOSS if count == 1 else TRIAL_SHARE, lambda: (batch[0], batch[1]))
    stop = StopConfig(rule="survival") if kind == "survival" else StopConfig(max_draft="auto")
    rules = [make_rule(stop, Streams(0), None, Tuning(seconds, shared=lambda: shared)) for _ in range(count)]
    logits, source = torch.tensor([[0.0, 3.0]]), cast("Source", None)
    for batch[1] in range(rounds):
        drafted = []
        for rule in rules:
            steps = (Step(n, torch.tensor([1]), logits, source) for n in itertools.count(1))
            opens = shared.opens_round(None if kind == "unknown gain" else rule.gain())
            drafted.append(next(step.drafted for step in steps if rule.stop(step)) if opens else 0)
        for rule, tokens in zip(rules, drafted, strict=True):
            accepted = next((token for token in range(tokens) if luck.random() >= share), tokens)
            shared.observe([1] * tokens, tokens, accepted + 1)
            if tokens:
                rule.observe(tokens, accepted)
            emitted += accepted + 1
        rows, drafts = sum(drafted) + count, [*filter(None, drafted)]
        spent += max(1.0, rows / 16) if seconds is FULL else 1.0 if not drafts else seconds.verify[min(rows, WIDEST)]
        spent += (seconds.step[1] * sum(drafts) + seconds.overhead * len(drafts)) / count
        lengths += drafts
    return emitted / count / spent, len(lengths) / count / rounds, sum(lengths) / max(1, len(lengths))


@pytest.mark.parametrize("kind", KINDS_OF_RULES)
@pytest.mark.parametrize("step", [CHEAP, DEAR])
def test_a_drafter_that_does_not_pay_costs_no_more_than_allowed(kind: str, step: float) -> None:
    for share in (0.0, 0.05):
        rate, drafting, _ = together(kind, 1, steps_cost(step), share, rounds=2000)
        assert rate > 1 - MAX_LOSS - (2 * step + 1.11) / MEMORY  # the last draft may go beyond the allowance
        assert 0 < drafting < 0.5


def test_a_few_wrong_drafts_on_end_are_no_reason_to_give_up() -> None:
    """Drafts of which a third is right pay, and are made nearly always, from the first one on."""
    found = [together("unknown gain", 1, steps_cost(0.12), 0.35, rounds=80, seed=seed)[1] for seed in range(100)]
    assert sum(found) / len(found) > 0.9


@pytest.mark.parametrize("kind", KINDS_OF_RULES)
def test_a_full_batch_drafts_nothing_but_trials(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each row costs its own, and where rows are free as much as alone; not by the costs of a text alone."""
    for share in (0.0, 0.6):
        rate, drafting, _ = together(kind, 16, FULL, share)
        assert rate > 1 - TRIAL_SHARE - 0.012  # the first drafts without a known gain
        assert 0 < drafting < 0.06
    (rate, drafting, length), (alone, _, expected) = (together(kind, count, FREE, 0.9) for count in (16, 1))
    assert drafting > 0.95
    assert (length, rate) == (pytest.approx(expected, rel=0.2), pytest.approx(alone, rel=0.2))
    monkeypatch.setattr(Costs, "shared_by", lambda alone, texts: alone)
    assert together(kind, 16, FULL, 0.6)[0] < 0.8


def tried_and_wasted(gains: Sequence[float]) -> tuple[int, float]:
    """Of texts whose drafts have such gains: the rounds of 500 with a draft, and the time that a wrong one costs."""
    batch, tried = [len(gains), 0], 0
    shared = Allowance(replace(FREE, overhead=0.0), MAX_LOSS, lambda: (batch[0], batch[1]))
    for batch[1] in range(501):
        drafted = 9 * (batch[1] == 500)
        tried += [*map(shared.opens_round, gains)][-1]
        for _ in gains:
            shared.observe([1] * drafted, drafted, 1)
    return tried, 1 / shared.rate - 1


@settings(deadline=None, max_examples=as_many(10))
@given(texts=st.integers(2, 16), gain=st.floats(0.1, 0.5))
def test_many_texts_try_and_lose_as_much_as_one(texts: int, gain: float) -> None:
    """Their mean gain decides, a trial costs the losses of all, and the rate forgets as it does for one."""
    for count in (1, texts):
        tried, wasted = tried_and_wasted([-gain] * count)
        assert (tried, wasted) == (pytest.approx((1 / count + 5) / gain, abs=2), pytest.approx(0.0018, rel=0.02))
    assert tried_and_wasted([gain] + [-3 * gain] * (texts - 1))[0] < 250


def test_texts_that_leave_make_room_for_drafts() -> None:
    """The number of texts now decides; in a round all draft, or none. What is no pass is not shared."""
    batch = [16, 0]
    shared = Allowance(FULL, TRIAL_SHARE, lambda: (batch[0], batch[1]))
    rule, sizes = BestLength(Tuning(FULL, shared=lambda: shared)), BestNodes(Tuning(FULL, shared=lambda: shared))
    assert [shared.takes_trial(1.0), shared.takes_trial(0.1)] == [
        True,
        False,
    ]  # once, as the text may differ from the measured one
    for batch[:], opens in (([16, 0], False), ([2, 0], False), ([2, 1], True), ([16, 1], True)):
        assert shared.opens_round(rule.gain()) == opens
    method, draft = MethodConfig(copy=3), (np.arange(-1, 14), 0.8 ** np.arange(1.0, 16.0))
    copies: Any = make_prompt_lookup(method, make_structure(method, Streams(0)), Tuning(FULL, shared=lambda: shared))
    for chosen, tried in ((sizes, 0), (copies.sizes, 2)):
        counts = [chosen.count(*draft) for batch[0] in (16, 2, 1)]
        assert tried == counts[0] < counts[1] < counts[2] == 15
    copies.sizes.observe(*draft, range(15))
    assert not any(shared.trials[0])  # what was copied says nothing of drafts
    for _ in range(40):
        shared.observe([], 0, 1)
    assert [shared.takes_trial(0.3), shared.takes_trial(0.3)] == [True, False]
    for batch[0], searches in ((16, 4 + 4), (1, 20)):  # which take time that texts do not share
        idle = BestNodes(Tuning(FULL, shared=lambda: shared))
        assert sum(idle.search_size() > 0 for _ in range(20)) == searches
    assert idle.count(*draft) == 15
    batch[0] = 16
    assert idle.search_size() > 15
    costs = replace(FULL, autoregressive=1.5, unshared=(0.01, 0.25, 0.5)).shared_by(4)
    assert (costs.step[1], costs.autoregressive) == pytest.approx((0.0125, 0.75))
    assert [costs.verify[width] for width in (1, 4, 8)] == pytest.approx([0.4375, 0.4375, 0.6875])
    shared.observe([1] * 999, 9, 1)
    assert (shared.blocks_drafts(), idle.search_size()) == (True, 0)
