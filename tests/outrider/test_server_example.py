"""docs/server_example.py: its answers are those of the model, whole, in pieces and to several at once."""

import json
import runpy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from outrider.data_prep.text import chat
from outrider.draft_models.targets.settings import TARGET

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient

FILE = Path(__file__).parents[2] / "docs/server_example.py"


@pytest.fixture
def server(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the example, with a tiny target that has a chat template."""
    monkeypatch.setenv("MODEL", str(tiny_models / TARGET))
    names = runpy.run_path(str(FILE), run_name="server_example")
    names["model"].tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    return names


def ask(server: dict[str, Any], **asked: Any) -> Any:
    return TestClient(server["app"]).post("/v1/chat/completions", json={"max_tokens": 8, **asked})


def streamed(answer: Any) -> str:
    """The text of the pieces of a streamed answer, which is as OpenAI's clients read it."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[:-1] == [None] * (len(choices) - 1)
    assert reasons[-1] in ("stop", "length")
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_the_server_answers_as_the_model_does(server: dict[str, Any]) -> None:
    model, messages = server["model"], [{"role": "user", "content": "hello"}]
    sampled = {"temperature": 0.7, "seed": 5}
    for options, asked in (({}, {}), ({"do_sample": True, **sampled}, sampled)):
        said = model.generate(messages, max_new_tokens=8, **options)
        answer = ask(server, messages=messages, **asked).json()
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": said}
        in_pieces = ask(server, messages=messages, stream=True, **asked)
        assert streamed(in_pieces) == said
        assert in_pieces.text.count("data: ") > 3
    with ThreadPoolExecutor(3) as pool:
        talks = [[{"role": "user", "content": content}] for content in ("a", "b", "c")]
        answers = pool.map(lambda talk: streamed(ask(server, messages=talk, stream=True)), talks)
        assert [*answers] == [model.generate(talk, max_new_tokens=8) for talk in talks]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_model_refuses_is_a_bad_request(server: dict[str, Any], stream: bool) -> None:
    talk = [{"role": "user", "content": "hi"}]
    for asked, said in (
        ({"messages": [{"role": "usr", "content": "hi"}]}, "did you mean 'user'"),
        ({"messages": talk, "max_tokens": 100_000}, "exceeds the target's context"),
    ):
        answer = ask(server, stream=stream, **asked)
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]


TALK = [{"role": "user", "content": "hello"}]


def test_the_length_the_counts_and_the_name_are_said(server: dict[str, Any]) -> None:
    model = server["model"]
    text = model.stream(TALK, max_new_tokens=8)
    while next(text, None) is not None:
        pass
    answer = ask(server, messages=TALK, model=server["NAME"]).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": model.last.prompt,
        "completion_tokens": model.last.tokens,
        "total_tokens": model.last.prompt + model.last.tokens,
    }
    assert model.last.tokens == 8
    assert (answer["model"], answer["object"]) == (server["NAME"], "chat.completion")
    assert answer["id"] != ask(server, messages=TALK).json()["id"]
    assert answer["created"] > 1.7e9
    limited = ask(server, messages=TALK, max_tokens=None, max_completion_tokens=3).json()
    assert limited["usage"]["completion_tokens"] == 3
    with_usage = ask(server, messages=TALK, stream=True, stream_options={"include_usage": True}).text.split("\n\n")
    assert json.loads(with_usage[-3].removeprefix("data: "))["usage"] == answer["usage"]
    listed = TestClient(server["app"]).get("/v1/models").json()
    assert [one["id"] for one in listed["data"]] == [server["NAME"]]


def test_an_end_token_is_a_stop(server: dict[str, Any]) -> None:
    model = server["model"]
    said = [token for r in model.rounds(TALK, max_new_tokens=8) for token in r.tokens]
    model.setup = replace(model.setup, eos=frozenset(said[-1:]))
    answer = ask(server, messages=TALK).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == said.index(said[-1]) + 1  # also where it is the last that is allowed


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_ends_before_a_stop_string(server: dict[str, Any], stream: bool) -> None:
    whole = ask(server, messages=TALK, max_tokens=24).json()["choices"][0]["message"]["content"]
    for stops in (whole[5], [whole[6:9], "never said"], [whole[-3:]]):
        first = min(whole.find(stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop in whole)
        answer = ask(server, messages=TALK, max_tokens=24, stop=stops, stream=stream)
        if stream:
            assert streamed(answer) == whole[:first]
        else:
            choice = answer.json()["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (whole[:first], "stop")


def test_what_acts_acts(server: dict[str, Any]) -> None:
    def said(**asked: Any) -> str:
        return ask(server, messages=TALK, max_tokens=24, **asked).json()["choices"][0]["message"]["content"]

    model = server["model"]
    sampled = model.generate(TALK, max_new_tokens=24, do_sample=True, temperature=3.0, top_p=0.9, seed=3)
    assert said(temperature=3.0, top_p=0.9, seed=3) == sampled
    assert said(temperature=3.0, top_p=1e-9, seed=3) == said() != sampled
    assert said(temperature=5.0) != said(temperature=5.0, seed=None)  # without a seed each has its own
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    assert ask(server, messages=parts, max_tokens=24).json()["choices"][0]["message"]["content"] == said()
    no_effect = {"n": 1, "logprobs": False, "tools": [], "tool_choice": "none", "presence_penalty": 0, "user": "me"}
    assert said(**no_effect, response_format={"type": "text"}, stop=None, logit_bias={}) == said()


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 2), ("logprobs", True), ("tools", [{"type": "function"}]),
     ("response_format", {"type": "json_object"}), ("model", "gpt-4o"), ("presence_penalty", 0.5), ("top_k", 3),
     ("logit_bias", {"5": -100}), ("no_such_field", "x"), ("messages", "hello"),
     ("messages.0.name", [TALK[0] | {"name": "me"}]), ("messages.0.content", [{"role": "user", "content": None}]),
     ("messages.0.content", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
     ("max_tokens", "many"), ("stop", [7])],
)  # fmt: skip
def test_what_would_change_the_text_and_is_not_read_is_named(server: dict[str, Any], field: str, value: Any) -> None:
    for stream in (False, True):
        answer = ask(server, **{"messages": TALK, "stream": stream, field.split(".")[0]: value})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"].startswith(field)
        assert field.split(".")[-1] in error["message"]


def test_no_body_is_read_or_tokenised_whole_that_cannot_fit(server: dict[str, Any]) -> None:
    client, tokenised = TestClient(server["app"]), []
    for body in (b"{", b"[" * 100_000, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"\xff\xfe", b"7"):
        answer = client.post("/v1/chat/completions", content=body)
        assert answer.status_code == 400
        assert "message" in answer.json()["error"]
    large = client.post("/v1/chat/completions", content=b" " * (server["LONGEST"] + 1))
    assert large.status_code == 400
    assert str(server["LONGEST"]) in large.json()["error"]["message"]
    real = chat.tokenize
    with patch.object(chat, "tokenize", lambda by, texts, **more: tokenised.append(texts) or real(by, texts, **more)):
        answer = ask(server, messages=[{"role": "user", "content": "a" * 10**7}])
    assert "exceeds the target's context" in answer.json()["error"]["message"]
    assert sum(len(text) for texts in tokenised for text in texts) < 10**6
