"""A chat server around `outrider.load` that clients of OpenAI's API can talk to, with streaming.

pip install fastapi uvicorn
MODEL=runs/eesd uvicorn --app-dir docs server_example:app

One model, called as MODEL is, serves all requests. FastAPI runs each in a thread, and the model computes their rounds
one at a time. Without `temperature` the text is greedy. A field that would change the text and is not in `Asked` is
refused.
"""

import json
import os
import random
import time
import uuid
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ValidationError

import outrider

NAME, LONGEST = os.environ["MODEL"], 2**24  # bytes of a request
# Fields that change no text, and the values with which others do not; all others may be empty.
UNREAD = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
HARMLESS = {"n": 1, "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}

app = FastAPI()
model = outrider.load(NAME)
Json = dict[str, Any]


class Message(BaseModel, extra="allow"):
    role: str
    content: str | list[Json]  # a text, or parts {"type": "text", "text": …}


class Asked(BaseModel, extra="allow"):
    """What is read of a request."""

    messages: list[Message]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: Json | None = None


class RefusedError(outrider.UserError):
    """A request that cannot be answered. param: its field."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


@app.exception_handler(outrider.UserError)
def refused(_: Request, error: outrider.UserError) -> JSONResponse:
    said = {"message": str(error), "type": "invalid_request_error", "code": None}
    return JSONResponse({"error": {**said, "param": getattr(error, "param", None)}}, status_code=400)


@app.get("/v1/models")
def models() -> Json:
    return {"object": "list", "data": [{"id": NAME, "object": "model", "created": 0, "owned_by": "outrider"}]}


@app.post("/v1/chat/completions")
async def complete(request: Request) -> Any:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LONGEST:
            raise RefusedError(f"a request of more than {LONGEST} bytes")
    return await run_in_threadpool(answer, bytes(body))


def answer(body: bytes) -> Any:
    try:
        asked = Asked.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(map(str, first["loc"]))
        raise RefusedError(f"{param or 'the request'}: {first['msg']}", param) from None
    refuse_others(asked)
    if asked.model not in (None, NAME):
        raise RefusedError(f"model: this server has {NAME}", "model")
    reply = Reply(asked)
    begin = next(reply.pieces, "")  # so that a prompt which is too long is refused before the answer begins
    if asked.stream:
        return StreamingResponse(reply.events(begin), media_type="text/event-stream")
    message = {"role": "assistant", "content": begin + "".join(reply.pieces)}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.reason}
    return reply.record("chat.completion", [choice], usage=reply.usage)


def refuse_others(read: BaseModel, where: str = "") -> None:
    """Raise `RefusedError` for the first field that is not read and would change the text."""
    for name, value in (read.model_extra or {}).items():
        harmless = value == HARMLESS[name] if name in HARMLESS else not value
        if name not in UNREAD and value is not None and not harmless:
            raise RefusedError(f"{where}{name}: not supported here; leave it out", f"{where}{name}")


def plain(place: int, message: Message) -> dict[str, str]:
    """The message as `outrider` reads it."""
    refuse_others(message, f"messages.{place}.")
    parts = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in parts):
        raise RefusedError("content: only texts are supported", f"messages.{place}.content")
    return {"role": message.role, "content": "".join(part["text"] for part in parts)}


class Reply:
    """The answer to a request. pieces: its text as it comes; reason and usage are known after the last one."""

    def __init__(self, asked: Asked):
        limits = (asked.max_completion_tokens, asked.max_tokens, 256)
        self.most = next(one for one in limits if one is not None)
        self.stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        self.counted = (asked.stream_options or {}).get("include_usage")
        options: Json = {"do_sample": True, "temperature": asked.temperature} if asked.temperature else {}
        if options and asked.top_p is not None:  # greedy text is that of any top_p
            options["top_p"] = asked.top_p
        options["seed"] = random.getrandbits(31) if asked.seed is None else asked.seed
        messages = [plain(place, message) for place, message in enumerate(asked.messages)]
        self.pieces = self._cut(model.stream(messages, max_new_tokens=self.most, stop_strings=self.stops, **options))
        self.id, self.created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    def _counted(self, text: Iterator[str]) -> Iterator[str]:
        self.passes: Any = yield from text

    def _cut(self, text: Iterator[str]) -> Iterator[str]:
        """The text before the first stop string. What may be the beginning of one is held back."""
        held, waiting, stopped = max(map(len, self.stops), default=1) - 1, "", False
        for piece in self._counted(text):
            waiting += "" if stopped else piece
            found = [place for place in map(waiting.find, self.stops) if place >= 0]
            ready = min(found) if found else max(0, len(waiting) - held)
            yield waiting[:ready]
            stopped, waiting = stopped or bool(found), "" if stopped or found else waiting[ready:]
        yield waiting
        self.reason = "stop" if stopped or self.passes.ended or self.passes.tokens < self.most else "length"
        counts = {"prompt_tokens": self.passes.prompt, "completion_tokens": self.passes.tokens}
        self.usage = counts | {"total_tokens": sum(counts.values())}

    def record(self, kind: str, choices: list[Json], **more: Any) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": NAME, "choices": choices, **more}

    def events(self, begin: str) -> Iterator[str]:
        yield self._event([{"index": 0, "delta": {"role": "assistant", "content": begin}, "finish_reason": None}])
        for piece in filter(None, self.pieces):
            yield self._event([{"index": 0, "delta": {"content": piece}, "finish_reason": None}])
        yield self._event([{"index": 0, "delta": {}, "finish_reason": self.reason}])
        if self.counted:
            yield self._event([], usage=self.usage)
        yield "data: [DONE]\n\n"

    def _event(self, choices: list[Json], **more: Any) -> str:
        return f"data: {json.dumps(self.record('chat.completion.chunk', choices, **more))}\n\n"
