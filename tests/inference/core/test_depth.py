"""How deep a draft is, and how often its depths were reached, on real drafts of every structure."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.base.streams import Streams
from outrider.inference.core.decode import speculative
from outrider.inference.core.rounds import Generation, Round, collect
from outrider.inference.core.tree import ROOT, DraftTree
from outrider.inference.drafters.ngram.lookup import PromptLookup
from outrider.inference.drafters.ngram.ngrams import make_ngram_drafter
from outrider.inference.drafters.shaped import ModelDrafter
from outrider.inference.measure.replay import replay
from outrider.inference.measure.statistics import acceptance_by_position
from outrider.inference.report.report import plot_acceptance
from outrider.inference.settings.method import NgramConfig, StructureConfig
from outrider.inference.shapes.factory import make_structure
from outrider.inference.shapes.shapes import EAGLE_25, static
from tests.inference.ngram_cases import make_table
from tests.known_source import KnownSource, paths_of, random_q, root
from tests.known_targets import Target, targets
from tests.tiny import (
    STRUCTURES,
    VOCABULARY,
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


def test_a_tree_of_25_nodes_and_depth_5_by_hand() -> None:
    tree = static(KnownSource(random_q(0)), root(), EAGLE_25, limit=9)
    assert (len(tree), tree.depth) == (25, 5)
    shallow = DraftTree(torch.arange(3), (ROOT, ROOT, 0), (-1,) * 3)
    outcomes = [(tree, 0), (tree, 3), (tree, 5), (shallow, 2), (shallow, 0)]
    rounds = tuple(Round(tuple(range(accepted + 1)), len(t), accepted, t.depth, 0.1) for t, accepted in outcomes)
    table = acceptance_by_position([Generation((1,), 0.1, 0.5, rounds)])
    assert [(row["position"], row["rounds"]) for row in table] == [(1, 5), (2, 5), (3, 3), (4, 3), (5, 3)]
    assert [row["accepted"] for row in table] == pytest.approx([3 / 5, 3 / 5, 2 / 3, 1 / 3, 1 / 3])
    axes = plot_acceptance([{"method": "m", "acceptance_by_position": table}]).axes[0]
    assert axes.lines[0].get_xdata().tolist() == [1, 2, 3, 4, 5]  # type: ignore[union-attr]
    assert "depth" in axes.get_xlabel()


make = pytest.fixture(scope="module")(targets)


def of_tokens() -> dict[str, Callable[[], Any]]:
    """The drafters that see nothing but tokens."""
    table = make_table(VOCABULARY)
    return {
        "prompt_lookup": lambda: PromptLookup(3, 6),
        "best_first": lambda: make_ngram_drafter(table, NgramConfig(depth=3, nodes=20), 0),
        "puct": lambda: make_ngram_drafter(table, NgramConfig(search="puct", iterations=40), 0),
        "mixed": lambda: make_ngram_drafter(table, NgramConfig(evidence="mixed", depth=5, nodes=30), 0),
    }


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


@pytest.mark.parametrize("name", of_tokens())
def test_acceptance_by_depth_of_what_was_decoded_and_replayed(make: Callable[..., Target], name: str) -> None:
    target, prompt, tables = make("llama"), random_prompt(12) * 3, []
    decode: Any = partial(speculative, target.stack)
    for _ in range(2):
        seen: Seen = []
        generation = collect(decode(noting(of_tokens()[name](), seen), prompt, max_new_tokens=40))
        tables += [acceptance_by_position([generation]), table_by_definition(seen)]
        assert any(len(tree) for tree, _ in seen)
        decode = lambda drafter, prompt, said=generation.tokens, **options: replay(drafter, prompt, said, **options)  # noqa: E731
    assert all(table == tables[0] for table in tables)
