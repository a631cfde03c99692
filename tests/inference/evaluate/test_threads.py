"""threads=: what the report says of it, and whether others used the processor."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.base.streams import Streams
from outrider.inference.core.rounds import Generation
from outrider.inference.measure.threads import CpuWatch, load_average
from outrider.inference.settings.evaluate import EvaluateConfig
from tests.inference.evaluate.evaluating import QUESTIONS, evaluate


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
