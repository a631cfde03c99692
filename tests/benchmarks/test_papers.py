"""The papers' tables: what is replayed is what is decoded, what is counted and judged is right."""

import argparse
import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.base.files import write_json
from outrider.draft_models.calibration_head import CalibrationHead
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.tiny.models import tiny_head
from outrider.inference.core.decode import autoregressive
from outrider.inference.core.tree import OptimalTree
from outrider.inference.drafters.model_plugin import Calibrated
from outrider.inference.loading.models import prepare_models
from outrider.inference.settings.method import MethodConfig, StopConfig, StructureConfig
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.shapes.token_graph import GraphTree
from tests.refusals import refusal
from tests.tiny import LAYERS, make_drafter, open_stack, random_prompt, save_target

Pair = tuple[LayerStack, dict[str, Any]]


TREE = StructureConfig(kind="opt_tree", nodes=12, delta=0.0, max_depth=4)
GRAPH = StructureConfig(kind="token_graph", nodes=20, tau=1, theta_prob=0.0, theta_sibling=0.0)
TOP_K = StructureConfig(kind="k_config", widths=(3, 2), draw="top_k")
WIDE = StructureConfig(kind="k_config", widths=(64, 4), draw="top_k")
CALIBRATED = StopConfig(rule="calibrated")
METHODS = {
    "chain": MethodConfig(source="small_lm"),
    "opt_tree": MethodConfig(source="small_lm", structure=TREE),
    "token_graph": MethodConfig(source="small_lm", structure=GRAPH),
    "k_config": MethodConfig(source="small_lm", structure=TOP_K),
    "small LM, calibrated": MethodConfig(source="small_lm", stop=CALIBRATED),
    "early exit": MethodConfig(),
    "early exit, Beta-TS": MethodConfig(stop=StopConfig(rule="beta")),
    "early exit, calibrated": MethodConfig(stop=CALIBRATED),
    "early exit, opt_tree": MethodConfig(structure=TREE, stop=CALIBRATED),
    "EAGLE-3, calibrated": MethodConfig(source="eagle3", structure=WIDE, stop=CALIBRATED),
    "skip_layers": MethodConfig(source="skip_layers", skip=(1,)),
    "skip_layers, token_graph": MethodConfig(source="skip_layers", structure=replace(GRAPH, deep_copies=True)),
    "naive": MethodConfig(source="small_lm", verify="naive"),
    "prompt_lookup": MethodConfig(source="prompt_lookup"),
}
# Whose candidates are drawn, and verified by rejection, under sampling.
DRAWN = ("chain", "skip_layers", "small LM, calibrated", "early exit", "early exit, Beta-TS", "early exit, calibrated")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target, and drafters that often decode as it does, with calibration heads of any weights."""
    folder = tmp_path_factory.mktemp("pair")
    _, stack = open_stack(save_target(folder, peak=6.0))
    _, small = open_stack(folder)
    for weight in small.parameters():
        weight.data += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(0)
    head = CalibrationHead(64, 64).requires_grad_(False)
    for parameter in head.parameters():
        parameter += torch.randn(parameter.shape, generator=generator) / 8
    eagle = tiny_head(stack.config).requires_grad_(False)
    drafters = {"small_lm": small, "early_exit": make_drafter(folder, LAYERS - 1, noise=0.3), "eagle3": eagle}
    found = {name: Calibrated(drafter, head) for name, drafter in drafters.items()}
    prepare_models(stack, found)
    return stack, found


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("name", METHODS)
def test_replayed_rounds_are_those_of_decoding(pair: Pair, tmp_path: Path, name: str, temperature: float) -> None:
    """Also where the text ends early; and all that is watched of them. Under sampling it is the text of decoding."""
    from papers.claims import Row
    from papers.measuring import Asked, Bench, continued, counts_of, replays, said_under

    (stack, drafters), method = pair, METHODS[name]
    law, asked = SamplingConfig(temperature=temperature), Asked("p", "c", tuple(random_prompt(12)))
    assert replays(method, law) == (not temperature or name not in DRAWN)
    if not replays(method, law):
        return
    bench = Bench(stack, drafters, stack.config.vocab_size, 30, answers=tmp_path / "answers.json")
    said = continued(bench, Row(name, method, law), asked, live=True).tokens
    for ends in (set(), {max(said, key=said.index)}):
        bench = replace(bench, eos=ends)
        live = continued(bench, Row(name, method, law), asked, live=True)
        write_json(tmp_path / "answers.json", {said_under(asked, law): live.tokens})
        replayed = continued(bench, Row(name, method, law), asked)
        assert replayed.tokens == live.tokens
        assert counts_of(replayed) == counts_of(live)
        assert counts_of(live)["accepted"] > 0


def test_prompts_are_measured_whole_until_the_time_is_over(pair: Pair, tmp_path: Path) -> None:
    """A prompt on which a row is missing counts for no row; the same call goes on."""
    from papers.claims import Row, Table
    from papers.judging import by_row, described
    from papers.measuring import Asked, Bench, key_of, measure_all, read_counts

    stack, drafters = pair
    bench = Bench(stack, drafters, stack.config.vocab_size, 4)
    rows = tuple(Row(f"K = {k}", MethodConfig(source="small_lm", stop=StopConfig(max_draft=k))) for k in (1, 2))
    rows = (*rows, Row("K = 1, b only", rows[0].method, category="b"))
    asked = []
    for place, category in enumerate("ab"):
        ids = tuple(random_prompt(6, place))
        answer = [token for r in autoregressive(stack, ids, max_new_tokens=4) for token in r.tokens]
        asked.append(Asked(f"p{place}", category, ids, tuple(answer)))
    table = Table("t", rows=rows)
    measure_all(bench, [table], asked, tmp_path, minutes=0, timed_prompts=0)
    assert {prompt for _, prompt in read_counts(tmp_path)} == {"p0"}
    measure_all(bench, [table], asked, tmp_path, minutes=None, timed_prompts=0)
    plain = described(table, {row.name: key_of(row) for row in rows})

    def found() -> dict[str, set[str]]:
        given = by_row(plain, {one.id: one.category for one in asked}, read_counts(tmp_path))
        return {name: set(counts) for name, counts in given.items()}

    assert found() == {
        "K = 1": {"p0", "p1"}, "K = 2": {"p0", "p1"}, "K = 1, b only": {"p1"}}  # fmt: skip
    kept = [line for line in (tmp_path / "counts.jsonl").read_text().splitlines(keepends=True)
            if json.loads(line)["key"] != key_of(rows[1]) or json.loads(line)["prompt"] == "p0"]  # fmt: skip
    (tmp_path / "counts.jsonl").write_text("".join(kept))
    assert found() == {
        "K = 1": {"p0"}, "K = 2": {"p0"}, "K = 1, b only": set()}  # fmt: skip


def graph_of(tokens: list[int], parents: tuple[int, ...], rows: tuple[int, ...] = ()) -> GraphTree:
    return GraphTree(torch.tensor(tokens), parents, rows or (-1,) * len(parents), drafted=len(parents))


def test_trees_are_counted_by_hand() -> None:
    """Root → 0:a (1:b → 2:c), 3:b → 4:c; the target takes 3 and 4, the second child of the root and its only one."""
    from papers.watching import of_tree

    a, b, c = 5, 6, 7
    tree = graph_of([a, b, c, b, c], (-1, 0, 1, -1, 3))
    found = of_tree(tree, [3, 4])
    assert found["reached"] == 3
    assert (found["tried"], found["rank_1"], found["rank_2"]) == (2, 1, 1)
    assert (found["verified"], found["verified_apart"]) == (6, 1 + 3 + 2)
    assert (found["nodes"], found["repeated_1"], found["repeated_2"], found["repeated_3"]) == (5, 4, 4, 0)
    assert found["shared_rounds"] == 0
    merged = GraphTree(tree.tokens, tree.parents, tree.rows, drafted=5, merged={3: 1})
    assert of_tree(merged, [0, 1])["shared_rounds"] == 0  # up to the merged node, not through it
    assert of_tree(merged, [0, 1, 2])["shared_rounds"] == 1
    copied = GraphTree(tree.tokens, tree.parents, tree.rows, drafted=4, merged={3: 1})
    assert of_tree(copied, [3, 4])["shared_rounds"] == 1
    optimal = OptimalTree(
        torch.tensor([a, b, c]), (-1, -1, 0), (-1,) * 3, masses=(0.9, 0.3), branch_probs=(0.55, 0.3, 0.95)
    )
    found = of_tree(optimal, [0])
    assert (found["in_band_3"], found["right_3"], found["in_band_2"], found["right_2"]) == (1, 1, 1, 0)
    assert (found["in_band_5"], found["right_5"]) == (1, 0)
    assert found["expected_reached"] == pytest.approx(2.2 * 2)


@pytest.mark.parametrize("acceptance", [(0.5, 0.2, 0.1), (0.9, 0.05), (0.3, 0.3, 0.2)])
@pytest.mark.parametrize("depth", [2, 5])
def test_sequoias_tree_is_what_its_dynamic_programme_finds(acceptance: tuple[float, ...], depth: int) -> None:
    from papers.opt_tree import best_shape

    def best(nodes: int, deep: int, rank: int = 0) -> float:
        """The largest sum over `nodes` nodes below one that is reached, its children from `rank` on."""
        if not nodes or not deep or rank == len(acceptance):
            return 0.0
        return max(
            acceptance[rank] * (1 + best(below - 1, deep - 1)) + best(nodes - below, deep, rank + 1) if below else 0.0
            for below in range(nodes + 1)
        )

    for nodes in (1, 4, 7):
        paths = best_shape(acceptance, nodes, depth)
        assert len(paths) == nodes if depth == 5 else len(paths) <= nodes
        reached = sum(math.prod(acceptance[rank] for rank in path) for path in paths)
        assert reached == pytest.approx(best(nodes, depth))


@pytest.mark.parametrize("name", ["eesd", "aded", "gsd", "opt_tree", "mcsd"])
def test_claims_are_about_rows_of_their_table(name: str, tmp_path: Path) -> None:
    from papers.claims import Row, quantity
    from papers.measuring import key_of

    given = SimpleNamespace(work=tmp_path, table=["a", "b"], code_table="c", frequent_table="d", transcripts=None,
                            checkpoint=None, small_lm=None, ablation="e", skip=[2], tables=None,
                            target="t", timed=0)  # fmt: skip
    tables = importlib.import_module(f"papers.{name}").tables(options=given, categories=["code", "chat"])
    assert sum(len(table.claims) for table in tables.values()) > 20
    ways = {(row.method, row.sampling, row.other) for table in tables.values() for row in table.rows if row.method}
    keys = {key_of(Row("", method, sampling, other=other)) for method, sampling, other in ways}
    assert all(method.skip == (2,) for method, _, _ in ways if method.source == "skip_layers")
    assert len(keys) == len(ways)  # rows share counts where they decode alike, and nowhere else
    for table in tables.values():
        rows = {row.name for row in table.rows}
        for claim in table.claims:
            for row, _, other in (term.partition("@") for term in claim.terms):
                assert row in rows, claim
                assert quantity(other or claim.quantity).label
            assert len(claim.scale) in (0, len(claim.terms))
        assert all(quantity(shown).label for shown in table.quantities)
        assert table.rows or table.never


def test_one_solved_example_stands_before_every_prompt(tmp_path: Path) -> None:
    from papers.loading import with_example

    from outrider.data_prep.text.prompts import Prompt

    file = tmp_path / "p.jsonl"
    rows = [{"question": "one?", "answer": "1"}, {"question": "two?", "answer": "2"}, {"question": "three?"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [Prompt("2", "q", ("two?",), True), Prompt("x", "q", ("go on",), False)]
    chat, text = with_example(prompts, str(file))
    assert chat.turns == ("one?", "1", "two?")
    assert text.turns == ("one?\n\n1\n\ngo on",)
    refusal("python_stdlib", with_example, prompts, "python_stdlib")
    file.write_text(json.dumps({"question": "three?"}) + "\n")
    assert with_example(prompts, str(file)) == prompts  # MT-Bench has no answers: nothing to show


def test_counts_of_a_drafter_made_again_in_its_place_are_not_taken(tmp_path: Path) -> None:
    import paper

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n')
    names = ("small_lm", "checkpoint", "eagle3", "table", "code_table", "frequent_table", "target", "transcripts")
    given = argparse.Namespace(paper="gsd", prompts=[f"a={tmp_path}/prompts.jsonl"], work=tmp_path / "work", tokens=8,
                               num_prompts=2, **dict.fromkeys(names))  # fmt: skip
    (tmp_path / "work").mkdir()
    paper.require_same(given)
    paper.require_same(argparse.Namespace(**{**vars(given), "num_prompts": 3}))  # more of them
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "two"}\n')
    refusal("digests", paper.require_same, given)
