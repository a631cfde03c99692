"""What a client asks for, as OpenAI's API has it, read into jobs for the workers.

A field that would change the answer and is not read here is refused by name.
"""

from dataclasses import replace
from typing import Annotated

from annotated_types import Ge, Le
from pydantic import BaseModel, ValidationError

import outrider
from outrider.base.settings import Count
from outrider.draft_models.targets.model_spec import context_limit
from outrider.inference.settings.sampling import SamplingConfig
from outrider.inference.settings.tools import ServeConfig
from outrider.server.workers import RefusedError
from outrider.server.writing import Job

# Fields that change no answer, and the values with which others do not; all others may be empty or 0.
UNREAD = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
HARMLESS = {"tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "best_of": 1}
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
        """How many of the likeliest tokens have their log-probabilities said; None: nor has the chosen one."""
        if self.top_logprobs and self.logprobs is not True:
            raise RefusedError("top_logprobs: needs logprobs=true", "top_logprobs")
        if isinstance(self.logprobs, bool):
            return (self.top_logprobs or 0) if self.logprobs else None
        return self.logprobs


class ChatRequest(ApiRequest):
    """A request to continue a conversation."""

    messages: list[Message]

    def prompts(self, model: "outrider.Model") -> list[list[int]]:
        """The token ids of the one prompt."""
        return [model.ids([_plain(one, f"messages.{place}.") for place, one in enumerate(self.messages)], "messages")]


class TextRequest(ApiRequest):
    """A request to continue texts, or token ids, as they stand."""

    prompt: str | list[int] | list[str] | list[list[int]]

    def prompts(self, model: "outrider.Model") -> list[list[int]]:
        """The token ids of the prompts."""
        if isinstance(self.prompt, str):
            return [model.ids(self.prompt)]
        several = [one for one in self.prompt if not isinstance(one, int)]
        ids = [one for one in self.prompt if isinstance(one, int)]
        return [model.ids(one, f"prompt[{place}]") for place, one in enumerate(several)] or [model.ids(ids)]


Request = ChatRequest | TextRequest


def read(
    body: bytes, kind: type[Request], model: "outrider.Model", config: ServeConfig, seed: int
) -> tuple[Request, list[Job]]:
    """The request in `body`, and the jobs of its choices in order. seed: where it has none. Raises `UserError`."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "str" and "[" not in str(part))
        raise RefusedError(f"{field or 'the request'}: {first['msg']}", field or None) from None
    refuse_others(request)
    prompts, choices, most = request.prompts(model), range(request.n or 1), config.batch + config.queue
    if not 0 < len(prompts) * len(choices) <= most:
        raise RefusedError(f"n: {len(prompts) * len(choices)} texts; expected 1 to {most}", "n")
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if not all(stops):
        raise RefusedError("stop: an empty text, which is everywhere", "stop")
    if others := {*(request.stop_token_ids or ())} - model.ends:
        raise RefusedError(f"stop_token_ids: {sorted(others)} are no end tokens of the model", "stop_token_ids")
    seed = seed if request.seed is None else request.seed
    return request, [
        Job(tuple(ids), _sampling(request, config), _length(request, len(ids), model, config), stops, seed + choice,
            request.speculate is not False, request.likeliest)
        for ids in prompts
        for choice in choices
    ]  # fmt: skip


def refuse_others(read: BaseModel, where: str = "") -> None:
    """Raise `RefusedError` for the first field that is not read and would change the answer."""
    for name, value in (read.model_extra or {}).items():
        harmless = value == HARMLESS[name] if name in HARMLESS else not value
        if name not in UNREAD and value is not None and not harmless:
            raise RefusedError(f"{where}{name}: not supported here; leave it out", f"{where}{name}")


def context_of(model: "outrider.Model", config: ServeConfig) -> int:
    """How many tokens a prompt and its answer may have together."""
    limit = context_limit(model.setup.config)
    return min(limit, config.context or limit)


def _plain(message: Message, where: str) -> dict[str, str]:
    """The message as `outrider` reads it. where: it stands, for errors."""
    refuse_others(message, where)
    parts = message.content if isinstance(message.content, list) else [{"type": "text", "text": message.content}]
    if any(part.keys() != {"type", "text"} or part["type"] != "text" for part in parts):
        raise RefusedError(f"{where}content: only texts are supported", f"{where}content")
    return {"role": message.role, "content": "".join(part["text"] for part in parts)}


def _sampling(request: ApiRequest, config: ServeConfig) -> SamplingConfig:
    """How tokens are chosen: as the request says, else by the server's options."""
    given = {name: value for name in SAMPLING if (value := getattr(request, name)) is not None}
    if request.top_k == -1:
        given["top_k"] = 0
    return replace(config.sampling, **given)


def _length(request: ApiRequest, prompt: int, model: "outrider.Model", config: ServeConfig) -> int:
    """How many tokens may follow a prompt of so many."""
    context, wanted = context_of(model, config), request.max_completion_tokens or request.max_tokens
    if prompt + (wanted or 1) > context:
        said = f"a prompt of {prompt} tokens and max_tokens={wanted or 1} exceed the context of {context}"
        raise RefusedError(f"{said}: shorten one of them", "max_tokens")
    return wanted or min(config.max_new_tokens, context - prompt)
