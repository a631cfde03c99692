"""Responses are a function of prompt, seed and target: whatever the batches, the processes and the interruptions."""

import json
import multiprocessing
import os
import shutil
import signal
import socket
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import PartialState
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, Lfm2Config, MambaConfig, PreTrainedTokenizerFast

from data_prep import generation, response_files
from data_prep import responses as responses_module
from data_prep.conversations import encode, render_prompt
from data_prep.generation import Answer, Generator, TopK, invert, uniforms
from data_prep.response_files import Response, law_document, prompt_id, read_responses
from data_prep.responses import Task, generate_responses
from data_prep.rows import load_rows
from data_prep.settings import DataConfig, GenerateConfig, MixPart
from draft_models.errors import UserError
from draft_models.losses import IGNORE
from inference.sampling import Sampler
from inference.settings import SamplingConfig
from tests.tiny import random_prompt, save_target

ENDS = [257, *range(182, 198), *range(199, 257)]  # the end token, and others, so that answers end after a while
TEMPLATE = (
    "{% if messages[0].content == 'refused' %}{{ raise_exception('no') }}{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


HYBRID = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Alone on the CPU, also where there is a GPU: what is expected is computed there, and forks have no CUDA."""
    alone = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        is_main_process=True,
        wait_for_everyone=lambda: None,
    )
    monkeypatch.setattr(responses_module, "join_processes", lambda: alone)


def letter_tokenizer():
    """One token per character, so that whatever is generated is a text that has just these tokens."""
    letters = [*map(chr, range(32, 127)), *map(chr, range(0x4E00, 0x4E00 + 161))]
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = save_target(tmp_path_factory.mktemp("target"), max_position_embeddings=160, peak=0.4)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    letter_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(target):
    return AutoModelForCausalLM.from_pretrained(target).eval()


def talk(*turns):
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]}


TALKS = [talk(f"question {i}", "an answer", "more? " + "x" * (7 * i % 40)) for i in range(10)]


@pytest.fixture
def make(target, tmp_path):
    def configure(records=TALKS, name="out", **values):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        data = DataConfig(source="local", path=str(path), heldout_fraction=values.pop("heldout_fraction", 0.0))
        values = {"max_new_tokens": 12, "greedy_tokens": 2, "batch_size": 4, "shard_size": 3, **values}
        return GenerateConfig(target=str(target), data=data, out_dir=str(tmp_path / name), **values)

    return configure


def responses(config):
    """{id: record}; no id is there twice."""
    found = [response.record for response in read_responses(config.out_dir)]
    assert len({record["id"] for record in found}) == len(found)
    return {record["id"]: record for record in found}


def skipped(config):
    files = sorted(Path(config.out_dir).glob("skipped-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def summary(config):
    return json.loads((Path(config.out_dir) / "summary.json").read_text())


# ------------------------------------------------------------------------------------------------- decoding


@torch.inference_mode()
def one_by_one(model, prompt, draws, greedy_tokens, sampling, ends):
    """Hybrid generation, slow and obvious: the whole text through the model for each token of one prompt."""
    text = list(prompt)
    while len(text) < len(prompt) + len(draws) and (len(text) == len(prompt) or text[-1] not in ends):
        logits = model(torch.tensor([text])).logits[:, -1]
        place = len(text) - len(prompt)
        if place < greedy_tokens:
            text.append(int(logits.argmax()))
            continue
        below = 0.0
        for token, probability in enumerate(Sampler(sampling).probabilities(logits)[0].double().tolist()):
            below += probability
            if below > draws[place]:
                text.append(token)
                break
    return tuple(text[len(prompt) :])


@pytest.mark.parametrize("architecture", ["llama", "mistral", "opt"])
@pytest.mark.parametrize(
    "sampling", [SamplingConfig(temperature=1.0), SamplingConfig(temperature=1.3, top_k=9, top_p=0.8)]
)
def test_a_batch_says_what_each_prompt_says_alone(tmp_path, architecture, sampling):
    path = save_target(tmp_path, architecture, peak=0.5)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    prompts = [random_prompt(length, seed=length) for length in (3, 30, 11, 19, 5)]
    draws = [uniforms(0, str(i), 0, count) for i, count in enumerate((14, 6, 1, 14, 10))]
    ends = set(range(40))
    expected = [one_by_one(model, p, d, 3, sampling, ends) for p, d in zip(prompts, draws, strict=True)]
    generator = Generator(model, Sampler(sampling), ends, greedy_tokens=3)
    answers = generator.answer(prompts, draws)
    assert [answer.tokens for answer in answers] == expected
    assert [answer.ended for answer in answers] == [tokens[-1] in ends for tokens in expected]
    assert len({answer.ended for answer in answers}) == 2  # both ways of stopping were seen
    order = [3, 0, 4, 1, 2]
    again = generator.answer([prompts[i] for i in order], [draws[i] for i in order])
    assert again == [answers[i] for i in order]


def test_a_batch_shrinks_where_layers_keep_no_keys():
    kinds = ["conv", "full_attention"]
    model = AutoModelForCausalLM.from_config(Lfm2Config(**HYBRID, layer_types=kinds), dtype=torch.float64).eval()
    prompts, counts = [random_prompt(6, seed=seed) for seed in range(4)], (2, 9, 2, 9)
    draws = [uniforms(0, str(i), 0, count) for i, count in enumerate(counts)]
    sampling = SamplingConfig(temperature=1.0)
    expected = [one_by_one(model, p, d, 1, sampling, ()) for p, d in zip(prompts, draws, strict=True)]
    answers = Generator(model, Sampler(sampling), (), greedy_tokens=1).answer(prompts, draws)
    assert [answer.tokens for answer in answers] == expected


def test_a_model_with_its_state_elsewhere_is_refused():
    model = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(UserError, match="MambaForCausalLM keeps its state elsewhere than in past_key_values"):
        Generator(model, Sampler(SamplingConfig()), (), greedy_tokens=1)


def test_the_first_tokens_are_greedy_and_the_rest_are_not(model):
    prompt = random_prompt(9)
    argmax = Generator(model, Sampler(SamplingConfig(temperature=1.0)), (), greedy_tokens=10**6)
    hybrid = Generator(model, Sampler(SamplingConfig(temperature=1.0)), (), greedy_tokens=4)
    several = [hybrid.answer([prompt], [uniforms(seed, "", 0, 12)])[0].tokens for seed in range(6)]
    (greedy,) = argmax.answer([prompt], [uniforms(0, "", 0, 12)])
    assert {tokens[:4] for tokens in several} == {greedy.tokens[:4]}
    assert len({tokens[4] for tokens in several}) > 1


def test_inversion_gives_each_token_its_probability():
    probabilities = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.125, 0.125, 0.0])
    uniform = torch.arange(1000, dtype=torch.float64) / 1000
    tokens = invert(probabilities.expand(1000, -1), uniform)
    assert torch.bincount(tokens, minlength=7).tolist() == [0, 250, 0, 500, 125, 125, 0]
    last = torch.nextafter(torch.tensor([1.0], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64))
    assert invert(probabilities[None], last).item() == 5


def test_uniforms_are_a_function_of_seed_prompt_and_turn():
    numbers = uniforms(1, "a", 0, 50)
    assert torch.equal(uniforms(1, "a", 0, 20), numbers[:20])
    for other in (uniforms(2, "a", 0, 50), uniforms(1, "b", 0, 50), uniforms(1, "a", 1, 50)):
        assert not torch.equal(other, numbers)


def test_the_kept_law_is_the_targets_own(model):
    prompts = [random_prompt(5, seed=1), random_prompt(17, seed=2)]
    hot = Sampler(SamplingConfig(temperature=2.0, top_k=3))  # decides what is emitted, not what is kept
    generator = Generator(model, hot, ENDS, greedy_tokens=1, top_k_logits=6)
    answers = generator.answer(prompts, [uniforms(0, str(i), 0, 9) for i in range(2)])
    for prompt, answer in zip(prompts, answers, strict=True):
        top = answer.top
        assert top.tokens.tolist() == list(answer.tokens)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer.tokens]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).topk(6)
        assert torch.equal(top.ids, expected.indices)
        torch.testing.assert_close(top.logprobs, expected.values, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(top.tail, 1 - expected.values.exp().sum(-1), atol=1e-5, rtol=0)


def test_a_batch_too_large_for_memory_is_halved(model, monkeypatch):
    generator = Generator(model, Sampler(SamplingConfig(temperature=1.0)), ENDS, greedy_tokens=2)
    prompts = [random_prompt(length, seed=length) for length in (4, 6, 8, 40, 9)]
    draws = [uniforms(0, str(i), 0, 8) for i in range(5)]
    expected = generator.answer(prompts, draws)
    real, sizes = generator._answer, []

    def limited(prompts, draws):
        sizes.append(len(prompts))
        if len(prompts) > 2 or any(len(prompt) == 40 for prompt in prompts):
            raise torch.OutOfMemoryError
        return real(prompts, draws)

    monkeypatch.setattr(generator, "_answer", limited)
    answers = generator.answer(prompts, draws)
    assert answers == [*expected[:3], Answer(failure="memory"), expected[4]]
    sizes.clear()
    generator.answer(prompts[:2], draws[:2])
    assert max(sizes) == 1  # what did not fit once is not tried again


def test_logits_that_are_no_numbers_fail_their_prompt_alone(target):
    broken = AutoModelForCausalLM.from_pretrained(target).eval()
    broken.get_input_embeddings().weight.data[7] = float("nan")
    generator = Generator(broken, Sampler(SamplingConfig(temperature=1.0)), ENDS, greedy_tokens=0)
    answers = generator.answer([[1, 2, 3], [4, 7, 5]], [uniforms(0, "a", 0, 5)] * 2)
    assert answers[1] == Answer(failure="not_a_number")
    assert answers[0] == generator.answer([[1, 2, 3]], [uniforms(0, "a", 0, 5)])[0]


# ------------------------------------------------------------------------------------------------ invariance


def test_responses_do_not_depend_on_batches_or_shards(make):
    expected = None
    for name, batch_size, shard_size in (("a", 1, 1), ("b", 3, 4), ("c", 64, 512)):
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
    real, count = response_files.write_atomically, 0

    def write_or_die(path, content):
        nonlocal count
        count += 1
        if count == write:
            path.with_name(f".{path.name}.1").write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, content)

    response_files.write_atomically = write_or_die
    generate_responses(config)


def test_killed_at_any_file_and_resumed_gives_the_same_responses(make):
    records = [*TALKS[:7], talk("refused")]
    whole = make(records, name="whole", top_k_logits=3, batch_size=2)
    generate_responses(whole)
    writes = len([path for path in Path(whole.out_dir).iterdir() if path.name.startswith(("responses-", "skipped-"))])
    assert writes == 7  # three shards of laws and responses, and what was skipped
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
        laws = {response.record["id"]: response.top for response in read_responses(config.out_dir)}
        for response in read_responses(whole.out_dir):
            law = laws[response.record["id"]]
            assert torch.equal(law.tokens, response.top.tokens)
            torch.testing.assert_close(law.logprobs, response.top.logprobs, atol=0.01, rtol=0)  # kept as float16
        names = {path.name for path in Path(config.out_dir).iterdir()}
        assert [name for name in names if name.startswith(".")] == [".lock"]
        assert all(name.replace("safetensors", "jsonl") in names for name in names if name.endswith(".safetensors"))


def _launched(config, rank, port):
    """What a launcher starts, without the imports' seconds."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    PartialState._reset_state()
    state = PartialState(cpu=True)
    responses_module.join_processes = lambda: state
    generate_responses(config)
    state.destroy_process_group()


def test_two_processes_give_what_one_gives(make):
    one, two = make(name="one"), make(name="two")
    generate_responses(one)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    jobs = [fork.Process(target=_launched, args=(two, rank, port)) for rank in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(timeout=120)
    assert [job.exitcode for job in jobs] == [0, 0]
    assert responses(two) == responses(one)
    assert summary(two) == summary(one)
    numbers = {int(path.stem.rpartition("-")[2]) % 2 for path in Path(two.out_dir).glob("responses-*.jsonl")}
    assert numbers == {0, 1}  # each process has written shards of its own


# --------------------------------------------------------------------------------------------------- content


def test_every_turn_is_answered_after_the_targets_own_answers(make, model, target):
    config = make(max_new_tokens=30)
    generate_responses(config)
    tokenizer = letter_tokenizer()
    generator = Generator(model, Sampler(config.sampling), ENDS, greedy_tokens=2)
    turns_answered = []
    for record in responses(config).values():
        messages = record["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        turns_answered.append(len(messages) // 2)
        for turn in range(len(messages) // 2):
            prompt = render_prompt(messages[: 2 * turn + 1], tokenizer)
            room = min(30, 160 - len(prompt))
            (answer,) = generator.answer([prompt], [uniforms(0, record["id"], turn, room)])
            assert messages[2 * turn + 1]["content"] == tokenizer.decode(answer.said, skip_special_tokens=True).strip()
        assert record["unanswered_turns"] == 2 - turn - 1
        assert record["finish"] == ("end" if answer.ended else "length")
    assert set(turns_answered) == {1, 2}
    first = make(name="first", max_new_tokens=30, turns="first")
    generate_responses(first)
    assert {len(record["messages"]) for record in responses(first).values()} == {2}


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
    assert cut
    assert {record["finish"] for record in responses(dropped).values()} <= {"end"}
    whole = {identity: record for identity, record in responses(kept).items() if identity not in cut}
    assert whole.items() <= responses(dropped).items()
    assert {entry["reason"] for entry in skipped(dropped)} == {"truncated"}
    assert len(skipped(dropped)) + len(responses(dropped)) == len(TALKS)


def test_an_answer_that_ends_at_once_is_empty(make, target, tmp_path):
    silent = shutil.copytree(target, tmp_path / "silent")
    (silent / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(260))}))
    config = replace(make(TALKS[:4]), target=str(silent))
    generate_responses(config)
    assert responses(config) == {}
    assert [entry["reason"] for entry in skipped(config)] == ["empty"] * 4


def test_heldout_records_are_not_asked(make):
    config = make(heldout_fraction=0.5)
    generate_responses(config)
    assert 0 < len(responses(config)) < len(TALKS)


# --------------------------------------------------------------------------------------------- the directory


def test_responses_from_elsewhere_count_as_answers(make):
    config = make()
    folder = Path(config.out_dir)
    folder.mkdir()
    theirs = [talk("question 0", "A", TALKS[0]["messages"][2]["content"], "B"), {**talk("q", "a"), "id": "own"}]
    (folder / "responses-engine.jsonl").write_text("".join(json.dumps(record) + "\n" for record in theirs))
    generate_responses(replace(config, resume=True))
    found = responses(config)
    assert len(found) == len(TALKS) + 1
    assert found["own"]["messages"] == talk("q", "a")["messages"]
    answer = next(r for r in found.values() if r["messages"][0]["content"] == "question 0")
    assert answer["messages"] == theirs[0]["messages"]
    assert summary(config)["responses"] == len(TALKS) + 1
    (folder / "responses-bad.jsonl").write_text('{"answer": "x"}\n')
    with pytest.raises(UserError, match=r"responses-bad\.jsonl:1: expected a record with id and text, or"):
        generate_responses(replace(config, resume=True))


def test_records_from_elsewhere_with_ids_of_their_own_answer_their_prompts(make):
    config = make([talk(f"question {i}") for i in range(4)])
    folder = Path(config.out_dir)
    folder.mkdir()
    theirs = [{**talk(f"question {i}", "A"), "id": f"own-{i}"} for i in range(3)]
    (folder / "responses-engine.jsonl").write_text("".join(json.dumps(record) + "\n" for record in theirs))
    generate_responses(replace(config, resume=True))
    assert responses(config).keys() == {"own-0", "own-1", "own-2", prompt_id(talk("question 3")["messages"])}


def test_two_runs_never_write_one_directory(make):
    config = make(TALKS[:2])
    folder = Path(config.out_dir)
    folder.mkdir()
    with FileLock(folder / ".lock"), pytest.raises(UserError, match="another run is writing responses there"):
        generate_responses(config)
    generate_responses(config)
    with pytest.raises(UserError, match="holds responses already"):
        generate_responses(config)
    generate_responses(replace(config, resume=True))  # free again, also after a failure


def test_the_directory_is_kept_from_others_until_the_end(make, monkeypatch):
    config, seen = make(TALKS[:2]), []

    def another(folder):
        with pytest.raises(UserError, match="another run is writing"):
            generate_responses(replace(config, resume=True))
        seen.append(folder)
        return response_files.summarise(folder)

    monkeypatch.setattr(responses_module, "summarise", another)
    generate_responses(config)
    assert seen == [Path(config.out_dir)]


def test_more_data_is_answered_on_resume_and_nothing_else(make):
    generate_responses(make(TALKS[:4]))
    before = responses(make())
    generate_responses(make(TALKS, resume=True))
    assert before.items() <= responses(make()).items()
    generate_responses(make(TALKS, name="whole"))
    assert responses(make()) == responses(make(name="whole"))


def test_a_directory_in_use_is_refused(make):
    generate_responses(make(TALKS[:2]))
    with pytest.raises(UserError, match="holds responses already; resume=true continues them"):
        generate_responses(make(TALKS[:2]))
    with pytest.raises(UserError, match=r"made with other settings: greedy_tokens=3 \(was 2\), seed=1 \(was 0\)"):
        generate_responses(make(TALKS[:2], resume=True, greedy_tokens=3, seed=1))
    with pytest.raises(UserError, match="both plain texts and conversations; answer them in two runs"):
        generate_responses(replace(make([talk("a")], name="mixed"), data=_both(make)))


def _both(make):
    chat = make([talk("a")]).data
    texts = Path(chat.path[0]).with_name("texts.jsonl")
    texts.write_text(json.dumps({"text": "some text"}) + "\n")
    return replace(chat, path=[*chat.path, str(texts)])


def test_training_reads_the_answers(make, tmp_path):
    config = make(max_new_tokens=8)
    generate_responses(config)
    data = DataConfig(
        source="local",
        path=f"{config.out_dir}/responses-*.jsonl",
        heldout_fraction=0.0,
        cache_dir=str(tmp_path / "rows"),
    )
    tokenizer = letter_tokenizer()
    rows = load_rows(data, tokenizer, 160, "train")
    trained = []
    for item in rows:
        for document in range(int(item["documents"].max()) + 1):
            labels = item["labels"][item["documents"] == document]
            trained.append(tokenizer.decode(labels[labels != IGNORE]))
    answers = [
        "".join(m["content"] + "</s>" for m in record["messages"][1::2]).removesuffix(
            "</s>" if record["finish"] == "length" else ""
        )
        for record in responses(config).values()
    ]
    assert {record["finish"] for record in responses(config).values()} == {"end", "length"}
    assert sorted(trained) == sorted(answers)


@torch.inference_mode()
def test_kept_laws_are_the_targets_at_their_places(make, model):
    """Of every response, also of several turns: what the target says after exactly the tokens before each place."""
    config = make(max_new_tokens=9, top_k_logits=4)
    generate_responses(config)
    turns = Counter()
    for response in read_responses(config.out_dir):
        document, places = law_document(response, letter_tokenizer(), "tokenizer")
        assert document.ids[places].tolist() == response.top.tokens.tolist()
        assert np.flatnonzero(document.supervised).tolist() == places.tolist()
        logits = model(torch.tensor(document.ids)[None]).logits[0, places - 1]
        expected = logits.log_softmax(-1).topk(4)
        torch.testing.assert_close(response.top.logprobs, expected.values, atol=0.01, rtol=0)
        torch.testing.assert_close(response.top.tail, 1 - expected.values.exp().sum(-1), atol=0.001, rtol=0)
        turns[len(response.record["messages"]) // 2] += 1
        assert len(places) <= response.record["tokens"]
        assert (len(places) == response.record["tokens"]) or len(response.record["messages"]) > 2
    assert set(turns) == {1, 2}


def test_an_earlier_answer_keeps_its_law_as_far_as_the_next_prompt_repeats_it():
    def answer(*tokens):
        return Answer(tokens, True, TopK(torch.tensor(tokens), *(torch.tensor(tokens)[:, None] for _ in range(3))))

    task = Task("a", "", "tokenizer", [1, 2])
    task.keep(answer(3, 4, 5))
    task.prompt = [1, 2, 3, 4, 5, 6]
    task.keep(answer(7))
    assert (task.sequence, task.places, task.law.tokens.tolist()) == ([1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 6], [3, 4, 5, 7])
    task.prompt = [1, 2, 3, 9, 5, 6, 7, 8]  # tokenised otherwise from the second token of the first answer on
    task.keep(answer(4))
    assert (task.sequence[-1], task.places, task.law.tokens.tolist()) == (4, [2, 8], [3, 4])
    assert task.law.ids[:, 0].tolist() == [3, 4]


def test_laws_from_elsewhere_are_found_where_the_record_has_their_tokens():
    tokenizer = letter_tokenizer()

    def find(record, tokens):
        n = len(tokens)
        law = TopK(torch.as_tensor(tokens), torch.zeros(n, 2).long(), torch.zeros(n, 2), torch.zeros(n))
        return law_document(Response(record, law), tokenizer, "tokenizer")

    chat = {"id": "a", **talk("one?", "first", "two?", "second")}
    (document,) = encode([chat], tokenizer, "tokenizer")
    said = document.ids[document.supervised]
    assert tokenizer.decode(said) == "first</s>second</s>"
    for tokens in (said, said[:-1]):  # with and without an end
        found, places = find(chat, tokens)
        assert np.array_equal(found.ids, document.ids)
        assert np.array_equal(found.ids[places], tokens)
        assert found.supervised[places].all()
    assert find(chat, [*said[:-1], 5]) is None
    assert find(chat, [*said, 5]) is None
    text = {"id": "b", "text": "prefix and more", "prompt_tokens": 6}
    (document,) = encode([text], tokenizer, "tokenizer")
    assert find(text, document.ids[6:])[1].tolist() == list(range(6, len(document.ids)))
    assert find(text, [*document.ids[6:], 1]) is None


def test_a_damaged_law_is_named(make):
    config = make(TALKS[:2], top_k_logits=2)
    generate_responses(config)
    (file,) = Path(config.out_dir).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"responses-00000\.safetensors: not a readable safetensors file"):
        list(read_responses(config.out_dir))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target": ""}, "^target=''"),
        ({"turns": "last"}, "^turns='last': expected one of all, first"),
        ({"max_new_tokens": 0}, "^max_new_tokens=0: expected an integer ≥ 1"),
        ({"greedy_tokens": -1}, "^greedy_tokens=-1"),
        ({"temperature": -1.0}, "^temperature=-1.0"),
        ({"top_p": 0.0}, "^top_p=0.0"),
        ({"dtype": "int8"}, "^dtype='int8'"),
        ({"seed": -1}, "^seed=-1"),
    ],
)
def test_impossible_options_are_named(values, message):
    with pytest.raises(UserError, match=message):
        GenerateConfig(**{"target": "t", "data": DataConfig(), **values})
    assert generation._FAILED < 0  # no token id


def test_a_mix_is_answered_whole_and_weighed_later():
    def configure(**weights):
        mix = {name: MixPart(source="local", path=name, weight=weight) for name, weight in weights.items()}
        return GenerateConfig(target="t", data=DataConfig(source="mix", mix=mix))

    configure(a=0.5, b=0.5, c=0.0)
    with pytest.raises(UserError, match=r"^data\.mix weights=\{'a': 0\.5, 'b': 1\.0\}: expected equal weights"):
        configure(a=0.5, b=1.0, c=0.0)
