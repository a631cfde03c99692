"""Draft structures against references that read as the definitions, on a source with a known q."""

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draft_models.errors import UserError
from inference.stop_rules import Step
from inference.structures import (
    EAGLE_25,
    Shape,
    _draw,
    binary_shape,
    chain,
    full_shape,
    k_config,
    opt_tree,
    parse_shape,
    plain_probs,
    read_shape,
    static,
)
from inference.token_graph import draft_graph, token_graph
from inference.tree import ROOT, DraftTree

Path_ = tuple[int, ...]
Q = Callable[[Path_], Sequence[float]]
ROOT_TOKEN = 1


class KnownSource:
    """A source whose q is a function of the path below the root; refuses rows under parents it was not fed."""

    def __init__(self, q: Q):
        self.q = q
        self.paths: list[Path_] = []  # of each row
        self.calls: list[int] = []
        self.target_hidden = torch.zeros(1, 1)

    @property
    def hidden(self) -> Tensor:
        rows = torch.arange(len(self.paths))
        return rows[-self.calls[-1] :, None]

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        assert tokens.dtype == torch.long
        assert tokens.shape == (len(parents),)
        if not self.paths:
            assert (tokens.tolist(), tuple(parents)) == ([ROOT_TOKEN], (ROOT,))
            new: list[Path_] = [()]
        else:
            assert all(0 <= parent < len(self.paths) for parent in parents)
            new = [(*self.paths[row], token) for row, token in zip(parents, tokens.tolist(), strict=True)]
        self.paths += new
        self.calls.append(len(new))
        return torch.tensor([self.q(path) for path in new], dtype=torch.float32).log()


def root() -> Tensor:
    return torch.tensor([ROOT_TOKEN])


def random_q(seed: int, vocabulary: int = 6, sharp: float = 2.0, zeros: float = 0.0, order: int = 99) -> Q:
    """Any q: a distribution per last `order` tokens, peaked by `sharp`, each token impossible with chance `zeros`."""

    @cache
    def conditional(context: Path_) -> Sequence[float]:
        chance = random.Random(f"{seed} {context}")
        weights = [math.exp(sharp * chance.gauss(0, 1)) * (chance.random() >= zeros) for _ in range(vocabulary)]
        if not any(weights):
            weights[chance.randrange(vocabulary)] = 1.0
        return [weight / sum(weights) for weight in weights]

    return lambda path: conditional(path[-order:])


def dyadic_q(seed: int) -> Q:
    """q over three tokens full of ties and zeros, all products exact in floating point."""
    kinds = [(1, 0, 0), (0.5, 0.5, 0), (0.5, 0.25, 0.25)]

    @cache
    def conditional(path: Path_) -> Sequence[float]:
        chance = random.Random(f"{seed} {path}")
        return chance.sample(chance.choice(kinds), 3)

    return conditional


def sources_with(sharpness: list[float]) -> st.SearchStrategy[Q]:
    return st.builds(
        random_q,
        seed=st.integers(0, 10**6),
        vocabulary=st.integers(2, 7),
        sharp=st.sampled_from(sharpness),
        zeros=st.sampled_from([0.0, 0.5]),
        order=st.sampled_from([1, 2, 99]),
    )


sources = sources_with([0.0, 1.0, 3.0])
untied = sources_with([1.0, 3.0])  # tokens of one distribution have different probabilities, so ranks are unique


def paths_of(tree: DraftTree) -> list[Path_]:
    paths: list[Path_] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents, strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
    return paths


def check(tree: DraftTree, source: KnownSource, limit: int) -> list[Path_]:
    """What every structure promises: returns the nodes' paths."""
    assert tree.tokens.shape == (len(tree),)
    assert tree.tokens.dtype == torch.long
    assert len(tree.rows) == len(tree)
    assert all(parent < node for node, parent in enumerate(tree.parents))
    paths = paths_of(tree)
    assert len(set(paths)) == len(paths)  # siblings differ
    assert all(len(path) <= limit for path in paths)
    for path, row in zip(paths, tree.rows, strict=True):
        assert row == -1 or source.paths[row] == path
        assert (row != -1) == (path in source.paths)  # what was fed knows its row
    fed = [row for row in tree.rows if row >= 0]
    assert len(set(fed)) == len(fed)
    row_of = dict(enumerate(tree.rows))
    rows = len(source.paths)
    for node, parent in enumerate(tree.parents):  # the rest can be fed in index order
        if row_of[node] < 0:
            assert parent == ROOT or row_of[parent] >= 0
            row_of[node] = rows
            rows += 1
        assert parent == ROOT or row_of[parent] < row_of[node]
    if tree.path_probs is not None:
        expected = [math.prod(source.q(path[:i])[path[i]] for i in range(len(path))) for path in paths]
        assert tree.path_probs.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-7)
    for parent, q in tree.q.items():
        assert q.tolist() == pytest.approx(list(source.q(paths[parent] if parent != ROOT else ())), abs=1e-6)
    return paths


class Until:
    """Stops after `count` tokens and keeps what it was shown."""

    def __init__(self, count: int):
        self.max_draft = count
        self.seen: list[tuple[Step, list]] = []

    def stop(self, step: Step) -> bool:
        self.seen.append((step, step.source.hidden.tolist()))
        return step.drafted >= self.max_draft

    def observe(self, drafted: int, accepted: int) -> None:
        pass


every_structure = pytest.mark.parametrize(
    "structure",
    [
        partial(chain, rule=Until(3)),
        *(partial(k_config, mode=mode) for mode in ("with_replacement", "without_replacement", "top_k")),
        partial(opt_tree, nodes=9, delta=0.0),
        partial(token_graph, node_budget=20),
        partial(static, shape=EAGLE_25),
    ],
)


@every_structure
def test_nothing_is_drafted_at_limit_zero(structure: Callable[..., DraftTree]) -> None:
    source = KnownSource(random_q(0))
    tree = structure(source, root(), limit=0)
    assert (len(tree), tree.tokens.shape, tree.rows, source.calls) == (0, (0,), (), [])


@every_structure
def test_processed_probabilities_decide_and_know_their_rows(structure: Callable[..., DraftTree]) -> None:
    """`to_probs` sees every row once, in order, and its law replaces the logits'."""
    source = KnownSource(random_q(0))
    seen: list[int] = []

    def only_four_and_five(logits: Tensor, rows: Sequence[int]) -> Tensor:
        assert len(logits) == len(rows)
        seen.extend(rows)
        return torch.tensor([0, 0, 0, 0, 0.75, 0.25]).expand(len(rows), 6)

    tree = structure(source, root(), limit=1, to_probs=only_four_and_five)
    assert tree.tokens[0] in (4, 5)
    source.paths.clear()
    seen.clear()
    structure(source, root(), limit=3, to_probs=only_four_and_five)
    assert seen == list(range(len(source.paths)))


# --- chain -------------------------------------------------------------------------------------------------------


@given(q=sources, count=st.integers(1, 6), limit=st.integers(0, 6), sampled=st.booleans())
def test_chain(q: Q, count: int, limit: int, sampled: bool) -> None:
    source, rule = KnownSource(q), Until(count)
    tree = chain(source, root(), rule, limit=limit, generator=torch.Generator().manual_seed(1) if sampled else None)
    n = min(count, limit)
    paths = check(tree, source, limit)
    assert tree.parents == tuple(range(-1, n - 1))
    assert source.calls == [1] * n
    for drafted, (path, (step, hidden)) in enumerate(zip(paths, rule.seen, strict=True), start=1):
        conditional = q(path[:-1])
        assert conditional[path[-1]] > 0
        assert sampled or conditional[path[-1]] == max(conditional)
        assert (step.drafted, step.token.tolist()) == (drafted, [path[-1]])
        assert step.logits.exp()[0].tolist() == pytest.approx(list(conditional), abs=1e-6)
        assert hidden == [[drafted - 1]]  # of the row that gave these logits
    assert sorted(tree.q) == (list(range(-1, n - 1)) if sampled else [])


# --- k-config ----------------------------------------------------------------------------------------------------


@given(
    q=sources,
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    mode=st.sampled_from(["with_replacement", "without_replacement", "top_k"]),
    limit=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_k_config_levels(q: Q, widths: list[int], mode: str, limit: int, seed: int) -> None:
    source = KnownSource(q)
    tree = k_config(
        source, root(), limit=limit, widths=widths, mode=mode, generator=torch.Generator().manual_seed(seed)
    )
    paths = check(tree, source, limit)
    children: dict[Path_, list[int]] = {(): []} | {path: [] for path in paths}
    for path in paths:
        children[path[:-1]].append(path[-1])
    depth = min(limit, len(widths))
    assert source.calls == [1, *(sum(len(path) == level for path in paths) for level in range(1, depth))]
    for node, path in [(ROOT, ()), *enumerate(paths)]:
        if len(path) == depth:
            assert not children[path]
            continue
        conditional, width = q(path), widths[len(path)]
        possible = [token for token, probability in enumerate(conditional) if probability > 0]
        if mode == "top_k":
            largest = sorted(conditional, reverse=True)[:width]
            assert [conditional[token] for token in children[path]] == largest
        elif mode == "without_replacement":
            assert set(children[path]) <= set(possible)
            assert len(children[path]) == min(width, len(possible))
        else:
            draws = [paths[child][-1] for child in tree.draws[node]]
            assert len(draws) == width
            assert set(draws) <= set(possible)
            assert list(dict.fromkeys(draws)) == children[path]  # first occurrences, in order
    expanded = {ROOT} | {node for node, path in enumerate(paths) if len(path) < depth}
    assert set(tree.q) == (set() if mode == "top_k" else expanded)
    assert mode == "top_k" or set(tree.draws) == (expanded if mode == "with_replacement" else set())


def chi_square(counts: Counter, law: dict, total: int) -> float:
    """The statistic in standard deviations above its mean; impossible outcomes count as infinite."""
    if set(counts) - {outcome for outcome, probability in law.items() if probability}:
        return math.inf
    statistic = sum((counts[o] - total * float(p)) ** 2 / (total * float(p)) for o, p in law.items() if p)
    freedom = sum(p > 0 for p in law.values()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


WEIGHTS = [Fraction(w, 20) for w in (9, 6, 0, 4, 1)]


def sequential_law(k: int) -> dict[Path_, Fraction]:
    """x_i ~ q_i, q_{i+1} = norm(q_i without x_i), by enumeration."""
    law: dict[Path_, Fraction] = {(): Fraction(1)}
    for _ in range(k):
        law = {
            (*drawn, token): probability * q / (1 - sum(WEIGHTS[other] for other in drawn))
            for drawn, probability in law.items()
            for token, q in enumerate(WEIGHTS)
            if q and token not in drawn
        }
    assert sum(law.values()) == 1
    return law


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_draws_without_replacement_follow_the_sequential_law(k: int) -> None:
    total, generator = 100_000, torch.Generator().manual_seed(k)
    probs = torch.tensor([float(w) for w in WEIGHTS]).expand(total, 5)
    before = probs.clone()
    right = Counter(map(tuple, _draw(probs, k, generator, replacement=False).tolist()))
    assert torch.equal(probs, before)
    assert chi_square(right, sequential_law(k), total) < 5
    if k > 1:  # power: the same pairs in index order, and draws that forget the renormalisation, must fail
        unordered = Counter(
            {o: sum(right[p] for p in itertools.permutations(o)) for o in right if list(o) == sorted(o)}
        )
        assert chi_square(unordered, sequential_law(k), total) > 50
        scores = torch.rand(total, 5, generator=generator) * probs  # "top-k of u · q" is not sampling
        wrong = Counter(map(tuple, scores.topk(k).indices.tolist()))
        assert chi_square(wrong, sequential_law(k), total) > 50
    exhausted = _draw(probs[:100], 5, generator, replacement=False)
    assert (exhausted == -1).sum(-1).eq(1).all()  # q > 0 for four tokens only
    assert (exhausted[:, -1] == -1).all()


def test_k_config_draws_have_their_laws() -> None:
    """Through the tree, both sampled modes: sequences of two draws at the root."""
    total = 4000
    generator = torch.Generator().manual_seed(0)
    iid = {(a, b): WEIGHTS[a] * WEIGHTS[b] for a in range(5) for b in range(5)}
    counts: dict[str, Counter] = {"with_replacement": Counter(), "without_replacement": Counter()}
    for mode, counter in counts.items():
        for _ in range(total):
            source = KnownSource(lambda path: [float(w) for w in WEIGHTS])
            tree = k_config(source, root(), limit=1, widths=(2,), mode=mode, generator=generator)
            tokens = tree.tokens.tolist()
            counter[tuple(tokens[i] for i in tree.draws.get(ROOT, range(len(tree))))] += 1
    assert chi_square(counts["with_replacement"], iid, total) < 5
    assert chi_square(counts["without_replacement"], sequential_law(2), total) < 5
    assert chi_square(counts["with_replacement"], sequential_law(2), total) == math.inf


def test_draws_see_tiny_and_huge_vocabularies() -> None:
    generator = torch.Generator().manual_seed(0)
    spike = torch.zeros(3, 100_000)
    spike[:, 77_777] = 1.0
    for replacement in (True, False):
        drawn = _draw(spike, 2, generator, replacement)
        assert drawn.tolist() == [[77_777, 77_777 if replacement else -1]] * 3
    flat = torch.full((50, 50_257), 1 / 50_257)
    drawn = _draw(flat, 8, generator, replacement=False)
    assert all(len(set(line)) == 8 for line in drawn.tolist())


def test_k_config_refuses_an_unknown_mode() -> None:
    with pytest.raises(UserError, match="mode='topk'"):
        k_config(KnownSource(random_q(0)), root(), limit=3, mode="topk")


# --- OPT-Tree ----------------------------------------------------------------------------------------------------


def weight(q: Q, path: Path_) -> float:
    return math.prod(q(path[:i])[path[i]] for i in range(len(path)))


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


@settings(max_examples=200)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 5), depth=st.integers(1, 4), ties=st.booleans())
def test_opt_tree_is_the_best_tree(seed: int, nodes: int, depth: int, ties: bool) -> None:
    q = dyadic_q(seed) if ties else random_q(seed, vocabulary=3)
    source = KnownSource(q)
    tree = opt_tree(source, root(), limit=depth, nodes=nodes, delta=0.0)
    paths = check(tree, source, depth)
    assert len(tree) <= nodes
    best = brute_force(q, 3, nodes, depth)
    assert math.fsum(weight(q, path) for path in paths) == pytest.approx(best, abs=1e-6)
    assert tree.expected == pytest.approx(1 + best, abs=1e-6)
    assert tree.path_probs is not None
    assert bool((tree.path_probs > 0).all())


@given(
    q=sources,
    nodes=st.integers(1, 12),
    delta=st.sampled_from([0.0, 0.11, 0.31, 0.73, 0.97]),
    depth=st.integers(1, 5),
)
def test_opt_tree_follows_algorithm_1(q: Q, nodes: int, delta: float, depth: int) -> None:
    """Feeding only the nodes that are in the best tree changes neither E nor the depth at which drafting stops."""
    source = KnownSource(q)
    tree = opt_tree(source, root(), limit=depth, nodes=nodes, delta=delta)
    paths = check(tree, source, depth)
    expected, drafted, chosen = algorithm_1(q, len(q(())), nodes, delta, depth)
    assert tree.expected == pytest.approx(1 + expected, abs=1e-5)
    assert len(source.calls) == drafted
    assert source.calls[0] == 1
    assert max(source.calls) <= nodes
    weights = sorted(weight(q, path) for path in chosen if weight(q, path) > 0)
    assert sorted(weight(q, path) for path in paths) == pytest.approx(weights, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), vocabulary=st.sampled_from([63, 64, 65, 200]), nodes=st.integers(1, 80))
def test_opt_tree_over_a_wide_vocabulary(seed: int, vocabulary: int, nodes: int) -> None:
    q = random_q(seed, vocabulary)
    source = KnownSource(q)
    tree = opt_tree(source, root(), limit=3, nodes=nodes, delta=0.0)
    paths = check(tree, source, 3)
    assert set(paths) == algorithm_1(q, vocabulary, nodes, 0.0, 3)[2]


@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 8))
def test_opt_tree_is_closed_under_certain_tokens(seed: int, nodes: int) -> None:
    """q ∈ {0, 1}: every p̂ is a tie; the tree is the chain."""
    source = KnownSource(lambda path: [float(token == (seed + len(path)) % 3) for token in range(3)])
    tree = opt_tree(source, root(), limit=12, nodes=nodes, delta=0.0)
    check(tree, source, 12)
    assert tree.parents == tuple(range(-1, nodes - 1))
    assert tree.expected == nodes + 1


def figure_4(path: Path_) -> Sequence[float]:
    """The q of OPT-Tree's Figure 4 over 40 tokens (Appendix B gives the numbers); the rest is spread evenly."""
    known = {
        (): [0.5, 0.4],
        (0,): [0.8, 0.1],
        (1,): [0.6, 0.2],
        (0, 0): [0.5, 0.2],
        (1, 0): [0.5],
    }.get(path, [])
    return [*known, *[(1 - sum(known)) / (40 - len(known))] * (40 - len(known))]


def test_figure_4() -> None:
    """E(A) = 3.07, by p̂ and by the law of the accepted length, as in Appendix B."""
    source = KnownSource(figure_4)
    tree = opt_tree(source, root(), limit=3, nodes=9, delta=0.0)
    paths = check(tree, source, 3)
    assert set(paths) == {(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 0, 1), (1, 0, 0)}
    assert tree.expected == pytest.approx(3.07)
    by_length = 0.0
    for path in [(), *paths]:  # accepted up to here and no further
        stays = 1 - sum(figure_4(path)[child[-1]] for child in paths if child[:-1] == path)
        by_length += (len(path) + 1) * weight(figure_4, path) * stays
    assert by_length == pytest.approx(3.07)


# --- token graph -------------------------------------------------------------------------------------------------

graphs = st.fixed_dictionaries(
    {
        "limit": st.integers(1, 6),
        "out_degree": st.integers(1, 4),
        "theta_prob": st.sampled_from([0.0, 0.11, 0.21, 0.41]),
        "theta_sibling": st.sampled_from([0.0, 0.31, 0.83]),
    }
)


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


@settings(max_examples=200)
@given(q=untied, config=graphs)
def test_without_merging_the_graph_is_the_pruned_tree(q: Q, config: dict) -> None:
    config = config | {"limit": min(config["limit"], 4)}
    source = KnownSource(q)
    tree = token_graph(source, root(), node_budget=10**6, tau=0, **config)
    paths = check(tree, source, config["limit"])
    expected = set(pruned_tree(q, **config))
    assert set(paths) == expected
    assert tree.drafted == len(tree)
    assert set(source.paths) == {path[:-1] for path in expected}  # only what has children was fed


@settings(max_examples=300)
@given(q=sources, config=graphs, tau=st.integers(1, 3), budget=st.sampled_from([7, 30, 300]))
def test_graph_merges_and_unmerges(q: Q, config: dict, tau: int, budget: int) -> None:
    source = KnownSource(q)
    graph = draft_graph(source, root(), node_budget=budget, tau=tau, **config)
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

    def successors(node: int) -> list[int]:
        own = graph.merged.get(node, node)
        return [child for child in range(n) if graph.parents[child] == own]

    def walk(node: int, below: tuple[int, ...]) -> None:
        """Follows children and merges without a bound: ends because the graph has no cycle."""
        assert node not in below
        for child in successors(node):
            walk(child, (*below, node))

    if n <= 30:
        for node in graph.merged:
            walk(node, ())

    tree = token_graph(KnownSource(q), root(), node_budget=budget, tau=tau, **config)
    unmerged = check(tree, source, config["limit"])
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
        if len(path) < config["limit"]:
            for child in successors(node):
                yield from expand(child, (*path, graph.tokens[child]))

    if len(tree) < budget:
        tops = [node for node in range(n) if graph.parents[node] == ROOT]
        assert set(unmerged) == {path for node in tops for path in expand(node, (graph.tokens[node],))}


@given(q=untied, budget=st.integers(1, 12))
def test_a_level_over_the_budget_keeps_its_likeliest_nodes(q: Q, budget: int) -> None:
    config = {"limit": 4, "out_degree": 3, "theta_prob": 0.0, "theta_sibling": 0.0, "tau": 0}
    bounded = paths_of(token_graph(KnownSource(q), root(), node_budget=budget, **config))
    whole = paths_of(token_graph(KnownSource(q), root(), node_budget=10**6, **config))
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
    tree = token_graph(source, root(), limit=5, node_budget=50, tau=1, out_degree=2)
    paths = check(tree, source, 5)
    assert (2, 3, 2, 3, 2) in paths
    assert (3, 2, 3, 2, 3) in paths
    before = [paths[first] for first in tree.merged.values()]
    assert len(before) == 1


def test_a_shared_continuation_is_drafted_once() -> None:
    """Two first tokens, then a certain text: the second branch is copied, its tokens are not drafted."""
    text = [4, 5, 6, 7, 8, 9]

    def q(path: Path_) -> Sequence[float]:
        out = [0.0] * 10
        if not path:
            out[2], out[3] = 0.6, 0.4
        else:
            out[text[len(path) - 1]] = 1.0
        return out

    def draft(tau: int) -> tuple[DraftTree, KnownSource]:
        source = KnownSource(q)
        return token_graph(source, root(), limit=6, node_budget=40, tau=tau), source

    merged, source = draft(2)
    alone, other = draft(0)
    assert set(paths_of(merged)) == set(paths_of(alone))
    assert merged.drafted == 2 + 2 + 2 + 3  # merged where (4, 5) occurs the second time
    assert list(merged.merged.values()) == [4]
    assert sum(source.calls) == 1 + 2 + 2 + 3 - 0
    assert sum(other.calls) == 1 + 2 * 5


# --- fixed shapes ------------------------------------------------------------------------------------------------

shapes = st.builds(
    lambda paths: parse_shape(sorted({path[:i] for path in paths for i in range(1, len(path) + 1)})),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8),
)


@given(
    q=sources,
    shape=st.one_of(shapes, st.just(EAGLE_25), st.integers(1, 40).map(binary_shape)),
    limit=st.integers(1, 6),
)
def test_static_tokens_have_their_ranks(q: Q, shape: Shape, limit: int) -> None:
    source = KnownSource(q)
    tree = static(source, root(), shape, limit=limit)
    paths = check(tree, source, limit)
    kept = [ranks for ranks in shape.paths if len(ranks) <= limit and max(ranks) < len(q(()))]
    rank_of: dict[Path_, Path_] = {(): ()}
    assert len(paths) == len(kept)
    for path, ranks in zip(paths, kept, strict=True):
        assert rank_of[path[:-1]] == ranks[:-1]
        rank_of[path] = ranks
        conditional = q(path[:-1])
        assert conditional[path[-1]] == sorted(conditional, reverse=True)[ranks[-1]]
    inner = {ranks[:-1] for ranks in kept}
    depth = max(map(len, kept), default=0)
    assert source.calls == ([sum(len(path) == level for path in inner) for level in range(depth)] or [1])


def test_known_shapes() -> None:
    assert len(EAGLE_25) == 25
    assert Counter(map(len, EAGLE_25.paths)) == {1: 4, 2: 8, 3: 8, 4: 3, 5: 2}
    assert Counter(map(len, binary_shape(25).paths)) == {1: 2, 2: 4, 3: 8, 4: 11}
    assert max(max(path) for path in binary_shape(60).paths) == 1
    assert Counter(map(len, full_shape((4, 2, 2)).paths)) == {1: 4, 2: 8, 3: 16}
    for bad in (0, -3):
        with pytest.raises(UserError, match="at least 1"):
            binary_shape(bad)
    with pytest.raises(UserError, match="widths"):
        full_shape((4, 0))


def test_shape_files(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[0, 0], [1], [0]]))
    assert read_shape(file).paths == ((0,), (1,), (0, 0))
    for content, message in [
        ([[0], [1, 0]], r"\[1, 0\] has no parent; add \[1\]"),
        ([[0], [1], [0]], r"\[0\] is listed twice"),
        ([[0], [-1]], "rank -1"),
        ([[0], [0.5]], "rank 0.5"),
        ([[True]], "rank True"),
        ([[0], []], "not a rank path"),
        ([0, 1], "not a rank path"),
        ([], "non-empty list"),
        ({"0": 1}, "non-empty list"),
    ]:
        file.write_text(json.dumps(content))
        with pytest.raises(UserError, match=message) as error:
            read_shape(file)
        assert str(file) in str(error.value)
    file.write_text("[[0],")
    with pytest.raises(UserError, match="not readable as JSON"):
        read_shape(file)
    with pytest.raises(UserError, match="no such file"):
        read_shape(tmp_path / "missing.json")


def test_plain_probs_are_float32() -> None:
    assert plain_probs(torch.zeros(2, 4, dtype=torch.bfloat16), (0, 1)).dtype == torch.float32
