"""How deep a draft is, and how often its depths were reached, on real drafts of every structure."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_models.targets.stack import LayerStack
from inference.core.decode import speculative
from inference.core.rounds import Generation, Round, collect
from inference.core.tree import ROOT, DraftTree, chain_parents
from inference.drafters.early_exit import EarlyExitSource
from inference.drafters.ngram.lookup import PromptLookup
from inference.drafters.ngram.ngrams import make_ngram_drafter
from inference.drafters.shaped import ModelDrafter
from inference.measure.replay import replay
from inference.measure.statistics import acceptance_by_position
from inference.report.report import plot_acceptance
from inference.settings.method import NgramConfig, StructureConfig
from inference.shapes.factory import Structure, make_structure
from inference.shapes.shapes import EAGLE_25, static
from outrider.streams import Streams
from tests.inference.ngram_cases import make_table
from tests.known_source import KnownSource, paths_of, random_q, root
from tests.tiny import (
    LAYERS,
    STRUCTURES,
    VOCABULARY,
    make_drafter,
    method_of,
    open_stack,
    random_prompt,
    save_target,
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


def watched(drafting: Structure, seen: Seen) -> Structure:
    """`drafting`, whose drafts and what was accepted of them are kept on the side."""
    observe = drafting.observe

    def noted(tree: DraftTree, accepted: Any) -> None:
        seen.append((tree, list(accepted)))
        observe(tree, accepted)

    drafting.observe = noted  # type: ignore[method-assign]
    return drafting


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


def test_the_depth_of_a_chain_is_its_length() -> None:
    for length in (0, 1, 7):
        assert DraftTree(torch.arange(length), chain_parents(0, length), (-1,) * length).depth == length


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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[LayerStack, Any]:
    path = save_target(tmp_path_factory.mktemp("depth"), kv_heads=2, peak=6.0)
    return open_stack(path)[1], make_drafter(path, LAYERS - 1, noise=0.5)


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
def test_acceptance_by_depth_of_what_was_decoded(models: tuple[LayerStack, Any], structure: str) -> None:
    """Against the drafts themselves, kept on the side."""
    stack, drafter = models
    seen: Seen = []
    drafting = watched(make_structure(method_of(DEEP[structure]), Streams(0)), seen)
    source = EarlyExitSource(drafter)
    generation = collect(speculative(stack, ModelDrafter(source, drafting), random_prompt(20), max_new_tokens=40))
    found = acceptance_by_position([generation])
    assert found == table_by_definition(seen)
    assert any(0 < row["accepted"] < 1 for row in found)
    if structure != "chain":
        assert len(found) < max(len(tree) for tree, _ in seen)


@pytest.mark.parametrize("name", of_tokens())
def test_acceptance_by_depth_of_drafters_that_see_tokens_decoded_and_replayed(
    models: tuple[LayerStack, Any], name: str
) -> None:
    stack, _ = models
    prompt = random_prompt(12) * 3
    drafted = [of_tokens()[name]() for _ in range(2)]
    live: Seen = []
    drafter = noting(drafted[0], live)
    generation = collect(speculative(stack, drafter, prompt, max_new_tokens=40))
    recorded: Seen = []
    again = noting(drafted[1], recorded)
    options: Any = {"max_new_tokens": 40}
    replayed = collect(replay(again, prompt, generation.tokens, **options))
    found = acceptance_by_position([generation])
    assert found == table_by_definition(live) == acceptance_by_position([replayed]) == table_by_definition(recorded)
    assert any(len(tree) for tree, _ in live)
