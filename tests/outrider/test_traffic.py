"""The log of outrider serve: what it answered, as trainings read the target's own answers; whatever ends the server."""

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import outrider
from outrider.data_prep.ngrams.token_shards import passages
from outrider.data_prep.text.documents import encode
from outrider.data_prep.text.records import Record
from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import read_records
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.encoder import open_encoder
from outrider.inference.settings.method import MethodConfig, StopConfig
from outrider.server.traffic import TrafficLog, TrafficRecords
from tests.faults import plant
from tests.forked import Fork
from tests.full_disk import largest_file
from tests.outrider.test_serve import TALK, Slow, ask, joined, serving, until_true
from tests.refusals import refusal
from tests.tiny import save_target

TEMPLATE = "{{ style }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TALKS = [*TALK, {"role": "assistant", "content": "an answer"}, {"role": "user", "content": "go on"}]
WRITE = "log.write({'id': f'é{number}', 'text': 'x' * 5000}); number += 1"
IDS = {"extra_body": {"return_token_ids": True}}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_target(tmp_path_factory.mktemp("target"), kv_heads=2, seed=1, num_hidden_layers=2, eos_token_id=257)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    return outrider.load(str(target), device="cpu", method=MethodConfig("prompt_lookup", stop=StopConfig(max_draft=4)))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "traffic.jsonl"


def data_of(log: Path, tmp_path: Path, **options: Any) -> DataConfig:
    return DataConfig(source="local", path=str(log), heldout_fraction=0.0, cache_dir=str(tmp_path / "cache"), **options)


def records_of(log: Path, tmp_path: Path, **options: Any) -> list[Record]:
    return [*read_records(data_of(log, tmp_path, **options), "train")]


def answers(log: Path, tmp_path: Path, model: Any) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of each line, as trainings read them."""
    pairs = []
    for document in encode(records_of(log, tmp_path), model.setup.target.tokenizer, "tokenizer"):
        start = int(np.flatnonzero(document.supervised)[0])
        assert document.supervised[start:].all()
        pairs.append((document.ids[:start].tolist(), document.ids[start:].tolist()))
    return pairs


def ids_of(choices: Any) -> Iterator[tuple[list[int], list[int]]]:
    return ((choice.prompt_token_ids, choice.token_ids) for choice in choices)


def test_trainings_read_every_answer_with_its_own_tokens(
    model: Any, log: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(model, log=str(log)) as (_, service, client):
        expected = [*ids_of(ask(client, **IDS).choices), *ids_of(ask(client, messages=TALKS, **IDS).choices)]
        expected += ids_of(ask(client, n=2, temperature=1.5, seed=3, **IDS).choices)
        expected += ids_of(client.completions.create(model="tiny", prompt=["ab", "c"], max_tokens=9, **IDS).choices)
        stop = model.generate(TALK, max_new_tokens=8)[-1]
        expected += ids_of(ask(client, stop=[stop], **IDS).choices)
        joined(ask(client, stream=True))
        expected.append(expected[0])
        until_true(lambda: not service.workers.open)
    assert sorted(answers(log, tmp_path, model)) == sorted(expected)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines) == 8
    assert sum(not line["greedy"] for line in lines) == 2
    ended = {tuple(ids) for _, ids in expected if ids[-1] == 257}
    assert all((line["finish"] == "end") == (line["tokens"] and ids in ended) for line, ids in written(lines))
    encoder = open_encoder(model.setup.target.source)
    counted = [list(passage.ids) for passage in passages(records_of(log, tmp_path), "assistant", encoder)]
    whole = [ids if "messages" in line else [*line["written"]["documents"][0]["ids"]] for line, ids in written(lines)]
    assert sorted(counted) == sorted(map(list, whole))
    rows = load_rows(data_of(log, tmp_path), model.setup.target.tokenizer, 128, "train")
    labels = sum(int((rows[i]["labels"] != IGNORE).sum()) for i in range(len(rows)))
    assert labels == sum(len(ids) for _, ids in expected)
    assert "tokenised anew" not in capfd.readouterr().err
    plant(monkeypatch, TrafficRecords, "make_record", "(answer_start, len(ids))", "(answer_start - 1, len(ids) - 1)")
    log.unlink()
    with serving(model, log=str(log)) as (_, service, client):
        wrong = [*ids_of(ask(client, **IDS).choices)]
        until_true(lambda: not service.workers.open)
    with pytest.raises(AssertionError):
        assert answers(log, tmp_path, model) == wrong


def written(lines: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
    for line in lines:
        [document] = line["written"]["documents"]
        [[begin, end]] = document["answers"]
        yield line, tuple(document["ids"][begin:end])


def test_arguments_of_the_template_belong_to_the_tokens(
    model: Any, log: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are read where a training gives the same, and else said not to be."""
    style = {"chat_template_kwargs": {"style": "terse"}}
    with serving(model, log=str(log)) as (_, service, client):
        [expected] = ids_of(ask(client, extra_body=style | IDS["extra_body"]).choices)
        until_true(lambda: not service.workers.open)
    for options in (style, {}):
        config = data_of(log, tmp_path, **options)
        row = load_rows(config, model.setup.target.tokenizer, 128, "train")[0]
        assert (row["input_ids"].tolist()[: len(expected[0])] == expected[0]) == bool(options)
        assert ("tokenised anew" in capfd.readouterr().err) == (not options)


def test_a_text_whose_client_leaves_is_logged_as_cut(model: Any, log: Path, tmp_path: Path) -> None:
    slow = Slow(model)
    with serving(slow, log=str(log)) as (url, service, _):
        body = {"messages": TALK, "stream": True, "max_tokens": 99}
        with (
            pytest.raises(httpx.ReadTimeout),
            httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=1) as left,
        ):
            [*left.iter_raw()]
        until_true(lambda: all(answers.cancelled for answers in [*service.workers.open.values()]))
        slow.go.set()
        until_true(lambda: not service.workers.open)
    [(_, ids)] = answers(log, tmp_path, model)
    tokens = [token for r in model.rounds(TALK, max_new_tokens=99) for token in r.tokens]
    assert 0 < len(ids) < 99
    assert tokens[: len(ids)] == ids
    [record] = records_of(log, tmp_path)
    assert record["truncated"]


def test_no_client_waits_for_the_log(model: Any, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, write = threading.Event(), TrafficLog.write
    monkeypatch.setattr(TrafficLog, "write", lambda *call: go.wait(60) and write(*call))
    with serving(model, log=str(log)) as (_, service, client):
        assert joined(ask(client, stream=True)) == ask(client).choices[0].message.content
        assert not log.read_bytes()
        go.set()
        until_true(lambda: not service.workers.open)
    assert len(log.read_bytes().splitlines()) == 2


def test_without_the_option_nothing_is_written(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(model) as (_, _, client):
        ask(client)
    assert [*tmp_path.iterdir()] == []


def test_a_killed_server_leaves_at_most_one_unfinished_line(log: Path, tmp_path: Path) -> None:
    lines = "from outrider.server.traffic import TrafficLog", f"log, number = TrafficLog({str(log)!r}), 0"
    server = Fork(["-c", "\n".join([*lines, f"while True: {WRITE}"])])
    until_true(lambda: log.exists() and log.stat().st_size > 10**5)
    server.send_signal(signal.SIGKILL)
    server.communicate()
    whole = log.read_bytes().rpartition(b"\n")[0]
    log.write_bytes(whole + b'\n{"id": "unfin')
    traffic = TrafficLog(str(log))
    refusal("another server writes it", TrafficLog, str(log))
    traffic.write({"id": "last"})
    traffic.close()
    numbers = [json.loads(line)["id"] for line in log.read_text().splitlines()]
    assert numbers == [*(f"é{number}" for number in range(len(numbers) - 1)), "last"]
    assert log.stat().st_mode & 0o077 == 0
    refusal("cannot be written", TrafficLog, str(tmp_path / "none" / "log"))


def test_a_file_of_another_program_loses_nothing(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_text('{"id": "first"}\n{"id": "without a line feed"}')
    log.chmod(0o644)
    traffic = TrafficLog(str(log))
    traffic.write({"id": "last"})
    traffic.close()
    assert [json.loads(line)["id"] for line in log.read_text().splitlines()] == ["first", "without a line feed", "last"]
    assert "others than its owner may read" in capsys.readouterr().err
    for note in ("a note\nanother", "a note\n", '{\n "a": 1\n}', '{\n "a": 1\n}\n'):
        log.write_text(note)
        refusal("holds something else than records", TrafficLog, str(log))
        assert log.read_text() == note


def test_a_conversation_that_no_training_reads_is_logged_as_a_text(model: Any, log: Path, tmp_path: Path) -> None:
    talks = [[*TALK, *TALK], [*TALK, {"role": "assistant", "content": ""}, *TALK]]
    with serving(model, log=str(log)) as (_, service, client):
        expected = [pair for talk in talks for pair in ids_of(ask(client, messages=talk, **IDS).choices)]
        until_true(lambda: not service.workers.open)
    assert sorted(answers(log, tmp_path, model)) == sorted(expected)
    assert all("text" in json.loads(line) for line in log.read_text().splitlines())


def test_a_full_disk_loses_whole_lines(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traffic = TrafficLog(str(log))
    traffic.write({"id": "first"})
    with largest_file(log.stat().st_size + 9):
        traffic.write({"id": "x" * 100})
    traffic.write({"id": "last"})
    traffic.close()
    assert [json.loads(line)["id"] for line in log.read_text().splitlines()] == ["first", "last"]
    assert "answers are missing" in capsys.readouterr().err
