"""The routes of the server, and its life from the model's loading to the last answer."""

import asyncio
import hmac
import json
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from outrider.api.decoder import Decoder
from outrider.base.errors import UserError
from outrider.base.words import secret
from outrider.inference.settings.tools import ServeConfig
from outrider.server.records import ChatRequest, Json, Reply, TextRequest, context_of, read
from outrider.server.workers import Answers, RefusedError, Workers

PAGE = Path(__file__).with_name("page.html")
# The page has its script and style in itself, and reaches this server alone.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def serve(config: ServeConfig) -> None:
    """Load the model and answer requests until SIGTERM or Ctrl-C. Raises `UserError` for a port that is not free."""
    try:
        listening = socket.create_server((config.host, config.port))
    except OSError as error:
        raise UserError(f"host={config.host} port={config.port}: {error.strerror}; give others") from None
    service = Service(load_model(config), config)
    service.model.generate("Hello", max_new_tokens=1)  # compiles and measures now, not for the first client
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises the signal again when it has finished
    try:
        print(f"serving {service.name} at http://{config.host}:{listening.getsockname()[1]}", flush=True)
        make_server(service).run([listening])
    finally:
        service.workers.close()


def load_model(config: ServeConfig) -> Decoder:
    """The model as the options say."""
    name, method = next(iter(config.methods.items()), (None, None))
    return Decoder.load(
        config.checkpoint or str(config.target), method=method, name=name, revision=config.revision,
        small_lm=config.small_lm, eagle3=config.eagle3, table=config.table, drafters=config.drafters,
        target=config.target if config.checkpoint else None, dtype=config.dtype, device=config.device,
        runtime=config.runtime, template=config.template, batch=config.batch,
    )  # fmt: skip


def make_server(service: "Service") -> uvicorn.Server:
    """A server that is ready to run. On a signal to end it finishes the running answers, within `grace`."""
    grace = service.config.grace
    return uvicorn.Server(uvicorn.Config(make_app(service), log_level="warning", timeout_graceful_shutdown=grace))


class Service:
    """A model as it is served. name: of the model for clients; workers: who write the answers."""

    def __init__(self, model: Decoder, config: ServeConfig):
        self.model, self.config = model, config
        self.name = config.name or config.checkpoint or str(config.target)
        self.workers = Workers(model, config.batch, config.batch + config.queue)
        self._seeds = random.Random(config.seed)  # of requests that have none
        self._key = config.api_key or secret("OUTRIDER_API_KEY")

    def require_key(self, request: Request) -> None:
        """Raise `RefusedError` for a request without the key, if there is one."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._key and not hmac.compare_digest(given.encode(), self._key.encode()):
            raise RefusedError("this server asks for its api_key as a bearer token", status=401)

    async def answer(self, request: Request, kind: type[ChatRequest] | type[TextRequest]) -> Response:
        """The answer to a request for texts, whole or as a stream. Raises `UserError`."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.config.max_bytes:
                raise RefusedError(f"a request of more than max_bytes={self.config.max_bytes}", status=413)
        seed = self._seeds.getrandbits(31)
        asked, jobs = await run_in_threadpool(read, bytes(body), kind, self.model, self.config, seed)
        if asked.model not in (None, self.name):
            raise RefusedError(f"model={asked.model!r}: this server has {self.name!r}", "model", status=404)
        answers = self.workers.submit(jobs, self.config.timeout)
        answers.watch = asyncio.create_task(_cancel_once_gone(request, answers))
        reply = Reply(asked, jobs, self.name, self.model.tokenizer)
        if asked.stream:
            return StreamingResponse(_events(reply, answers), media_type="text/event-stream")
        try:
            async for index, piece in answers.read():
                reply.take(index, piece)
        finally:
            answers.cancel()
        return JSONResponse(reply.whole())


def make_app(service: Service) -> FastAPI:
    """The routes."""
    app = FastAPI(openapi_url=None)  # its pages would load their scripts from elsewhere
    guarded = [Depends(service.require_key)]

    @app.exception_handler(UserError)
    @app.exception_handler(ClientDisconnect)  # while it sent: it reads no answer, and it is no error of the server
    async def refuse(_: Request, error: Exception) -> Response:
        status, said = refusal(error)
        return JSONResponse(said, status, {"Retry-After": "1"} if status == 429 else None)

    @app.post("/v1/chat/completions", dependencies=guarded)
    async def chat(request: Request) -> Response:
        return await service.answer(request, ChatRequest)

    @app.post("/v1/completions", dependencies=guarded)
    async def complete(request: Request) -> Response:
        return await service.answer(request, TextRequest)

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> Json:
        model = {"id": service.name, "object": "model", "created": 0, "owned_by": "outrider"}
        return {"object": "list", "data": [model | {"max_model_len": context_of(service.model, service.config)}]}

    @app.get("/health")
    async def health() -> Json:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        texts, batch = len(service.workers.open), service.config.batch
        counts = {f"{name}_total": count for name, count in sorted(service.workers.counts.items())}
        counts |= {"running_texts": min(texts, batch), "waiting_texts": max(0, texts - batch)}
        return PlainTextResponse("".join(f"outrider_{name} {count}\n" for name, count in counts.items()))

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(PAGE.read_text("utf-8"), headers={"Content-Security-Policy": POLICY})

    return app


async def _events(reply: Reply, answers: Answers) -> AsyncIterator[str]:
    """The answer as server-sent events, all that are there at once. An error is one too: the status has been sent."""
    said = ""
    try:
        async for index, piece in answers.read():
            if chunk := reply.chunk(index, piece):
                said += f"data: {json.dumps(chunk)}\n\n"
            if said and not answers.events:
                yield said
                said = ""
        if counts := reply.counts():
            said += f"data: {json.dumps(counts)}\n\n"
        yield f"{said}data: [DONE]\n\n"
    except UserError as error:
        yield f"{said}data: {json.dumps(refusal(error)[1])}\n\n"
    finally:
        answers.cancel()


async def _cancel_once_gone(request: Request, answers: Answers) -> None:
    """Cancel the answers as soon as the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    answers.cancel()


def refusal(error: Exception) -> tuple[int, Json]:
    """The HTTP status of an error, and the error in OpenAI's shape."""
    status, param = (error.status, error.param) if isinstance(error, RefusedError) else (400, None)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": str(error), "type": kind, "param": param, "code": None}}
