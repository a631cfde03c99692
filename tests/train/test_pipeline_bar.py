"""The time that a pipeline has left: by what its steps were expected to take, and how fast this machine was so far."""

import io
from functools import partial
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from train import pipeline_bar
from train.pipeline_bar import LEAST, Pace, StepBar

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


def test_the_bar_is_drawn_where_there_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    drawn = {}
    for stream in (Terminal(), io.StringIO()):
        ticks = count(0.0, 50.0)
        monkeypatch.setattr(pipeline_bar, "tqdm", partial(tqdm, file=stream))
        with StepBar(Pace(EXPECTED, {"a": 100.0}), "b", clock=ticks.__next__):
            pass
        drawn[stream.isatty()] = stream.getvalue()
    assert "pipeline 2/3 b |" in drawn[True]
    assert "25 %, left: 7 min 30 s" in drawn[True]
    assert drawn[False] == ""
