"""Node counts of drafts that came best-first, against what OPT-Tree's policy says of the same tree."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.core.tree import OptimalTree
from inference.settings.limits import MOST_NODES
from inference.sizing.costs import Costs
from inference.sizing.node_sizes import SEARCH_SIZES, BestNodes, trials_of
from inference.sizing.policy import BANDS, Tuning, band, best_count, trials_by_band
from tests.tiers import as_many

FLAT = Costs((0.1,) * 65, (1.0,) * 65, 0.2, 0.9)


def costs(row: float) -> Costs:
    """A row of the target's pass takes so many seconds, beside one for the pass."""
    return Costs((0.1,) * 65, tuple(1 + row * width for width in range(65)), 0.2, 0.9)


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
    random = np.random.default_rng(seed)
    tuning = Tuning(costs(row), tuple(random.uniform(0, 20, BANDS)), tuple(random.uniform(0, 20, BANDS)))
    sizes = BestNodes(tuning)
    trust = sizes._evidence.shares()
    worths: list[float] = []
    for above, q in zip(parents, steps, strict=True):
        worths.append(min(1.0, q * trust[band(q)]) * (worths[above] if above >= 0 else 1.0))
    count, rate = best_count(worths, 0.1, tuning.costs)
    none = 1 / (0.1 + tuning.costs.verify[1] + tuning.costs.rest)
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
    tree = OptimalTree(torch.arange(len(parents)), tuple(parents.tolist()), (), steps=tuple(steps))
    tried, right = Counter[int](), Counter[int]()
    for index, trials, hit in trials_by_band(tree, accepted):
        tried[index] += trials
        right[index] += hit
    found = list(trials_of(parents, probs, accepted))
    assert {index: trials for index, trials, _ in found} == pytest.approx(dict(tried))
    assert {index: hits for index, _, hits in found} == pytest.approx({index: right[index] for index in tried})


def test_counts_follow_costs_and_what_comes_true() -> None:
    """Everything where rows are free; little where they are dear; less, and at last nothing, where drafts are wrong."""
    parents, probs = np.arange(-1, 40, dtype=np.int64), 0.8 ** np.arange(1.0, 42)
    prior = ((20.0,) * BANDS, (20.0,) * BANDS)
    assert BestNodes(Tuning(FLAT, *prior)).count(parents, probs) == 41
    sizes = BestNodes(Tuning(costs(0.5), *prior))
    first = sizes.count(parents, probs)
    assert 0 < first < 10
    for _ in range(60):
        sizes.observe(parents[:8], probs[:8], [])
    assert sizes.count(parents, probs) == 0
    for _ in range(400):  # without a draft nothing is learnt, and what was is forgotten
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
