"""A small server of a tiny target: /v1/models and /v1/completions as vLLM speaks them, and with planted faults."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from inference.core.sampling import Sampler, invert
from inference.settings.sampling import SamplingConfig

MODELS = b'{"data": [{"id": "tiny"}]}'
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
def serving(engine: Engine) -> Iterator[str]:
    """The URL of a server on this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(200, {"data": [{"id": name} for name in engine.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with engine.lock:
                number, engine.count = engine.count, engine.count + 1
                reply = engine.complete(body)
            if "error" in reply:
                self.send(404 if "model" in reply["error"] else 400, reply)
                return
            found = engine.fault(number, reply)
            if found is None:
                self.close_connection = True
                self.connection.close()
                return
            self.send(found, {"error": "planted"}) if isinstance(found, int) else self.send(200, found)

        def send(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with listening(Handler) as url:
        yield url


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The URL of a local server while the context lasts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def replying(post: bytes, models: bytes = MODELS, seen: list[Any] | None = None, **sent: Any) -> Any:
    """The URL of a server that says `post` to every request and `models` of its models. sent: status and headers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(models)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send(post)

        def send(self, content: bytes) -> None:
            if seen is not None:
                seen.append(dict(self.headers))
            self.send_response(sent.get("status", 200))
            for name, value in {"Content-Length": str(len(content)), **sent.get("headers", {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    return listening(Handler)
