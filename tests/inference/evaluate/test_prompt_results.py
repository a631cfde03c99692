"""Kept results of prompts: what was written is what is read, and half a line is nothing."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from outrider.base.errors import UserError
from outrider.base.settings import construct
from outrider.inference.core.rounds import Generation, Round
from outrider.inference.measure import results
from outrider.inference.measure.lossless import Deviation
from outrider.inference.measure.prepared import Prepared
from outrider.inference.settings.method import MethodConfig, StopConfig, StructureConfig
from outrider.inference.sizing.costs import Costs
from outrider.inference.sizing.policy import Tuning
from tests.refusals import refusal


def measured(position: int, processes: int = 1) -> results.MeasuredPrompt:
    rounds = (Round((5, 6), 4, 1, 3, 0.1 + position, 1 / 3, 1e-17, 0.2), Round((7,), 0, 0, 0, 3.0))
    generation = Generation((4, 5, 6, 7), 0.1, 2 / 3, rounds, {"expected_tau": 1.7})
    arms = {"autoregressive": replace(generation, rounds=(), totals={}), "m": generation}
    judged = {"m": Deviation(3, (0.5, -0.25), 2.5, 1, 4, (0.5,), 1, 0.75)}
    result = results.PromptResult("p/turn1", "c", (1, 2, 3), arms, "autoregressive", {"m": generation}, judged)
    talk = (result, replace(result, prompt_id="p/turn2", profiles={}, conversation="p"))
    return results.MeasuredPrompt(position, processes, talk, (results.Skipped("p/turn3", "too long"),))


def test_what_was_kept_is_what_was_measured(tmp_path: Path) -> None:
    kept = {3: measured(3), 0: measured(0, processes=2), 1: measured(1)}
    results.append_result(tmp_path, 0, kept[3])
    results.append_result(tmp_path, 0, kept[1])
    results.append_result(tmp_path, 2, kept[0])
    assert results.next_number(tmp_path) == 3
    assert results.read_results(tmp_path) == kept
    assert isinstance(results.read_results(tmp_path)[0].turns[0].generations["m"].rounds[0], Round)


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_half_a_line_is_no_result(tmp_path: Path, cut: int) -> None:
    """Whatever a kill has left of the last line; a line that ends must be whole."""
    results.append_result(tmp_path, 0, measured(0))
    results.append_result(tmp_path, 0, measured(1))
    path = tmp_path / "results-00000.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert results.read_results(tmp_path) == {0: measured(0)}
    path.write_bytes(whole[:-cut] + b"\n" + whole)
    if cut > 1:
        refusal(r"results-00000.jsonl:2: not a result", results.read_results, tmp_path)


def test_a_directory_is_continued_when_told_to_and_with_the_same_settings(tmp_path: Path) -> None:
    settings = {"seed": 0, "methods": {"m": {"nodes": 4}}, "widths": (4, 2)}
    assert results.open_run(tmp_path, settings, resume=False) is None
    assert results.open_run(tmp_path, settings, resume=True) is None
    results.begin_run(tmp_path, settings, {"delta": 0.25})
    assert results.open_run(tmp_path, settings, resume=False) is None  # nothing was measured
    results.append_result(tmp_path, 0, measured(0))
    assert results.open_run(tmp_path, settings, resume=True) == {"delta": 0.25}
    (tmp_path / "run.json").unlink()
    with pytest.raises(UserError, match=r"holds results, but no run.json that says how they were made"):
        results.open_run(tmp_path, settings, resume=True)
    only_a_report = tmp_path / "replayed"
    only_a_report.mkdir()
    (only_a_report / "report.json").write_text("{}")
    refusal("holds results already", results.open_run, only_a_report, settings, resume=False)


def test_what_was_prepared_survives_its_file(tmp_path: Path) -> None:
    costs = Costs((0.1, 0.2), (1 / 3, 0.4), 1e-9, 0.5)
    chain = MethodConfig(stop=StopConfig(rule="fixed", max_draft=3))
    tree = MethodConfig(structure=StructureConfig(kind="opt_tree", nodes=6))
    adaptive = MethodConfig(structure=StructureConfig(kind="opt_tree", nodes="auto", max_depth="auto"))
    prepared = Prepared(
        {"chain": chain, "tree": tree, "auto": adaptive}, {"auto": Tuning(costs, (4.0, 2.0), (1.5, 0.0))}
    )
    results.begin_run(tmp_path, {}, asdict(prepared))
    assert construct(Prepared, results.open_run(tmp_path, {}, resume=True)) == prepared
