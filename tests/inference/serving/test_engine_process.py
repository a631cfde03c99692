"""The process of an engine: one that cannot run is named before, and none is left afterwards."""

import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from inference.core.rounds import Round
from inference.serving.engine_process import require_engine, running
from inference.settings.serving import python_in
from outrider.errors import UserError

JOB = {"engine": "vllm"}


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """A Python that runs `body` whatever it is asked to run; `say` answers a line."""

    def write(body: str) -> str:
        python, imports = tmp_path / "python", "import json, os, signal, subprocess, sys, time"
        python.write_text(f"#!{sys.executable}\n{imports}\ndef say(x): print(json.dumps(x), flush=True)\n{body}")
        python.chmod(0o755)
        return str(python)

    return write


def test_what_is_no_environment_with_the_engine_is_said(tmp_path: Path, script: Callable[[str], str]) -> None:
    (tmp_path / "text").write_text("")
    (tmp_path / "empty").mkdir()
    for place, why in (
        ("nothing", "No such file"),
        ("text", "Permission denied"),
        ("empty", "No such file"),
        (script("sys.exit(3)"), "its status is 3"),
    ):
        with pytest.raises(UserError, match=why):
            require_engine("vllm", python_in(str(tmp_path / place)))
    with pytest.raises(UserError, match=r"a Python with openvino_genai .*it is not there"):
        require_engine("openvino", script(f"os.execv({sys.executable!r}, [{sys.executable!r}, '-S', *sys.argv[1:]])"))
    require_engine("transformers", python_in(None))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", ["it ends", "Ctrl-C while it loads", "Ctrl-C while it runs", "no error"])
def test_no_process_is_left(
    how: str, script: Callable[[str], str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Neither of the engine nor of what it started."""
    pids, before = tmp_path / "pids", signal.signal(signal.SIGINT, signal.default_int_handler)  # workers ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    python = script(f"""
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
if {how == "it ends"}: sys.exit("nothing to say")
if {how == "Ctrl-C while it loads"}: os.kill(os.getppid(), signal.SIGINT); time.sleep(600)
say({{"version": "1"}})
time.sleep(600)
""")
    said = {"it ends": pytest.raises(UserError, match="its last words: nothing to say"), "no error": nullcontext()}
    with said.get(how, pytest.raises(KeyboardInterrupt)), running(python, JOB, tmp_path / "log", {}):
        if how == "Ctrl-C while it runs":
            raise KeyboardInterrupt
    until = time.monotonic() + 10
    for pid in map(int, pids.read_text().split()):
        while alive(pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert not alive(pid)


def test_steps_are_rounds_but_the_first(script: Callable[[str], str], tmp_path: Path) -> None:
    """Of an engine that drafts after the prompt already, too. A prompt without tokens is named."""
    python = script("""
json.loads(sys.stdin.readline())
say({"version": os.environ["WHICH"]})
for line in sys.stdin:
    said = [{"tokens": [[1, 2], [3], [4, 5, 6]], "times": [1.0, 3.0, 3.5, 4.75]}, {"tokens": [[7]], "times": [1, 2]}]
    asked = json.loads(line)
    say({"requests": said if asked["seeds"] == [8, 9] else [{"tokens": [], "times": [0]}], "seconds": 9.0})
""")
    with running(python, JOB, tmp_path / "log", {"WHICH": "one of ours"}) as engine:
        (text, short), seconds = engine.continued([[0], [0, 0]], {"seeds": [8, 9]}, 3)
        with pytest.raises(UserError, match="says nothing after a prompt of 4 tokens"):
            engine.continued([[0] * 4], {"seeds": [0]}, 3)
    assert (engine.version, seconds) == ("one of ours", 9.0)
    assert (text.tokens, text.prefill_seconds, text.decode_seconds) == ((1, 2, 3, 4, 5, 6), 2.0, 1.75)
    assert text.rounds == (Round((3,), 3, 0, 3, 0.5), Round((4, 5, 6), 3, 2, 3, 1.25))
    assert (short.tokens, short.prefill_seconds, short.decode_seconds, short.rounds) == ((7,), 1, 0, ())
