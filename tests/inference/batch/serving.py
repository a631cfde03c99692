"""A small server of a tiny target: /v1/models and /v1/completions as vLLM speaks them, and with planted faults."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from outrider.inference.core.sampling import Sampler, invert
from outrider.inference.settings.sampling import SamplingConfig

MODELS = b'{"data": [{"id": "tiny"}]}'
Said = tuple[int, dict[str, str], bytes] | None  # status, headers, content; None: the connection is dropped
Fault = Callable[[int, dict[str, Any]], dict[str, Any] | int | None]


class Engine:
    """What the server runs. fault(number of the request, its reply): a reply, an HTTP status, or None, which drops it.

    ids: whether it names token ids. limit: log-probabilities a token. processed: they are those after temperature.
    """

    def __init__(self, model, tokenizer, eos, fault: Fault = lambda number, reply: reply, **shown: Any):
        self.model, self.tokenizer, self.eos, self.fault = model, tokenizer, set(eos), fault
        self.ids, self.limit, self.models = (
            shown.get("ids", True),
            shown.get("limit", 20),
            shown.get("models", ["tiny"]),
        )
        self.processed, self.count, self.lock = shown.get("processed", False), 0, threading.Lock()

    @torch.inference_mode()
    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["model"] not in self.models or body["logprobs"] > self.limit:
            return {"error": "no such model" if body["model"] not in self.models else "too many logprobs"}
        greedy, tokens = body["temperature"] == 0, []
        options = {} if greedy else {"top_k": max(0, body["top_k"]), "top_p": body["top_p"]}
        sampler = Sampler(SamplingConfig(temperature=body["temperature"], **options))
        chance, names, rows = torch.Generator().manual_seed(body["seed"]), [], []
        while len(tokens) < body["max_tokens"] and not (tokens and tokens[-1] in self.eos):
            logits = self.model(torch.tensor([[*body["prompt"], *tokens]])).logits[:, -1]
            probabilities = sampler.probabilities(logits)
            drawn = torch.rand(1, 1, generator=chance, dtype=torch.float64)
            tokens.append(int(logits.argmax() if greedy else invert(probabilities, drawn)))
            told = (probabilities.log() if self.processed and not greedy else logits.log_softmax(-1))[0].tolist()
            likeliest = sorted(range(len(told)), key=lambda i: -told[i])[: body["logprobs"]]
            rows.append({f"token_id:{i}": max(told[i], -9999.0) for i in {*likeliest, tokens[-1]}})
            names.append(f"token_id:{tokens[-1]}")
        ended = tokens[-1] in self.eos
        choice = {
            "text": self.tokenizer.decode(tokens[:-1] if ended else tokens),
            "finish_reason": "stop" if ended else "length",
            "token_ids": tokens,
            "prompt_token_ids": body["prompt"],
            "logprobs": {
                "tokens": names,
                "token_logprobs": [row[name] for name, row in zip(names, rows, strict=True)],
                "top_logprobs": rows,
            },
        }
        if not self.ids:
            choice = {key: choice[key] for key in ("text", "finish_reason")} | {"stop_reason": tokens[-1]}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens)}
        return {"choices": [choice], "usage": usage}


@contextmanager
def listening(say: Callable[[str, Any, dict[str, str]], Said]) -> Iterator[str]:
    """The URL of a local server while the context lasts. say: of a request's path, its JSON, None for GET, and headers:
    status, headers and content of the reply; None drops the connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, body: Any) -> None:
            said = say(self.path, body, dict(self.headers))
            if said is None:
                self.close_connection = True
                self.connection.close()
                return
            status, headers, content = said
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def as_json(status: int, content: Any) -> Said:
    return status, {"Content-Type": "application/json"}, json.dumps(content).encode()


def serving(engine: Engine) -> Any:
    """The URL of a server on this machine."""

    def say(path: str, body: Any, _: dict[str, str]) -> Said:
        if body is None:
            return as_json(200, {"data": [{"id": name} for name in engine.models]})
        with engine.lock:
            number, engine.count = engine.count, engine.count + 1
            reply = engine.complete(body)
        if "error" in reply:
            return as_json(404 if "model" in reply["error"] else 400, reply)
        found = engine.fault(number, reply)
        if isinstance(found, int):
            return as_json(found, {"error": "planted"})
        return None if found is None else as_json(200, found)

    return listening(say)


def replying(post: bytes, models: bytes = MODELS, seen: list[Any] | None = None, **sent: Any) -> Any:
    """The URL of a server that says `post` to every request and `models` of its models. sent: status and headers."""

    def say(path: str, body: Any, headers: dict[str, str]) -> Said:
        if seen is not None:
            seen.append(headers)
        return sent.get("status", 200), sent.get("headers", {}), models if body is None else post

    return listening(say)
