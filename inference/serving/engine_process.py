"""The process of a serving engine, such as vLLM, which continues prompts when asked.

The process runs `WORKER` in the Python environment of the engine. A job is a line of JSON on its stdin, an answer a
line on its stdout. A round is a step of the engine after the first step, which reads the prompt.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.base.errors import UserError, reason, require
from outrider.base.progress import Stage
from outrider.inference.core.rounds import Generation, Round
from outrider.inference.serving.engine_worker import Json
from outrider.inference.settings.engine import MODULES

WORKER = Path(__file__).with_name("engine_worker.py")
_LOG_CHARS = 600  # characters of an engine's last words in an error
_START_LIMIT = 60  # most seconds for the start of Python


def require_engine(engine: str, python: str) -> None:
    """Raise `UserError` unless `python` is a Python that finds `engine`."""
    script = f"from importlib.util import find_spec; print(find_spec({MODULES[engine]!r}) is not None)"
    try:
        ran = subprocess.run([python, "-c", script], capture_output=True, timeout=_START_LIMIT, text=True, check=False)
        problem = {"True": "", "False": "it is not there"}.get(ran.stdout.strip(), f"its status is {ran.returncode}")
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
        problem = reason(error)
    require(not problem, "engine_python", python, f"a Python with {MODULES[engine]} (`make engines`): {problem}")


class EngineProcess:
    """An engine that has loaded a target and, if the job says so, a drafter (see `start_engine`)."""

    counts: tuple[int, ...] | None = None  # as of `EngineServer`: None, as rounds arrive one by one

    def __init__(self, process: "subprocess.Popen[str]", job: Mapping[str, object], log: Path):
        """job: the first one, which loads the models."""
        self.process, self._engine, self._log = process, job["engine"], log
        self.warm = 0  # the concurrency that it was last warmed up with
        self.version = str(self._ask(job)["version"])

    def continue_prompts(
        self, prompts: Sequence[Sequence[int]], request: Mapping[str, object], n_draft: int
    ) -> tuple[tuple[Generation, ...], float]:
        """A generation for each prompt, and the seconds of all together.

        request: its max_new_tokens, eos, sampling, seeds and concurrency. n_draft: tokens of a draft; 0 for plain
        decoding. Raises `UserError` if a prompt gets no token.
        """
        answer = self._ask({**request, "prompts": prompts})
        for prompt, output in zip(prompts, outputs := answer["requests"], strict=True):
            if not output["tokens"]:
                raise self._make_error(f"it says nothing after a prompt of {len(prompt)} tokens")
        return tuple(to_generation(output["tokens"], output["times"], n_draft) for output in outputs), answer["seconds"]

    def _ask(self, job: Mapping[str, object]) -> Json:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # the error shows the last lines of its log
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise self._make_error("it ended")
        return json.loads(line)

    def _make_error(self, problem: str) -> UserError:
        log_tail = self._log.read_text("utf-8", "replace").strip()[-_LOG_CHARS:]
        return UserError(f"engine={self._engine}: {problem}, see {self._log}; its last words: {log_tail}")


@contextmanager
def start_engine(
    python_path: str, job: Mapping[str, object], log_file: Path, environment: Mapping[str, str], worker: Path = WORKER
) -> Iterator[EngineProcess]:
    """An engine while the context lasts; afterwards no process of it is left.

    python_path: of the engine's environment. job: the engine's name and options, target and drafter, as `worker` reads
    them. log_file: what the engine prints. Raises `UserError` with its last words if the process ends.
    """
    with open(log_file, "wb") as log_stream:
        process = subprocess.Popen(
            [python_path, str(worker)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log_stream,
            text=True, env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
    try:
        with Stage(f"starting {job['engine']}"):
            engine = EngineProcess(process, job, log_file)
        yield engine
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
        process.communicate()


def to_generation(step_tokens: Sequence[Sequence[int]], step_times: Sequence[float], draft_len: int) -> Generation:
    """The engine's output by steps; every step after the first is a round, which ends with a token of the target.

    step_times: when the request began and when each step ended, in seconds. draft_len: tokens of each draft.
    """
    (first_tokens, *round_tokens), (start_time, prefill_end, *step_times) = step_tokens, step_times
    round_seconds = [end - start for start, end in zip([prefill_end, *step_times], step_times, strict=False)]
    rounds = tuple(
        Round(tuple(ids), drafted=draft_len, accepted=len(ids) - 1, depth=draft_len, seconds=seconds)
        for ids, seconds in zip(round_tokens, round_seconds, strict=True)
    )
    token_ids = tuple(token for tokens in (first_tokens, *round_tokens) for token in tokens)
    return Generation(token_ids, prefill_end - start_time, sum(round_seconds), rounds)
