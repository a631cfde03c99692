"""Every setting of a method reaches what drafts; what it drafts fits the rows that are kept for it."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from draft_models.calibration_head import CalibrationHead
from inference.core.tree import ROOT, DraftTree
from inference.settings.method import MethodConfig, StopConfig, StructureConfig
from inference.shapes.factory import make_structure, make_tree
from inference.shapes.opt_tree import opt_tree
from inference.shapes.shapes import binary_shape, k_config, plain_probs, static
from inference.shapes.token_graph import token_graph
from inference.sizing.costs import WIDEST, Costs
from inference.sizing.policy import Tuning
from inference.stopping.factory import make_rule
from inference.stopping.plain import Confidence, FixedLength
from inference.stopping.thompson import BetaThompson, CalibratedThompson
from outrider.streams import Streams
from tests.known_source import KnownSource, random_q, root

# No value is the default one, and none the same as another's.
GRAPH = {"out_degree": 5, "theta_prob": 0.04, "theta_sibling": 0.11, "tau": 1}
BUILDERS: dict[str, tuple[StructureConfig, int, Callable[..., DraftTree]]] = {
    "opt_tree": (
        StructureConfig(kind="opt_tree", nodes=14, max_depth=6, delta=0.25, temperature=0.7),
        6,
        partial(opt_tree, nodes=14, delta=0.25),
    ),
    "token_graph": (
        StructureConfig(kind="token_graph", nodes=40, max_depth=4, temperature=0.7, **GRAPH),
        4,
        partial(token_graph, settings=StructureConfig("token_graph", nodes=40, **GRAPH)),
    ),
    "opt_tree by the drafter": (
        StructureConfig(kind="opt_tree", nodes=14, max_depth=6, delta=0.25, temperature=0.7, rank="drafter"),
        6,
        partial(opt_tree, nodes=14, delta=0.25),
    ),
    "token_graph by the drafter": (
        StructureConfig(kind="token_graph", nodes=40, max_depth=4, temperature=0.7, rank="drafter", **GRAPH),
        4,
        partial(token_graph, settings=StructureConfig("token_graph", nodes=40, **GRAPH)),
    ),
    "k_config": (
        StructureConfig(kind="k_config", widths=(3, 2, 2)),
        3,
        partial(k_config, widths=(3, 2, 2), mode="top_k"),
    ),
    "binary": (
        StructureConfig(kind="static", shape="binary", nodes=11),
        9,
        partial(static, shape=binary_shape(11)),
    ),
}


def as_drafted(tree: DraftTree) -> tuple:
    return tree.tokens.tolist(), tree.parents, tree.rows


@pytest.mark.parametrize("name", BUILDERS)
def test_a_tree_is_drafted_by_its_settings(name: str) -> None:
    settings, depth, build = BUILDERS[name]
    processed: list[int] = []

    def flatter(logits: Tensor, rows: Any) -> Tensor:
        processed.extend(rows)
        return plain_probs(logits / 3, rows)

    sharper = partial(lambda logits, rows: plain_probs(logits / settings.temperature, rows))
    for seed in range(12):
        structure = make_tree(settings)
        for to_probs in (None, flatter):  # of the target's sampler; none when greedy
            ours, other = KnownSource(random_q(seed, order=2)), KnownSource(random_q(seed, order=2))
            ours.to_probs = to_probs
            own = sharper if settings.kind in ("opt_tree", "token_graph") else None
            expected = own if settings.rank == "drafter" else to_probs or own
            tree = structure.draft(ours, root(), 9)
            assert as_drafted(tree) == as_drafted(build(other, root(), limit=depth, to_probs=expected))
            rows = len(ours.paths) - 1 + tree.rows.count(-1)  # besides the root: fed while drafting, and to the target
            assert rows <= structure.max_rows
    assert bool(processed) == (settings.rank == "sampler")


@pytest.mark.parametrize("draw", ["with_replacement", "without_replacement", "top_k"])
def test_candidates_are_drawn_as_the_settings_say(draw: str) -> None:
    settings = StructureConfig(kind="k_config", widths=(3, 2), draw=draw)
    for sampled in (False, True):
        generators = [random.Random(1) if sampled else None for _ in range(2)]
        structure = make_tree(settings, generators[0])
        found = structure.draft(KnownSource(random_q(0)), root(), 9)
        mode = draw if sampled else "top_k"
        options = {"limit": 2, "widths": (3, 2), "mode": mode, "generator": generators[1]}
        expected = k_config(KnownSource(random_q(0)), root(), **options)
        assert as_drafted(found) == as_drafted(expected)
        assert (set(found.q), found.draws) == (set(expected.q), expected.draws)


def test_a_rule_is_made_of_its_settings() -> None:
    def made(rule: str, **settings: Any) -> Any:
        return make_rule(StopConfig(rule=rule, max_draft=5, **settings), Streams(3), head=head)

    head = CalibrationHead(2, 2)
    assert made("fixed") == FixedLength(5)
    assert made("confidence", threshold=0.3) == Confidence(5, 0.3)
    beta = made("beta", alpha=7.0, beta=3.0, update="printed")
    assert isinstance(beta, BetaThompson)
    assert (beta.max_draft, beta.alpha, beta.beta, beta.update) == (5, 7.0, 3.0, "printed")
    sigmas = {"model_sigma": 0.5, "sample_sigma": 0.25}
    calibrated = made("calibrated", **sigmas, prior=0.4, mean="printed")
    assert isinstance(calibrated, CalibratedThompson)
    believed = calibrated.posterior
    assert (believed.head, calibrated.max_draft, believed.estimate) == (head, 5, 0.4)
    assert (believed.model_variance, believed.sample_variance) == (0.5**2, 0.25**2)
    assert (believed.mean, believed.evidence) == ("printed", "both")
    assert made("calibrated", evidence="model").posterior.evidence == "model"


@pytest.mark.parametrize("score", ["draft", "head"])
@pytest.mark.parametrize("verify", ["exact", "naive"])
def test_how_likely_a_drawn_token_was_hardly_matters(score: str, verify: str) -> None:
    """It is accepted with min(1, p/q). The likeliest token is accepted as often as the target says it."""
    costs = Costs((0.1,) * (WIDEST + 1), tuple(1 + 0.1 * width for width in range(WIDEST + 1)), 0.1, 1.0)
    method = MethodConfig(stop=StopConfig(rule="survival", score=score), verify=verify)
    for drawn in (False, True):
        made: Any = make_structure(method, Streams(0), drawn, CalibrationHead(2, 2), Tuning(costs))
        unlikely, likely = (made.rule.trust.probability(odds) for odds in (-3.0, 3.0))
        assert (0 < likely - unlikely < 0.2) == (drawn and verify == "exact")


def test_candidates_are_counted_at_every_node_the_target_went_through() -> None:
    structure = make_tree(StructureConfig(kind="k_config", widths=(2, 3)))
    tree = DraftTree(torch.arange(5), (ROOT, ROOT, 1, 1, 1), (-1,) * 5)
    for accepted in ([1, 4], [1], []):
        structure.observe(tree, accepted)
    assert structure.totals == {"nodes_tried": 5, "accepted_candidate_2": 2, "accepted_candidate_3": 1}
