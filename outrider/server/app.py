"""The routes of the server, and its life from the model's loading to the last answer.

    request → Front (may it ask?) → Service.answer → read_request (jobs, one a text) → Workers (threads decode)
            → Reply (pieces to JSON) → Answers (hands them to the event loop) → the client

`Service.answer` is this way. Reading a request and writing a whole body run in threads, so that the event loop is never
busy for long. A piece: the next part of a text, with its tokens. τ: tokens per pass of the target.
"""

import asyncio
import hmac
import json
import random
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from functools import cache, partial
from ipaddress import ip_address
from pathlib import Path

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from outrider.api.decoder import Decoder
from outrider.base.errors import UserError
from outrider.base.progress import hide_stages
from outrider.base.words import read_secret
from outrider.draft_models.formats.model_name import model_name
from outrider.inference.settings.tools import ServeConfig
from outrider.server import records
from outrider.server.front import FIGURES, Front, refusal
from outrider.server.records import ChatRequest, DrafterRequest, Json, TextRequest, read_request
from outrider.server.replies import Reply
from outrider.server.traffic import TrafficLog, TrafficRecords
from outrider.server.workers import Answers, RefusedError, Workers

PAGE = Path(__file__).with_name("page.html")
FLUSH = 5  # seconds in which errors are sent to the clients whose answers are given up
_TRIAL = 9  # tokens of the text that `measure` decodes; few, as the start waits for it


def serve(config: ServeConfig) -> None:
    """Load the model and answer requests until SIGTERM or Ctrl-C. Raises `UserError` for a port that is not free."""
    try:
        is_ipv6 = ":" in config.host
        dual_stack = config.host == "::" and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        listening_socket = socket.create_server((config.host, config.port), family=family, dualstack_ipv6=dual_stack)
    except OSError as error:
        raise UserError(f"host={config.host} port={config.port}: {error.strerror}; give others") from None
    log = TrafficLog(config.log) if config.log else None
    service = Service(load_model(config), config, log)
    service.measured = measure(service.model)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises the signal again when it has finished
    try:
        host = f"[{config.host}]" if is_ipv6 else config.host
        print(f"serving {service.name} at http://{host}:{listening_socket.getsockname()[1]}", flush=True)
        hide_stages()
        GracefulServer(service).run([listening_socket])
    finally:
        service.close()
        print(f"served {service.name}: {service.workers.counts['texts']} texts; the server has ended", flush=True)


def load_model(config: ServeConfig) -> Decoder:
    name, method = next(iter(config.methods.items()), (None, None))  # one at most; None: the drafter's default
    return Decoder.load(
        config.checkpoint or str(config.target), method=method, name=name, revision=config.revision,
        small_lm=config.small_lm, eagle3=config.eagle3, mtp=config.mtp, dflash=config.dflash, table=config.table,
        drafters=config.drafters, target=config.target if config.checkpoint else None, dtype=config.dtype,
        device=config.device, runtime=config.runtime, template=config.template,
        chat_template_kwargs=config.chat_template_kwargs, batch=config.batch, cache_bytes=config.cache_bytes,
    )  # fmt: skip


class GracefulServer(uvicorn.Server):
    """A server that finishes the running answers after a signal to end; after `config.grace` seconds they fail."""

    def __init__(self, service: "Service"):
        self._service, wait_seconds = service, service.config.grace + FLUSH
        app = Front(make_app(service), service.config)
        super().__init__(
            uvicorn.Config(app, log_level="warning", lifespan="off", ws="none", timeout_graceful_shutdown=wait_seconds)
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which would cancel the answers without an error to their clients."""
        timer = asyncio.get_running_loop().call_later(self._service.config.grace, self._service.workers.give_up)
        await super().shutdown(sockets)
        timer.cancel()


class Service:
    """A model as it is served. name: of the model for clients; workers: the threads that write the answers.

    log: the file of answered texts, if there is one. measured: the figures of the last answer, at first of `measure`.
    """

    def __init__(self, model: Decoder, config: ServeConfig, log: TrafficLog | None = None):
        self.model, self.config, self._log = model, config, log
        self.name = config.name or model_name(str(model.setup.target.source))
        self.workers = Workers(config.batch, config.batch + config.queue)
        self.measured: dict[str, float] = {}
        self._traffic, self._swapping = TrafficRecords(model.setup), asyncio.Lock()  # for one swap at a time
        self._token_name = cache(lambda token: json.dumps(model.tokenizer.decode([token])))
        self._seeds = random.SystemRandom() if config.seed is None else random.Random(config.seed)  # for requests
        self._key = config.api_key or read_secret("OUTRIDER_API_KEY")

    def about(self) -> Json:
        """The model's entry in the list of models: OpenAI's fields, its method, its context and the last figures."""
        entry = {"id": self.name, "object": "model", "created": 0, "owned_by": "outrider", "method": self.model.name}
        return entry | {"max_model_len": records.context_tokens(self.model, self.config), "measured": self.measured}

    def require_key(self, request: Request) -> None:
        """Raise `RefusedError` for a request without the key, if there is one."""
        client_key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._key and not hmac.compare_digest(client_key.encode(), self._key.encode()):
            raise RefusedError("this server asks for its api_key as a bearer token", status=401)

    def close(self) -> None:
        """Give up all texts, and close the log after their last records."""
        self.workers.close()
        if self._log is not None:
            self._log.close()

    async def answer(self, request: Request, request_class: type[ChatRequest] | type[TextRequest]) -> Response:
        """The answer to a request for texts, whole or as a stream. Raises `UserError`."""
        body, model, seed = await self._read_body(request), self.model, self._seeds.getrandbits(31)
        parsed, jobs = await run_in_threadpool(read_request, body, request_class, model, self.config, self.name, seed)
        reply = Reply(parsed, jobs, self.name, self._token_name)
        encode, on_end = reply.chunk if parsed.stream else reply.take, partial(self._log_text, reply)
        answers = self.workers.submit(model, jobs, self.config.timeout, encode, on_end)
        answers.watch = asyncio.create_task(_cancel_after_disconnect(request, answers))
        encoded_pieces = self._read(reply, answers, request.scope)
        if parsed.stream:
            return StreamingResponse(_events(encoded_pieces, reply, answers), media_type="text/event-stream")
        async for _ in encoded_pieces:  # empty: `reply` collects the pieces
            pass
        return Response(await run_in_threadpool(reply.body), media_type="application/json")

    async def swap_drafter(self, request: Request) -> Json:
        """Draft by another drafter, once it is checked, loaded and measured. Texts that wait or run keep theirs.

        Raises `UserError` for a directory without a drafter of this target, and for a client of another machine.
        """
        address = None
        with suppress(ValueError):  # a proxy may send no address
            address = None if request.client is None else ip_address(request.client.host)  # or ::ffff:127.0.0.1
        is_local = address is not None and (getattr(address, "ipv4_mapped", None) or address).is_loopback
        if not (is_local or self.config.remote_swap):
            raise RefusedError("only clients of this machine may give a drafter, but for remote_swap=true", status=403)
        checkpoint = records.parse_request(await self._read_body(request), DrafterRequest).checkpoint
        async with self._swapping:
            model = await run_in_threadpool(self.model.with_drafter, checkpoint)
            self.measured = await run_in_threadpool(measure, model)
            self.model = model
        return self.about()

    async def _read_body(self, request: Request) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.config.max_bytes:
                raise RefusedError(f"a request of more than max_bytes={self.config.max_bytes}", status=413)
        return bytes(body)

    def _log_text(self, reply: Reply, text_index: int, tokens: Sequence[int]) -> None:
        """Write the text `text_index` of an answer to the log, if there is one."""
        if self._log is None:
            return
        record = self._traffic.make_record(reply.request, reply.jobs[text_index], f"{reply.id}-{text_index}", tokens)
        if record is not None:
            self._log.write(record)

    async def _read(self, reply: Reply, answers: Answers, scope: Scope) -> AsyncGenerator[str]:
        """The encoded pieces of an answer. At its end its figures are stored, also in `scope` for the printed line."""
        try:
            async for record in answers.read():
                yield record
        finally:
            answers.cancel()
            scope[FIGURES] = figures = reply.figures()
            self.measured = figures if "tau" in figures else self.measured


def measure(model: Decoder) -> dict[str, float]:
    """Compile and measure now, before the first client asks. Returns the figures of a short text: tokens, τ, speed."""
    model.generate("Hello", max_new_tokens=1)
    start_time = time.perf_counter()
    model.generate("Hello", max_new_tokens=_TRIAL)
    if (last_counts := model.last) is None or not last_counts.passes:
        return {}
    token_rate = last_counts.tokens / (time.perf_counter() - start_time)
    return {"tokens": last_counts.tokens, "tau": round(last_counts.tau, 2), "tokens_per_second": round(token_rate, 1)}


def make_app(service: Service) -> FastAPI:
    app = FastAPI(openapi_url=None)  # its pages would load their scripts from elsewhere
    key_check = [Depends(service.require_key)]

    @app.exception_handler(UserError)
    @app.exception_handler(HTTPException)
    @app.exception_handler(ClientDisconnect)  # the client left while it sent its request: no error of the server
    async def _(_: Request, error: Exception) -> Response:
        return refusal(error)

    @app.post("/v1/chat/completions", dependencies=key_check)
    async def chat(request: Request) -> Response:
        return await service.answer(request, ChatRequest)

    @app.post("/v1/completions", dependencies=key_check)
    async def complete(request: Request) -> Response:
        return await service.answer(request, TextRequest)

    @app.post("/v1/drafter", dependencies=key_check)
    async def swap_drafter(request: Request) -> Json:
        return await service.swap_drafter(request)

    @app.get("/v1/models", dependencies=key_check)
    async def models() -> Json:
        return {"object": "list", "data": [service.about()]}

    @app.get("/health")
    async def health() -> Json:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        open_count, max_batch = len(service.workers.open), service.config.batch
        counts = {f"{name}_total": count for name, count in sorted(service.workers.counts.items())}
        counts |= {"running_texts": min(open_count, max_batch), "waiting_texts": max(0, open_count - max_batch)}
        return PlainTextResponse("".join(f"outrider_{name} {count}\n" for name, count in counts.items()))

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(PAGE.read_text("utf-8"))

    return app


async def _events(events: AsyncGenerator[str], reply: Reply, answers: Answers) -> AsyncGenerator[str]:
    """The answer as server-sent events; all events that wait in `answers` are sent together.

    An error is an event too, as the status has been sent before.
    """
    unsent_text = ""
    async with aclosing(events):
        try:
            async for record in events:
                unsent_text += record
                if unsent_text and not answers.events:
                    yield unsent_text
                    unsent_text = ""
            yield f"{unsent_text}{reply.usage_event()}data: [DONE]\n\n"
        except UserError as error:
            yield f"{unsent_text}data: {bytes(refusal(error).body).decode()}\n\n"


async def _cancel_after_disconnect(request: Request, answers: Answers) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    answers.cancel()
