"""Draft structures against references that follow the definitions, on a source with a known q; and their settings."""

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.base.errors import UserError
from outrider.base.streams import Streams
from outrider.draft_models.calibration_head import CalibrationHead
from outrider.inference.core.tree import ROOT, DraftTree
from outrider.inference.settings.method import DRAWS, MethodConfig, StopConfig, StructureConfig
from outrider.inference.shapes import shapes as forms
from outrider.inference.shapes.factory import make_structure, make_tree
from outrider.inference.shapes.structure import Structure, softmax_probs
from outrider.inference.sizing.policy import Tuning
from outrider.inference.stopping.interface import Step
from tests.inference.known_source import KnownSource, Path_, Q, check, paths_of, random_q, root, sources
from tests.inference.priced import costs
from tests.refusals import refusal
from tests.tiny import STRUCTURES


class Until:
    """Stops after `count` tokens and records its inputs."""

    def __init__(self, count: int):
        self.max_draft = count
        self.seen: list[tuple[Step, list]] = []

    def stop(self, step: Step) -> bool:
        self.seen.append((step, step.source.hidden.tolist()))
        return step.drafted >= self.max_draft

    def observe(self, drafted: int, accepted: int) -> None:
        pass


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=40))
def test_the_depth_of_any_tree(places: list[int]) -> None:
    parents = tuple(place % (node + 1) - 1 for node, place in enumerate(places))
    tree = DraftTree(torch.arange(len(parents)), parents, (-1,) * len(parents))
    assert tree.depth == max(map(len, paths_of(tree)), default=0)


KINDS = {
    "chain": StructureConfig(),
    **{f"k_config, {draw}": StructureConfig("k_config", draw=draw) for draw in DRAWS},
    "opt_tree": StructureConfig("opt_tree", nodes=9, delta=0.0),
    "token_graph": StructureConfig("token_graph", nodes=20),
    "eagle": StructureConfig("static"),
}


def made(kind: str, generator: random.Random | None = None) -> Structure:
    """A structure; with a generator, candidates are sampled."""
    return forms.Chain(Until(3), generator) if kind == "chain" else make_tree(KINDS[kind], generator)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_drafted_at_limit_zero(kind: str) -> None:
    source = KnownSource(random_q(0))
    tree = made(kind).draft(source, root(), 0)
    assert (len(tree), tree.tokens.shape, tree.rows, source.calls) == (0, (0,), (), [])


@pytest.mark.parametrize("kind", KINDS)
def test_processed_probabilities_decide_and_know_their_rows(kind: str) -> None:
    """The sampler sees every row once, in order, and its distribution replaces the logits'."""
    source: Any = KnownSource(random_q(0))
    seen: list[int] = []

    def only_four_and_five(logits: Tensor, rows: Sequence[int]) -> Tensor:
        assert len(logits) == len(rows)
        seen.extend(rows)
        return torch.tensor([0, 0, 0, 0, 0.75, 0.25]).expand(len(rows), 6)

    source.to_probs = only_four_and_five
    for generator in (None, random.Random(0)):
        structure = made(kind, generator)
        source.paths.clear()
        seen.clear()
        tree = structure.draft(source, root(), 3)
        assert tree.tokens[0] in (4, 5)
        assert seen == list(range(len(source.paths)))
        rows = len(source.paths) - 1 + tree.rows.count(-1)  # besides the root: fed while drafting, and to the target
        assert rows <= structure.max_rows


def test_a_session_has_room_for_nodes_that_were_fed_and_did_not_stay() -> None:
    """Of a tree with a width: twelve likely children of the third level displace weak ones that had been fed."""

    def q(path: tuple[int, ...]) -> list[float]:
        return [1 / 12] * 12 if path == (0, 0) else [0.9, *[0.1 / 11] * 11]

    source = KnownSource(q)
    structure = make_tree(StructureConfig("opt_tree", nodes=8, delta=0.0, width=2, max_depth=3))
    tree = structure.draft(source, root(), 3)
    rows = len(source.paths) - 1 + tree.rows.count(-1)
    assert max(8, 2 * 3) < rows <= structure.max_rows


@settings(deadline=None)
@given(q=sources, count=st.integers(1, 6), limit=st.integers(0, 6), sampled=st.booleans())
def test_chain(q: Q, count: int, limit: int, sampled: bool) -> None:
    source, rule = KnownSource(q), Until(count)
    tree = forms.Chain(rule, random.Random(1) if sampled else None).draft(source, root(), limit)
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


@settings(deadline=None)
@given(
    q=sources,
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    mode=st.sampled_from(["with_replacement", "without_replacement", "top_k"]),
    limit=st.integers(1, 4),
    seed=st.integers(0, 99),
)
@pytest.mark.slow
def test_k_config_levels(q: Q, widths: list[int], mode: str, limit: int, seed: int) -> None:
    source = KnownSource(q)
    config = StructureConfig("k_config", widths=tuple(widths), draw=mode)  # type: ignore[arg-type]
    tree = make_tree(config, random.Random(seed) if seed % 4 or mode != "top_k" else None).draft(source, root(), limit)
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


def chi_square(counts: Counter, distribution: dict, total: int) -> float:
    """The statistic in standard deviations above its mean; impossible outcomes count as infinite."""
    if set(counts) - {outcome for outcome, probability in distribution.items() if probability}:
        return math.inf
    statistic = sum((counts[o] - total * float(p)) ** 2 / (total * float(p)) for o, p in distribution.items() if p)
    freedom = sum(p > 0 for p in distribution.values()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


WEIGHTS = [Fraction(w, 20) for w in (9, 6, 0, 4, 1)]


def sequential_distribution(k: int) -> dict[Path_, Fraction]:
    """x_i ~ q_i, q_{i+1} = norm(q_i without x_i), by enumeration."""
    distribution: dict[Path_, Fraction] = {(): Fraction(1)}
    for _ in range(k):
        distribution = {
            (*drawn, token): probability * q / (1 - sum(WEIGHTS[other] for other in drawn))
            for drawn, probability in distribution.items()
            for token, q in enumerate(WEIGHTS)
            if q and token not in drawn
        }
    assert sum(distribution.values()) == 1
    return distribution


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.slow
def test_draws_without_replacement_follow_the_sequential_distribution(k: int) -> None:
    total, generator = 100_000, random.Random(k)
    probs = torch.tensor([float(w) for w in WEIGHTS]).expand(total, 5)
    before = probs.clone()
    right = Counter(map(tuple, forms._draw(probs, k, generator, replacement=False).tolist()))
    assert torch.equal(probs, before)
    assert chi_square(right, sequential_distribution(k), total) < 5
    if k > 1:  # power: draws that forget the renormalisation must fail, as the top k of u · q
        scores = torch.rand(total, 5, generator=torch.Generator().manual_seed(k)) * probs
        wrong = Counter(map(tuple, scores.topk(k).indices.tolist()))
        assert chi_square(wrong, sequential_distribution(k), total) > 50
    exhausted = forms._draw(probs[:100], 5, generator, replacement=False)
    assert (exhausted == -1).sum(-1).eq(1).all()  # q > 0 for four tokens only
    assert (exhausted[:, -1] == -1).all()


shapes = st.builds(
    lambda paths: forms.parse_shape(sorted({path[:i] for path in paths for i in range(1, len(path) + 1)})),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8),
)


@settings(deadline=None)
@given(
    q=sources,
    shape=st.one_of(shapes, st.just(forms.EAGLE_25), st.integers(1, 40).map(forms.binary_shape)),
    limit=st.integers(1, 6),
)
def test_static_tokens_have_their_ranks(q: Q, shape: forms.Shape, limit: int) -> None:
    source = KnownSource(q)
    tree = forms.Static(StructureConfig("static"), None, None).draft_shape(source, root(), shape, limit)
    paths = check(tree, source, limit)
    kept = [ranks for ranks in shape if len(ranks) <= limit and max(ranks) < len(q(()))]
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


@pytest.mark.parametrize("sharp", [1.0, 200.0])
def test_tokens_that_sampling_leaves_out_follow_by_their_logits(sharp: float) -> None:
    source: Any = KnownSource(random_q(0, 40, sharp))
    source.to_probs = lambda logits, rows: torch.eye(40)[logits.argmax(-1)]  # as of top_k=1
    tree = made("eagle").draft(source, root(), 1)
    assert tree.tokens.tolist() == torch.tensor(source.q(())).topk(4).indices.tolist()


def test_known_shapes() -> None:
    assert len(forms.EAGLE_25) == 25
    assert Counter(map(len, forms.EAGLE_25)) == {1: 4, 2: 8, 3: 8, 4: 3, 5: 2}
    assert Counter(map(len, forms.binary_shape(25))) == {1: 2, 2: 4, 3: 8, 4: 11}
    assert max(max(path) for path in forms.binary_shape(60)) == 1
    assert Counter(map(len, forms.full_shape((4, 2, 2)))) == {1: 4, 2: 8, 3: 16}


def test_shape_files(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[0, 0], [1], [0]]))
    assert forms.read_shape(file) == ((0,), (1,), (0, 0))
    for content, message in [
        ([[0], [1, 0]], r"\[1, 0\] has no parent; add \[1\]"),
        ([[0], [1], [0]], r"\[0\] is listed twice"),
        ([[0], [-1]], r"\[1\]\[0\]=-1: expected a number greater than or equal to 0"),
        ([[0], []], r"\[1\]=\[\]"),
        ({"0": 1}, "damaged list of rank paths"),
    ]:
        file.write_text(json.dumps(content))
        with pytest.raises(UserError, match=message) as error:
            forms.read_shape(file)
        assert str(file) in str(error.value)
    file.write_text("[[0],")
    refusal("damaged list of rank paths", forms.read_shape, file)
    refusal("No such file", forms.read_shape, tmp_path / "missing.json")


def test_plain_probs_are_float32() -> None:
    assert softmax_probs(torch.zeros(2, 4, dtype=torch.bfloat16), (0, 1)).dtype == torch.float32


@pytest.mark.parametrize("kind", ["opt_tree", "token_graph"])
def test_a_tree_grows_by_q_at_its_temperature_or_by_the_samplers_q(kind: str) -> None:
    """By the drafter's q when greedy and with rank=drafter: sampling then changes the verification only."""
    delta = {"delta": 0.0} if kind == "opt_tree" else {}

    def draft(seed: int, power: float, sampler: Any = None, **changes: Any) -> tuple:
        q = random_q(seed, vocabulary=(6, 40)[seed % 2], order=2)  # of many tokens, compiled code finds the likeliest

        def sharper(path: Path_) -> list[float]:
            powers = [p**power for p in q(path)]
            return [p / sum(powers) for p in powers]

        source: Any = KnownSource(sharper)
        source.to_probs = sampler
        settings = StructureConfig(kind, nodes=14, max_depth=6, **delta, **changes)  # type: ignore[arg-type]
        tree = make_tree(settings).draft(source, root(), 9)
        return tree.tokens.tolist(), tree.parents, tree.rows

    def flatter(logits: Tensor, rows: Any) -> Tensor:
        return softmax_probs(logits / 4, rows)

    for seed in range(12):
        cold = draft(seed, 2)
        assert draft(seed, 1, temperature=0.5) == draft(seed, 1, flatter, temperature=0.5, rank="drafter") == cold
        assert draft(seed, 1, flatter, temperature=0.5) == draft(seed, 0.25) != cold


@pytest.mark.parametrize("levels", [None, 12])
def test_a_tree_has_the_levels_that_are_asked_for_or_its_own(levels: int | None) -> None:
    for shape in [*STRUCTURES.values()][1:]:  # the first is a chain
        made: Any = make_structure(MethodConfig(structure=shape, stop=StopConfig(max_draft=levels)), Streams(0))
        assert made.rule.max_draft == (levels or make_tree(shape).max_depth)


@pytest.mark.parametrize("score", ["draft", "head"])
@pytest.mark.parametrize("verify", ["exact", "naive"])
def test_how_likely_a_drawn_token_was_hardly_matters(score: str, verify: str) -> None:
    """It is accepted with min(1, p/q). The likeliest token is accepted as often as the target says it."""
    method = MethodConfig(stop=StopConfig(rule="survival", score=score), verify=verify)
    for drawn in (False, True):
        made: Any = make_structure(method, Streams(0), drawn, CalibrationHead(2, 2), Tuning(costs(node=0.1, rest=0.1)))
        unlikely, likely = (made.rule.trust.probability(odds) for odds in (-3.0, 3.0))
        assert (0 < likely - unlikely < 0.2) == (drawn and verify == "exact")


def test_candidates_are_counted_at_every_node_the_target_went_through() -> None:
    structure = make_tree(StructureConfig(kind="k_config", widths=(2, 3)))
    tree = DraftTree(torch.arange(5), (ROOT, ROOT, 1, 1, 1), (-1,) * 5)
    for accepted in ([1, 4], [1], []):
        structure.observe(tree, accepted)
    assert structure.totals == {"nodes_tried": 5, "accepted_candidate_2": 2, "accepted_candidate_3": 1, "observed": 3}
