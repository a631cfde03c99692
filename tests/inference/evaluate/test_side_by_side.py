"""Two evaluations side by side: paired by prompt, each over its own baseline, and refused where nothing is shared."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from outrider.inference.core.rounds import Generation, Round
from outrider.inference.measure.results import MeasuredPrompt, PromptResult, append_result
from outrider.inference.measure.statistics import MedianInterval
from outrider.inference.measure.threads import MachineLoad
from outrider.inference.report.comparison import Comparison, compare_reports
from outrider.inference.report.types import to_json
from outrider.inference.settings.method import AUTOREGRESSIVE
from outrider.inference.settings.tools import CompareConfig
from tests.inference.evaluate.reports import report_of
from tests.refusals import refusal

TOKENS = (7, 1, 2, 3, 4)


def generation(seconds: float, rounds: int) -> Generation:
    """Five tokens, of which the last four took so many seconds and rounds."""
    each = 4 // rounds
    parts = [TOKENS[1 + each * n : 1 + each * (n + 1)] for n in range(rounds)]
    return Generation(TOKENS, 0.1, seconds, tuple(Round(part, each, each - 1, each, 0.1) for part in parts))


def result(name: str, plain: float, drafted: float, rounds: int, prompt: tuple[int, ...] = (1, 2)) -> PromptResult:
    arms = {AUTOREGRESSIVE: generation(plain, 4), "m": generation(drafted, rounds)}
    return PromptResult(name, "x", prompt, arms, AUTOREGRESSIVE)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """An evaluation's directory with those results."""

    def make(name: str, results: list[PromptResult], method: str = "m", **facts: Any) -> str:
        folder = tmp_path / name
        folder.mkdir()
        for position, one in enumerate(results):
            arms = {method if arm == "m" else arm: g for arm, g in one.generations.items()}
            append_result(folder, 0, MeasuredPrompt(position, 1, (replace(one, generations=arms),)))
        report = replace(
            report_of(results, digests={"tokenizer": "t"} | facts.pop("digests", {}), **facts), method=method
        )
        (folder / "report.json").write_text(json.dumps({"reports": [to_json(report)]}))
        return str(folder)

    return make


def compared(tmp_path: Path, *folders: str, **options: Any) -> Comparison:
    return compare_reports(CompareConfig(compare=list(folders), out_dir=str(tmp_path / "out"), **options))


def test_a_slow_day_does_not_count(run: Callable[..., str], tmp_path: Path) -> None:
    """All of the second run took three times as long; over its own baseline the method is twice as fast as before."""
    kernels = [{"layers": "at once"}, {"layers": "one by one"}]
    before = [result(f"p{n}", 4.0 + n, 2.0 + n / 2, 2) for n in range(6)]
    after = [result(f"p{n}", 3 * (4.0 + n), 3 * (1.0 + n / 4), 1) for n in range(5)]
    first = run("a", before, dtype="float32", kernels=kernels[0])
    second = run("b", after, dtype="bfloat16", kernels=kernels[1])
    found = compared(tmp_path, first, second)
    assert found.prompts == (6, 5, 5)
    [row] = found.methods
    assert row.gain == MedianInterval(pytest.approx(2.0), (pytest.approx(2.0),) * 2, 5)
    assert row.seconds.median == pytest.approx(2 / 3)
    assert row.tau.median == pytest.approx(2.0)
    assert (row.same_text, row.verdict) == (5, "faster")
    assert found.differences == {"dtype": ("float32", "bfloat16"), "kernels": tuple(kernels)}
    table = (tmp_path / "out/compare.md").read_text()
    assert "Not the same in both: dtype, kernels." in table
    assert "| m | m | 2.00× [2.00, 2.00] | 2.00× [2.00, 2.00] | 0.67× [0.67, 0.67] | 2.00× [2.00, 2.00] |" in table
    assert json.loads((tmp_path / "out/compare.json").read_text()) == to_json(found)
    refusal("resume=true makes it anew", compared, tmp_path, first, second)
    assert compared(tmp_path, first, second, resume=True) == found
    load = MachineLoad(busy="The machine was busy: so it was.")
    assert compared(tmp_path, first, run("c", after, load=load), resume=True).methods[0].verdict == "undecided"
    assert load.busy in (tmp_path / "out/compare.md").read_text()


def test_only_the_same_prompts_are_paired(run: Callable[..., str], tmp_path: Path) -> None:
    """Of an equal id and other words nothing is learned. With another tokenizer the words cannot be compared."""
    first = run("a", [result("p", 4.0, 2.0, 2), result("q", 4.0, 2.0, 2)])
    second = run("b", [result("p", 4.0, 1.0, 2), result("q", 4.0, 2.0, 2, prompt=(9, 9))])
    assert compared(tmp_path, first, second).prompts == (2, 2, 1)
    third = run("c", [result("q", 4.0, 2.0, 2, prompt=(9, 9))], digests={"tokenizer": "u"})
    assert compared(tmp_path, first, third, resume=True).prompts == (2, 1, 1)
    fourth = run("d", [result("r", 4.0, 2.0, 2)])
    refusal("no prompt in both", compared, tmp_path, first, fourth, resume=True)


def test_a_method_that_is_not_lossless_is_not_faster_and_one_group_is_one_speed(
    run: Callable[..., str], tmp_path: Path
) -> None:
    names = [f"p{number}" for number in range(6)]
    first = run("a", [result(name, 4.0, 2.0, 2) for name in names])
    second = run("b", [result(name, 4.0, 1.0, 2) for name in names])
    assert compared(tmp_path, first, second).methods[0].verdict == "faster"
    report = json.loads(Path(second, "report.json").read_text())
    report["reports"][0]["verdict"] = "not lossless"
    Path(second, "report.json").write_text(json.dumps(report))
    assert compared(tmp_path, first, second, resume=True).methods[0].verdict == "not lossless"
    grouped = run("c", [replace(result(name, 4.0, 1.0, 2), group="one") for name in names])
    again = compared(tmp_path, first, grouped, resume=True).methods[0]
    assert (again.gain.prompts, again.verdict) == (1, "undecided")
    pairs = [replace(result(name, 4.0, 1.0, 2), group=str(number // 2)) for number, name in enumerate(names)]
    looping = {arm: replace(text, tokens=(5,) * 60) for arm, text in pairs[0].generations.items()}
    paired = run("d", [replace(pairs[0], generations=looping), *pairs[1:]])
    again = compared(tmp_path, first, paired, resume=True).methods[0]
    assert (again.gain.prompts, again.gain_without_loops.prompts) == (3, 2)


def test_methods_of_other_names_are_paired_when_told(run: Callable[..., str], tmp_path: Path) -> None:
    first = run("a", [result("p", 4.0, 2.0, 2)])
    second = run("b", [result("p", 4.0, 1.0, 2)], method="other")
    refusal(r"no method in both \(m and other\); say which with pairs", compared, tmp_path, first, second)
    [row] = compared(tmp_path, first, second, pairs={"m": "other"}).methods
    assert row.pair == ("m", "other")
    assert row.gain.median == pytest.approx(2.0)
    refusal(r"pairs=.*nobody.*methods of", compared, tmp_path, first, second, pairs={"m": "nobody"}, resume=True)


def test_what_is_no_evaluation_is_refused(run: Callable[..., str], tmp_path: Path) -> None:
    first = run("a", [result("p", 4.0, 2.0, 2)])
    refusal("no readable report", compared, tmp_path, first, str(tmp_path / "nowhere"))
    (tmp_path / "replay").mkdir()
    (tmp_path / "replay/report.json").write_text(json.dumps({"reports": [{"method": "m"}]}))
    refusal("a report without results", compared, tmp_path, first, str(tmp_path / "replay"))
    refusal("two directories", CompareConfig, compare=["a"])
    assert asdict(CompareConfig(compare=["a", "b"]))["pairs"] == {}
