"""GSD's tables: whose drafts they are of, and the arithmetic that stands in their notes."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.inference.core.tree import DraftTree
from outrider.inference.settings.method import StructureConfig
from outrider.inference.shapes.factory import make_tree
from tests.known_source import KnownSource, Q, root, untied
from tests.refusals import refusal
from tests.tiers import as_many

NONE = {"small_lm": None, "checkpoint": None, "skip": None}


@pytest.mark.parametrize(("given_", "source", "skip"), [
    ({}, "small_lm", None),
    ({"small_lm": "s", "checkpoint": "e"}, "small_lm", None),
    ({"checkpoint": "e"}, "early_exit", None),
    ({"skip": [3, 4]}, "skip_layers", (3, 4)),
])  # fmt: skip
def test_every_row_is_of_the_drafter_that_was_given(given_: dict, source: str, skip: tuple[int, ...] | None) -> None:
    from papers.gsd import tables

    found = tables(options=SimpleNamespace(**NONE | given_))
    methods = [row.method for table in found.values() for row in table.rows if row.method]
    assert {(method.source, method.skip) for method in methods} == {(source, skip)}
    graphs = [method.structure for method in methods if method.structure.kind == "token_graph"]
    within = [shape for shape in graphs if shape.tau and not shape.deep_copies]
    assert len(within) == 1  # the row that stops copies where drafting stops


def test_two_drafters_at_once_are_refused() -> None:
    from papers.gsd import tables

    refusal("checkpoint", tables, options=SimpleNamespace(**NONE | {"skip": [1], "checkpoint": "e"}))


@settings(deadline=None, max_examples=as_many(60))
@given(q=untied, theta=st.sampled_from([0.05, 0.3, 0.5, 0.66]))
def test_weak_sibling_pruning_prunes_nothing_where_weak_tokens_are_pruned(q: Q, theta: float) -> None:
    """As the note of Fig. 8 says."""

    def draft(theta_sibling: float) -> DraftTree:
        shape = StructureConfig("token_graph", nodes=10**4, theta_prob=0.4, theta_sibling=theta_sibling, tau=1)
        return make_tree(shape).draft(KnownSource(q), root(), 4)

    ours, other = draft(theta), draft(0.0)
    assert torch.equal(ours.tokens, other.tokens)
    assert ours.parents == other.parents
