"""What is said of the stages that are going on: by whom, when, and how long it goes on."""

import io
import os
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from outrider.base import progress
from outrider.base.progress import Stage, show_command, track_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def until(stream: io.StringIO, said: str) -> bool:
    """Whether it is said there before long; the machine may be busy."""
    for _ in range(1000):
        if said in stream.getvalue():
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any silence is long."""
    monkeypatch.setattr(progress, "INTERVAL", 0.0)


def refresh() -> None:
    """tqdm's monitor has its turn."""
    assert progress._bar is not None
    progress._bar.refresh()


def test_the_time_left_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stage, "seconds_spent", 60.0)
    plain, counting, unknown = Stage("a"), Stage("b", 10, "steps", done_before=4), Stage("c", unit="records")
    assert (str(plain), str(counting), str(unknown)) == ("a", "b 4/10 steps", "c")
    assert (plain.seconds_left, counting.seconds_left) == (None, None)
    counting.advance(2)
    unknown.advance(1_234_567)
    assert counting.seconds_left == 120.0  # 2 steps took a minute, 4 are left
    assert (str(counting), str(unknown)) == ("b 6/10 steps", "c 1234567 records")
    given = Stage("d", 10, "prompts", max_seconds=100.0)
    assert given.seconds_left == 40.0
    given.advance(9)
    assert given.seconds_left == pytest.approx(60 / 9)
    over = Stage("e", 10, max_seconds=50.0)
    assert over.seconds_left is None  # its time is over, and it goes on
    over.advance(2)
    assert over.seconds_left == 240.0
    counting.after = 30.0
    assert counting.seconds_left == 150.0
    assert Stage("f", 10, estimate=lambda: None).seconds_left is None


def test_all_stages_are_named_by_a_thread(impatient: None) -> None:
    err = io.StringIO()
    with redirect_stderr(err), Stage("outer"):
        for item in track_progress("xyz", "inner", "letters"):
            if item == "y":
                assert until(err, "progress: outer > inner 1/3 letters; ")
                break
        assert until(err, "progress: outer; ")


def test_lines_are_said_after_silence_only_and_not_among_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        with show_command("some"):
            now = time.monotonic()
            monkeypatch.setattr(progress.time, "monotonic", lambda: now)
            refresh()
            assert err.getvalue() == ""
            now += progress.INTERVAL
            refresh()
            assert err.getvalue() == "progress: some; 10 s so far\n"
            now += progress.INTERVAL
            print("a word")
            refresh()
        assert (sys.stdout, sys.stderr) == (out, err)
    assert (out.getvalue(), err.getvalue()) == ("a word\n", "progress: some; 10 s so far\n")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_whatever_ends_a_command_ends_what_is_said_of_it(error: type[BaseException]) -> None:
    before = sys.stdout, sys.stderr

    def fail() -> None:
        for _ in track_progress([1, 2], "inner", "items"):
            raise error

    with pytest.raises(error), show_command("some"):
        fail()
    assert (sys.stdout, sys.stderr) == before
    assert (progress._stages, progress._bar) == ([], None)


def test_on_a_terminal_there_is_a_bar_under_what_is_printed() -> None:
    screen = Terminal()
    with redirect_stdout(screen), redirect_stderr(screen), show_command("some"), Stage("inner", 4, "items") as stage:
        stage.advance()
        assert until(screen, "some > inner 1/4 items")
        print("a word")
        assert "\ra word\n" in screen.getvalue()  # the bar was wiped away before
        print("half a line", end="")
        refresh()
        assert "half" not in screen.getvalue()  # no bar goes on in it
        print()
        assert "\rhalf a line\n" in screen.getvalue()
        stage.advance()
        assert until(screen, "inner 2/4 items")
    assert screen.getvalue().endswith("\r")  # nothing is left of it
    assert "progress:" not in screen.getvalue()


@pytest.mark.slow
def test_a_stage_keeps_no_process_alive() -> None:
    """Not one that ends within it."""
    code = "from outrider.base.progress import Stage; Stage('some').__enter__(); print('over')"
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")
