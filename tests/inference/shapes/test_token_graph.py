"""Token graphs against the tree they stand for, and against merging by its definition."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.inference.core.tree import ROOT
from outrider.inference.settings.method import StructureConfig
from outrider.inference.shapes.factory import make_tree
from outrider.inference.shapes.token_graph import Graph
from tests.inference.known_source import (
    ROOT_TOKEN,
    KnownSource,
    Path_,
    Q,
    check,
    paths_of,
    root,
    sources,
    untied,
    weight,
)
from tests.tiers import as_many

graphs = st.fixed_dictionaries(
    {
        "limit": st.integers(1, 6),
        "out_degree": st.integers(1, 4),
        "theta_prob": st.sampled_from([0.0, 0.11, 0.21, 0.41]),
        "theta_sibling": st.sampled_from([0.0, 0.31, 0.83]),
    }
)


def graph_of(source: KnownSource, *, limit: int, longest: int = 0, grow: bool = False, **shape: Any) -> Any:
    """The graph's tree, or with `grow` the graph itself."""
    config = StructureConfig("token_graph", max_depth=limit, deep_copies=longest > 0, **shape)
    structure = make_tree(config)
    assert isinstance(structure, Graph)
    return (structure.grow if grow else structure.draft)(source, root(), longest or limit)


def gram(path: Path_, tau: int) -> Path_ | None:
    whole = (ROOT_TOKEN, *path)
    return whole[-tau:] if len(whole) >= tau else None


def pruned_tree(q: Q, limit: int, out_degree: int, theta_prob: float, theta_sibling: float) -> Iterable[Path_]:
    """The tree without merging, by its definition."""
    level: list[Path_] = [()]
    for _ in range(limit):
        extended: list[Path_] = []
        for path in level:
            tokens = sorted((t for t in range(len(q(path))) if q(path)[t] > 0), key=lambda t: -q(path)[t])
            for token in tokens[:out_degree]:
                yield (*path, token)
                conditional = q(path)[token]
                if conditional >= theta_prob and conditional >= theta_sibling * q(path)[tokens[0]]:
                    extended.append((*path, token))
        level = extended


@settings(deadline=None, max_examples=as_many(200))
@given(q=untied, config=graphs)
@pytest.mark.slow
def test_without_merging_the_graph_is_the_pruned_tree(q: Q, config: dict) -> None:
    config = config | {"limit": min(config["limit"], 4)}
    source = KnownSource(q)
    tree = graph_of(source, nodes=10**6, tau=0, **config)
    paths = check(tree, source, config["limit"])
    expected = set(pruned_tree(q, **config))
    assert set(paths) == expected
    assert tree.drafted == len(tree)
    assert set(source.paths) == {path[:-1] for path in expected}  # only what has children was fed


@settings(deadline=None, max_examples=as_many(300))
@given(q=sources, config=graphs, tau=st.integers(1, 3), budget=st.sampled_from([7, 30, 300]),
       longest=st.sampled_from([0, 8]))  # fmt: skip
def test_graph_merges_and_unmerges(q: Q, config: dict, tau: int, budget: int, longest: int) -> None:
    source = KnownSource(q)
    graph = graph_of(source, grow=True, nodes=budget, tau=tau, **config)
    n = len(graph.tokens)
    paths: list[Path_] = []
    for token, parent in zip(graph.tokens, graph.parents, strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
    assert graph.root_token == ROOT_TOKEN
    extended = {path for path in paths if path in source.paths}
    for node, first in graph.merged.items():
        assert gram(paths[node], tau) == gram(paths[first], tau)
        assert first < node
        assert paths[node][: len(paths[first])] != paths[first]  # no ancestor
        assert paths[node] not in extended
        assert not any(gram(paths[i], tau) == gram(paths[first], tau) and paths[i] in extended for i in range(first))
    if n < budget:
        for node, path in enumerate(paths):
            siblings = q(path[:-1])
            pruned = siblings[path[-1]] < max(config["theta_prob"], config["theta_sibling"] * max(siblings))
            merged = node in graph.merged
            assert (path in extended) == (len(path) < config["limit"] and not pruned and not merged)

    def top_tokens(node: int) -> list[int]:
        own = graph.merged.get(node, node)
        return [child for child in range(n) if graph.parents[child] == own]

    def walk(node: int, below: tuple[int, ...]) -> None:
        """Follows children and merges without a bound: ends because the graph has no cycle."""
        assert node not in below
        for child in top_tokens(node):
            walk(child, (*below, node))

    if n <= 30:
        for node in graph.merged:
            walk(node, ())

    tree = graph_of(KnownSource(q), nodes=budget, tau=tau, longest=longest, **config)
    unmerged = check(tree, source, longest or config["limit"])
    assert len(tree) <= budget
    assert tree.drafted == n
    assert tree.tokens[:n].tolist() == graph.tokens
    assert tree.rows[n:] == (-1,) * (len(tree) - n)
    grams = {gram(path, tau) for path in paths}
    longer = {gram(path, tau + 1) for path in paths}
    for path in unmerged[n:]:
        assert gram(path, tau) in grams
        assert gram(path, tau + 1) in longer  # a copy's edge hangs below the same τ-gram somewhere in the draft

    def expand(node: int, path: Path_) -> Iterable[Path_]:
        yield path
        if len(path) < (longest or config["limit"]):
            for child in top_tokens(node):
                yield from expand(child, (*path, graph.tokens[child]))

    if len(tree) < budget:
        tops = [node for node in range(n) if graph.parents[node] == ROOT]
        assert set(unmerged) == {path for node in tops for path in expand(node, (graph.tokens[node],))}


@settings(deadline=None)
@given(q=untied, budget=st.integers(1, 12))
def test_a_level_over_the_budget_keeps_its_likeliest_nodes(q: Q, budget: int) -> None:
    config = {"limit": 4, "out_degree": 3, "theta_prob": 0.0, "theta_sibling": 0.0, "tau": 0}
    bounded = paths_of(graph_of(KnownSource(q), nodes=budget, **config))
    whole = paths_of(graph_of(KnownSource(q), nodes=10**6, **config))
    assert len(bounded) == min(budget, len(whole))
    last = len(bounded[-1])
    level = sorted((path for path in whole if len(path) == last), key=lambda path: -weight(q, path))
    kept = [path for path in bounded if len(path) == last]
    assert set(bounded) - set(kept) == {path for path in whole if len(path) < last}
    assert sum(weight(q, path) for path in kept) == pytest.approx(sum(weight(q, path) for path in level[: len(kept)]))


def test_two_branches_that_would_merge_into_each_other() -> None:
    """τ = 1, 2→3→…, 3→2→…: one merge is made, the second would close a cycle and is refused."""

    def swap(path: Path_) -> Sequence[float]:
        if not path:
            return [0, 0, 0.5, 0.5]
        return [0, 0, 0.01, 0.99] if path[-1] == 2 else [0, 0, 0.99, 0.01]

    source = KnownSource(swap)
    tree = graph_of(source, limit=5, nodes=50, tau=1, out_degree=2)
    paths = check(tree, source, 5)
    assert (2, 3, 2, 3, 2) in paths
    assert (3, 2, 3, 2, 3) in paths
    before = [paths[first] for first in tree.merged.values()]
    assert len(before) == 1
