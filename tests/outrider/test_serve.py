"""outrider serve: its answers are the model's, whatever clients do; asked by OpenAI's own client and over HTTP."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import httpx
import openai
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

import outrider
from outrider.api import decoder
from outrider.base.errors import UserError
from outrider.data_prep.text import chat
from outrider.inference.audit.audit import audit
from outrider.inference.core.rounds import Round
from outrider.inference.core.stop_strings import StopStrings, cut_at_stop
from outrider.inference.settings.method import MethodConfig, StopConfig
from outrider.inference.settings.sampling import GREEDY
from outrider.inference.settings.tools import AuditConfig, ServeConfig
from outrider.server import app, records, workers
from outrider.server.records import ChatRequest, TextRequest
from outrider.server.replies import Reply
from outrider.server.traffic import TrafficLog
from outrider.server.workers import TextJob, decode_pieces
from tests.inference.core.test_stop_strings import BASE, BYTES, spelled
from tests.inference.evaluate.test_page import Page
from tests.tiny import save_target

TEMPLATE = "{{ style }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
JSON = {"Content-Type": "application/json"}
TALK = [{"role": "user", "content": "hello"}]
SERVERS: dict[str, app.GracefulServer] = {}  # by URL
SAMPLED = {"temperature": 1.5, "top_p": 0.9, "seed": 5}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), kv_heads=2, seed=1, num_hidden_layers=2, eos_token_id=999)


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    lookup = MethodConfig("prompt_lookup", stop=StopConfig(max_draft=4))  # no measured time decides what is drafted
    loaded = outrider.load(str(target), device="cpu", method=lookup)
    loaded.tokenizer.chat_template = TEMPLATE
    return loaded


def client_of(url: str, key: str = "any") -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


@contextmanager
def serving(model: Any, **options: Any) -> Iterator[tuple[str, app.Service, Any]]:
    """The URL of a server of `model`, called tiny, its service and a client."""
    config = ServeConfig(target="t", name="tiny", **options)
    service = app.Service(model, config, TrafficLog(config.log) if config.log else None)
    server, listening = app.GracefulServer(service), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        SERVERS[url] = server
        yield url, service, client_of(url)
    finally:
        server.should_exit = True
        thread.join()
        service.close()


@pytest.fixture(scope="module")
def url(model: Any) -> Iterator[str]:
    with serving(model, batch=2, queue=8) as (found, _, _):
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    return client_of(url)


def ask(client: Any, **asked: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": TALK, "max_tokens": 16, **asked})


def text_of(answer: Any) -> str:
    return answer.choices[0].message.content


def joined(stream: Any) -> str:
    return "".join(choice.delta.content for chunk in stream for choice in chunk.choices)


def said(model: Any, prompt: Any = TALK, **sampled: Any) -> str:
    return model.generate(prompt, max_new_tokens=16, **({"do_sample": True, **sampled} if sampled else {}))


def until_true(holds: Callable[[], bool]) -> None:
    for _ in range(400):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it does not come true")


class Slow:
    """`model`, each of whose rounds waits until `go` is set. begun: texts that have been begun."""

    def __init__(self, model: Any):
        self.model, self.go, self.begun = model, threading.Event(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def rounds(self, *given: Any, **more: Any) -> Iterator[Round]:
        self.begun += 1
        for r in self.model.rounds(*given, **more):
            self.go.wait(60)
            yield r


@pytest.mark.parametrize("sampled", [{}, SAMPLED])
def test_an_answer_is_the_models_whole_and_in_pieces(client: Any, model: Any, sampled: dict[str, float]) -> None:
    expected = said(model, **sampled)
    assert text_of(ask(client, **sampled)) == expected
    stream = [*ask(client, stream=True, stream_options={"include_usage": True}, **sampled)]
    assert joined(stream) == expected
    assert len(stream) > 3
    assert [choice.finish_reason for chunk in stream for choice in chunk.choices if choice.finish_reason] == ["length"]
    assert stream[-1].usage == ask(client, **sampled).usage
    completed = client.completions.create(model="tiny", prompt=["def f(", "a"], max_tokens=16, **sampled)
    assert [one.text for one in completed.choices] == [
        said(model, prompt, **(sampled and {**sampled, "seed": 5 + i})) for i, prompt in enumerate(("def f(", "a"))
    ]
    answer = client.completions.create(model="tiny", prompt=model.ids("def f("), max_tokens=16, **sampled)
    assert answer.choices[0].text == said(model, model.ids("def f("), **sampled)


def test_the_usage_counts_tokens_and_those_drafted(client: Any, model: Any) -> None:
    rounds = [*model.rounds(TALK, max_new_tokens=16)]
    usage, accepted = ask(client).usage, sum(r.accepted for r in rounds)
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(model.ids(TALK)), 16)
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens == accepted
    assert details.rejected_prediction_tokens == sum(r.drafted for r in rounds) - accepted > 0
    ids = client.completions.create(model="tiny", prompt="aaaa", max_tokens=40, extra_body={"return_token_ids": True})
    rounds = [*model.rounds("aaaa", max_new_tokens=40)]
    assert ids.choices[0].token_ids == [token for r in rounds for token in r.tokens]
    assert ids.choices[0].prompt_token_ids == model.ids("aaaa")
    origins = [place < r.accepted for r in rounds for place in range(len(r.tokens))]
    assert ids.choices[0].drafted == origins
    assert any(origins)
    plain = ask(client, extra_body={"speculate": False})
    assert text_of(plain) == said(model)
    assert plain.usage.completion_tokens_details.rejected_prediction_tokens == 0


def test_several_choices_and_clients_have_texts_of_their_own(client: Any, model: Any) -> None:
    """A seed gives the same text in any company."""
    seeds = [said(model, **{**SAMPLED, "seed": 5 + choice}) for choice in range(3)]
    assert [one.message.content for one in ask(client, n=3, **SAMPLED).choices] == seeds
    streams = ["", "", ""]
    for chunk in ask(client, n=3, stream=True, **SAMPLED):
        streams[chunk.choices[0].index] += chunk.choices[0].delta.content
    assert streams == seeds
    with ThreadPoolExecutor(3) as pool:
        asked = [{**SAMPLED, "seed": 5 + number % 3} for number in range(6)]
        assert [*pool.map(lambda one: joined(ask(client, stream=True, **one)), asked)] == [*seeds, *seeds]
    completed = client.completions.create(model="tiny", prompt=["a"] * 3, n=2, max_tokens=16, **SAMPLED)
    assert [one.text for one in completed.choices] == [said(model, "a", **{**SAMPLED, "seed": 5 + i}) for i in range(6)]


def test_an_end_token_is_a_stop_and_the_servers_settings_are_defaults(model: Any, target: Path, tmp_path: Path) -> None:
    ended = outrider.load(str(target), device="cpu")
    ended.tokenizer.chat_template = TEMPLATE
    ids = [token for r in model.rounds(TALK, max_new_tokens=8) for token in r.tokens]
    ended.setup = replace(ended.setup, eos=frozenset(ids[-1:]))
    with serving(ended, max_new_tokens=8, context=40) as (_, _, client):
        count = ids.index(ids[-1]) + 1
        for most in (None, count):  # also where it is the last token that is allowed
            answer = ask(client, max_tokens=most)
            assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", count)
        with pytest.raises(openai.BadRequestError, match="context of 40"):
            ask(client, max_tokens=39)
    whole = re.findall(r"[^\ufffd]", said(model))
    inheriting = save_target(tmp_path / "inheriting", kv_heads=2, seed=1, num_hidden_layers=2, eos_token_id=999)
    (inheriting / "generation_config.json").write_text(json.dumps({"stop_strings": [whole[2]]}))
    inheriting = outrider.load(str(inheriting), device="cpu", template="none")
    prompt = model.ids(TALK)
    with serving(inheriting) as (_, _, client):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=16)
    assert f"{answer.choices[0].text}{whole[2]}" == inheriting.generate(prompt, max_new_tokens=16)
    assert answer.choices[0].finish_reason == "stop"
    small = save_target(tmp_path, "opt", max_position_embeddings=30)
    with serving(outrider.load(str(target), device="cpu", small_lm=str(small), method="vanilla")) as (_, _, client):
        assert client.completions.create(model="tiny", prompt=[5] * 20).usage.completion_tokens == 30 - 20


def cut(text: str, before: str, stops: list[str]) -> str:
    """`text`, which ends with a stop string that is not yet in `before`, as far as this."""
    begins = [text.find(stop, max(0, len(before) - len(stop) + 1)) for stop in stops]
    return text[: min((begin for begin in begins if begin >= 0), default=len(text))]


def test_the_text_ends_where_generate_ends_it_and_before_the_stop_string(client: Any, model: Any) -> None:
    chance = random.Random(3)
    for number in range(24):
        sampled = {"temperature": 1.5, "seed": number}
        whole = re.findall(r"[^\ufffd]+", said(model, **sampled)) or ["a"]
        starts = [(piece := chance.choice(whole), chance.randrange(len(piece))) for _ in range(3)]
        stops = [piece[start : start + chance.choice([1, 1, 2, 5])] for piece, start in starts]
        text = said(model, stop_strings=stops, **sampled)
        found = any(stop in text for stop in stops)
        answer = ask(client, stop=stops, **sampled)
        expected = cut(text, "", stops)
        assert (text_of(answer), answer.choices[0].finish_reason) == (expected, "stop" if found else "length")
        assert answer.usage.completion_tokens == model.last.tokens
        assert joined(ask(client, stop=stops, stream=True, **sampled)) == expected


@pytest.mark.parametrize("chunks", [1, 3])
def test_stop_strings_with_special_tokens_and_those_that_begin_in_the_prompt(chunks: int) -> None:
    """Pieces show nothing that is, or belongs to, a stop string; and all that is before it."""
    names = [BASE, *"ab", "ab", "ba", "é", "…", "<s>", "<t>"]
    tokenizer = BYTES([*map(spelled, names)], additional_special_tokens=["<s>", "<t>"])
    chance = random.Random(chunks)
    for _ in range(400):
        ids = [chance.randrange(1, len(names)) for _ in range(12)]
        size = chance.choice([1, 4])
        texts = ["".join(names[token] for token in ids[:count]) for count in range(len(ids) + 1)]
        starts = chance.sample(range(len(texts[-1])), 2)
        stops = [texts[-1][start : start + chance.choice([1, 2, 4, 7])] for start in starts]
        ends = (count for count in range(size + 1, 13) if cut(texts[count], texts[count - 1], stops) != texts[count])
        count = next(ends, None)
        rule, parts = StopStrings(stops, tokenizer), range(size, len(ids), chunks)
        rounds = (Round(tuple(ids[start : start + chunks]), 2, min(1, chunks), 2, 0.0) for start in parts)
        job = TextJob((*ids[:size],), GREEDY, 12 - size, (), rule, 0, True, None)
        pieces = [*decode_pieces(cut_at_stop(rounds, ids[:size], rule.first_end), job, tokenizer, ())]
        assert sum(len(piece.tokens) for piece in pieces) == (count or 12) - size
        expected = cut(texts[count], texts[count - 1], stops) if count else texts[-1]
        assert "".join(piece.text for piece in pieces) == re.sub("[<st>]", "", expected[len(texts[size]) :])
        assert pieces[-1].reason == ("stop" if count else "length")


def test_log_probabilities_are_the_targets_before_temperature(client: Any, model: Any) -> None:
    asked = {"max_tokens": 12, "extra_body": {"return_token_ids": True, "return_tokens_as_token_ids": True}}
    transformers = AutoModelForCausalLM.from_pretrained(model.setup.target.source).requires_grad_(False)
    for more in ({}, SAMPLED, {"temperature": 0.5, "seed": 1}):
        text = client.completions.create(model="tiny", prompt="aaaa", logprobs=2, **asked, **more).choices[0]
        ids = torch.tensor([[*model.ids("aaaa"), *text.token_ids]])
        reference = transformers(ids).logits[0, -13:-1].log_softmax(-1)
        assert text.logprobs.token_logprobs == pytest.approx(reference[range(12), text.token_ids].tolist(), abs=1e-3)
        for token, row, top in zip(text.token_ids, reference, text.logprobs.top_logprobs, strict=True):
            best = {f"token_id:{one}" for one in row.topk(2).indices.tolist()}
            assert top.keys() == best | {f"token_id:{token}"}
    talked = ask(client, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    assert [entry.logprob for entry in talked] == [entry.top_logprobs[0].logprob for entry in talked]  # greedy
    stream = ask(client, logprobs=True, stream=True)
    streamed = [entry for chunk in stream for entry in chunk.choices[0].logprobs.content]
    assert [entry.logprob for entry in streamed] == [entry.logprob for entry in talked]
    assert text_of(ask(client, logprobs=True)) == said(model)
    plain = ask(client, logprobs=True, extra_body={"speculate": False}).choices[0].logprobs.content
    assert [entry.logprob for entry in plain] == pytest.approx([entry.logprob for entry in talked], abs=1e-3)


def test_fields_that_change_no_answer_are_accepted(url: str, client: Any) -> None:
    plain = text_of(ask(client))
    part = {"type": "text", "text": TALK[0]["content"], "cache_control": {"type": "ephemeral"}}
    for message in (TALK[0] | {"type": "text"}, TALK[0] | {"content": [part]}, TALK[0] | {"name": "user"}):
        assert text_of(ask(client, messages=[message])) == plain


@pytest.mark.parametrize("host", ["::1", "::", "127.0.0.1"])
def test_a_server_listens_on_addresses_of_both_kinds(host: str) -> None:
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip("this machine has no such address")
    with patch.object(app, "load_model", side_effect=RuntimeError("listening")), pytest.raises(RuntimeError):
        app.serve(ServeConfig(target="t", host=host, port=0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_audit_accepts_the_server(url: str, target: Path, tmp_path: Path, temperature: float) -> None:
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("".join(json.dumps({"turns": [f"question {number}"]}) + "\n" for number in range(12)))
    out = tmp_path / "out"
    audit(AuditConfig(target=str(target), server=url, prompts=str(asked), template="none", temperature=temperature,
                      max_new_tokens=24, concurrency=3, out_dir=str(out)))  # fmt: skip
    numbers = json.loads((out / "report.json").read_text())["arms"]["answers"]["numbers"]
    assert (numbers["answers"], numbers["retokenised"], numbers["tokens"]) == (12, 0, 12 * 24)  # none can end early


@pytest.mark.parametrize(
    ("field", "value"),
    [("tools", [{"type": "function"}]), ("response_format", {"type": "json_object"}), ("presence_penalty", 0.5),
     ("logit_bias", {"5": -100}), ("no_such_field", "x"), ("messages", "hello"), ("messages", []), ("max_tokens", 999),
     ("messages.0.content", [{"role": "user", "content": None}]),
     ("messages.0.content", [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
     ("max_tokens", "many"), ("max_completion_tokens", 10**20), ("stop", [7]), ("stop", ""), ("temperature", -1.0),
     ("stop", ["a"] * 17), ("stop", "a" * 257), ("stream_options.include_usage", {"include_usage": "yes"}),
     ("top_p", 0.0), ("n", 11), ("n", 10**20), ("top_logprobs", 3), ("stop_token_ids", [3]), ("detokenize", False),
     ("chat_template_kwargs", "x"), ("chat_template_kwargs.stile", {"stile": "x"}), ("chat_template_kwargs", [1]),
     ("chat_template_kwargs", {"style": "x" * 2**14}), ("enable_thinking", False),
     ("stream_options.continuous_usage_stats", {"include_usage": True, "continuous_usage_stats": True})],
)  # fmt: skip
def test_what_would_change_the_answer_and_is_not_read_is_named(url: str, field: str, value: Any) -> None:
    for stream in (False, True):
        body = {"messages": TALK, "stream": stream, field.split(".")[0]: value}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert field.split(".")[-1] in error["message"]


def test_what_changes_nothing_is_allowed(client: Any, model: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    none = {"tool_choice": "none", "response_format": {"type": "text"}, "tools": [], "stop": None, "logit_bias": {},
            "stream_options": {"include_obfuscation": False}}  # fmt: skip
    assert text_of(ask(client, messages=parts, n=1, user="me", presence_penalty=0, **none)) == said(model)
    own: Any = {"chat_template_kwargs": {"style": "terse"}}
    for options in ({}, own):
        asked = ask(client, extra_body=options | {"return_token_ids": True}).choices[0]
        assert asked.prompt_token_ids == model.tokenizer.apply_chat_template(
            TALK, return_dict=False, **options.get("chat_template_kwargs", {})
        )


def test_what_is_no_request_is_refused(client: Any, url: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny"):
        ask(client, model="gpt-4o")
    assert [one.id for one in client.models.list()] == ["tiny"]
    monkeypatch.setattr(records, "MOST_SCORES", 16 * 8 * 3 - 1)
    with pytest.raises(openai.BadRequestError, match="logprobs: up to 384 of them"):
        ask(client, logprobs=True, top_logprobs=7, n=3)
    wrong = ("messages", "prompt", "stop", "stop_token_ids", "messages.0.content")
    for body in (json.dumps({name.split(".")[0]: [None] * 9999}) for name in wrong):
        for kind in (ChatRequest, TextRequest):
            with pytest.raises(ValidationError) as raised:
                kind.model_validate_json(body)
            assert raised.value.error_count() < 9
    with pytest.raises(openai.BadRequestError, match="- logprobs: Input should be less than"):
        ask(client, extra_body={"logprobs": 129})
    unread = b'{"messages": [], "%s": 1}' % (b"x" * 10**6)
    surrogate = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    for body in (b"{", b"[" * 100_000, surrogate, b"\xff\xfe", b"7", unread):
        answer = httpx.post(f"{url}/v1/chat/completions", content=body, headers=JSON)
        assert answer.status_code == 400
        assert "message" in answer.json()["error"]
        assert len(answer.content) < 10**4
    sizes, real = [], chat.tokenize
    monkeypatch.setattr(
        chat, "tokenize", lambda by, texts, **more: sizes.append(len(texts[0])) or real(by, texts, **more)
    )
    with pytest.raises(openai.BadRequestError, match="context"):
        ask(client, messages=[{"role": "user", "content": "a" * 4 * 10**6}])
    with pytest.raises(openai.BadRequestError, match="n=1 texts for each of 1000 prompts: expected 1 to 10 in all"):
        client.completions.create(model="tiny", prompt=["a" * 4000] * 1000)
    assert sum(sizes) < 10**6


def test_a_key_and_a_limit_of_bytes(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "by the environment")
    for options, key in (({"api_key": "secret"}, "secret"), ({}, "by the environment")):
        with serving(model, max_bytes=1000, **options) as (url, _, other):
            with pytest.raises(openai.AuthenticationError):
                ask(other)
            client = client_of(url, key)
            assert text_of(ask(client)) == said(model)
            with pytest.raises(openai.APIStatusError, match="max_bytes=1000") as refused:
                ask(client, user="x" * 1000)
            assert refused.value.status_code == 413
            assert httpx.get(f"{url}/health").status_code == 200
            assert httpx.get(f"{url}/v1/models").status_code == 401


HERE = {"Host": "localhost:8000"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 200), ({"Host": "evil.example:80"}, 421), ({"Host": "localhost.evil.org"}, 421), ({"Host": "10.0.0.9"}, 421),
     ({"Host": "[::1]:80"}, 200), ({"Host": "LOCALHOST."}, 200), ({"Host": "mine.example"}, 200), ({"Host": ""}, 421),
     ({**HERE, "Origin": "https://evil.example"}, 403), ({**HERE, "Origin": "null"}, 403),
     ({**HERE, "Origin": "http://localhost:8000.evil.org"}, 403), ({**HERE, "Origin": "http://evil@localhost"}, 403),
     ({**HERE, "Origin": "http://localhost:3000"}, 200), ({**HERE, "Origin": "https://good.example"}, 200),
     ({"Content-Type": "text/plain"}, 415), ({"Content-Type": ""}, 415)],
)  # fmt: skip
def test_a_foreign_page_can_neither_read_nor_ask(model: Any, headers: dict[str, str], status: int) -> None:
    """Whatever it asks for, but for /health; and no answer may stand in a frame."""
    config = ServeConfig(target="t", allow_hosts=["mine.example"], allow_origins=["https://good.example"])
    service = app.Service(model, config)
    paths = [("GET", "/"), ("GET", "/v1/models"), ("GET", "/metrics"), ("OPTIONS", "/v1/models"), ("GET", "/health")]
    bodies = [("POST", f"/v1/{name}completions") for name in ("", "chat/")]

    async def answers(method: str, path: str) -> httpx.Response:
        front = app.Front(app.make_app(service), config)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://localhost") as client:
            body = json.dumps({"max_tokens": 1} | ({"messages": TALK} if "chat" in path else {"prompt": "a"}))
            own = {**JSON, **headers} if method == "POST" else headers
            return await client.request(method, path, content=body if method == "POST" else None, headers=own)

    for method, path in [*paths, *bodies]:
        answer = asyncio.run(answers(method, path))
        expected = 200 if path == "/health" or (status == 415 and method != "POST") else status
        assert answer.status_code == (204 if method == "OPTIONS" and expected == 200 else expected), (method, path)
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Frame-Options"] == "DENY"
        readers = answer.headers.get("Access-Control-Allow-Origin")
        assert readers == (headers.get("Origin") if expected == 200 and path != "/health" else None)
        if expected >= 400:
            assert answer.json()["error"]["type"] == "invalid_request_error"
    service.workers.close()


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_request_asks_for_is_computed_in_no_thread_that_others_wait_for(model: Any, stream: bool) -> None:
    """Neither in the event loop nor in the batch's thread, however much it is."""
    threads: dict[str, set[threading.Thread]] = {}

    def watched(name: str, call: Any) -> Any:
        def watching(*values: Any, **more: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread())
            return call(*values, **more)

        return watching

    seams = [
        (json, "dumps"),
        (json, "loads"),
        (type(model.tokenizer), "decode"),
        (type(model), "ids"),
        (Reply, "_scores"),
    ]
    seams += [(app, "read_request"), (decoder, "StopStrings"), (workers, "decode_pieces"), (StopStrings, "shown_end")]
    with ExitStack() as patches, serving(model) as (url, service, _):
        for owner, name in seams:
            patches.enter_context(patch.object(owner, name, watched(name, getattr(owner, name))))
        loops = patches.enter_context(patch.object(service.workers, "submit", watched("loop", service.workers.submit)))
        batch = patches.enter_context(patch.object(model, "_decode", watched("batch", model._decode)))
        asked = {"n": 2, "logprobs": True, "top_logprobs": 9, "stop": ["zz", "yy"], "stream": stream}
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": TALK, "max_tokens": 16, **asked})
        assert len(answer.content) > 1000
        assert loops is not batch
    waited = threads.pop("loop") | threads.pop("batch")
    assert len(waited) > 1
    assert {*threads} >= {"dumps", "decode", "ids", "read_request", "StopStrings", "shown_end", "_scores"}
    assert {name: own & waited for name, own in threads.items() if own & waited} == {}


def test_a_full_queue_says_so_and_who_waited_is_answered(model: Any) -> None:
    slow = Slow(model)
    with serving(slow, batch=1, queue=1) as (url, service, client), ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ask, client) for _ in range(2)]
        until_true(lambda: len(service.workers.open) == 2 and slow.begun == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            ask(client)
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        now = httpx.get(f"{url}/metrics").text
        assert "outrider_running_texts 1\n" in now
        assert "outrider_waiting_texts 1\n" in now
        slow.go.set()
        assert {text_of(one.result()) for one in waiting} == {said(model)}
        until_true(lambda: len(service.workers.open) == 0)
        assert re.search(r"^outrider_tokens_total 32$", httpx.get(f"{url}/metrics").text, re.MULTILINE)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_the_place(model: Any, stream: bool) -> None:
    slow = Slow(model)
    with serving(slow, batch=1, queue=1) as (url, service, client):
        body = {"messages": TALK, "stream": stream, "max_tokens": 200}
        for _ in range(2):  # one at work, one that waits
            with (
                pytest.raises(httpx.ReadTimeout),
                httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=1) as left,
            ):
                [*left.iter_raw()]
        until_true(lambda: len(service.workers.open) <= 1)
        slow.go.set()
        until_true(lambda: len(service.workers.open) == 0)
        assert service.workers.counts["tokens"] < 200
        assert (service.workers.counts["cancelled_texts"], slow.begun) == (2, 1)
        assert text_of(ask(client)) == said(model)
        sent = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": sent, "query_string": b""}
        left = AsyncMock(return_value={"type": "http.disconnect"})  # before its request has come: no traceback
        asyncio.run(app.Front(app.make_app(service), service.config)(scope, left, AsyncMock()))


@pytest.mark.parametrize("stream", [False, True])
def test_a_late_or_failed_answer_is_an_error(model: Any, stream: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(client: Any, words: str) -> None:
        with pytest.raises(openai.APIError, match=words):
            joined(ask(client, stream=True)) if stream else ask(client)

    slow = Slow(model)
    with serving(slow, timeout=0.3) as (_, service, client):
        refused(client, r"timeout=0\.3")
        slow.go.set()
        until_true(lambda: len(service.workers.open) == 0)
    with serving(slow) as (_, _, client):
        slow.rounds = lambda *_, **__: iter([None])
        refused(client, "error of the server")
        assert "Traceback" in capsys.readouterr().err
        slow.rounds = model.rounds
        assert text_of(ask(client)) == said(model)


@pytest.mark.slow
def test_a_signal_lets_answers_end(target: Path) -> None:
    (target / "chat_template.jinja").write_text(TEMPLATE)
    command = [sys.executable, "-m", "outrider.cli", "serve", f"target={target}", "port=0", "grace=20", "device=cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
        assert process.stdout is not None
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        body = {"messages": TALK, "max_tokens": 200, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(30) == 0


@pytest.mark.parametrize("by", ["grace", "close"])
def test_at_the_end_clients_are_told_that_their_answers_are_given_up(
    model: Any, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a stream too, and also whose request has not wholly come; new texts are refused."""
    slow = Slow(model)
    fields = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Content-Length: 9")
    with (
        patch.object(app, "FLUSH", 1),
        serving(slow, batch=2, grace=1) as (url, service, client),
        ThreadPoolExecutor(3) as pool,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as half,
    ):
        half.sendall("\r\n".join([*fields, "\r\n"]).encode())
        whole, stream = pool.submit(ask, client), pool.submit(lambda: joined(ask(client, stream=True)))
        until_true(lambda: slow.begun == 2)
        if by == "grace":
            SERVERS[url].should_exit = True
        else:
            pool.submit(service.workers.close)
        for answer in (whole, stream):
            with pytest.raises(openai.APIError, match="given up"):
                answer.result()
        assert whole.exception().status_code == 503
        slow.go.set()
        with pytest.raises(UserError, match="given up"):
            service.workers.submit(model, [], 1.0, lambda *_: "")
        if by == "grace":
            half.settimeout(30)
            assert b"503" in half.recv(99)
    assert len(service.workers.open) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_the_page_is_one_file_that_loads_nothing_from_elsewhere(url: str) -> None:
    answer = httpx.get(url)
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    page, read = answer.text, Page(answer.text)
    assert read.open == []
    found = [(key, value) for _, one in read.elements for key, value in one.items()]
    assert [value for key, value in found if key in ("src", "href", "action")] == ["data:,"]
    assert not re.search(r"https?://|@import|url\(", page)
    assert set(re.findall(r'\bat\("(\w+)"\)', page)) <= {value for key, value in found if key == "id"}
    assert set(re.findall(r'fetch\("([^"]+)"', page)) == {"v1/models", "v1/chat/completions"}
    assert {"method", "measured", "tokens_per_second", "tau"} <= {*re.findall(r"\w+", page)}
    assert "innerHTML" not in page  # the model's text is no markup
