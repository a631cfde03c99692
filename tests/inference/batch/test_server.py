"""Answers of a server: those of the own path, whatever the server drops, delays, repeats or gets wrong."""

import copy
import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.base.errors import UserError
from outrider.data_prep.text.data_files import RUN_FILE
from outrider.inference.batch.client import ReplyError
from outrider.inference.batch.generate import generate_responses
from outrider.inference.batch.server import TokenRow, check_rows
from tests.inference.batch.responding import ENDS, TALKS, letter_tokenizer, read_responses, responses, skipped
from tests.inference.batch.serving import Engine, serving
from tests.refusals import refusal

pytestmark = pytest.mark.usefixtures("quick")
GREEDY = {"temperature": 0.0, "greedy_tokens": 0}


@pytest.fixture
def engine(model):
    return lambda *args, **shown: Engine(model, letter_tokenizer(), ENDS, *args, **shown)


def asked(make, url, name="served", **values):
    return make(name=name, server=url, **{"concurrency": 3, **values})


def tops(config):
    return {response.record["id"]: response for response in read_responses(config.out_dir)}


def test_a_servers_greedy_answers_and_log_probabilities_are_the_own_paths(make, engine, tmp_path):
    own = make(name="own", top_k_logits=4, **GREEDY)
    generate_responses(own)
    described = tmp_path / "described"
    shutil.copytree(own.target, described, ignore=shutil.ignore_patterns("*.safetensors"))  # no weights are read
    with serving(engine()) as url:
        config = replace(asked(make, url, top_k_logits=4, **GREEDY), target=str(described))
        generate_responses(config)
    assert responses(config) == responses(own)
    assert len(responses(own)) == len(TALKS)
    expected = tops(own)
    for identity, found in tops(config).items():
        want = expected[identity]
        assert torch.equal(found.top.tokens, want.top.tokens)
        torch.testing.assert_close(found.top.logprobs, want.top.logprobs, atol=0.01, rtol=0)
        torch.testing.assert_close(found.top.tail, want.top.tail, atol=0.01, rtol=0)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_tokenizer_stands_for_the_target_of_a_server(make, engine, tmp_path, file):
    """Also without a config: the files are the same, but that they say that no weights were seen."""
    short = {**GREEDY, "turns": "first"}  # within the context, which a tokenizer does not tell
    own = make(name="own", **short)
    generate_responses(own)
    missing = shutil.ignore_patterns("*.safetensors", file)
    shutil.copytree(own.target, tmp_path / "tokenizer", ignore=missing)
    with serving(engine()) as url:
        config = replace(asked(make, url, **short), target=None, tokenizer=str(tmp_path / "tokenizer"))
        generate_responses(config)
        generate_responses(replace(config, resume=True))
    assert responses(config) == responses(own)
    run = json.loads((tmp_path / "served" / RUN_FILE).read_text())
    assert run["model"].keys() == {"vocabulary", "weights_seen"}
    assert run["model"]["weights_seen"] is False


def test_an_answer_begins_greedily_and_is_sampled_by_its_seed_alone(make, engine):
    with serving(engine()) as url:
        one = asked(make, url, "one", top_k_logits=3, greedy_tokens=4)
        two = asked(make, url, "two", top_k_logits=3, greedy_tokens=4, batch_size=7, concurrency=1, shard_size=2)
        other = asked(make, url, "other", seed=1, greedy_tokens=4)
        for config in (one, two, other):
            generate_responses(config)
    assert responses(one) == responses(two)
    assert responses(one) != responses(other)
    for response in read_responses(one.out_dir):
        first = response.top.tokens[:4] if len(response.record["messages"]) == 2 else response.top.tokens[:1]
        assert torch.equal(first, response.top.ids[: len(first), 0])


def _fault(kind):
    """A fault at every third request, of servers that get the rest right."""
    last, planted = {}, []

    def fault(number, reply):
        before = last.get("reply", reply)
        last["reply"] = reply
        if number % 3 != 1 or (kind == "shifts" and len({*reply["choices"][0]["token_ids"]}) == 1):
            return reply  # of one token said over and over any row may be of any place
        if kind == "slow":
            time.sleep(0.3)
        shifted = copy.deepcopy(reply)
        found = shifted["choices"][0]["logprobs"]
        planted.append(number)
        found["top_logprobs"] = [*found["top_logprobs"][1:], found["top_logprobs"][0]]
        found["token_logprobs"] = [*found["token_logprobs"][1:], found["token_logprobs"][0]]
        statuses = {"drops": None, "500": 500, "429": 429}
        return {**statuses, "slow": reply, "repeats": before, "no completion": {"choices": []}, "shifts": shifted}[kind]

    fault.planted = planted
    return fault


@pytest.mark.parametrize("kind", ["drops", "500", "429", "slow", "repeats", "no completion", "shifts"])
def test_a_server_with_faults_gives_the_same_files(make, engine, kind):
    with serving(engine()) as url:
        right = asked(make, url, "right", records=TALKS[:5], top_k_logits=2)
        generate_responses(right)
    fault = _fault(kind)
    with serving(engine(fault)) as url:
        config = asked(make, url, "wrong", records=TALKS[:5], top_k_logits=2, concurrency=1, server_timeout=0.2)
        generate_responses(config)
    assert len(fault.planted) >= 3
    assert responses(config) == responses(right)
    files = {path.name for path in Path(right.out_dir).iterdir()}
    assert {path.name for path in Path(config.out_dir).iterdir()} == files
    for name in files - {"run.json", "seconds.json", ".lock"}:
        assert (Path(config.out_dir) / name).read_bytes() == (Path(right.out_dir) / name).read_bytes()


def test_a_server_that_goes_away_ends_the_run_which_goes_on_with_another(make, engine):
    with serving(engine()) as url:
        whole = asked(make, url, "whole", top_k_logits=2)
        generate_responses(whole)
    with serving(engine(lambda number, reply: reply if number < 18 else None)) as url:
        config = asked(make, url, top_k_logits=2, server_retries=1)
        refusal(r"prompts failed.*no reply.*resume=true", generate_responses, config)
    assert 0 < len(responses(config)) < len(TALKS)
    with serving(engine()) as url:
        generate_responses(replace(config, server=url, resume=True))
    assert responses(config) == responses(whole)
    assert not skipped(config)
    for identity, found in tops(config).items():
        assert torch.equal(found.top.logprobs, tops(whole)[identity].top.logprobs)


@pytest.mark.parametrize("ends", ["gone", "refused"])
def test_no_answer_is_lost_when_a_server_ends_the_run(make, engine, ends):
    """Not of the unfinished shard, nor of the last batch."""

    def fault(number, reply):
        return reply if number < 6 else 401 if ends == "refused" else None

    with serving(engine(fault)) as url:
        config = asked(
            make, url, server_retries=0, shard_size=100, batch_size=100, concurrency=1, turns="first", **GREEDY
        )
        refusal("prompts failed|401", generate_responses, config)
    assert len(responses(config)) >= 4


def test_texts_without_ids_are_taken_where_they_are_tokenised_so(make, engine, capsys):
    own = make(name="own", **GREEDY)
    generate_responses(own)

    def lossy(number, reply):
        if number % 4 == 3:
            reply["usage"]["completion_tokens"] += 3
        return reply

    with serving(engine(ids=False)) as url, serving(engine(lossy, ids=False)) as other:
        config, some = asked(make, url, **GREEDY), asked(make, other, "some", concurrency=1, turns="first", **GREEDY)
        generate_responses(config)
        generate_responses(some)
    assert responses(config) == {name: {**one, "retokenised": True} for name, one in responses(own).items()}
    assert re.search(r"retokenised=4/4", capsys.readouterr().out)
    assert {record["reason"] for record in skipped(some)} == {"retokenised"}
    assert len(skipped(some)) + len(responses(some)) == len(TALKS)


@pytest.mark.parametrize(("first", "words"), [(0, "fewer log-probabilities"), (1, "does not list all tokens")])
def test_tokens_of_which_llama_cpp_says_too_little_are_read_nevertheless(make, engine, first, words):
    """It lists none that ends within a character, here those before `first`, and none beside those it drafted."""

    def brief(number, reply):
        choice = reply["choices"][0]
        rows = zip(choice.pop("token_ids"), choice["logprobs"]["token_logprobs"], strict=True)
        content = [{"id": token, "logprob": logprob, "top_logprobs": []} for token, logprob in rows]
        choice |= {"logprobs": {"content": content[first:]}, "stop_reason": content[-1]["id"]}
        return reply

    generate_responses(own := make(name="own", **GREEDY))
    with serving(engine(brief)) as url:
        generate_responses(config := asked(make, url, **GREEDY))
        refusal(words, generate_responses, asked(make, url, "top", top_k_logits=2, **GREEDY))
    fields = {"retokenised": True} if first else {}
    assert responses(config) == {name: record | fields for name, record in responses(own).items()}


@pytest.mark.parametrize(("shown", "values", "words"), [
    ({"ids": False}, {"top_k_logits": 2}, "no token ids"),
    ({"limit": 2}, {"top_k_logits": 3}, "answered 400: .*too many logprobs"),
    ({}, {"server_model": "huge"}, "lists tiny, not server_model=huge"),
    ({"models": []}, {}, "lists no model"),
    ({"processed": True}, {"top_k_logits": 2, "temperature": 0.3}, "after temperature"),
])  # fmt: skip
def test_what_a_server_lacks_is_said_before_anything_is_written(make, engine, shown, values, words):
    with serving(engine(**shown)) as url:
        config = asked(make, url, **values)
        refusal(f"server={url}.*{words}", generate_responses, config)
    assert not [path for path in Path(config.out_dir).iterdir() if path.name != ".lock"]


@pytest.mark.parametrize("always", ["shifts", "short", "others", "another"])
def test_a_server_that_is_always_wrong_is_refused(make, engine, always):
    def fault(number, reply):
        choice = reply["choices"][0]
        if always == "shifts":
            choice["logprobs"]["top_logprobs"] = choice["logprobs"]["top_logprobs"][::-1]
        elif always == "short":
            choice["token_ids"], choice["logprobs"] = choice["token_ids"][:1], None
        elif always == "others":
            choice["token_ids"] = [token + 1 for token in choice["token_ids"]]
        else:
            choice["prompt_token_ids"] = [5]
        return reply

    words = {
        "shifts": "not those of its tokens", "short": "1 tokens of 4", "others": "of other tokens",
        "another": "another prompt",
    }  # fmt: skip
    with serving(engine(fault)) as url, pytest.raises(UserError, match=words[always]):
        generate_responses(asked(make, url))


def test_rows_that_cannot_be_of_their_tokens():
    check_rows([TokenRow(1, -0.7, {1: -0.7, 2: -0.9}), TokenRow(3, -3.0, {1: -0.7, 2: -0.9})], [1, 3], greedy=False)
    wrong = [(TokenRow(1, -0.9, {1: -0.9, 2: -0.7}), True), (TokenRow(1, -0.9, {1: -2.0}), False)]
    wrong += [(TokenRow(3, -0.1, {1: -0.7}), False), (TokenRow(1, -0.1, {1: -0.1, 2: -0.1}), False)]
    for row, greedy in wrong:
        with pytest.raises(ReplyError):
            check_rows([row], [row.token], greedy=greedy)
    with pytest.raises(ReplyError):
        check_rows([TokenRow(1, -0.7, {1: -0.7})], [2], greedy=False)
