"""What is said of the stages that are going on: by whom, when, and how long it goes on."""

import io
import os
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from outrider import progress
from outrider.progress import Stage, command, counted

SHORT, NEVER = 0.02, 1e6  # seconds


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


def speakers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "progress"]


def overdue() -> None:
    """The speaker has its turn, as if nothing had been said for long."""
    assert progress._speaker is not None
    progress._speaker._heard -= 2 * progress.INTERVAL
    progress._speaker._say()


def test_the_time_left_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stage, "spent", 60.0)
    plain, counting, unknown = Stage("a"), Stage("b", 10, "steps", first=4), Stage("c", unit="records")
    assert (str(plain), str(counting), str(unknown)) == ("a", "b 4/10 steps", "c")
    assert (plain.left, counting.left, counting.share, plain.share) == (None, None, 0.4, None)
    counting.advance(2)
    unknown.advance(1_234_567)
    assert counting.left == 120.0  # 2 steps took a minute, 4 are left
    assert (str(counting), str(unknown)) == ("b 6/10 steps", "c 1234567 records")
    given = Stage("d", 10, "prompts", most=100.0)
    assert given.left == 40.0
    given.advance(9)
    assert given.left == pytest.approx(60 / 9)
    assert Stage("e", 10, most=50.0).left == 0.0  # its time is over
    assert Stage("f", 10, left=lambda: None).left is None


def test_all_stages_are_named_and_the_thread_ends_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL", SHORT)
    err = io.StringIO()
    with redirect_stderr(err), Stage("outer"):
        for item in counted("xyz", "inner", "letters"):
            if item == "y":
                assert until(err, "progress: outer > inner 1/3 letters; 0 s so far\n")
                assert len(speakers()) == 1
                break
        assert until(err, "progress: outer; 0 s so far\n")
    assert speakers() == []


def test_a_word_of_the_commands_own_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL", NEVER)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        with command("some"):
            overdue()
            assert err.getvalue() == "progress: some; 0 s so far\n"
            assert progress._speaker is not None
            progress._speaker._heard -= 2 * NEVER
            print("a word")
            progress._speaker._say()
        assert (sys.stdout, sys.stderr) == (out, err)
    assert (out.getvalue(), err.getvalue()) == ("a word\n", "progress: some; 0 s so far\n")  # nothing of it in the data


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_whatever_ends_a_command_ends_what_is_said_of_it(error: type[BaseException]) -> None:
    before = sys.stdout, sys.stderr

    def fail() -> None:
        for _ in counted([1, 2], "inner", "items"):
            raise error

    with pytest.raises(error), command("some"):
        fail()
    assert (sys.stdout, sys.stderr) == before
    assert (progress._stages, progress._speaker, speakers()) == ([], None, [])


def test_only_the_main_process_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with Stage("some"):
        assert (progress._speaker, speakers()) == (None, [])


def test_a_reader_that_has_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL", SHORT)
    err = io.StringIO()
    with redirect_stderr(err), Stage("some"):
        err.close()
        while speakers():
            time.sleep(SHORT)


def test_threads_of_a_server_load_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL", SHORT)
    err, begun = io.StringIO(), threading.Barrier(3)

    def load(name: str) -> None:
        with Stage(name):
            begun.wait()
            assert until(err, f"{name}")

    with redirect_stderr(err):
        threads = [threading.Thread(target=load, args=(name,)) for name in ("first", "second")]
        for thread in threads:
            thread.start()
        begun.wait()
        for thread in threads:
            thread.join()
    assert (progress._stages, speakers()) == ([], [])


def test_on_a_terminal_there_is_a_bar_under_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW", SHORT)
    screen = Terminal()
    with redirect_stdout(screen), redirect_stderr(screen), command("some"), Stage("inner", 4, "items") as stage:
        stage.advance()
        assert until(screen, "some > inner 1/4 items |")
        print("a word")
        assert "\ra word\n" in screen.getvalue()  # the bar was wiped away before
        print("half a line", end="")
        time.sleep(5 * SHORT)
        assert screen.getvalue().endswith("half a line")  # and does not go on in it
        print()
        stage.advance()
        assert until(screen, "inner 2/4 items")
    assert screen.getvalue().endswith("\r")  # nothing is left of it
    assert "progress:" not in screen.getvalue()


def test_on_a_terminal_without_a_size_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `script` and some containers make them: nothing that is drawn there would be seen."""
    monkeypatch.setattr(progress, "INTERVAL", SHORT)
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as screen, redirect_stderr(screen), Stage("some"):
        assert screen.isatty()
        assert os.read(ours, 1000).startswith(b"progress: some; 0 s so far")
    os.close(ours)


@pytest.mark.slow
def test_a_stage_keeps_no_process_alive() -> None:
    """Not one that ends within it."""
    code = "from outrider.progress import Stage; Stage('some').__enter__(); print('over')"
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")
