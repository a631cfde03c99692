"""An evaluation of so many minutes: spread prompts, enough of them, and a resumed run that has the same time."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.base import progress
from outrider.inference.core.rounds import Clock
from outrider.inference.evaluate import evaluation, measuring
from outrider.inference.measure.results import read_results
from outrider.inference.measure.statistics import MIN_PROMPTS
from outrider.inference.measure.time_limit import TimeLimit, spread_order
from outrider.inference.report import plots
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig
from tests.inference.evaluate.evaluating import QUESTIONS


@given(st.integers(1, 200), st.integers(1, 200))
def test_wherever_prompts_are_cut_they_are_spread(count: int, cut: int) -> None:
    """Between two neighbours that were taken lie at most twice as many as an even spread would leave, rounded up."""
    order = spread_order(count)
    assert sorted(order) == list(range(count))
    taken = sorted(order[: min(cut, count)])
    gaps = [after - before for before, after in zip(taken, [*taken[1:], count], strict=True)]
    assert max(gaps) <= 2 * -(-count // len(taken))


@given(st.integers(1, 40), st.sets(st.integers(0, 39)), st.floats(0, 100))
def test_what_is_left_and_what_must_be_done(count: int, before: set[int], earlier: float) -> None:
    done = {position for position in before if position < count}
    left, must = TimeLimit(1, earlier=earlier).to_do(count, done)
    assert not done & set(left)
    assert must == max(0, min(count, MIN_PROMPTS) - len(done))
    assert len(left) == (must if earlier >= 60 else count - len(done))
    everything, all_of_them = TimeLimit(None, earlier=earlier).to_do(count, done)
    assert (everything, all_of_them) == (sorted(set(range(count)) - done), count - len(done))


def timed(
    config: Callable[..., EvaluateConfig],
    name: str,
    minutes: float,
    seconds: float,
    resume: bool = False,
    clock: Clock | None = None,
) -> tuple[list[int], dict]:
    """The positions that an evaluation has results of, whose clock ticks at each look, and its report."""
    made = config(name, methods={"lookup": MethodConfig(source="prompt_lookup")}, compare_transformers=False)
    made = replace(made, minutes=minutes, resume=resume)
    questions = [replace(QUESTIONS[0], id=str(number)) for number in range(8)]
    with patch.object(plots, "_save", return_value=""):  # plots take longer to draw than these models to decode
        evaluation.evaluate_checkpoint(made, questions, clock or count(seconds, seconds).__next__)
    return list(read_results(Path(made.out_dir))), json.loads((Path(made.out_dir) / "report.json").read_text())


def measuring_total() -> float | None:
    return next(stage.total for stage in progress._stages if stage.what == "measuring")


def test_no_prompt_is_taken_once_the_time_is_over(config: Callable[..., EvaluateConfig]) -> None:
    """A look before the first prompt and one after each: with 10 s a look the seventh is over at 80 s."""
    taken, report = timed(config, "timed", minutes=80 / 60, seconds=10)
    assert taken == spread_order(8)[:7]
    assert (report["prompts"], report["prompts_given"]) == (7, 8)
    page = (Path(config("timed").out_dir) / "report.md").read_text()
    assert "7 of 8 prompts, as many as 1.33 minutes held ×" in page
    with patch.object(measuring, "load_models", None):  # its time was over: nothing is loaded or done again
        assert timed(config, "timed", minutes=80 / 60, seconds=10, resume=True) == (taken, report)
    assert sorted(timed(config, "timed", minutes=5, seconds=1, resume=True)[0]) == list(range(8))


def test_a_verdict_has_enough_prompts_however_slow_the_machine(
    config: Callable[..., EvaluateConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """And a line says that this takes longer than the minutes: a look before the first prompt, and one after each."""
    totals, append = [], measuring.append_result
    with patch.object(measuring, "append_result", lambda *given: totals.append(measuring_total()) or append(*given)):
        taken, report = timed(config, "slow", minutes=1, seconds=25)
    assert totals == [8, 8, *[MIN_PROMPTS] * 3]  # of which the time left is that of what is still measured
    assert taken == spread_order(8)[:MIN_PROMPTS]
    assert report["verdict"] in ("faster", "slower", "undecided")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("1 minutes are over")]
    assert said == [f"1 minutes are over: {done} of at least {MIN_PROMPTS} prompts are done" for done in (2, 3, 4)]
    timed(config, "quick", minutes=1, seconds=0.1)
    assert "are over" not in capsys.readouterr().out


@pytest.mark.parametrize("seconds", [4, 9])
def test_an_evaluation_whose_machine_becomes_slow_ends_in_time(
    config: Callable[..., EvaluateConfig], seconds: float
) -> None:
    """Twice as slow from the middle on: at most one prompt over, at a look a prompt."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += seconds * (1 if now < 30 else 2)
        return now

    taken, _ = timed(config, "half", minutes=1, seconds=0, clock=clock)
    assert len(taken) in (MIN_PROMPTS, 8) or now <= 1.1 * 60 + 2 * seconds
    assert len(taken) >= MIN_PROMPTS


def test_a_killed_run_goes_on_with_the_time_that_it_had_left(config: Callable[..., EvaluateConfig]) -> None:
    whole, _ = timed(config, "killed", minutes=8 / 60, seconds=1)
    file = Path(config("killed").out_dir) / "results-00000.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:5]))  # 6 s of 8 are spent
    assert timed(config, "killed", minutes=8 / 60, seconds=1, resume=True)[0] == whole[:6]
