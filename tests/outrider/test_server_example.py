"""docs/server_example.py: its answers are those of the model, whole, in pieces and to several at once."""

import json
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from draft_models.targets.settings import TARGET

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
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert len(choices) > 2
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_the_server_answers_as_the_model_does(server: dict[str, Any]) -> None:
    model, messages = server["model"], [{"role": "user", "content": "hello"}]
    sampled = {"temperature": 0.7, "seed": 5}
    for options, asked in (({}, {}), ({"do_sample": True, **sampled}, sampled)):
        said = model.generate(messages, max_new_tokens=8, **options)
        answer = ask(server, messages=messages, **asked).json()
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": said}
        assert streamed(ask(server, messages=messages, stream=True, **asked)) == said
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
