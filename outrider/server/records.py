"""Requests of OpenAI's API: `read_request` makes the JSON of a request into jobs, one for each text to write.

A job has the prompt's token ids, the options of sampling, and where the text ends.

A field that would change the answer and is not read here is refused by its name. What a request may ask for is bounded
here: texts, stop strings, arguments of the chat template, log-probabilities, tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

from annotated_types import Ge, Le, Lt
from pydantic import BaseModel, Field, ValidationError

from outrider.api.arguments import PromptInput
from outrider.base.settings import Count
from outrider.inference.loading.drafters import context_length
from outrider.inference.settings.tools import ServeConfig
from outrider.server.workers import RefusedError, TextJob

if TYPE_CHECKING:
    from outrider.api.decoder import Decoder

# Fields that are accepted and not read: `UNREAD` with any value, `HARMLESS` with the value that changes no answer. An
# unknown field may be empty or 0.
UNREAD = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
          "include_obfuscation", "timings_per_token"}  # fmt: skip
HARMLESS = {"tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "best_of": 1,
            "type": "text"}  # fmt: skip  # "type": of a message, as lm-evaluation-harness writes it
HARMLESS |= dict.fromkeys(("enable_thinking", "thinking"))  # only null: they belong into `chat_template_kwargs`
HARMLESS |= dict.fromkeys(("skip_special_tokens", "add_special_tokens", "add_generation_prompt", "detokenize"), True)
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MOST_STOPS, LONGEST_STOP = 16, 256  # stop strings of a request, and characters of each
MOST_ARGUMENTS = 2**14  # characters of `chat_template_kwargs`, which are compiled with the template
MOST_SCORES = 2**21  # log-probabilities of a request: they take some 70 bytes each
TopCount = Annotated[int, Ge(0), Le(128)]  # likeliest tokens at a position; this server's own bound
BRANCHES = ("str", "bool", "constrained-int")  # union members in the locations of pydantic's errors; list[…] is another
Json = dict[str, object]
FAIL_FAST = Field(fail_fast=True)  # an error names only the first wrong member of a list
TokenIds = Annotated[list[int], FAIL_FAST]
TextList = Annotated[list[str], FAIL_FAST]


class ChatMessage(BaseModel, extra="allow", strict=True):
    """A message of a conversation. content: a text, or parts {"type": "text", "text": …}."""

    role: str
    content: str | Annotated[list[Json], FAIL_FAST]


class StreamOptions(BaseModel, extra="allow", strict=True):
    """What a stream has besides the text."""

    include_usage: bool | None = None


class ApiRequest(BaseModel, extra="allow", strict=True):
    """The fields of every request that are read. Those after `top_logprobs` are not OpenAI's."""

    model: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Count | None = None
    stop: str | TextList | None = None
    seed: Annotated[int, Ge(-(2**63)), Lt(2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | TopCount | None = None  # a number of the likeliest, or true with `top_logprobs`
    top_logprobs: TopCount | None = None
    top_k: Annotated[int, Ge(-1)] | None = None  # -1 and 0: all tokens
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: TokenIds | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    speculate: bool | None = None  # false: without the drafter
    chat_template_kwargs: dict[str, object] | None = None  # over the server's own

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

    messages: Annotated[list[ChatMessage], FAIL_FAST]

    @property
    def plain_messages(self) -> list[dict[str, str]]:
        """The messages with their roles and texts."""
        return [_plain_message(message, f"messages.{i}.") for i, message in enumerate(self.messages)]

    @property
    def prompts(self) -> Mapping[str, PromptInput]:
        """The one prompt, by its key in the request."""
        return {"messages": self.plain_messages}


class DrafterRequest(BaseModel, extra="forbid", strict=True):
    """A request for another drafter, which is in the directory `checkpoint`."""

    checkpoint: str


class TextRequest(ApiRequest):
    """A request to continue texts, or token ids, as they stand."""

    prompt: str | TokenIds | TextList | Annotated[list[TokenIds], FAIL_FAST]

    @property
    def prompts(self) -> Mapping[str, PromptInput]:
        """The prompts, by their keys in the request."""
        prompt_items = [] if isinstance(self.prompt, str) else self.prompt
        prompts = [member for member in prompt_items if not isinstance(member, int)]  # none in a text or in token ids
        return {f"prompt[{i}]": text for i, text in enumerate(prompts)} or {"prompt": cast("PromptInput", self.prompt)}


CompletionRequest = ChatRequest | TextRequest
RequestKind = TypeVar("RequestKind", bound=BaseModel)


def read_request(
    body: bytes, request_cls: type[CompletionRequest], model: "Decoder", config: ServeConfig, model_name: str, seed: int
) -> tuple[CompletionRequest, list[TextJob]]:
    """The request in `body`, and the jobs of its choices (answers to a prompt) in order.

    model_name: the name for clients. seed: of a request that has none. Choice i, counted over all prompts, has the
    seed + i. Raises `UserError`.
    """
    request = parse_request(body, request_cls)
    if request.model not in (None, model_name):
        raise RefusedError(f"model={request.model!r}: this server has {model_name!r}", "model", status=404)
    refuse_unread_fields(request.model_extra)
    if request.stream_options is not None:
        refuse_unread_fields(request.stream_options.model_extra, "stream_options.")
    prompts, n_choices, max_texts = request.prompts, request.n or 1, config.batch + config.queue
    if not 0 < len(prompts) * n_choices <= max_texts:
        fault = f"n={n_choices} texts for each of {len(prompts)} prompts"
        raise RefusedError(f"{fault}: expected 1 to {max_texts} in all", "n")
    stops = _require_stops(request, model)
    sampling_fields = {field: value for field in SAMPLING if (value := getattr(request, field)) is not None}
    sampling = replace(config.sampling, **sampling_fields | ({"top_k": 0} if request.top_k == -1 else {}))
    rule, seed = model.stop_rule(stops, sampling), seed if request.seed is None else request.seed
    jobs = list[TextJob]()
    for prompt_key, prompt in prompts.items():
        ids = tuple(model.ids(prompt, prompt_key, request.chat_template_kwargs))
        token_limit = _answer_tokens(request, len(ids), model, config)
        seeds = range(seed + len(jobs), seed + len(jobs) + n_choices)
        speculate, top_count = request.speculate is not False, request.likeliest
        jobs += [TextJob(ids, sampling, token_limit, stops, rule, job_seed, speculate, top_count) for job_seed in seeds]
    scores = sum(job.max_new_tokens * (1 + job.logprobs) for job in jobs if job.logprobs is not None)
    if scores > MOST_SCORES:
        raise RefusedError(f"logprobs: up to {scores} of them; expected {MOST_SCORES} at most in a request", "logprobs")
    return request, jobs


def parse_request(body: bytes, request_class: type[RequestKind]) -> RequestKind:
    """The request in `body`. Raises `RefusedError` for the first wrong field."""
    try:
        return request_class.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors()  # a union has an error for each type; the error of the right type says more
        first_error = next((detail for detail in errors if not detail["type"].endswith("_type")), errors[0])
        field_path = ".".join(str(part) for part in first_error["loc"] if part not in BRANCHES and "[" not in str(part))
        raise RefusedError(f"{field_path or 'the request'}: {first_error['msg']}", field_path or None) from None


def _require_stops(request: ApiRequest, model: "Decoder") -> tuple[str, ...]:
    """The stop strings of a request. Raises `RefusedError` for bad stop strings, template arguments or end tokens."""
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if len(stops) > MOST_STOPS or not all(0 < len(stop) <= LONGEST_STOP for stop in stops):
        longest_length, limits = max(map(len, stops)), f"{MOST_STOPS} texts at most, of 1 to {LONGEST_STOP} characters"
        raise RefusedError(f"stop: {len(stops)} texts, the longest of {longest_length}; expected {limits}", "stop")
    if (char_count := len(str(request.chat_template_kwargs or ""))) > MOST_ARGUMENTS:
        limits = f"{char_count} characters; expected {MOST_ARGUMENTS} at most"
        raise RefusedError(f"chat_template_kwargs: {limits}", "chat_template_kwargs")
    if non_end_ids := {*(request.stop_token_ids or ())} - model.ends:
        raise RefusedError(f"stop_token_ids: {min(non_end_ids)} is no end token of the model", "stop_token_ids")
    return stops


def refuse_unread_fields(fields: Mapping[str, object] | None, key_prefix: str = "") -> None:
    """Raise `RefusedError` for the first of the unread `fields` that would change the answer."""
    for name, value in (fields or {}).items():
        is_harmless = value == HARMLESS[name] if name in HARMLESS else not value
        if name not in UNREAD and value is not None and not is_harmless:
            raise RefusedError(f"{key_prefix}{name}: not supported here; leave it out", f"{key_prefix}{name}")


def context_tokens(model: "Decoder", config: ServeConfig) -> int:
    """How many tokens a prompt and its answer may have together, for the target and its drafters."""
    limit = context_length(model.setup.config, model.drafters)
    return min(limit, config.context or limit)


def _plain_message(message: ChatMessage, prefix: str) -> dict[str, str]:
    """The message as {"role", "content": one text}, without `name` and `cache_control`. prefix: its key, for errors."""
    refuse_unread_fields({key: value for key, value in (message.model_extra or {}).items() if key != "name"}, prefix)
    content_parts = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    content_parts = [{name: value for name, value in part.items() if name != "cache_control"} for part in content_parts]
    texts = [part["text"] for part in content_parts if part.keys() == {"type", "text"} and part["type"] == "text"]
    if len(texts) < len(content_parts) or not all(isinstance(text, str) for text in texts):
        raise RefusedError(f"{prefix}content: only texts are supported", f"{prefix}content")
    return {"role": message.role, "content": "".join(map(str, texts))}


def _answer_tokens(request: ApiRequest, n_prompt: int, model: "Decoder", config: ServeConfig) -> int:
    """How many tokens may follow a prompt of so many tokens. Raises `RefusedError` if the context is too short."""
    context, limit = context_tokens(model, config), request.max_completion_tokens or request.max_tokens
    if n_prompt + (limit or 1) > context:
        name = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
        raise RefusedError(f"a prompt of {n_prompt} tokens and {name}={limit or 1} exceed a context of {context}", name)
    return limit or min(config.max_new_tokens, context - n_prompt)
