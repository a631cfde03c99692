"""A chat server around `outrider.load` that clients of OpenAI's API can talk to, with streaming.

pip install fastapi uvicorn
MODEL=runs/eesd uvicorn --app-dir docs server_example:app

One model serves all requests. FastAPI runs each in a thread, and the model computes their rounds one at a time.
`finish_reason` is always "stop", also where max_tokens ended the text.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

import outrider

app = FastAPI()
model = outrider.load(os.environ["MODEL"])


class Asked(BaseModel):
    """What is read of a request; other fields are ignored."""

    messages: list[dict[str, str]]
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    stream: bool = False


@app.exception_handler(outrider.UserError)
def refused(_: Request, error: outrider.UserError) -> JSONResponse:
    return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, status_code=400)


@app.post("/v1/chat/completions")
def complete(asked: Asked) -> Any:
    sampling = {"do_sample": True, "temperature": asked.temperature} if asked.temperature else {}
    pieces = model.stream(asked.messages, max_new_tokens=asked.max_tokens, seed=asked.seed, **sampling)
    first = next(pieces, "")  # so that a prompt which is too long is refused before the answer begins
    if asked.stream:
        return StreamingResponse(events(first, pieces), media_type="text/event-stream")
    message = {"role": "assistant", "content": first + "".join(pieces)}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def events(first: str, pieces: Iterator[str]) -> Iterator[str]:
    yield event({"role": "assistant", "content": first})
    for piece in pieces:
        yield event({"content": piece})
    yield event({}, "stop")
    yield "data: [DONE]\n\n"


def event(delta: dict[str, str], ended: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": ended}
    return f"data: {json.dumps({'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"
