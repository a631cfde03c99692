"""Run `python WORDS…` in a fork of the test process, which saves the seconds of the imports.

A test starts a new interpreter only to test that itself: what is imported, what a launcher or a shell starts.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import torch

ROOT = Path(__file__).parents[1]


class Fork:
    """A process that runs `words` from `cwd`, as -c CODE, -m MODULE or a script. It is used as a `subprocess.Popen`.

    env: what differs from the environment here. anew: packages that it imports anew. It has one thread and no GPU.
    """

    def __init__(
        self,
        words: Sequence[object],
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        anew: Collection[str] = (),
    ):
        self._anew = anew
        self._said = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115  # stdout, stderr
        self._process = multiprocessing.get_context("fork").Process(
            target=self._run, args=([str(word) for word in words], cwd, dict(env or {}))
        )
        self._process.start()
        self.pid: int = self._process.pid  # type: ignore[assignment]

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """What it wrote to stdout and to stderr, when it has ended."""
        self._process.join(timeout)
        assert self.returncode is not None, "a process hangs"
        for file in self._said:
            file.seek(0)
        out, err = (file.read() for file in self._said)
        return out, err

    def _run(self, words: list[str], cwd: Path, env: dict[str, str]) -> None:
        for number, file in enumerate(self._said, start=1):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = _line_by_line(1), _line_by_line(2)
        os.environ |= env
        os.chdir(cwd)
        torch.set_num_threads(1)  # a fork has none of the threads that its parent's OpenMP waits for
        torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0  # a fork has no CUDA
        for name in [name for name in sys.modules if name.partition(".")[0] in self._anew]:
            del sys.modules[name]
        match words:
            case ["-c", code, *rest]:
                sys.argv = ["-c", *rest]
                exec(code, {"__name__": "__main__"})
            case ["-m", module, *rest]:
                sys.argv = [module, *rest]
                runpy.run_module(module, run_name="__main__")
            case [script, *rest]:
                sys.argv = [script, *rest]
                runpy.run_path(script, run_name="__main__")


def _line_by_line(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, closefd=False)
