"""How deep a draft is, and how often its depths were reached, on real drafts of every structure."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.base.streams import Streams
from outrider.inference.core.decode import speculative
from outrider.inference.core.rounds import collect
from outrider.inference.core.tree import DraftTree
from outrider.inference.drafters.shaped import ModelDrafter
from outrider.inference.measure.statistics import acceptance_by_position
from outrider.inference.settings.method import StructureConfig
from outrider.inference.shapes.factory import make_structure
from tests.known_source import paths_of
from tests.known_targets import Target, targets
from tests.tiny import (
    STRUCTURES,
    method_of,
    random_prompt,
)

DEEP = {**STRUCTURES, "token_graph": StructureConfig(kind="token_graph", nodes=30)}
Seen = list[tuple[DraftTree, list[int]]]


def table_by_definition(seen: Seen) -> list[dict[str, Any]]:
    """Depth i: of the rounds whose draft has a path of i tokens, those that accepted i tokens."""
    reached = [(max(map(len, paths_of(tree)), default=0), len(accepted)) for tree, accepted in seen]
    table = []
    for depth in range(1, max(deepest for deepest, _ in reached) + 1):
        outcomes = [accepted >= depth for deepest, accepted in reached if deepest >= depth]
        share = float(Fraction(sum(outcomes), len(outcomes)))
        table.append({"position": depth, "rounds": len(outcomes), "accepted": share})
    return table


def noting(drafter: Any, seen: Seen) -> Any:
    """`drafter`, whose drafts and what was accepted of them are kept on the side."""
    commit = drafter.commit

    def noted(tree: DraftTree, nodes: Any, tokens: Any) -> None:
        seen.append((tree, list(nodes)))
        commit(tree, nodes, tokens)

    drafter.commit = noted
    return drafter


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=40))
def test_the_depth_of_any_tree(places: list[int]) -> None:
    parents = tuple(place % (node + 1) - 1 for node, place in enumerate(places))
    tree = DraftTree(torch.arange(len(parents)), parents, (-1,) * len(parents))
    assert tree.depth == max(map(len, paths_of(tree)), default=0)


make = pytest.fixture(scope="module")(targets)


@pytest.mark.parametrize("structure", DEEP)
def test_acceptance_by_depth_of_what_was_decoded(make: Callable[..., Target], structure: str) -> None:
    """Against the drafts themselves, kept on the side."""
    target, seen = make("llama"), list[tuple[DraftTree, list[int]]]()
    drafter = noting(
        ModelDrafter(target.source("early_exit", 0.5), make_structure(method_of(DEEP[structure]), Streams(0))), seen
    )
    found = acceptance_by_position([collect(speculative(target.stack, drafter, random_prompt(20), max_new_tokens=40))])
    assert found == table_by_definition(seen)
    assert any(0 < row["accepted"] < 1 for row in found)
    assert structure == "chain" or len(found) < max(len(tree) for tree, _ in seen)
