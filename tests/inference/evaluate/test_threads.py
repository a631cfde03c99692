"""threads=auto: what is measured, what is chosen, and what the report says of it."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.base.errors import UserError
from outrider.base.streams import Streams
from outrider.inference.core.rounds import Generation
from outrider.inference.measure.threads import (
    CpuWatch,
    choose_threads,
    load_average,
    thread_counts,
    time_product,
    use_threads,
)
from outrider.inference.settings.evaluate import EvaluateConfig
from tests.inference.evaluate.evaluating import QUESTIONS, evaluate


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 1.0, 2: 0.55, 4: 0.3}, 4),  # an idle machine
        ({1: 1.0, 2: 30.0, 4: 40.0}, 1),  # another process holds a core
        ({1: 1.0, 2: 0.95, 4: 0.97}, 1),  # nothing is gained: the fewest
        ({1: 1.0, 2: 0.5, 4: 0.49}, 2),
    ],
)
def test_the_fewest_threads_that_no_others_beat_clearly(seconds: dict[int, float], chosen: int) -> None:
    assert choose_threads(list(seconds), seconds.__getitem__) == chosen == torch.get_num_threads()


def test_now_and_then_slow_is_slow() -> None:
    """Every fourth product of two threads takes thirty times as long; a single slow one does not decide."""
    calls = {1: 0, 2: 0}

    def timed(count: int) -> float:
        calls[count] += 1
        if count == 1:
            return 50.0 if calls[1] == 5 else 1.0
        return 15.0 if calls[2] % 4 == 0 else 0.5

    assert choose_threads([1, 2], timed) == 1


def test_what_is_tried_and_timed() -> None:
    counts = thread_counts()
    assert counts[0] == 1
    assert counts == sorted(set(counts))
    assert time_product(1) > 0
    assert torch.get_num_threads() == 1


@pytest.mark.slow
def test_the_report_says_how_many(tmp_path: Path, config: Callable[..., EvaluateConfig]) -> None:
    """The number is chosen once, and all arms of all prompts use it."""
    made = config("out", threads=2)
    evaluate(made, QUESTIONS[:2])
    report = json.loads((Path(made.out_dir) / "report.json").read_text())["reports"][0]
    assert report["threads"] == {"2": report["prompts"]}
    assert "(2 threads)" in (Path(made.out_dir) / "report.md").read_text()


@pytest.mark.parametrize("turn", [1, 2])
def test_every_test_begins_with_one_thread(turn: int) -> None:
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)


def test_a_number_or_auto() -> None:
    used = torch.get_num_threads()
    for given, count in ((None, used), (used + 1, used + 1), ("auto", used + 2)):
        assert use_threads(given, lambda: used + 2) == count == torch.get_num_threads()
    for bad in ("many", 0):
        with pytest.raises(UserError, match="threads="):
            EvaluateConfig(target="t", table="n", threads=bad)  # type: ignore[arg-type]


def test_a_process_that_waits_for_its_cores_is_seen() -> None:
    """Of four threads no more than two run at once: the time of two cores is due."""
    torch.set_num_threads(4)
    got, wall = itertools.count(0, 3), itertools.count(0, 2)
    watch = CpuWatch(lambda: next(got), lambda: next(wall), lambda: 2)
    arm = watch.around(lambda prompt, streams: Generation((1,), 0.0, 1.0))
    assert watch.take() is None
    assert arm([1], Streams(0)) == arm([2], Streams(0))
    assert watch.take() == 3 / 4
    assert watch.take() is None


def test_without_a_load_average_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_average() is not None
    monkeypatch.delattr(os, "getloadavg")
    assert load_average() is None
