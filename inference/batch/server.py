"""Answers of a target on an OpenAI-compatible server: vLLM, SGLang, llama.cpp's.

Prompts are sent as token ids to /v1/completions. Tokens are returned as ids: in `token_ids`, as names "token_id:7"
(vLLM), or in llama.cpp's `content`. Every reply is validated: it repeats the prompt's ids or their number, has a row of
log-probabilities for each token, gives that token the same log-probability as in the top list, and a greedy token is
the most likely one. All ids are the target's. If the server does not repeat prompt ids, an answer to another prompt of
the same length is not detected. Log-probabilities shifted by a token are detected, except within repetitions of a token
and, with llama.cpp, for a sampled token outside the top list. An answer is retokenised if its ids are made of its text.
"""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import httpx
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.base.errors import UserError
from outrider.base.files import parse_json
from outrider.base.settings import construct
from outrider.inference.batch.client import UNANSWERED, Client, ReplyError, ask_together, lines_of, read_json
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.batch.tasks import Answer, TopK

RETOKENISED = "retokenised"  # the failure (`Answer.failure`) of a text whose tokenisation has another length
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": None}  # log-probabilities take time
_FAILED_SHARE, _FAILED_FEW = 0.1, 3  # a run stops above this share of failed prompts, once more than this number failed
_WITHIN_REPLY, _BETWEEN_REPLIES = 1e-3, 0.1  # tolerances of a log-probability, in nats
_WRONG_LOGPROBS = "log-probabilities that are not those of its tokens"
Json = Mapping[str, Any]
# The answer, the tokens of each step, the times (seconds) of the request and of each step, and the reply.
Streamed = tuple[Answer, list[tuple[int, ...]], list[float], Json]


class TokenRow(NamedTuple):
    """A reply's entry for one token: its id, its log-probability, and those of the most likely tokens by id."""

    token: int
    logprob: float
    top: dict[int, float]


class TargetServer:
    """Continues prompts, as `Generator` does by a model here, by `concurrency` requests at a time to `config.server`.

    model: the target's name on it. context: the smaller context length, in tokens, of server and target. vocabulary:
    the number of the target's ids. checked: refuse log-probabilities of other tokens, and greedy tokens that are not
    the likeliest; False for an audit. option: the name of the option, for errors. owner: the engine's name for itself.
    refusal: why the server will answer no further prompt, once that is so. The answers before are not lost. The
    constructor raises `UserError` for a server that cannot be reached or lacks what the run needs.
    """

    def __init__(
        self,
        config: GenerateConfig,
        tokenizer: PreTrainedTokenizerBase,
        eos: Collection[int],
        context: int,
        vocabulary: int,
        *,
        checked: bool = True,
        option: str = "server",
    ) -> None:
        assert config.server is not None
        self.config, self.tokenizer, self.eos, self.vocabulary = config, tokenizer, frozenset(eos), vocabulary
        self.checked, self.setting, self._prompt_count, self._failed_count = checked, f"{option}={config.server}", 0, 0
        self.client = Client(config.server, self.setting, config.server_timeout, config.server_retries)
        self.refusal: UserError | None = None
        try:
            self.model, self.context = self._find_model(context)
            self._try_out()
        except ReplyError as error:
            raise UserError(f"{self.setting}: {error}; see docs/data.md for servers") from None

    def answer(self, prompts: Sequence[Sequence[int]], uniforms: Sequence[Tensor]) -> list[Answer]:
        """Continue each prompt by at most as many tokens as it has `uniforms`, of which the first determines its seed.

        Sets `refusal` if the server refuses a request, or too many prompts have failed.
        """
        requests = [partial(self._answer, [*ids], numbers) for ids, numbers in zip(prompts, uniforms, strict=True)]
        results = ask_together(requests, self.config.concurrency)
        failures = [error for error, _ in results if error is not None and error.failure == UNANSWERED]
        self._prompt_count, self._failed_count = self._prompt_count + len(results), self._failed_count + len(failures)
        if self._failed_count > max(_FAILED_FEW, _FAILED_SHARE * self._prompt_count):
            self.refusal = self.refusal or UserError(
                f"{self.setting}: {self._failed_count} of {self._prompt_count} prompts failed, the last one by: "
                f"{failures[-1]}; mend the server and go on with resume=true"
            )
        return [answer for _, answer in results]

    def stream(self, prompt: list[int], count: int, seed: int, **further_fields: object) -> Streamed:
        """At most `count` tokens after the prompt, by one request, as it is timed. further_fields: of the request. A
        step is a chunk of the stream, or a round that llama.cpp tells. Without token ids there are two steps, the first
        chunk and the other chunks together. Raises `UserError`."""
        body = {**self._body(prompt, count, seed, greedy=self.config.temperature == 0), **_STREAMED, **further_fields}
        request_time = time.perf_counter()
        try:
            read_reply = partial(self._read_stream, prompt=prompt, count=count)
            chunks, reply, answer = self.client.fetch("/v1/completions", body, read_reply)
            if not answer.tokens:
                raise ReplyError(f"it says nothing after a prompt of {len(prompt)} tokens")
        except ReplyError as error:
            raise UserError(f"{self.setting}: {error}; see docs/deploy.md") from None
        timed_ends = rounds_of_timings(reply["timings"], count, self.setting)
        if answer.retokenised:
            chunks = [chunks[0], *chunks[1:][-1:]]  # the last one gives the time of the others
        if timed_ends:
            step_times, step_ends = [when for when, _ in timed_ends], [end for _, end in timed_ends[:-1]]
        else:
            sizes = (len(choice.get("token_ids") or self._tokenise(choice["text"])) or 1 for _, choice in chunks[:-1])
            step_times, step_ends = [when for when, _ in chunks], [*accumulate(sizes)]
        step_tokens = [tokens for start, end in pairwise([0, *step_ends, None]) if (tokens := answer.tokens[start:end])]
        return answer, step_tokens, [request_time, *step_times][: 1 + len(step_tokens)], reply

    def _read_stream(
        self, response: httpx.Response, prompt: list[int], count: int
    ) -> tuple[list[tuple[float, Json]], Json, Answer]:
        """The chunks and the reply of a stream (see `read_stream`), and its answer, retokenised in any length."""
        chunks, reply = read_stream(response)
        try:
            return chunks, reply, self._read(reply, prompt, count, greedy=False)
        except ReplyError as error:
            if error.failure != RETOKENISED:
                raise
            tokens = self._tokenise(reply["choices"][0]["text"])
            return chunks, reply, Answer(tuple(tokens), retokenised=True, failure=RETOKENISED)

    def _find_model(self, context: int) -> tuple[str, int]:
        """The name of the model to request, and its context length (which vLLM reports)."""
        retries = min(2, self.config.server_retries)
        models_reply: Json = self.client.retry(lambda: self.client.fetch("/v1/models"), retries)
        try:
            contexts = {str(entry["id"]): int(entry.get("max_model_len") or context) for entry in models_reply["data"]}
            self.owner = str(models_reply["data"][0].get("owned_by") or "server")
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError):
            contexts = {}
        model_name = self.config.server_model or next(iter(contexts), None)
        if model_name not in contexts or contexts[model_name] < 1:
            raise ReplyError(f"/v1/models lists {', '.join(contexts) or 'no model'}, not server_model={model_name}")
        return model_name, min(context, contexts[model_name])

    def _try_out(self) -> None:
        """Send each kind of request once. Raises `ReplyError` for a server that lacks what the run needs."""
        prompt = self.tokenizer("Hello, world", add_special_tokens=False)["input_ids"] or [0]
        sampling = self.config.sampling
        greedy_top = self._ask(prompt, min(4, self.config.max_new_tokens), seed=0, greedy=True).top
        if greedy_top is None or sampling.temperature == 0:
            return
        sampled_top = self._ask(prompt, 1, seed=0, greedy=False).top
        assert sampled_top is not None
        if not torch.allclose(greedy_top.logprobs[0], sampled_top.logprobs[0], atol=_BETWEEN_REPLIES):
            raise ReplyError(
                "its log-probabilities are those after temperature, top_k and top_p, and the target's own are needed "
                "(vLLM: --logprobs-mode raw_logprobs); or sample with temperature=1 top_k=0 top_p=1"
            )

    def _answer(self, prompt: list[int], uniform_draws: Tensor) -> tuple[ReplyError | None, Answer]:
        """(error or None, answer): a greedy request, then a sampled request after its tokens. An answer after an error
        has no tokens, and the error's failure."""
        if self.refusal is not None:
            return ReplyError(str(self.refusal)), Answer(failure=UNANSWERED)
        max_tokens, seed = len(uniform_draws), int(uniform_draws[0] * 2**31)
        greedy_count = max_tokens if self.config.temperature == 0 else min(self.config.greedy_tokens, max_tokens)
        try:
            first = self._ask(prompt, greedy_count, seed, greedy=True) if greedy_count else Answer()
            if first.ended or greedy_count == max_tokens:
                return None, first
            second = self._ask([*prompt, *first.tokens], max_tokens - greedy_count, seed, greedy=False)
        except ReplyError as error:
            return error, Answer(failure=error.failure)
        except UserError as error:
            self.refusal = error
            return ReplyError(str(error)), Answer(failure=UNANSWERED)
        top = second.top if first.top is None or second.top is None else first.top.then(second.top)
        return None, Answer((*first.tokens, *second.tokens), second.ended, top, second.retokenised)

    def _body(self, prompt: list[int], max_tokens: int, seed: int, *, greedy: bool) -> Json:
        """A request. Parameters with server-side defaults are sent explicitly."""
        sampling = self.config.sampling
        return {
            "model": self.model, "prompt": prompt, "max_tokens": max_tokens, "seed": seed, "n": 1, "stream": False,
            "temperature": 0.0 if greedy else sampling.temperature,
            "top_p": 1.0 if greedy else sampling.top_p, "top_k": -1 if greedy else sampling.top_k or -1,  # -1: all
            "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "logprobs": max(1, self.config.top_k_logits), "stop_token_ids": sorted(self.eos),
            "return_token_ids": True, "return_tokens_as_token_ids": True, "timings_per_token": True,
        }  # fmt: skip

    def _ask(self, prompt: list[int], max_tokens: int, seed: int, *, greedy: bool) -> Answer:
        """At most `max_tokens` tokens after the prompt."""
        body = self._body(prompt, max_tokens, seed, greedy=greedy)

        def read(response: httpx.Response) -> Answer:
            return self._read(read_json(response), prompt, max_tokens, greedy=greedy)

        return self.client.retry(partial(self.client.fetch, "/v1/completions", body, read))

    def _read(self, reply: Json, prompt: list[int], max_tokens: int, *, greedy: bool) -> Answer:
        """The answer in a reply, checked as the module's text says; at most `max_tokens` tokens after `prompt`."""
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        echoed_ids, echoed_count = choice.get("prompt_token_ids"), usage.get("prompt_tokens")
        if echoed_ids not in (None, prompt) or echoed_count not in (None, len(prompt)):
            raise ReplyError("the answer to another prompt")
        token_rows = read_rows(choice.get("logprobs")) if self.checked or not choice.get("token_ids") else None
        ids = list(choice.get("token_ids") or [row.token for row in token_rows or ()])
        if token_rows is not None and not choice.get("token_ids") and not self._lists_all(ids, choice, usage):
            if self.config.top_k_logits:
                raise ReplyError("a text of which it does not list all tokens", RETOKENISED, retry=False)
            ids, token_rows = [], None
        if self.config.top_k_logits and (not ids or token_rows is None):
            raise ReplyError("it names no token ids, and top_k_logits needs them (vLLM and llama.cpp do)", retry=False)
        tokens = ids or self._retokenise(choice, usage.get("completion_tokens"))
        if token_rows is not None and self.checked:
            check_rows(token_rows, tokens, greedy=greedy)
        tokens = self._up_to_end(tokens, choice)
        self._require_vocabulary([*tokens, *(candidate for row in token_rows or () for candidate in row.top)])
        if len(tokens) > max_tokens or (self.checked and len(tokens) < max_tokens and tokens[-1] not in self.eos):
            raise ReplyError(f"{len(tokens)} tokens of {max_tokens} without an end")
        top = top_of(token_rows or (), tokens, self.config.top_k_logits) if self.config.top_k_logits else None
        return Answer(tuple(tokens), bool(tokens) and tokens[-1] in self.eos, top, retokenised=not ids)

    def _lists_all(self, ids: list[int], choice: Json, usage: Json) -> bool:
        """Whether these log-probabilities' tokens are the whole answer. llama.cpp lists none within a character."""
        omits_end = choice.get("finish_reason") == "stop" and ids[-1:] and ids[-1] not in self.eos
        return usage.get("completion_tokens") in (None, len(ids), len(ids) + bool(omits_end))

    def _tokenise(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _retokenise(self, choice: Json, token_count: int | None) -> list[int]:
        """The tokens of a text without ids, by tokenising it, if their number matches the server's count."""
        text, ids = choice["text"], self._tokenise(choice["text"])
        round_trips = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        if not round_trips or token_count not in (len(ids), len(ids) + (choice.get("finish_reason") == "stop")):
            raise ReplyError("a text without token ids that is not tokenised so", RETOKENISED, retry=False)
        return ids

    def _up_to_end(self, tokens: list[int], choice: Json) -> list[int]:
        """`tokens` up to and including the first end token, which a reply that stopped there may leave out. Without
        `checked`, and if the left-out end token may be one of several, nothing is added."""
        end_index = next((index for index, token in enumerate(tokens) if token in self.eos), None)
        if end_index is not None or choice.get("finish_reason") != "stop":
            return tokens if end_index is None else tokens[: end_index + 1]
        stop_token = choice.get("stop_reason", choice.get("matched_stop"))
        end_tokens = self.eos if stop_token is None else self.eos & {stop_token}
        if self.checked and (len(end_tokens) != 1 or self.config.top_k_logits):
            raise ReplyError("an answer that ended without its end token", retry=False)
        return [*tokens, *(end_tokens if len(end_tokens) == 1 else ())]

    def _require_vocabulary(self, tokens: Sequence[object]) -> None:
        """Raise `ReplyError` for a token that is none of the target's."""
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.vocabulary:
                raise ReplyError(f"the token {token!r}, where the target has 0 to {self.vocabulary - 1}")


def read_stream(response: httpx.Response) -> tuple[list[tuple[float, Json]], Json]:
    """([(time in seconds, choice)] of the chunks with tokens or text, all chunks as one reply). The reply has the
    "timings" of every chunk. Raises `ReplyError` unless the server streamed."""
    if not response.headers.get("Content-Type", "").startswith("text/event-stream"):
        raise ReplyError("it does not stream its answers")
    lines = [(time.perf_counter(), line[5:].strip()) for line in lines_of(response) if line.startswith(b"data:")]
    chunks: list[tuple[float, Any]] = [(arrival, parse_json(line)) for arrival, line in lines if line != b"[DONE]"]
    choices = [(arrival, choice) for arrival, chunk in chunks for choice in chunk.get("choices", ())]
    joined_choice = {key: value for _, choice in choices for key, value in choice.items() if value is not None}
    if not joined_choice.get("finish_reason"):
        raise ReplyError(f"a stream without an end, the last of it: {lines[-1:]}")
    joined_choice |= {"text": "".join(choice.get("text") or "" for _, choice in choices), "logprobs": None}
    joined_choice["token_ids"] = [token for _, choice in choices for token in choice.get("token_ids") or ()]
    reply = {key: value for _, chunk in chunks for key, value in chunk.items() if value is not None}
    timed_choices = [(arrival, choice) for arrival, choice in choices if choice.get("token_ids") or choice.get("text")]
    timings = [(arrival, timing) for arrival, chunk in chunks if isinstance(timing := chunk.get("timings"), dict)]
    return timed_choices or choices[-1:], {**reply, "choices": [joined_choice], "timings": timings}


def rounds_of_timings(timings: Sequence[tuple[float, Json]], limit: int, setting: str) -> list[tuple[float, int]]:
    """[(time in seconds, number of tokens so far)] at the end of each round, by the totals in llama.cpp's chunks, up to
    `limit` tokens; empty if only the last chunk has totals. A round adds the accepted tokens and one token. Raises
    `UserError` for totals that are no counts. setting: the option and its value, for the error."""
    counts_of_chunks = [[timing.get(key, 0) for key in ("predicted_n", "draft_n_accepted")] for _, timing in timings]
    timed_ends, accepted_before = [(0.0, 0)], 0
    totals = construct(list[tuple[int, int]], counts_of_chunks, f"{setting}: timings")
    for (arrival, _), (predicted_total, accepted_total) in zip(timings, totals, strict=False):
        while min(predicted_total, limit) > timed_ends[-1][1]:
            timed_ends.append((arrival, timed_ends[-1][1] + 1 + max(0, accepted_total - accepted_before)))
            accepted_before = accepted_total
    return timed_ends[1:] if len(timings) > 1 else []


def read_rows(logprobs: Json | None) -> list[TokenRow] | None:
    """The rows of a reply's log-probabilities; None if it has none, or names tokens by their text."""
    if not logprobs:
        return None
    if "content" in logprobs:  # llama.cpp
        entries = [(e.get("id"), e["logprob"], [(t.get("id"), t["logprob"]) for t in e["top_logprobs"]])
                   for e in logprobs["content"]]  # fmt: skip
    else:
        columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
        entries = [(_token_id(token), logprob, [(_token_id(name), value) for name, value in top.items()])
                   for token, logprob, top in zip(*columns, strict=True)]  # fmt: skip
    if any(token is None or any(candidate is None for candidate, _ in top) for token, _, top in entries):
        return None
    rows = [TokenRow(token, float(logprob), dict(top)) for token, logprob, top in entries]
    if not all(value <= _WITHIN_REPLY for row in rows for value in (row.logprob, *row.top.values())):  # nor is a NaN
        raise ReplyError("log-probabilities above 0")
    if "content" not in logprobs and any(row.token not in row.top for row in rows):  # the API always lists it
        raise ReplyError(_WRONG_LOGPROBS)
    return rows


def _token_id(name: str) -> int | None:
    id_text = name.removeprefix("token_id:")
    return int(id_text) if id_text != name and id_text.isdecimal() else None


def check_rows(rows: Sequence[TokenRow], tokens: Sequence[int], *, greedy: bool) -> None:
    """Raise `ReplyError` unless the rows are consistent with `tokens`, each at the position of its token."""
    if [row.token for row in rows] != list(tokens):
        raise ReplyError("log-probabilities of other tokens than it said")
    for row in rows:
        values = row.top.values() or (row.logprob,)  # llama.cpp gives none for a token that it drafted
        expected = row.top.get(row.token, min(row.logprob, min(values)))  # unlisted: no likelier
        shifted = abs(row.logprob - expected) > _WITHIN_REPLY or (greedy and row.logprob < max(values) - _WITHIN_REPLY)
        if shifted or sum(map(math.exp, values)) > 1 + _WITHIN_REPLY:
            raise ReplyError(_WRONG_LOGPROBS)


def top_of(rows: Sequence[TokenRow], tokens: Sequence[int], k: int) -> TopK:
    """The k most likely tokens at each position. Raises `ReplyError` if a row has fewer."""
    top_pairs = [sorted(row.top.items(), key=lambda pair: -pair[1])[:k] for row in rows[: len(tokens)]]
    if any(len(row) < k for row in top_pairs):
        remedy = f"vLLM: --max-logprobs {k}; llama-server gives none for tokens that it drafted"
        raise ReplyError(f"fewer log-probabilities than top_k_logits={k} ({remedy})", retry=False)
    logprobs = torch.tensor([[value for _, value in row] for row in top_pairs])
    ids = torch.tensor([[token for token, _ in row] for row in top_pairs])
    return TopK(torch.tensor(tokens), ids, logprobs, (1 - logprobs.exp().sum(-1)).clamp(min=0))
