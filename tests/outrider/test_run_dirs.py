"""The lock of an out_dir: who holds it is named, it ends with its process, all processes of a launcher share it."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate import PartialState

from outrider.base import processes
from outrider.base.errors import UserError
from outrider.base.processes import join_processes, only_run_of
from outrider.base.run_dirs import HOLDER_FILE, LOCK_FILE, clear, only_run
from tests.launched import launched

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from outrider.base.run_dirs import only_run
with only_run(Path(sys.argv[1]), "a training"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the directory."""
    environment = {**os.environ, "SLURM_JOB_ID": "77", "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "held\n"
    yield job
    job.kill()
    job.communicate()


def test_a_refusal_names_the_run_and_a_killed_one_is_taken_over(
    tmp_path: Path, holder: subprocess.Popen[str], capsys: pytest.CaptureFixture
) -> None:
    who = f"process {holder.pid} on {socket.gethostname()}, Slurm job 77, since {time.strftime('%Y')}"
    with pytest.raises(UserError, match=rf"another run is writing results there: {who}.*; wait for it"):  # noqa: SIM117
        with only_run(tmp_path, "results"):
            pytest.fail("the directory is held")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with only_run(tmp_path, "results"):
        assert f"taken over from a run that did not end by itself: {who}" in capsys.readouterr().out
        assert json.loads((tmp_path / HOLDER_FILE).read_text())["process"] == os.getpid()
    with only_run(tmp_path, "results"):
        assert "taken over" not in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {LOCK_FILE}


@pytest.mark.parametrize("error", [OSError(errno.ENOSYS, "Not implemented"), NotImplementedError("none")], ids=repr)
def test_what_cannot_be_locked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Also where there is no flock at all: a file in its place would outlive a killed run."""

    def no_locks(*_: object) -> None:
        raise error

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(UserError, match=rf"cannot be locked against other runs .*{error.args[-1]}"):  # noqa: SIM117
        with only_run(tmp_path, "results"):
            pass


def test_all_processes_of_a_launcher_are_one_run(tmp_path: Path) -> None:
    """The main one holds the directory; refused, all of them end, and all can say by whom."""

    def work(state: PartialState) -> None:
        try:
            with only_run_of(state, tmp_path, "results"):
                state.wait_for_everyone()
                (tmp_path / f"{state.process_index}").touch()
        except UserError as error:
            os._exit(2 if f"process {os.getppid()} on" in str(error) else 3)

    with only_run(tmp_path, "results"):
        assert launched(3, work) == [2, 2, 2]
    assert {path.name for path in tmp_path.iterdir()} == {LOCK_FILE}
    assert launched(3, work) == [0, 0, 0]
    assert {path.name for path in tmp_path.iterdir()} == {LOCK_FILE, "0", "1", "2"}


def test_a_directory_that_a_machine_does_not_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "from_main", lambda *_: None)  # the main process holds another directory
    with pytest.raises(UserError, match="all machines share"), only_run_of(join_processes(), tmp_path, "results"):
        pass


def test_one_thread_of_a_launcher_is_warned_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setattr(processes, "usable_cores", lambda: 8)  # PyTorch has one thread at the start of a test
    join_processes.__wrapped__()
    assert "OMP_NUM_THREADS=8" in capsys.readouterr().err


def test_clear_leaves_the_lock(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    folder = tmp_path / "out"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "file").touch()
    (folder / "link").symlink_to(elsewhere)
    with only_run(folder, "results"):
        clear(folder)
        assert {path.name for path in folder.iterdir()} == {LOCK_FILE, HOLDER_FILE}
    assert (elsewhere / "kept").exists()
