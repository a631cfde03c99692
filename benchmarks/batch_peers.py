"""The peers of bench_batch.py that inference/serving/engine_worker.py does not have, also with many requests at once.

This file, too, runs in a peer's own environment. As many clients as "concurrency" says take the prompts in turn; each
asks again as soon as its last text has ended. No peer keeps prompts.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "outrider" / "inference" / "serving"))

from engine_worker import ENGINES, Continuation, Json, Transformers, main


def by_clients(asked: Json, pieces: Callable[[list[int], int], Iterable[list[int]]]) -> list[Continuation]:
    """The requests of clients in threads. pieces: the new tokens after a prompt with a seed, as they come."""

    def one(prompt: list[int], seed: int) -> Continuation:
        request = Continuation()
        for tokens in pieces(prompt, seed):
            request.add(tokens)
        return request

    with ThreadPoolExecutor(asked["concurrency"]) as pool:
        return [*pool.map(one, asked["prompts"], asked["seeds"])]


def events(url: str, body: Json) -> Iterator[Json]:
    """The server-sent events of an answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


class Outrider:
    """The Python API, from threads. options: of `outrider.load`."""

    def __init__(self, job: Json) -> None:
        import outrider

        shared = {"source": job["target"], "batch": job["most"], "dtype": job["dtype"]}
        self.model = outrider.load(**{**shared, **job["options"]})
        self.version, self.speculate, self.setup = version("outrider"), job["draft"] is not None, self.model.setup

    def run(self, asked: Json) -> list[Continuation]:
        from outrider.inference.settings.sampling import SamplingConfig

        self.model.setup = replace(self.setup, eos=frozenset(asked["eos"]))
        sampling = SamplingConfig(temperature=asked["temperature"], **asked["sampling"])
        own = {"max_new_tokens": asked["max_new_tokens"], "speculate": self.speculate}

        def pieces(prompt: list[int], seed: int) -> Iterator[list[int]]:
            return ([*each.tokens] for each in self.model.rounds(prompt, sampling, seed=seed, **own))

        return by_clients(asked, pieces)


class Served:
    """`outrider serve`, over HTTP. Its texts end with end tokens."""

    def __init__(self, job: Json) -> None:
        options = {"target": job["target"], "batch": job["most"], "dtype": job["dtype"], "port": 0, **job["options"]}
        words = ["-m", "outrider.cli", "serve", *(f"{name}={value}" for name, value in options.items())]
        server = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        self.url = next(line.split()[-1] for line in server.stdout if line.startswith("serving"))
        self.version, self.speculate = version("outrider"), job["draft"] is not None

    def run(self, asked: Json) -> list[Continuation]:
        own = {"max_tokens": asked["max_new_tokens"], "speculate": self.speculate, "return_token_ids": True}
        own |= {"temperature": asked["temperature"], **asked["sampling"], "stream": True}

        def pieces(prompt: list[int], seed: int) -> Iterator[list[int]]:
            for event in events(f"{self.url}/v1/completions", {**own, "prompt": prompt, "seed": seed}):
                yield event["choices"][0]["token_ids"]

        return by_clients(asked, pieces)


class Llama:
    """llama.cpp's server with a slot for each client, over HTTP. It writes no end token.

    options: "server", the program, and further "words" of its command.
    """

    def __init__(self, job: Json) -> None:
        self.job, self.program, self.slots = job, job["options"]["server"], 0
        self.server: subprocess.Popen[bytes] | None = None
        told = subprocess.run([self.program, "--version"], stderr=subprocess.PIPE, text=True, check=True).stderr
        self.version = told.splitlines()[0]

    def start(self, slots: int) -> None:
        if self.server is not None:
            self.server.kill()
            self.server.wait()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = ["-m", self.job["target"], "-np", slots, "-c", slots * self.job["context"], "--cache-ram", 0]
        words += ["--port", port, *self.job["options"]["words"]]
        self.server, self.slots = subprocess.Popen([self.program, *map(str, words)], stdout=2), slots
        self.url = f"http://127.0.0.1:{port}"
        while self.server.poll() is None:
            with suppress(OSError):  # it does not listen, or still loads
                urllib.request.urlopen(f"{self.url}/health").close()
                return
            time.sleep(0.05)
        raise RuntimeError(f"{self.program} ended with status {self.server.returncode}")

    def run(self, asked: Json) -> list[Continuation]:
        if asked["concurrency"] != self.slots:
            self.start(asked["concurrency"])
        own = {"n_predict": asked["max_new_tokens"], "ignore_eos": not asked["eos"], "cache_prompt": False}
        own |= {"temperature": asked["temperature"], "top_k": 0, "top_p": 1.0, "min_p": 0.0, **asked["sampling"]}

        def pieces(prompt: list[int], seed: int) -> Iterator[list[int]]:
            body = {**own, "prompt": prompt, "seed": seed, "stream": True, "return_tokens": True}
            return (event["tokens"] for event in events(f"{self.url}/completion", body))

        return by_clients(asked, pieces)


class Compiled(Transformers):
    """transformers with a static cache and compiled decoding; one request at a time."""

    def __init__(self, job: Json) -> None:
        super().__init__(job)
        from transformers import CompileConfig

        compiled: Any = CompileConfig()
        compiled._compile_all_devices = True  # else only on a GPU
        static = {"cache_implementation": "static", "max_cache_len": job["context"]}
        self.settings = {"compile_config": compiled, **static}


if __name__ == "__main__":
    main({**ENGINES, "outrider": Outrider, "serve": Served, "llama.cpp": Llama, "compiled": Compiled})
