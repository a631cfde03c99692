"""Prompts that a target writes itself: by its own distribution, each once, in two files that share none."""

import hashlib
import json
import shutil
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache

from outrider.data_prep.settings import PromptsConfig
from outrider.data_prep.text.chat import question_affixes
from outrider.data_prep.text.prompts import read_prompts
from outrider.data_prep.text.records import turn_key
from outrider.inference.batch.directory import Shard
from outrider.inference.batch.own_prompts import write_prompts
from outrider.inference.batch.tasks import uniforms
from outrider.inference.core.sampling import invert
from tests.inference.batch.responding import ENDS as MANY
from tests.refusals import refusal

COUNT, ENDS = 40, MANY[:6]


@pytest.fixture(scope="module")
def target(target, tmp_path_factory):
    """It writes for longer than the others' target."""
    copy = shutil.copytree(target, tmp_path_factory.mktemp("writer") / "target")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return copy


@pytest.fixture
def config(target, tmp_path, on_the_cpu):
    return PromptsConfig(target=str(target), count=COUNT, batch_size=7, out_dir=str(tmp_path / "prompts"))


def files(config):
    return {path.name: path.read_bytes() for path in Path(config.out_dir).glob("*.json*")}


def keys(config, *, chat=True):
    prompts = [one for half in ("train", "heldout") for one in read_prompts(f"{config.out_dir}/{half}.jsonl")]
    assert {prompt.chat for prompt in prompts} == {chat}
    found = {turn_key(prompt.turns[0]) for prompt in prompts}
    assert len(found) == len(prompts) > 10
    return found


@torch.inference_mode()
def reference(model, tokenizer, start, ends, *, must_end=True):
    """Text by text and token by token, from transformers' own forward."""
    for number in range(COUNT):
        written, ended, ids, cache = [], False, start, DynamicCache()
        for uniform in uniforms(0, f"{number:032x}", 0, min(128, 160 - len(start))):
            logits = model(torch.tensor([ids]), past_key_values=cache).logits[0, -1].float()
            ids = [int(invert((logits / 0.9).softmax(-1)[None], uniform[None, None]))]
            if ended := ids[0] in ends:
                break
            written += ids
        text = tokenizer.decode(written).strip()
        if (ended or not must_end) and len(text) >= 16 and not {*written} & {*tokenizer.all_special_ids}:
            yield turn_key(text)


def test_prompts_are_what_the_target_writes_as_a_user(config, model, target):
    tokenizer = AutoTokenizer.from_pretrained(target)
    write_prompts(config)
    assert 5 < json.loads(files(config)["prompts.json"])["heldout"]["prompts"] <= 12
    assert keys(config) == {*reference(model, tokenizer, tokenizer("u:", add_special_tokens=False).input_ids, ENDS)}
    for name, same, options in (("batch", True, {"batch_size": 64}), ("seed", False, {"seed": 1})):
        write_prompts(other := replace(config, out_dir=f"{config.out_dir}-{name}", **options))
        assert files(other) == files(config) if same else not keys(other) & keys(config)


def test_a_turn_ends_where_the_template_goes_on(config, target, tmp_path, model):
    write_prompts(config)
    closing = Counter(letter for letter in "".join(keys(config)) if ord(letter) > 0x4000).most_common(1)[0][0]
    copy = shutil.copytree(target, tmp_path / "copy")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS[:4]}))
    (copy / "chat_template.jinja").write_text("{% for m in messages %}u:{{ m.content }}" + closing + "{% endfor %}")
    tokenizer = AutoTokenizer.from_pretrained(copy)
    write_prompts(other := replace(config, target=str(copy), out_dir=f"{config.out_dir}-other"))
    start, ends = (tokenizer(text, add_special_tokens=False).input_ids for text in ("u:", closing))
    assert keys(other) == {*reference(model, tokenizer, start, {*ENDS[:4], *ends})}


def test_a_base_model_writes_the_beginnings_of_documents(config, target, tmp_path, model):
    """They end anywhere. `template=none` has them of a chat model."""
    copy = shutil.copytree(target, tmp_path / "base")
    (copy / "chat_template.jinja").unlink()
    tokenizer = AutoTokenizer.from_pretrained(copy)
    expected = {*reference(model, tokenizer, [tokenizer.bos_token_id], ENDS, must_end=False)}
    for name, options in (("base", {"target": str(copy)}), ("chat", {"template": "none"})):
        write_prompts(base := replace(config, out_dir=f"{config.out_dir}-{name}", **options))
        assert keys(base, chat=False) == expected
    tokenizer.bos_token = None
    refusal(r"has no BOS token.*prompts of your own", question_affixes, tokenizer, "auto")


def test_a_killed_run_or_one_whose_time_was_over_goes_on_to_the_same_files(config, monkeypatch):
    write_prompts(expected := replace(config, out_dir=f"{config.out_dir}-whole"))
    save = Shard.save
    monkeypatch.setattr(Shard, "save", lambda *given: (save(*given), signal.default_int_handler(signal.SIGINT, None)))
    with pytest.raises(KeyboardInterrupt):
        write_prompts(config)
    monkeypatch.setattr(Shard, "save", save)
    assert files(config) == {}
    refusal(r"template=\[\"none\"\] \(was", write_prompts, replace(config, resume=True, template="none"))
    write_prompts(replace(config, resume=True))
    assert files(config) == files(expected)
    write_prompts(short := replace(config, out_dir=f"{config.out_dir}-short", batch_size=32, minutes=1e-9))
    assert files(short) != files(expected)
    write_prompts(replace(short, resume=True, minutes=None))
    assert files(short) == files(expected)


def test_what_gives_no_prompts_is_refused(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for options in ({}, {"target": "t", "file": "mt_bench"}):
        refusal(r"target=.*or file=", PromptsConfig, **options)
    refusal("expected at least 10", write_prompts, replace(config, count=9))
    (file := Path("p.txt")).write_text("prompt")
    made_of = {"file": hashlib.sha256(b"prompt").hexdigest(), "heldout_fraction": 0.1}
    made_of |= {"chat_template_kwargs": {}, "count": 10000, "dtype": "auto", "seed": 0, "template": "auto"}
    (file.parent / "prompts.json").write_text(json.dumps({"made_of": made_of}))
    write_prompts(PromptsConfig(file=str(file), out_dir=str(file.parent), resume=True))
    assert "finished already" in capsys.readouterr().out
