"""Requests and records of OpenAI's API: a request becomes jobs, and the pieces of their texts become records.

A field that would change the answer and is not read here is refused by name. If token ids are asked for, choices also
have `prompt_token_ids`, `token_ids`, and `drafted`: for each of them whether the drafter proposed it.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, cast

from annotated_types import Ge, Le
from pydantic import BaseModel, ValidationError
from transformers import PreTrainedTokenizerBase

from outrider.api.asked import Asked
from outrider.base.settings import Count
from outrider.inference.loading.targets import context_length
from outrider.inference.settings.tools import ServeConfig
from outrider.server.workers import Job, Piece, RefusedError

if TYPE_CHECKING:
    from outrider.api.decoder import Decoder

# Fields that change no answer, and the values with which others do not; all others may be empty or 0.
UNREAD = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
          "include_obfuscation", "timings_per_token"}  # fmt: skip
HARMLESS = {"tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "best_of": 1}
HARMLESS |= dict.fromkeys(("skip_special_tokens", "add_special_tokens", "add_generation_prompt", "detokenize"), True)
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
Top = Annotated[int, Ge(0), Le(128)]
Json = dict[str, object]


class Message(BaseModel, extra="allow", strict=True):
    """A message of a conversation. content: a text, or parts {"type": "text", "text": …}."""

    role: str
    content: str | list[dict[str, str]]


class ApiRequest(BaseModel, extra="allow", strict=True):
    """The fields of every request that are read. Those after `top_logprobs` are not OpenAI's."""

    model: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Count | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None
    logprobs: bool | Top | None = None  # a number of the likeliest, or true with `top_logprobs`
    top_logprobs: Top | None = None
    top_k: Annotated[int, Ge(-1)] | None = None  # -1 and 0: all tokens
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    speculate: bool | None = None  # false: without the drafter

    @property
    def likeliest(self) -> int | None:
        """The number of likeliest tokens whose log-probabilities are returned; None: not even the chosen token's."""
        if self.top_logprobs and self.logprobs is not True:
            raise RefusedError("top_logprobs: needs logprobs=true", "top_logprobs")
        if isinstance(self.logprobs, bool):
            return (self.top_logprobs or 0) if self.logprobs else None
        return self.logprobs


class ChatRequest(ApiRequest):
    """A request to continue a conversation."""

    messages: list[Message]

    @property
    def asked(self) -> Mapping[str, Asked]:
        """The one prompt, by its place in the request."""
        return {"messages": [_plain(one, f"messages.{place}.") for place, one in enumerate(self.messages)]}


class TextRequest(ApiRequest):
    """A request to continue texts, or token ids, as they stand."""

    prompt: str | list[int] | list[str] | list[list[int]]

    @property
    def asked(self) -> Mapping[str, Asked]:
        """The prompts, by their places in the request."""
        several = [] if isinstance(self.prompt, str) else [one for one in self.prompt if not isinstance(one, int)]
        return {f"prompt[{place}]": one for place, one in enumerate(several)} or {"prompt": cast("Asked", self.prompt)}


Request = ChatRequest | TextRequest


def read(
    body: bytes, kind: type[Request], model: "Decoder", config: ServeConfig, seed: int
) -> tuple[Request, list[Job]]:
    """The request in `body`, and the jobs of its choices in order. seed: where it has none. Raises `UserError`."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "str" and "[" not in str(part))
        raise RefusedError(f"{field or 'the request'}: {first['msg']}", field or None) from None
    refuse_others(request.model_extra)
    refuse_others({**(request.stream_options or {}), "include_usage": None}, "stream_options.")
    asked, choices, most = request.asked, request.n or 1, config.batch + config.queue
    if not 0 < len(asked) * choices <= most:
        raise RefusedError(f"n={choices} texts for each of {len(asked)} prompts: expected 1 to {most} in all", "n")
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if not all(stops):
        raise RefusedError("stop: an empty text, which is everywhere", "stop")
    if others := {*(request.stop_token_ids or ())} - model.ends:
        raise RefusedError(f"stop_token_ids: {sorted(others)} are no end tokens of the model", "stop_token_ids")
    given = {name: value for name in SAMPLING if (value := getattr(request, name)) is not None}
    sampling = replace(config.sampling, **given | ({"top_k": 0} if request.top_k == -1 else {}))
    seed = seed if request.seed is None else request.seed
    return request, [
        Job(tuple(ids), sampling, _length(request, len(ids), model, config), stops, seed + choice,
            request.speculate is not False, request.likeliest)
        for ids in [model.ids(one, place) for place, one in asked.items()]
        for choice in range(choices)
    ]  # fmt: skip


def refuse_others(fields: Mapping[str, object] | None, where: str = "") -> None:
    """Raise `RefusedError` for the first of the unread `fields` that would change the answer."""
    for name, value in (fields or {}).items():
        harmless = value == HARMLESS[name] if name in HARMLESS else not value
        if name not in UNREAD and value is not None and not harmless:
            raise RefusedError(f"{where}{name}: not supported here; leave it out", f"{where}{name}")


def context_of(model: "Decoder", config: ServeConfig) -> int:
    """How many tokens a prompt and its answer may have together, for the target and its drafters."""
    limit = context_length(model.setup, model.drafters)
    return min(limit, config.context or limit)


def _plain(message: Message, where: str) -> dict[str, str]:
    """The message as `outrider` reads it. where: it stands, for errors."""
    refuse_others(message.model_extra, where)
    parts = message.content if isinstance(message.content, list) else [{"type": "text", "text": message.content}]
    if any(part.keys() != {"type", "text"} or part["type"] != "text" for part in parts):
        raise RefusedError(f"{where}content: only texts are supported", f"{where}content")
    return {"role": message.role, "content": "".join(part["text"] for part in parts)}


def _length(request: ApiRequest, prompt: int, model: "Decoder", config: ServeConfig) -> int:
    """How many tokens may follow a prompt of this length."""
    context, wanted = context_of(model, config), request.max_completion_tokens or request.max_tokens
    if prompt + (wanted or 1) > context:
        name = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
        raise RefusedError(f"a prompt of {prompt} tokens and {name}={wanted or 1} exceed a context of {context}", name)
    return wanted or min(config.max_new_tokens, context - prompt)


class Reply:
    """The records of one answer. model: its name here."""

    def __init__(self, request: Request, jobs: Sequence[Job], model: str, tokenizer: PreTrainedTokenizerBase):
        self._request, self._jobs, self._tokenizer = request, jobs, tokenizer
        self._chat = isinstance(request, ChatRequest)
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._begun = set[int]()  # choices that have a record
        self._pieces: dict[int, list[Piece]] = {index: [] for index in range(len(jobs))}

    def take(self, index: int, piece: Piece) -> None:
        """A piece of the choice `index` has come."""
        self._pieces[index].append(piece)

    def chunk(self, index: int, piece: Piece) -> Json | None:
        """The record of a piece that has come in a stream; None if it is empty."""
        self.take(index, piece)
        if not (piece.text or piece.reason or piece.scores or (piece.tokens and self._request.return_token_ids)):
            return None
        role = {} if index in self._begun else {"role": "assistant"}
        said: Json = {"delta": role | {"content": piece.text}} if self._chat else {"text": piece.text}
        return self._record("chat.completion.chunk", [self._choice(index, said, [piece])])

    def whole(self) -> Json:
        """The answer, once all pieces are there."""
        choices = []
        for index, own in self._pieces.items():
            text = "".join(piece.text for piece in own)
            said: Json = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append(self._choice(index, said, own))
        return self._record("chat.completion", choices) | self._usage()

    def counts(self) -> Json | None:
        """The last record of a stream, with its usage; None unless it is asked for."""
        asked = (self._request.stream_options or {}).get("include_usage")
        return self._record("chat.completion.chunk", []) | self._usage() if asked else None

    def _record(self, kind: str, choices: Sequence[Json]) -> Json:
        return {**self._head, "object": kind if self._chat else "text_completion", "choices": choices}

    def _usage(self) -> Json:
        prompt = sum(len(job.ids) for job in self._jobs[:: self._request.n or 1])  # each once
        pieces = [piece for own in self._pieces.values() for piece in own]
        tokens = sum(len(piece.tokens) for piece in pieces)
        accepted = sum(len(piece.tokens) for piece in pieces if piece.drafted)
        rejected = sum(piece.proposed for piece in pieces) - accepted
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        counts = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        return {"usage": {**counts, "completion_tokens_details": details}}

    def _choice(self, index: int, said: Json, pieces: Sequence[Piece]) -> Json:
        job = self._jobs[index]
        choice: Json = {"index": index, **said, "logprobs": None, "finish_reason": pieces[-1].reason}
        if job.logprobs is not None:
            choice["logprobs"] = self._logprobs(pieces)
        if self._request.return_token_ids:
            choice["token_ids"] = [token for piece in pieces for token in piece.tokens]
            choice["drafted"] = [piece.drafted for piece in pieces for _ in piece.tokens]
            choice |= {} if index in self._begun else {"prompt_token_ids": job.ids}
        self._begun.add(index)
        return choice

    def _logprobs(self, pieces: Sequence[Piece]) -> Json:
        """Log-probabilities as chat completions have them, or as completions do, with the token in its top list."""
        rows = list[tuple[Json, list[Json]]]()
        for piece in pieces:
            for token, scores in zip(piece.tokens, piece.scores, strict=False):
                rows.append((self._entry(token, scores.own), [self._entry(*one) for one in scores.top.items()]))
        if self._chat:
            return {"content": [own | {"top_logprobs": top} for own, top in rows]}
        return {
            "tokens": [own["token"] for own, _ in rows],
            "token_logprobs": [own["logprob"] for own, _ in rows],
            "top_logprobs": [{str(one["token"]): one["logprob"] for one in [*top, own]} for own, top in rows],
        }

    def _entry(self, token: int, value: float) -> Json:
        name = f"token_id:{token}" if self._request.return_tokens_as_token_ids else self._tokenizer.decode([token])
        return {"token": name, "logprob": max(value, -9999.0), "bytes": None}  # OpenAI's least: JSON has no infinity
