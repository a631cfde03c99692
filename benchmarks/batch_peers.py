"""The peers of bench_batch.py beside vLLM: engines of inference/serving/engine_worker.py, with many requests at once.

This file, too, runs in a peer's own environment. As many clients as "concurrency" says take the prompts in turn; each
asks again as soon as its last text has ended. No peer keeps prompts.
"""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "outrider" / "inference" / "serving"))

from engine_worker import ENGINES, Json, Request, Transformers, main


def by_clients(asked: Json, pieces: Callable[[list[int]], Iterable[list[int]]]) -> list[Request]:
    """The requests of clients in threads. pieces: the new tokens after a prompt, as they come."""

    def one(prompt: list[int]) -> Request:
        request = Request()
        for tokens in pieces(prompt):
            request.add(tokens)
        return request

    with ThreadPoolExecutor(asked["concurrency"]) as pool:
        return [*pool.map(one, asked["prompts"])]


def events(url: str, body: Json) -> Iterator[Json]:
    """The server-sent events of an answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


class Outrider:
    """The Python API, from threads. Its texts end with end tokens."""

    def __init__(self, job: Json) -> None:
        import outrider

        self.model = outrider.load(job["target"], batch=job["most"], dtype=job["dtype"], **job["options"])
        self.version, self.speculate = version("outrider"), job["draft"] is not None

    def run(self, asked: Json) -> list[Request]:
        def pieces(prompt: list[int]) -> Iterator[list[int]]:
            rounds = self.model.rounds(prompt, max_new_tokens=asked["max_new_tokens"], speculate=self.speculate)
            return ([*each.tokens] for each in rounds)

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

    def run(self, asked: Json) -> list[Request]:
        own = {"max_tokens": asked["max_new_tokens"], "speculate": self.speculate, "return_token_ids": True}

        def pieces(prompt: list[int]) -> Iterator[list[int]]:
            for event in events(f"{self.url}/v1/completions", {**own, "prompt": prompt, "stream": True}):
                yield event["choices"][0]["token_ids"]

        return by_clients(asked, pieces)


class Llama:
    """llama.cpp's server in this process, with a slot for each client, over HTTP. It writes no end token.

    options: "threads".
    """

    def __init__(self, job: Json) -> None:
        self.job, self.version, self.slots = job, version("xllamacpp"), 0
        self.server: Any = None

    def start(self, slots: int) -> None:
        import xllamacpp

        params, draft = xllamacpp.CommonParams(), self.job["draft"]
        params.model.path, params.n_parallel, params.n_ctx = self.job["target"], slots, slots * self.job["context"]
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self.job["options"]["threads"]
        params.cache_ram_mib = 0
        if draft is not None:
            params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
            lookup = params.speculative.ngram_simple
            lookup.size_n, lookup.size_m = draft["max_ngram"], draft["tokens"]
        self.server = None  # the former one ends
        self.server, self.slots = xllamacpp.Server(params), slots

    def run(self, asked: Json) -> list[Request]:
        if asked["concurrency"] != self.slots:
            self.start(asked["concurrency"])
        own = {"n_predict": asked["max_new_tokens"], "temperature": 0, "ignore_eos": True, "cache_prompt": False}

        def pieces(prompt: list[int]) -> Iterator[list[int]]:
            body = {**own, "prompt": prompt, "stream": True, "return_tokens": True}
            return (event["tokens"] for event in events(f"{self.server.listening_address}/completion", body))

        return by_clients(asked, pieces)


class Continuous(Transformers):
    """transformers' continuous batching."""

    def __init__(self, job: Json) -> None:
        super().__init__(job)
        from transformers import ContinuousBatchingConfig, GenerationConfig

        own = ContinuousBatchingConfig(max_batch_tokens=job["context"], allow_block_sharing=False)
        own.num_blocks = job["most"] * -(-job["context"] // own.page_size)
        self.manager = self.model.init_continuous_batching(GenerationConfig(eos_token_id=-1, pad_token_id=0), own)
        self.manager.start()

    def run(self, asked: Json) -> list[Request]:
        waiting, done, running = [*enumerate(asked["prompts"])], [Request() for _ in asked["prompts"]], 0
        while waiting or running:
            while waiting and running < asked["concurrency"]:
                number, prompt = waiting.pop(0)
                done[number].times, running = Request().times, running + 1
                self.manager.add_request(prompt, f"{number}", asked["max_new_tokens"], record_timestamps=True)
            result, running = self.manager.get_result(), running - 1  # a whole text
            request = done[int(result.request_id)]
            request.tokens, request.times = (
                [[one] for one in result.generated_tokens],
                request.times + result.timestamps,
            )
        return done


if __name__ == "__main__":
    own = {"outrider": Outrider, "serve": Served, "llama.cpp": Llama, "continuous": Continuous}
    main({**ENGINES, **own})
