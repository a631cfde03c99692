"""The time that a pipeline has left: by what its steps were expected to take, and how fast this machine was so far."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.progress import Stage
from train.pipeline_bar import LEAST, Pace, step_stage

EXPECTED = {"a": 100.0, "b": 200.0, "c": 300.0}


def test_the_time_left_by_hand() -> None:
    pace = Pace(EXPECTED)
    assert (pace.left(), pace.left("a", 40.0), pace.left("a", 400.0)) == (600.0, 560.0, 500.0 + LEAST * 100)
    pace.done["a"] = 150.0  # half as fast again as expected
    assert pace.left() == 750.0
    assert pace.left("b", 100.0) == 650.0
    assert pace.share("b", 100.0) == 250.0 / 900.0
    assert pace.words() == "12 min 30 s"
    pace.done |= {"b": 1.0, "c": 1.0}
    assert (pace.left(), pace.share()) == (0.0, 1.0)


def test_time_that_a_step_is_given_is_the_same_on_any_machine() -> None:
    """A slow download says nothing of trainings of half an hour, but for what they do beside."""
    pace = Pace({"fetch": 20.0, "train": 1900.0, "report": 1500.0}, given={"train": 1800.0, "report": 1400.0})
    assert pace.left() == 3420.0
    pace.done["fetch"] = 100.0  # five times as slow
    assert pace.left() == 1800.0 + 5 * 100.0 + 1400.0 + 5 * 100.0
    pace.done["train"] = 1860.0
    assert pace.left() == pytest.approx(1400.0 + 100.0 * (100.0 + 60.0) / (20.0 + 100.0))
    only = Pace({"train": 1800.0, "more": 60.0}, {"train": 900.0}, {"train": 1800.0})  # over before its time
    assert only.left() == 60.0


def test_what_nobody_knows_is_not_made_up() -> None:
    pace = Pace({"a": 100.0, "b": None, "c": None}, {"a": 100.0})
    assert (pace.left("b", 5.0), pace.words(), pace.share("b", 5.0)) == (None, "unknown", 1 / 3)
    pace.done |= {"b": 7.0}
    assert pace.left() is None
    assert (
        Pace({"a": None, "b": 10.0}, {"a": 99.0}).left() == 10.0
    )  # a step without an expectation says nothing of pace


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=6), st.data())
def test_the_share_grows_while_a_step_runs_and_reaches_one(expected: list[float], data: Any) -> None:
    steps = {f"s{number}": seconds for number, seconds in enumerate(expected)}
    pace, shares = Pace(steps), [0.0]
    for name, seconds in steps.items():
        for part in (0.0, 0.5, 1.0, 3.0):
            running = pace.share(name, part * seconds)
            assert running >= shares[-1] or part == 0.0  # a new step may have shown that the machine is slower
            shares.append(running)
            assert 0 <= running < 1
        pace.done[name] = seconds * data.draw(st.floats(0.5, 2.0))
    assert pace.share() == 1.0


def test_the_stage_of_a_step_is_timed_by_the_whole_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a step that was cut and goes on where it was."""
    stage = step_stage(Pace(EXPECTED, {"a": 100.0}), "b")
    cut = step_stage(Pace(EXPECTED, {"a": 100.0}), "b", spent=100.0)
    monkeypatch.setattr(Stage, "spent", 50.0)
    assert (str(stage), stage.share) == ("step 2/3 b (left: 7 min 30 s)", 150.0 / 600.0)
    assert (str(cut), cut.share) == ("step 2/3 b (left: 5 min 50 s)", 250.0 / 600.0)
