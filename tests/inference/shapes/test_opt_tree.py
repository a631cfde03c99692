"""OPT-Tree against all trees there are, and against its algorithm as printed."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.inference.core.tree import OptimalTree
from outrider.inference.settings.method import StructureConfig
from outrider.inference.shapes.factory import make_tree
from tests.inference.known_source import KnownSource, Path_, Q, check, dyadic_q, random_q, root, sources, weight
from tests.tiers import as_many


def opt_tree(source: KnownSource, depth: int, **sizes: Any) -> OptimalTree:
    tree = make_tree(StructureConfig("opt_tree", max_depth=depth, **sizes)).draft(source, root(), 99)
    assert isinstance(tree, OptimalTree)
    return tree


def brute_force(q: Q, vocabulary: int, nodes: int, depth: int) -> float:
    """The largest Σ p̂ over *all* parent-closed sets of at most `nodes` nodes, each visited once."""

    def grow(frontier: tuple[Path_, ...], left: int) -> float:
        if not left or not frontier:
            return 0.0
        path, rest = frontier[0], frontier[1:]
        below = tuple((*path, token) for token in range(vocabulary)) if len(path) < depth else ()
        return max(grow(rest, left), weight(q, path) + grow(rest + below, left - 1))

    return grow(tuple((token,) for token in range(vocabulary)), nodes)


def algorithm_1(q: Q, vocabulary: int, nodes: int, delta: float, depth: int) -> tuple[float, int, set[Path_]]:
    """OPT-Tree's Algorithm 1 as printed: E without the root, levels drafted, and the chosen nodes."""
    level, tree, expected, drafted = [()], [], 0.0, 0
    while True:
        children = [(*path, token) for path in level for token in range(vocabulary)]
        level = sorted(children, key=lambda path: -weight(q, path))[:nodes]
        tree += level
        drafted += 1
        chosen = sorted(tree, key=lambda path: (-weight(q, path), len(path)))[:nodes]
        now = math.fsum(weight(q, path) for path in chosen)
        if drafted >= depth or now - expected <= delta:
            return now, drafted, set(chosen)
        expected = now


@settings(deadline=None, max_examples=as_many(200))
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 5), depth=st.integers(1, 4), ties=st.booleans())
def test_opt_tree_is_the_best_tree(seed: int, nodes: int, depth: int, ties: bool) -> None:
    q = dyadic_q(seed) if ties else random_q(seed, vocabulary=3)
    source = KnownSource(q)
    tree = opt_tree(source, depth, nodes=nodes, delta=0.0)
    paths = check(tree, source, depth)
    assert len(tree) <= nodes
    best = brute_force(q, 3, nodes, depth)
    assert math.fsum(weight(q, path) for path in paths) == pytest.approx(best, abs=1e-6)
    assert tree.expected_tau == pytest.approx(1 + best, abs=1e-6)
    assert tree.path_probs is not None
    assert bool((tree.path_probs > 0).all())


@settings(deadline=None)
@given(
    q=sources, nodes=st.integers(1, 12), delta=st.sampled_from([0.0, 0.11, 0.31, 0.73, 0.97]), depth=st.integers(1, 5)
)
def test_opt_tree_follows_algorithm_1(q: Q, nodes: int, delta: float, depth: int) -> None:
    """Feeding only the nodes that are in the best tree changes neither E nor the depth at which drafting stops."""
    source = KnownSource(q)
    tree = opt_tree(source, depth, nodes=nodes, delta=delta)
    paths = check(tree, source, depth)
    expected, drafted, chosen = algorithm_1(q, len(q(())), nodes, delta, depth)
    assert tree.expected_tau == pytest.approx(1 + expected, abs=1e-5)
    assert len(source.calls) == drafted
    assert source.calls[0] == 1
    assert max(source.calls) <= nodes
    weights = sorted(weight(q, path) for path in chosen if weight(q, path) > 0)
    assert sorted(weight(q, path) for path in paths) == pytest.approx(weights, abs=1e-6)


def test_a_level_that_adds_exactly_delta_is_the_last() -> None:
    exact = torch.tensor([[0.5, 0.25, 0.25]])
    for delta, passes in ((0.5, 1), (0.499, 2)):
        source = KnownSource(dyadic_q(0))
        source.to_probs = lambda logits, _: exact.expand(len(logits), -1)
        opt_tree(source, 5, nodes=1, delta=delta)
        assert len(source.calls) == passes


def eagle_2(q: Q, vocabulary: int, nodes: int, width: int, depth: int) -> list[float]:
    """EAGLE-2 as it is described: the `width` best of a level are extended, then the `nodes` best of all are kept."""
    level, every = [()], []
    for _ in range(depth):
        children = [(*path, token) for path in level for token in range(vocabulary)]
        every += children
        level = sorted(children, key=lambda path: -weight(q, path))[:width]
    return sorted((weight(q, path) for path in every), reverse=True)[:nodes]


@settings(deadline=None, max_examples=as_many(50))
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 12), width=st.integers(1, 4), depth=st.integers(1, 5))
def test_opt_tree_of_some_width_is_the_tree_of_eagle_2(seed: int, nodes: int, width: int, depth: int) -> None:
    q = random_q(seed)  # without ties, of which either could be extended
    source = KnownSource(q)
    tree = opt_tree(source, depth, nodes=nodes, delta=0.0, width=width)
    paths = check(tree, source, depth)
    assert max(source.calls) <= width
    expected = [value for value in eagle_2(q, len(q(())), nodes, width, depth) if value > 0]
    assert sorted((weight(q, path) for path in paths), reverse=True) == pytest.approx(expected, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), vocabulary=st.sampled_from([63, 64, 65, 200]), nodes=st.integers(1, 80))
@pytest.mark.slow
def test_opt_tree_over_a_wide_vocabulary(seed: int, vocabulary: int, nodes: int) -> None:
    q = random_q(seed, vocabulary)
    source = KnownSource(q)
    tree = opt_tree(source, 3, nodes=nodes, delta=0.0)
    paths = check(tree, source, 3)
    assert set(paths) == algorithm_1(q, vocabulary, nodes, 0.0, 3)[2]
