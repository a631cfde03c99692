"""Responses of a target: what is answered, how, and that nothing but the prompt and the seed decides it."""

import functools
import json
import multiprocessing
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from outrider.base.errors import UserError
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import read_records
from outrider.draft_models.targets.open_target import OpenTarget, load_tokenizer
from outrider.draft_models.targets.proof import NotByLayersError
from outrider.inference.batch import directory
from outrider.inference.batch import generate as responses_module
from outrider.inference.batch.batch_decoder import Generator
from outrider.inference.batch.directory import prompt_id
from outrider.inference.batch.generate import generate_responses
from outrider.inference.batch.responder import Responder
from outrider.inference.core.batch import Batch
from outrider.inference.measure.time_limit import TimeLimit
from outrider.train.parts.top_k_rows import load_top_k_rows
from tests.inference.batch.responding import (
    TALKS,
    read_responses,
    responses,
    skipped,
    summary,
    talk,
)
from tests.launched import launched


def test_responses_do_not_depend_on_batches_or_shards(make, monkeypatch):
    """Nor on how they are decoded: a target that is not proven to run by layers has padded batches."""
    expected = None
    for name, batch_size, shard_size in (("a", 1, 1), ("b", 3, 4), ("c", 64, 512), ("whole", 3, 512)):
        if name == "whole":
            monkeypatch.setattr(OpenTarget, "stack", Mock(side_effect=NotByLayersError("no")))
        config = make(name=name, batch_size=batch_size, shard_size=shard_size)
        generate_responses(config)
        expected = expected or responses(config)
        assert responses(config) == expected
    assert len(expected) == len(TALKS)
    assert len(list(Path(make(name="a").out_dir).glob("responses-*.jsonl"))) == len(TALKS)
    generate_responses(make(name="seed", seed=1))
    assert responses(make(name="seed")) != expected


def _killed_at(config, write):
    """In a process of its own: SIGKILL before the given write of a file, or half through it."""
    real, count = directory.write_atomically, 0

    def write_or_die(path, content):
        nonlocal count
        count += 1
        if count == write:
            path.with_name(f".{path.name}.1").write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, content)

    directory.write_atomically = write_or_die
    generate_responses(config)


@pytest.mark.slow
def test_killed_at_any_file_and_resumed_gives_the_same_responses(make):
    records = [*TALKS[:7], talk("refused")]
    whole = make(records, name="whole", top_k_logits=3, batch_size=2)
    generate_responses(whole)
    writes = len([path for path in Path(whole.out_dir).iterdir() if path.name.startswith(("responses-", "skipped-"))])
    assert writes == 7  # three shards of distributions and responses, and what was skipped
    for write in range(1, writes + 1):
        config = make(records, name=f"killed{write}", top_k_logits=3, batch_size=2)
        job = multiprocessing.get_context("fork").Process(target=_killed_at, args=(config, write))
        job.start()
        job.join()
        assert job.exitcode == -signal.SIGKILL
        assert len(responses(config)) < 7
        generate_responses(replace(config, resume=True, batch_size=3))
        assert responses(config) == responses(whole)
        assert [entry["reason"] for entry in skipped(config)] == ["template"]
        assert {key: summary(config)[key] for key in ("responses", "tokens", "skipped")} == {
            key: summary(whole)[key] for key in ("responses", "tokens", "skipped")
        }
        tops = {response.record["id"]: response.top for response in read_responses(config.out_dir)}
        for response in read_responses(whole.out_dir):
            top = tops[response.record["id"]]
            assert torch.equal(top.tokens, response.top.tokens)
            torch.testing.assert_close(top.logprobs, response.top.logprobs, atol=0.01, rtol=0)  # kept as float16
        names = {path.name for path in Path(config.out_dir).iterdir()}
        assert [name for name in names if name.startswith(".")] == [".lock"]
        assert all(name.replace("safetensors", "jsonl") in names for name in names if name.endswith(".safetensors"))


def test_two_processes_give_what_one_gives(make):
    one, two = make(name="one"), make(name="two")
    generate_responses(one)

    def respond(state):
        responses_module.join_processes = lambda: state
        generate_responses(two)

    assert launched(2, respond) == [0, 0]
    assert responses(two) == responses(one)
    assert summary(two) == summary(one)
    numbers = {int(path.stem.rpartition("-")[2]) % 2 for path in Path(two.out_dir).glob("responses-*.jsonl")}
    assert numbers == {0, 1}  # each process has written shards of its own


def test_a_prompt_joins_as_another_ends(make, monkeypatch):
    """Over layers: the same answers in fewer passes, of a batch at most; a kill loses no more than it says."""
    step, answer, found, passes = Batch.step, Responder.answer, [], []
    monkeypatch.setattr(Batch, "step", lambda batch: passes[-1].append(len(batch.texts)) or step(batch))
    monkeypatch.setattr(
        Responder, "answer", lambda self, tasks, left: groups.append(len(tasks)) or answer(self, tasks, left)
    )
    for joined in (1, 4):
        monkeypatch.setattr(responses_module, "_MAX_GROUPS", joined)
        groups = passes.append([]) or []
        config = make([talk(f"question {i}") for i in range(40)], str(joined), batch_size=4, shard_size=18)
        generate_responses(config)
        found.append(responses(config))
    assert groups == [4, 12, 4, 16, 4]
    assert found[0] == found[1]
    assert [max(counts) for counts in passes] == [4, 4]
    assert len(passes[1]) < 0.85 * len(passes[0])


def test_a_next_turn_waits_for_no_other_answer(make, monkeypatch):
    """Over layers; in padded batches all prompts of a turn are answered together."""
    real, turns = Responder._take, []
    monkeypatch.setattr(Responder, "_take", lambda *given: turns.append(len(given[1].answers)) or real(*given))
    generate_responses(make(batch_size=10))
    assert turns != sorted(turns)


@pytest.fixture
def answering_takes(monkeypatch):
    """A clock that only answering moves, by what a function of the time says; returns how that function is given."""
    now, answer = [0.0], Responder.answer

    def take(seconds):
        def slow(responder, tasks, seconds_left):
            answer(responder, tasks, seconds_left)
            now[0] += seconds(now[0]) * -(-len(tasks) // responder.config.batch_size)

        monkeypatch.setattr(Responder, "answer", slow)
        monkeypatch.setattr(responses_module, "TimeLimit", functools.partial(TimeLimit, clock=lambda: now[0]))
        return now

    return take


@pytest.fixture
def thirty_seconds_a_batch(answering_takes):
    answering_takes(lambda _: 30)


def test_a_batch_that_is_too_slow_goes_on_with_fewer_prompts(make, monkeypatch, capsys):
    """A resumed run answers the others, as if they had been answered at once."""
    now, choose, whole = [0.0], Generator.choose, make(name="whole", max_new_tokens=30)

    def slow(*given):
        now[0] += 1.0
        return choose(*given)

    generate_responses(whole)
    with monkeypatch.context() as patched:
        patched.setattr(Generator, "choose", slow)
        patched.setattr(responses_module, "TimeLimit", functools.partial(TimeLimit, clock=lambda: now[0]))
        generate_responses(config := make(batch_size=10, smallest_batch=1, max_new_tokens=30, minutes=1.5))
    found = responses(config)
    assert 1 <= len(found) < len(responses(whole)) == 10
    assert now[0] < 1.5 * 90  # all would have taken 300
    assert (
        f"unanswered={10 - len(found)} prompts, of a server that failed or a batch too slow" in capsys.readouterr().out
    )
    generate_responses(replace(config, resume=True, minutes=None))
    assert responses(config) == responses(whole)


def test_the_time_in_which_prompts_are_read_does_not_make_a_batch_smaller(make, monkeypatch):
    now, step = [0.0], Batch.step

    def slow(batch):
        now[0] += 0.1 if now[0] else 60
        return step(batch)

    monkeypatch.setattr(Batch, "step", slow)
    monkeypatch.setattr(responses_module, "TimeLimit", functools.partial(TimeLimit, clock=lambda: now[0]))
    generate_responses(config := make(batch_size=10, smallest_batch=1, max_new_tokens=30, minutes=1.5))
    assert len(responses(config)) == 10


@pytest.mark.usefixtures("thirty_seconds_a_batch")
def test_when_the_time_is_over_what_is_there_is_kept_and_more_time_goes_on(make, monkeypatch):
    whole = make(name="whole")
    generate_responses(whole)
    config = make(batch_size=2, shard_size=3, minutes=1)
    generate_responses(config)
    first = responses(config)
    assert len(first) == 4  # two batches: a full shard would have been three
    assert summary(config)["responses"] == 4
    with monkeypatch.context() as patched:
        patched.setattr(responses_module, "Responder", None)
        generate_responses(replace(config, resume=True))  # the minute is over: the target is not even loaded
    assert responses(config) == first
    generate_responses(replace(config, resume=True, minutes=2))
    assert len(responses(config)) == 8
    generate_responses(replace(config, resume=True, minutes=None))
    assert responses(config) == responses(whole)


@pytest.mark.usefixtures("thirty_seconds_a_batch")
def test_a_slow_target_loses_minutes_at_most(make, monkeypatch):
    monkeypatch.setattr(responses_module, "_MAX_GROUPS", 1)
    monkeypatch.setattr(responses_module, "SAVE_SECONDS", 50)
    generate_responses(make(batch_size=2, shard_size=100))
    files = sorted(Path(make().out_dir).glob("responses-*.jsonl"))
    assert [len(file.read_text().splitlines()) for file in files] == [4, 4, 2]


def test_a_plan_is_an_upper_bound_and_makes_nothing(make, capsys):
    """Of what a run then answers; without a word about the memory of a server. A resumed run has fewer prompts."""

    def plan(**options):
        generate_responses(make(plan=True, **options))
        said = capsys.readouterr().out
        assert not Path(make().out_dir).exists()
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+) ", said)}, said

    found, said = plan(batch_size=3)
    assert (found["prompts"], found["turns"], found["tokens_at_most"]) == (10, 20, 240)
    assert "keys and values of 3 texts of up to" in said
    assert "data.max_records= makes them fewer" in said
    assert "minutes=7 end it at the latest" in plan(minutes=7)[1]
    assert "memory" not in plan(server="http://127.0.0.1:9", concurrency=4)[1]  # which is not asked
    assert plan(turns="first")[0]["turns"] == 10
    generate_responses(make(name="made"))
    told = json.loads((Path(make(name="made").out_dir) / "summary.json").read_text())
    assert told["tokens"] <= 240
    assert plan(name="made", resume=True)[0]["prompts"] == 0
    with pytest.raises(UserError, match=r"data source=local: no prompt in it .*\(found nothing\); give more data"):
        plan(records=[{"text": "a"}], heldout_fraction=0.999)
    with pytest.raises(UserError, match=r"data\.heldout_fraction=0\.1: expected 0\.05 or 0: all prompts are answered"):
        plan(records=[talk("a", "b")], heldout_fraction=0.1)


def test_a_training_holds_out_a_part_of_the_answers(make, target):
    """By the options of both commands that nobody gives: no prompt that a training would hold out lacks an answer."""
    config = make([talk(f"question {i}", "an answer") for i in range(100)], max_new_tokens=2, top_k_logits=4,
                  heldout_fraction=DataConfig.heldout_fraction)  # fmt: skip
    generate_responses(config)
    data = DataConfig(source="local", path=f"{config.out_dir}/responses-*.jsonl", cache_dir=f"{config.out_dir}/cache")
    sides = {side: {r["messages"][0]["content"] for r in read_records(data, side)} for side in ("train", "heldout")}
    assert sides["heldout"]
    assert not sides["heldout"] & sides["train"]
    assert summary(config)["prompts"] == 100
    parts = [replace(data, share=share) for share in (1.0, 0.5)]
    tokens = [
        sum(int((rows[i]["documents"] >= 0).sum()) for i in range(len(rows)))
        for rows in (load_top_k_rows(part, load_tokenizer(str(target)), 64, "train") for part in parts)
    ]
    assert 0 < tokens[1] < 0.8 * tokens[0]
    assert len(load_top_k_rows(data, load_tokenizer(str(target)), 64, "heldout"))


def test_of_plain_texts_the_held_out_ones_are_not_continued(make):
    """Their continuations have another hash, so a training would not hold them out."""
    config = make([{"text": f"{i} def add(first, second): return first"} for i in range(100)], heldout_fraction=0.1)
    expected = len([*read_records(config.data, "train")])
    generate_responses(config)
    assert summary(config)["prompts"] == expected < 100


def test_plain_text_is_continued_from_its_beginning(make):
    texts = [f"{i} def add(first, second): return first" for i in range(6)]
    config = make([{"text": text} for text in texts], prefix_tokens=16)
    generate_responses(config)
    found = responses(config)
    assert len(found) == 6
    for record in found.values():
        assert record["prompt_tokens"] == 16
        source = next(text for text in texts if record["text"].startswith(text[:16]))
        assert record["text"] != source
        assert record["id"] == prompt_id(text=source[:16])
    short = make([{"text": "0123456789"}], name="short", prefix_tokens=16)
    generate_responses(short)
    (record,) = responses(short).values()
    assert record["text"].startswith("01234")
    assert record["prompt_tokens"] == 5


def test_what_cannot_be_answered_is_counted_and_listed(make):
    records = [talk("hello"), talk("hello", "said already"), talk("refused"), talk("x" * 200), talk("y" * 140, "b")]
    records += [{"messages": [{"role": "system", "content": "be kind"}]}, {"messages": []}]
    config = make(records)
    generate_responses(config)
    told = summary(config)
    assert told | {"records": 6, "empty": 1, "prompts": 5, "duplicates": 1, "skipped": 3} == told
    assert told["skipped_by_reason"] == {"template": 1, "too_long": 1, "no_question": 1}
    listed = {entry["reason"]: entry for entry in skipped(config)}
    assert listed["too_long"]["source"].endswith("prompts.jsonl:4")
    assert listed["too_long"]["detail"] == "205 tokens in a context of 160"
    assert "refuses this conversation (no)" in listed["template"]["detail"]
    before = {path: path.read_bytes() for path in Path(config.out_dir).glob("*.jsonl")}
    generate_responses(replace(config, resume=True))
    assert {path: path.read_bytes() for path in Path(config.out_dir).glob("*.jsonl")} == before


def test_answers_without_an_end_can_be_left_out(make):
    kept, dropped = make(name="kept", max_new_tokens=3), make(name="dropped", max_new_tokens=3, keep_truncated=False)
    generate_responses(kept)
    generate_responses(dropped)
    cut = {identity for identity, record in responses(kept).items() if record["finish"] == "length"}
    assert len(cut) == summary(kept)["truncated"] > 0
    assert {record["finish"] for record in responses(dropped).values()} <= {"end"}
    whole = {identity: record for identity, record in responses(kept).items() if identity not in cut}
    assert whole.items() <= responses(dropped).items()
    assert {entry["reason"] for entry in skipped(dropped)} == {"truncated"}
    assert len(skipped(dropped)) + len(responses(dropped)) == len(TALKS)
