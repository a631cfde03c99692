"""What comes from outside: keys are never shown, replies are checked, work is bounded, a crash is no verdict."""

import itertools
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel

from outrider import cli
from outrider import commands as conf
from outrider.base.errors import UserError, warn
from outrider.base.run_dirs import HOLDER_FILE, only_run
from outrider.base.streams import Streams
from outrider.base.wandb_config import WandbConfig
from outrider.base.words import remove_secrets
from outrider.commands import main_of
from outrider.commands.ending import Terminated
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.audit.answers import ServedAnswer, read_answers
from outrider.inference.audit.audit import audit, judge_arm, score_answers
from outrider.inference.batch import server
from outrider.inference.batch.client import Client, ask_together
from outrider.inference.batch.generate import generate_responses
from outrider.inference.batch.server import TargetServer
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.settings.engine import EngineConfig
from outrider.inference.settings.tools import AuditConfig, ServeConfig
from tests.inference.batch.responding import ALONE, ENDS, letter_tokenizer, responses, save_answering, skipped
from tests.inference.batch.serving import MODELS, Engine, listening, replying, serving
from tests.pairwise import each_value
from tests.refusals import refusal
from tests.tiers import typical_where
from tests.typed import status_of

KEY = "sk-abcdef0123456789"
PROMPTS = 12
VOCABULARY = 264
pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_answering(tmp_path_factory.mktemp("target"), num_hidden_layers=1, vocab_size=VOCABULARY)


@pytest.fixture
def asked(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """By command and URL, a run that asks a server."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": [f"question {i}"]}) + "\n" for i in range(PROMPTS)))
    monkeypatch.setattr("outrider.inference.batch.generate.join_processes", lambda: ALONE)

    def make(command: str, url: str, **values: Any) -> Any:
        own = {"max_new_tokens": 8, "concurrency": 2, "server_retries": 0, "server_timeout": 5.0, **values}
        shared = {"target": str(target), "server": url, "out_dir": str(tmp_path / command), **own}
        if command == "audit":
            return AuditConfig(prompts=str(file), **shared)
        data = DataConfig(source="local", path=str(file), layout="prompts", heldout_fraction=0.0)
        return GenerateConfig(data=data, greedy_tokens=0, temperature=0.0, **shared)

    return make


RUN: dict[str, Callable[[Any], None]] = {"audit": audit, "generate": generate_responses}


@pytest.mark.parametrize("command", RUN)
@pytest.mark.parametrize("ending", ["\r\n", "\x07", "\u2026"])
def test_a_key_that_no_header_holds_is_named_and_not_shown(
    command: str, ending: str, asked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY + ending)
    with replying(b"{}") as url, pytest.raises(UserError, match="OPENAI_API_KEY") as raised:
        RUN[command](asked(command, url))
    assert KEY[:8] not in str(raised.value)
    monkeypatch.setenv("WANDB_API_KEY", KEY + ending)
    with pytest.raises(UserError, match="WANDB_API_KEY") as raised:
        WandbConfig(mode="offline").is_on()
    assert KEY[:8] not in str(raised.value)
    assert KEY[:8] not in refusal("api_key=.*ASCII", ServeConfig, target="t", api_key=KEY + ending)


def test_a_file_of_certificates_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/certificates.pem")
    refusal("server=a: .*SSL_CERT_FILE", Client, "http://localhost", "server=a", 1.0, 0)


@pytest.mark.parametrize("status", [200, 401, 500])
def test_a_server_that_repeats_the_key_does_not_have_it_printed(
    status: int, asked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    said = json.dumps({"error": f"Incorrect key {KEY}", "got": f"Authorization: Bearer {KEY}", "data": KEY}).encode()
    with replying(said, said, status=status) as url, pytest.raises(UserError) as raised:
        generate_responses(asked("generate", url))
    assert KEY not in str(raised.value)


def test_another_server_does_not_get_the_key(asked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    own: list[dict[str, str]] = []
    others: list[dict[str, str]] = []
    with replying(b"{}", seen=others) as other:
        away = {"status": 302, "headers": {"Location": f"{other}/v1/models?key={KEY}"}}
        with replying(b"", b"", own, **away) as url, pytest.raises(UserError) as raised:
            generate_responses(asked("generate", url))
    assert own[0]["Authorization"] == f"Bearer {KEY}"
    assert others
    assert not any("Authorization" in headers for headers in others)
    assert KEY not in str(raised.value)


def test_a_server_that_lives_elsewhere_is_named(asked: Callable[..., Any]) -> None:
    """A redirected POST would arrive there as a GET."""
    with replying(b"{}") as there:
        headers = {"Location": f"{there}/v1/completions"}

        def say(_: str, body: Any, __: Any) -> Any:
            return (301, headers, b"") if body else (200, {}, MODELS)

        with listening(say) as url:
            refusal(f"/v1/completions is redirected to {there}; give", generate_responses, asked("generate", url))


@pytest.mark.parametrize(
    "url",
    ["http://me:s3cret@host:80", "https://me:s3/cret@host", "http://me:s3 cret@host", "http://:s3cret@host/v1",
     "http://host/v1?key=s3cret", "http://me:p@s3cret@host", "ftp://me:s3cret@host"],
)  # fmt: skip
def test_a_login_in_a_url_is_refused_and_not_shown(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    makes: list[Callable[[], object]] = [
        lambda: AuditConfig(target="t", server=url),
        lambda: GenerateConfig(target="t", server=url, data=DataConfig()),
        lambda: EngineConfig(target="t", engine=url),
        lambda: EngineConfig(target="t", engine="http://host", engine_plain=url),
    ]
    for make in makes:
        with pytest.raises(UserError, match=r"(server|engine|engine_plain)=.*expected .*http") as raised:
            make()
        assert "cret" not in str(raised.value)
    for words in (f'server="{url}"', f"server={url}", f"no_such={url}", f"server=[{url}"):
        assert status_of(main_of("audit"), "outrider audit", f"target={tmp_path}", words) == 2
        assert "cret" not in "".join(capsys.readouterr()).replace("s3 cret", "")  # of a space nothing is known


def test_what_is_written_and_printed_is_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_ABCDEFGH")
    monkeypatch.setenv("SOME_PASSWORD", "tricky\x07pass")
    texts = (
        "a hf_ABCDEFGH b", repr("hf_ABCDEFGH\n"), f"{'tricky' + chr(7) + 'pass'!r}", "https://x.y/?a=1&api_key=tricky1",
        "s3://id:tricky2@bucket/x", "Authorization: Bearer tricky3", "https://h/p?X-Amz-Signature=tricky4&b=2",
        str({"hf_token": "tricky5"}), json.dumps({"api_key": "tricky6"}), "+engine_options.hf_token=tricky7",
    )  # fmt: skip
    for text in texts:
        errors = (f"read: {text}; mend it", repr({"a": [text]}))
        for shown in (remove_secrets(text), *(str(UserError(message)) for message in errors)):
            assert not re.search("tricky|ABCDEFGH", shown)
            assert remove_secrets(shown) == shown
    plain = "http://localhost:8000/v1 is there; mail a@b.c, see https://host:80/x@y and ?limit=3"
    assert remove_secrets(plain) == plain
    words = ["audit", "+x=https://me:tricky@host", "y=hf_ABCDEFGH"]
    with patch.object(sys, "argv", words), only_run(tmp_path, "an audit"):
        assert not re.search("tricky|ABCDEFGH", (tmp_path / HOLDER_FILE).read_text())
    warn(f"cannot load {texts[0]}")
    with patch.object(cli, "find", side_effect=RuntimeError(f"Illegal header {texts[1]}")):
        assert status_of(cli.main, *words)
    printed = "".join(capsys.readouterr())
    assert "RuntimeError" in printed
    assert "ABCDEFGH" not in printed


NESTED = b'{"data": [{"id": "tiny"}], "choices": [{"text": "", "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}]}"


def scored(logprob: object) -> bytes:
    """A reply of one token with this log-probability."""
    rows = {"tokens": ["token_id:5"], "token_logprobs": [logprob], "top_logprobs": [{"token_id:5": logprob}]}
    choice = {"text": "a", "token_ids": [5], "finish_reason": "length", "logprobs": rows}
    return json.dumps({"choices": [choice]}).encode()


def listed(context: object) -> bytes:
    """A list of one model with this length of context."""
    return json.dumps({"data": [{"id": "tiny", "max_model_len": context}]}).encode()


REPLIES: list[tuple[bytes, bytes]] = [  # to a request of text, and of the models
    *((json.dumps(reply).encode(), MODELS) for reply in ({"choices": {}}, {"choices": "a"}, [], None)),
    *((scored(logprob), MODELS) for logprob in (float("nan"), 1.5, 1e400, "0.1", None, 10**400, [1])),
    *((b"{}", listed(context)) for context in ("many", -5, 0.5, [1], 1e400, {})),
    (NESTED, MODELS), (b"[" * 100_000, MODELS), (MODELS, NESTED),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REPLIES)))
def test_what_is_no_reply_is_refused_with_the_servers_address(number: int, asked: Callable[..., Any]) -> None:
    """Of other types, no numbers where numbers are asked for, or nested without end. By every command."""
    text, models = REPLIES[number]
    command = [*RUN][number % 2 if text in (NESTED, MODELS) else 1]
    options = {"max_new_tokens": 1, "top_k_logits": 1} if command == "generate" else {}
    with replying(text, models) as url, pytest.raises(UserError, match="server=http"):
        RUN[command](asked(command, url, **options))


def test_a_nested_stream_is_none(target: Path, asked: Callable[..., Any]) -> None:
    lines = [b'data: {"choices": [{"text": "a", "token_ids": [1], "finish_reason": "length"}]}', b"data: " + NESTED]
    config = asked("generate", "http://127.0.0.1")
    opened = open_target(str(target), None, by_layers=False)
    with (
        patch.object(TargetServer, "_find_model", lambda *_: ("tiny", 160)),
        patch.object(TargetServer, "_try_out", lambda _: None),
        replying(b"\n\n".join(lines), headers={"Content-Type": "text/event-stream"}) as url,
    ):
        served = TargetServer(config, opened.tokenizer, ENDS, 160, VOCABULARY)
        served.client.url = url
        refusal("nested", served.stream, [1, 2], 4, 0)


def _with_ids(change: Callable[[list[Any]], Any], rate: int = 3) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    """A fault of every third answer: its ids changed, and named so in its log-probabilities."""

    def fault(number: int, reply: dict[str, Any]) -> dict[str, Any]:
        if number % rate == rate - 1:
            choice = reply["choices"][0]
            ids, rows = change([*choice["token_ids"]]), choice["logprobs"]
            choice["token_ids"] = ids
            if isinstance(ids, list) and len(ids) == len(rows["tokens"]):
                names = [f"token_id:{one}" for one in ids]
                top = [{**row, name: row[old]} for row, name, old in
                       zip(rows["top_logprobs"], names, rows["tokens"], strict=True)]  # fmt: skip
                choice["logprobs"] = {**rows, "tokens": names, "top_logprobs": top}
        return reply

    return fault


CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "beyond": lambda ids: [VOCABULARY, *ids[1:]], "huge": lambda ids: [*ids[:-1], 2**70],
    "negative": lambda ids: [-1, *ids[1:]], "floats": lambda ids: [float(one) for one in ids],
    "bool": lambda ids: [True, *ids[1:]], "texts": lambda ids: [str(one) for one in ids], "a text": lambda ids: "abc",
    "a mapping": lambda ids: {"0": 1}, "null": lambda ids: [None, *ids[1:]], "a list": lambda ids: [[1], *ids[1:]],
}  # fmt: skip
CHANGED = [*itertools.product(CHANGES, RUN)]


@pytest.mark.parametrize(("change", "command"), typical_where(each_value(CHANGED).__contains__, CHANGED))
def test_ids_that_the_target_has_not_are_asked_again(
    command: str, change: str, model: PreTrainedModel, asked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_FAILED_SHARE", 1.0)
    run = RUN[command]
    with serving(engine := Engine(model, letter_tokenizer(), ENDS, _with_ids(CHANGES[change]))) as url:
        run(first := asked(command, url, concurrency=1))
        engine.fault = lambda _, reply: reply
        run(again := replace(first, resume=True))
    if command == "generate":
        assert not [one for one in skipped(again) if one["reason"] != "empty"]
        told = {**responses(again), **{one["id"]: one for one in skipped(again)}}
        assert len(told) == PROMPTS
        with serving(Engine(model, letter_tokenizer(), ENDS)) as url:
            run(right := replace(first, server=url, out_dir=f"{first.out_dir}-right"))
        assert responses(again) == responses(right)
    else:
        report = json.loads((Path(again.out_dir) / "report.json").read_text())
        numbers = report["arms"]["answers"]["numbers"]
        assert (numbers["answers"], numbers["unanswered"]) == (PROMPTS, 0)
        assert not report["arms"]["answers"]["faults"]


ABSURD = [
    {"temperature": 1e-320}, {"temperature": 1e300}, {"temperature": float("nan")}, {"temperature": "NaN"},
    {"temperature": -1}, {"temperature": 1, "top_k": 10**30}, {"temperature": 1, "top_k": -1}, {"top_p": "inf"},
    {"temperature": 1, "top_p": 0}, {"temperature": 1, "top_p": float("inf")}, {"repetition_penalty": 1e-300},
    {"repetition_penalty": 1e300}, {"repetition_penalty": 0}, {"repetition_penalty": -2.0}, {"min_p": float("nan")},
    {"prompt_ids": [-1]}, {"prompt_ids": [VOCABULARY]}, {"output_ids": [10**30]}, {"output_ids": [1.0]},
    {"output_ids": [True]}, {"prompt_ids": "12"}, {"output_ids": []}, {"prompt_ids": [1] * 200},
]  # fmt: skip


@pytest.mark.parametrize("absurd", ABSURD, ids=str)
def test_absurd_values_are_refused_with_their_line(absurd: dict[str, Any], target: Path, tmp_path: Path) -> None:
    good = {"prompt_ids": [1, 2, 3], "output_ids": [4, 5], "temperature": 0}
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (good, {**good, **absurd})))
    with pytest.raises(UserError, match=rf"answers\.jsonl:2: .*{[*absurd][-1]}"):
        read_answers(str(file), open_target(str(target), None, by_layers=False))


def test_values_at_the_limits_are_judged(model: PreTrainedModel) -> None:
    for own in (
        {"temperature": 1e-6}, {"temperature": 1e6}, {"temperature": 1.0, "top_p": 1e-300},
        {"temperature": 1.0, "min_p": 1e-300}, {"temperature": 1.0, "top_k": 2**31 - 1}, {"repetition_penalty": 1e-3},
        {"temperature": 1.0, "repetition_penalty": 1e3}, {"temperature": 1.0, "top_p": 1 - 1e-16},
    ):  # fmt: skip
        answers = {1: ServedAnswer(prompt_ids=[1, 2, 3], output_ids=[4, 5, 6], **own)}
        finding = judge_arm(score_answers(model, answers, Streams(0), simulate=False), answers, 0.001)
        assert finding.verdict


INTERRUPTED = SystemError("compiled code returned a result with an exception set")
INTERRUPTED.__cause__ = KeyboardInterrupt()


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("a bug"), 3), (SystemError("a bug"), 3), (INTERRUPTED, 130), (MemoryError(), 3),
     (RecursionError(), 3), (torch.OutOfMemoryError("full"), 3), (OSError("no number"), 3),
     (BrokenPipeError(32, "pipe"), 3), (KeyboardInterrupt(), 130), (Terminated(), 143), (UserError("bad"), 2),
     (PermissionError(13, "denied"), 2), (SystemExit(1), 1)],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)  # fmt: skip
def test_a_verdicts_status_is_no_crashs(
    error: BaseException, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with patch.object(conf, "look_for_files", side_effect=error):
        said = ["outrider", "audit", "target=owner/name", f"out_dir={tmp_path}", "answers=a.jsonl"]
        assert status_of(cli.main, *said) == status
    said = capsys.readouterr().err
    assert ("Traceback" in said) == (status == 3)
    assert said or status == 1


def test_what_is_typed_wrongly_and_what_cannot_be_imported_are_no_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["audit", "no_such=1"], ["audit", "target"], ["audit"], ["audit", "--target", "x"], ["no-such"]):
        assert status_of(cli.main, "outrider", *words) == 2
    with patch.object(cli, "import_module", side_effect=ImportError("no torch")):
        assert status_of(cli.main, "outrider", "audit", "target=x") == 3
    assert "no torch" in capsys.readouterr().err


def test_requests_run_together_and_an_error_waits_for_no_other() -> None:
    lock, running, most, hangs = threading.Lock(), 0, [0], threading.Event()

    def work(number: int) -> int:
        nonlocal running
        with lock:
            running += 1
            most.append(running)
        time.sleep(0.01)
        with lock:
            running -= 1
        return number * number

    assert ask_together([partial(work, number) for number in range(20)], 3) == [n * n for n in range(20)]
    assert max(most) == 3
    refusal("no more", ask_together, [partial(raise_refusal, "no more"), hangs.wait, hangs.wait], 2)
    hangs.set()  # only now do they end


def raise_refusal(words: str) -> None:
    raise UserError(words)
