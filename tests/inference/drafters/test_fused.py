"""Fused drafts: a model's q and n-grams in one tree, against the same written slowly, and what they fall back to."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draft_models.ngrams.table import TrigramTable
from inference.drafters.ngram.fused import Fused
from inference.drafters.ngram.fused_growth import band, later_passes, new_join
from inference.drafters.ngram.ngram_mixing import SUREST, predict
from inference.drafters.ngram.ngrams import PLUGIN, MixedDrafter
from inference.settings.method import AUTO, MethodConfig, NgramConfig, StructureConfig
from inference.shapes.opt_tree import opt_tree
from inference.sizing.costs import Costs
from inference.sizing.feeding import BANDS
from inference.sizing.policy import Tuning
from outrider.errors import UserError
from tests.inference.fused_cases import FedModel, begun, fused_draft, fused_method
from tests.inference.ngram_cases import TABLE, VOCABULARY, draft, make_documents
from tests.inference.test_tree_stops import Transfers
from tests.known_source import ROOT_TOKEN, KnownSource, Path_, Q, paths_of, random_q, root

TEXT = [*make_documents()[3][:40], ROOT_TOKEN]
GROWN = [{"nodes": 12, "max_depth": 1}, {"nodes": 20, "max_depth": 3}, {"nodes": 20, "max_depth": 4, "width": 2}]


def ngrams_after(drafter: Fused, path: Path_) -> dict[int, float]:
    """The mixture's distribution after the text and `path`."""
    ids, stop = drafter._ngrams.text
    recent = [*reversed(path), *ids[:stop][::-1]][: len(drafter._scratch.recent)]
    drafter._scratch.recent[: len(recent)] = recent
    found = predict(*drafter._ngrams.mixture.sources, len(recent), 1e-9, drafter._scratch)
    return dict(zip(drafter._scratch.tokens[:found].tolist(), drafter._scratch.probs[:found].tolist(), strict=True))


def joined(drafter: Fused, q: Q, path: Path_) -> dict[int, float]:
    """P after a node that the drafter was asked at, as the module says it: λ·q + (1 − λ)·(n + r·q)."""
    n, own = ngrams_after(drafter, path), dict(enumerate(q(path)))
    rest = 1 - sum(n.values())
    kind = min(BANDS - 1, int(max(own.values()) * BANDS)) * BANDS + min(
        BANDS - 1, int(max(n.values(), default=0) * BANDS)
    )
    share = drafter._weights.now[kind]
    tokens = {*n, *(token for token, prob in own.items() if prob > 0)}
    return {t: share * own.get(t, 0) + (1 - share) * (n.get(t, 0) + rest * own.get(t, 0)) for t in tokens}


@pytest.mark.parametrize("share", [-math.inf, -1.0, 0.0, 0.5, 1.0, 1.1, 1e18, 1e300, math.inf, math.nan])
def test_a_band_is_one_of_those_that_there_are(share: float) -> None:
    assert 0 <= band(share) < BANDS
    assert not 0 <= share <= 1 or band(share) == min(BANDS - 1, int(share * BANDS))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from(GROWN), table=st.booleans())
@example(seed=5488, shape=GROWN[1], table=True)  # one is missed
def test_the_tree_is_the_best_of_the_joined_probabilities(seed: int, shape: dict, table: bool) -> None:
    """Every node's probability is that of its path, and no child that was left out has a larger one than the last.

    But in a full tree for a child that only n-grams could tell of: one likelier than SUREST may be missed.
    """
    q = random_q(seed, VOCABULARY)
    drafter = begun(fused_method(**shape), q, TEXT[:-1], TABLE if table else None)
    tree = drafter.draft(root(), 99)
    source = drafter.model
    assert isinstance(source, FedModel)
    paths = paths_of(tree)
    for path, row in zip(paths, tree.rows, strict=True):
        assert row == -1 or source.paths[row] == path
        assert (row != -1) == (path in source.paths)
    assert all(parent < node for node, parent in enumerate(tree.parents))
    distributions = {path: joined(drafter, q, path) if path in source.paths else ngrams_after(drafter, path)
            for path in [(), *paths]}  # fmt: skip
    found = dict(zip(paths, tree.path_probs.tolist(), strict=True))
    whole = {path: math.prod(distributions[path[:i]][path[i]] for i in range(len(path))) for path in paths}
    assert found == pytest.approx(whole, rel=1e-5)
    full = len(tree) == shape["nodes"]
    worst = min(found.values()) if full else 1e-4
    left = [
        (*path, t) for path in [(), *paths] if len(path) < 8 for t in distributions[path] if (*path, t) not in found
    ]
    whole[()] = 1.0
    missed = {path for path in whole if full and path not in source.paths and whole[path] * SUREST <= worst}
    looked_at = [path for path in left if path[:-1] not in missed]
    assert all(whole[path[:-1]] * distributions[path[:-1]][path[-1]] <= worst * 1.0001 for path in looked_at)
    assert len(source.calls) <= shape["max_depth"]
    assert max(source.calls) <= shape.get("width", 99)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), sharp=st.sampled_from([0.5, 3.0]), depth=st.integers(1, 5))
def test_without_evidence_of_n_grams_it_is_the_opt_tree(seed: int, sharp: float, depth: int) -> None:
    """q alone decides, whatever its share."""
    q = random_q(seed, 5, sharp)
    tree = fused_draft(fused_method(nodes=9, max_depth=depth, longest=0), q, [ROOT_TOKEN])
    expected = opt_tree(KnownSource(q), root(), limit=depth, nodes=9, delta=0.0)
    ours, theirs = (dict(zip(paths_of(t), t.path_probs.tolist(), strict=True)) for t in (tree, expected))
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("table", [TABLE, None])
def test_where_the_model_says_nothing_it_is_the_draft_of_the_n_grams(table: TrigramTable | None) -> None:
    """q is no number; or asking takes so long that nobody does."""
    silent: Q = lambda path: [math.nan] * VOCABULARY  # noqa: E731
    other = table or TrigramTable(VOCABULARY, "", {}, {})
    # With room for all: where there is none n-grams leave out what adds little to a probability.
    expected = draft(MixedDrafter(other, NgramConfig(evidence="mixed", depth=8, nodes=200)), TEXT, 2)
    tree = fused_draft(fused_method(nodes=200, max_depth=3), silent, TEXT, 2, table=table)
    slow = Tuning(Costs((0.0, *[9.0] * 64), (0.0, *[1e-3] * 64), 0.0, 1e-3))
    unasked = fused_draft(
        fused_method(nodes=60, max_depth=AUTO), random_q(1, VOCABULARY), TEXT, 2, table=table, tuning=slow
    )
    assert set(unasked.rows) == {-1}
    whole = dict(zip(paths_of(expected), expected.path_probs.tolist(), strict=True))
    assert len(tree) > 15
    for found in (tree, unasked):
        known = dict(zip(paths_of(found), found.path_probs.tolist(), strict=True))
        assert known == pytest.approx({path: whole[path] for path in known})
        assert all(prob <= min(known.values()) + 1e-4 for path, prob in whole.items() if path not in known)


def test_shares_follow_what_came_true() -> None:
    """One step of expectation–maximisation for every node that the model was asked at and the text went through."""
    q = random_q(5, VOCABULARY)
    drafter = begun(fused_method(nodes=12, max_depth=2, strength=3.0), q, TEXT[:-1], TABLE)
    tree = drafter.draft(root(), 99)
    node = next(i for i, row in enumerate(tree.rows) if row >= 0)
    token = int(tree.tokens[node])
    after = max(range(VOCABULARY), key=lambda t: q((token,))[t])
    expected, hits = new_join().now.copy(), {}
    for path, came in (((), token), ((token,), after)):
        n, own = ngrams_after(drafter, path), q(path)
        by_n = n.get(came, 0) + (1 - sum(n.values())) * own[came]
        kind = min(7, int(max(own) * 8)) * 8 + min(7, int(max(n.values(), default=0) * 8))
        hit = expected[kind] * own[came] / (expected[kind] * own[came] + (1 - expected[kind]) * by_n)
        seen, total = hits.get(kind, (0, 0.0))
        hits[kind] = seen + 1, total + hit
        expected[kind] = (3 * new_join().prior[kind] + total + hit) / (3 + seen + 1)
    drafter.commit(tree, [node], [ROOT_TOKEN, token])
    drafter.draft(torch.tensor([after]), 0)
    assert drafter._weights.now.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert hits


def test_the_larger_one_counts_where_it_is_asked_for() -> None:
    q = random_q(2, VOCABULARY, sharp=1.0)
    drafter = begun(fused_method(nodes=20, max_depth=1, join="maximum"), q, TEXT[:-1], TABLE)
    tree = drafter.draft(root(), 1)
    n = ngrams_after(drafter, ())
    larger = {t: max(p, n.get(t, 0)) for t, p in enumerate(q(()))}
    scale = max(1, sum(larger.values()))
    found = dict(zip(tree.tokens.tolist(), tree.path_probs.tolist(), strict=True))
    assert scale > 1
    assert found == pytest.approx({t: larger[t] / scale for t in found}, rel=1e-5)


def costs(step: float, verify: Sequence[float] | float) -> Tuning:
    curve = tuple(verify) if isinstance(verify, Sequence) else (verify,) * 65
    return Tuning(Costs((step,) * 65, curve, 0.0, 1.0))


def test_the_dearer_a_pass_the_fewer_there_are_and_now_and_then_one_to_see() -> None:
    """Over the rounds of one text; at the highest price only those that keep the estimate alive."""
    passes = []
    for step in (1e-6, 0.1, 0.4, 50.0):
        drafter = begun(
            fused_method(nodes=AUTO, max_depth=AUTO), random_q(3, VOCABULARY), TEXT[:-1], TABLE, costs(step, 1.0)
        )
        for _ in range(30):
            tree = drafter.draft(root(), 99)
            drafter.commit(tree, [], [ROOT_TOKEN])
        passes.append(drafter.totals.get("drafter_passes", 0))
    assert passes == sorted(passes, reverse=True)
    assert passes[0] > 60 > 30 > passes[2]
    assert 1 <= passes[3] <= 3


def test_nodes_follow_the_price_of_verifying_them() -> None:
    sizes = []
    for dear in (1e-4, 0.05, 5.0):
        tuning = costs(0.1, [1 + dear * width for width in range(65)])
        tree = fused_draft(
            fused_method(nodes=AUTO, max_depth=3), random_q(3, VOCABULARY), TEXT, table=TABLE, tuning=tuning
        )
        sizes.append(len(tree))
        assert tree.path_probs.tolist() == sorted(tree.path_probs.tolist(), reverse=True)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 40 > 3 >= sizes[2]


def test_a_step_transfers_once() -> None:
    """And once a round, for the root."""
    drafter = begun(fused_method(nodes=20, max_depth=3), random_q(3, VOCABULARY), TEXT[:-1], TABLE)
    with Transfers() as counted:
        drafter.draft(root(), 99)
    assert isinstance(drafter.model, FedModel)
    assert len(drafter.model.calls) == 3
    assert counted.count == 1 + 3 * 3  # a step also looks twice at what is on the host: tokens, the array


def test_a_table_is_opened_for_it(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "table")
    target = SimpleNamespace(vocabulary_digest="t", vocabulary_size=VOCABULARY)
    found = [PLUGIN.load(str(tmp_path / "table"), target, {"m": method})
             for method in (MethodConfig("small_lm"), fused_method())]  # fmt: skip
    assert found[0] is None
    assert found[1].vocabulary == VOCABULARY


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ngrams": NgramConfig()}, "ngrams.evidence='table': expected mixed with kind=fused"),
        ({"ngrams": NgramConfig(evidence="mixed", nodes=9)}, "ngrams.nodes=9: expected 64, its default"),
        ({"source": "ngrams"}, "structure.kind='fused'"),
    ],
)
def test_what_does_not_go_with_it_is_refused(given: dict, message: str) -> None:
    whole = {"source": "small_lm", "ngrams": NgramConfig(evidence="mixed"), **given}
    with pytest.raises(UserError, match=message):
        MethodConfig(structure=StructureConfig("fused"), **whole)


@pytest.mark.parametrize("seed", range(3))
def test_later_passes_reach_the_nodes_under_those_of_earlier_ones(seed: int) -> None:
    """Against every node's own ancestors, one after the other."""
    text = [*random.Random(seed).choices(range(4), k=60), ROOT_TOKEN]
    fused = begun(fused_method(nodes=16, max_depth=3, width=2), lambda _: [1 / VOCABULARY] * VOCABULARY, text[:-1])
    fused.draft(torch.tensor(text[-1:]), 99)
    pool, count = fused._pool, len(fused._drafted[0])
    pool["row"][fused._ranked.order[seed % count]] = -1
    gains = np.linspace(0.5, 0.1, BANDS)
    wanted: dict[int, float] = {}
    for node in fused._ranked.order[:count]:
        above, unfed = int(node), -1
        while above >= 0:
            unfed += pool["row"][above] < 0
            above = int(pool["parent"][above]) if above else -1
        if pool["row"][node] < 0 and unfed and pool["depth"][node] < 8:
            value = gains[band(pool["sure"][node])] * pool["path"][node]
            wanted[unfed] = max(wanted.get(unfed, 0.0), float(value))
    later, scratch, parents = np.empty(16), np.empty(16, np.int64), fused._places[1]
    passes = later_passes(pool, fused._ranked, count, 8, gains, 0.0, parents, scratch, later)
    assert passes == max(wanted, default=0)
    assert later[:passes].tolist() == pytest.approx([wanted.get(place + 1, 0.0) for place in range(passes)])
