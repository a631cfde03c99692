"""The process of a serving engine, which continues prompts when asked."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inference.core.generation import Generation
from inference.core.stopwatch import Round
from inference.serving import engine_worker
from inference.serving.engine_worker import Json
from outrider.errors import UserError

_SHOWN = 600  # characters of an engine's last words in an error


@dataclass(frozen=True)
class Asked:
    """How an engine is to continue prompts. sampling: as `SamplingConfig`, without what is off."""

    max_new_tokens: int
    eos: Sequence[int]
    sampling: Mapping[str, float]
    seed: int


class EngineProcess:
    """An engine that has loaded a target and, if the job says so, a drafter. A context manager.

    python: of the engine's environment. job: as `engine_worker` reads it. log: what the engine prints.
    Raises `UserError` with its last words if the process ends.
    """

    def __init__(self, python: str, job: Mapping[str, object], log: Path, environment: Mapping[str, str]):
        self._engine, self._log = job["engine"], log
        self.warm = 0  # the concurrency that it was last warmed up with
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                [python, str(engine_worker.__file__)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                text=True, env={**os.environ, **environment},
            )  # fmt: skip
        self.version = str(self._ask(job)["version"])

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def continued(
        self, prompts: Sequence[Sequence[int]], asked: Asked, concurrency: int, drafted: int
    ) -> tuple[tuple[Generation, ...], float]:
        """A generation for each prompt, and the seconds of them all, with up to `concurrency` at a time.

        drafted: tokens of a draft; 0 for plain decoding.
        """
        job = {**vars(asked), "prompts": prompts, "concurrency": concurrency}
        answer = self._ask(job)
        return tuple(_generation(one, drafted) for one in answer["requests"]), answer["seconds"]

    def _ask(self, job: Mapping[str, object]) -> Json:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its last words say why
        line = self._process.stdout.readline()
        if not line:
            words = self._log.read_text(errors="replace").strip()[-_SHOWN:]
            raise UserError(f"engine={self._engine}: it ended, see {self._log}; its last words: {words}")
        answer: Json = json.loads(line)
        return answer


def _generation(request: Json, drafted: int) -> Generation:
    """What the engine said, each of its steps a round."""
    (first, *rest), (begun, prefilled, *times) = request["tokens"], request["times"]
    spent = [now - before for before, now in zip([prefilled, *times], times, strict=False)]
    rounds = tuple(
        Round(tuple(tokens), drafted, len(tokens) - 1, drafted, seconds)
        for tokens, seconds in zip(rest, spent, strict=True)
    )
    said = tuple(token for tokens in (first, *rest) for token in tokens)
    return Generation(said, prefilled - begun, sum(spent), rounds)
