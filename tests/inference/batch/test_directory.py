"""The directory of responses: continued, shared with records from elsewhere, and kept from others."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.base.errors import UserError
from outrider.base.run_dirs import code_version
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.batch.generate import generate_responses, run_identity
from tests.inference.batch.responding import TALKS, letter_tokenizer, responses, save_answering, summary, talk
from tests.refusals import refusal


def _both(make):
    chat = make([talk("a")]).data
    texts = Path(chat.path[0]).with_name("texts.jsonl")
    texts.write_text(json.dumps({"text": "some text"}) + "\n")
    return replace(chat, path=[*chat.path, str(texts)])


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


def test_more_data_is_answered_on_resume_and_nothing_else(make):
    generate_responses(make(TALKS[:4]))
    before = responses(make())
    generate_responses(make(TALKS, resume=True))
    assert before.items() <= responses(make()).items()
    generate_responses(make(TALKS, name="whole"))
    assert responses(make()) == responses(make(name="whole"))


def test_a_directory_in_use_is_refused(make):
    generate_responses(make(TALKS[:2]))
    refusal(r"holds an earlier run \(responses-.*\); resume=true continues it", generate_responses, make(TALKS[:2]))
    with pytest.raises(UserError, match=r"made with other settings: greedy_tokens=3 \(was 2\), seed=1 \(was 0\)"):
        generate_responses(make(TALKS[:2], resume=True, greedy_tokens=3, seed=1))
    with pytest.raises(UserError, match="both plain texts and conversations; answer them in two runs"):
        generate_responses(replace(make([talk("a")], name="mixed"), data=_both(make)))


def test_a_run_is_known_by_the_target_as_it_is_and_not_by_its_place(make, target, tmp_path):
    def identity(path=target, dtype=torch.float32):
        return run_identity(replace(make(), target=str(path)), open_target(str(path), by_layers=False), dtype)

    def other(name, edit):
        edit(shutil.copytree(target, tmp_path / name))
        return identity(tmp_path / name)

    def new_template(path):
        tokenizer = letter_tokenizer()
        tokenizer.chat_template += " "
        tokenizer.save_pretrained(path)

    def new_token(path):
        tokenizer = letter_tokenizer()
        tokenizer.add_tokens(["more"])
        tokenizer.save_pretrained(path)

    def middle_layer(path):
        stored = load_file(path / "model.safetensors")
        save_file({n: -t if ".layers.2." in n else t for n, t in stored.items()}, path / "model.safetensors",
                  metadata={"format": "pt"})  # fmt: skip

    def config(path, **changes):
        (path / "config.json").write_text(json.dumps({**json.loads((path / "config.json").read_text()), **changes}))

    def ends(path):
        (path / "generation_config.json").write_text('{"eos_token_id": [7]}')

    assert other("moved", lambda _: None) == identity()
    for number, edit in enumerate((middle_layer, lambda path: config(path, rms_norm_eps=1e-3))):
        assert other(f"model-{number}", edit)["model"] != identity()["model"]
    assert other("said", lambda path: config(path, transformers_version="1")) == identity()
    for name, changed in {
        "model": other("weights", lambda path: save_answering(path, peak=0.4, seed=1)),
        "template": other("template", new_template),
        "tokenizer": other("tokenizer", new_token),
        "dtype": identity(dtype=torch.bfloat16),
        "end_tokens": other("ends", ends),
    }.items():
        assert changed[name] != identity()[name]


def test_a_changed_target_is_refused_and_other_code_is_recorded(make, target, tmp_path, monkeypatch):
    path = shutil.copytree(target, tmp_path / "target")
    run = replace(make(TALKS[:2]), target=str(path))
    generate_responses(run)
    record = Path(run.out_dir) / "run.json"
    before = json.loads(record.read_text())
    assert before["code"] == code_version()
    monkeypatch.setattr("outrider.inference.batch.generate.code_version", lambda: "0.2+abc")
    generate_responses(replace(run, resume=True))
    assert json.loads(record.read_text()) == {**before, "code": "0.2+abc"}
    described = json.loads((path / "config.json").read_text())
    described["rope_parameters"]["rope_theta"] = 5e5
    (path / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"model\.config\.rope_parameters\.rope_theta=500000\.0 \(was 10000\.0\)"):
        generate_responses(replace(run, resume=True))
