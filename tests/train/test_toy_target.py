"""The toy target: an ordinary Hugging Face directory, made again to the bit, never made twice."""

import json
import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.base.errors import UserError
from outrider.base.files import differences
from outrider.base.run_dirs import LOCK_FILE
from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.formats.model_name import model_name
from outrider.draft_models.losses import IGNORE
from outrider.inference.measure.statistics import LEAST, TIMES
from outrider.train import toy_target as toy
from outrider.train.core.driver import TrainingRun
from outrider.train.parts.drafter import export_model
from outrider.train.settings.fit import FitConfig
from outrider.train.settings.toy import TOY_REPORT, ToyTargetConfig
from tests.refusals import refusal
from tests.train import jobs

TEXTS = ["def f(x):\n    return x + 1\n", "class A:\n    pass  # naïve 😀\n", "for i in range(10):\n    print(i)\n"]


def _config(directory: Path, **changes: object) -> ToyTargetConfig:
    options: dict[str, object] = {
        "data": DataConfig(layout="code", max_records=8, heldout_fraction=0.3, cache_dir=str(directory / "cache")),
        "fit": FitConfig(steps=6, batch_rows=4, optimizer="muon", lr=0.004, save_every=2, wandb=jobs.FIT.wandb),
        "out_dir": str(directory / "toy"), "vocabulary": 320, "layers": 2, "hidden": 16, "intermediate": 24, "heads": 2,
        "kv_heads": 1, "seq_len": 32, "max_positions": 64, "eval_rows": 4,
    }  # fmt: skip
    return ToyTargetConfig(**{**options, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    config = _config(tmp_path_factory.mktemp("toy"))
    toy.train_toy_target(config)
    return config


@pytest.mark.slow
def test_it_is_an_ordinary_directory(finished):
    model = AutoModelForCausalLM.from_pretrained(finished.out_dir)
    tokenizer = AutoTokenizer.from_pretrained(finished.out_dir)
    assert model.config.num_hidden_layers == 2
    assert model.config.num_key_value_heads == 1
    assert model.dtype == torch.float32
    assert model_name(finished.out_dir) == "toy-0M"
    unique = model.generation_config.no_repeat_ngram_size
    assert all(period + unique - 1 < max(TIMES * period, LEAST) for period in range(1, 99))  # no text is a loop
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.bos_token_id == tokenizer.bos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    ids = tokenizer("import os", return_tensors="pt")
    assert ids["input_ids"][0, 0] == tokenizer.bos_token_id
    assert model.generate(**ids, max_new_tokens=3).shape[1] <= ids["input_ids"].shape[1] + 3
    assert {path.name for path in Path(finished.out_dir).glob(".*")} == {LOCK_FILE}  # nothing half-written is left


def test_the_command_finds_it_finished(finished, capsys):
    toy.train_toy_target(replace(finished, resume=True))
    assert capsys.readouterr().out.splitlines()[-1] == f"{finished.out_dir}: finished already"
    for changes, message in (({}, "holds an earlier run"), ({"resume": True, "layers": 3}, r"layers=3 \(was 2\)")):
        refusal(message, toy.train_toy_target, replace(finished, **changes))


def test_minutes_end_it(tmp_path):
    config = _config(tmp_path, minutes=1e-9)
    toy.train_toy_target(config)
    report = json.loads((Path(config.out_dir) / TOY_REPORT).read_text())
    assert (report["steps"], report["settings"]["minutes"]) == (1, 1e-9)
    assert 0 < report["bits_per_byte"] < 9


@pytest.mark.slow
def test_a_killed_run_is_exported_after_resume(finished, tmp_path):
    config = _config(tmp_path, resume=True)
    toy.train_toy_target(config)
    out_dir = Path(config.out_dir)
    for name in ("toy_target.json", "config.json"):
        (out_dir / name).unlink()  # as if killed between training and export
    with pytest.raises(UserError, match=r"data\.max_records=7 \(was 8\)"):
        toy.train_toy_target(replace(config, data=replace(config.data, max_records=7)))
    toy.train_toy_target(config)
    assert AutoModelForCausalLM.from_pretrained(out_dir).config.num_hidden_layers == 2


def test_a_directory_is_whole_once_it_has_a_config(finished, tmp_path):
    """What is in the way of config.json alone lets all others be there."""
    (tmp_path / "config.json" / "in the way").mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(finished.out_dir)
    refusal("cannot be written", export_model, model, AutoTokenizer.from_pretrained(finished.out_dir), tmp_path)
    assert {"model.safetensors", "tokenizer.json"} < {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
def test_gradient_checkpointing_changes_nothing(finished, tmp_path):
    """And the same settings give the same bits, elsewhere too."""
    config = _config(tmp_path, fit=replace(finished.fit, gradient_checkpointing=True))
    toy.train_toy_target(config)
    for name in ("model.safetensors", "tokenizer.json"):
        assert (Path(config.out_dir) / name).read_bytes() == (Path(finished.out_dir) / name).read_bytes()
    student = toy.ToyTarget(toy.build_lm(config, toy.train_tokenizer(TEXTS, 320)))
    student.gradient_checkpointing_enable()
    assert all(layer.gradient_checkpointing for layer in student.lm.model.layers)


def test_other_text_is_another_run(tmp_path):
    """What was read decides, not where it lies."""
    file, identities = tmp_path / "texts.jsonl", []
    for word in ("one", "other"):
        file.write_text("".join(json.dumps({"text": f"{word} text, number {n}\n" * 9}) + "\n" for n in range(30)))
        data = DataConfig(source="local", path=[str(file)], heldout_fraction=0.3, cache_dir=str(tmp_path / "cache"))
        with patch.object(TrainingRun, "fit", lambda *_, identity, **options: identities.append(identity)):
            toy.train_toy_target(_config(tmp_path, data=data))
    assert [key for key, *_ in differences(*identities)] == ["data_key"]


def test_conversations_are_refused(tmp_path):
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps(record) + "\n")
    config = _config(tmp_path, data=DataConfig(source="local", path=str(file), heldout_fraction=0.0))
    refusal("learns from plain text", toy.train_toy_target, config)


def test_tokenizer_round_trips_any_text():
    tokenizer = toy.train_tokenizer(TEXTS, 300)
    assert len(tokenizer) == 300
    assert toy.train_tokenizer(iter(TEXTS), 300).backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    for text in [*TEXTS, " tabs\tand \r\n ends ", "数学 €"]:
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert toy.token_bytes(tokenizer)[ids].sum() == len(text.encode())


def test_untrained_layers_are_the_identity(tmp_path):
    config, tokenizer = _config(tmp_path), toy.train_tokenizer(TEXTS, 320)
    lm = toy.build_lm(config, tokenizer)
    ids = torch.arange(10)[None]
    hidden = lm.model(input_ids=ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(hidden[0], hidden[-2], rtol=0, atol=0)
    for name, parameter in toy.build_lm(config, tokenizer).named_parameters():
        assert torch.equal(parameter, lm.get_parameter(name))


@pytest.mark.parametrize("tied", [True, False])
def test_loss_is_that_of_each_document_alone(tmp_path, tied):
    """A packed row costs what its documents cost in separate forwards of the plain model."""
    lm = toy.build_lm(_config(tmp_path, tied=tied), toy.train_tokenizer(TEXTS, 300)).double()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    lengths = (5, 9, 2)
    ids = torch.randint(3, 300, (1, 20), generator=torch.Generator().manual_seed(1))
    labels, positions = torch.full((1, 20), IGNORE), torch.zeros(1, 20, dtype=torch.long)
    documents, expected, start = torch.full((1, 20), -1), 0.0, 0
    for number, length in enumerate(lengths):
        part = slice(start, start + length)
        documents[0, part], positions[0, part] = number, torch.arange(length)
        labels[0, start : start + length - 1] = ids[0, start + 1 : start + length]
        logits = lm(ids[:, part]).logits[0, :-1]
        expected += F.cross_entropy(logits, ids[0, start + 1 : start + length], reduction="sum")
        start += length
    batch = {"input_ids": ids, "labels": labels, "positions": positions, "documents": documents}
    loss = toy.ToyTarget(lm)(**batch)["loss_sum"]
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)


def test_bits_per_byte_counts_bytes_of_text(finished):
    tokenizer = AutoTokenizer.from_pretrained(finished.out_dir)
    rows = load_rows(finished.data, tokenizer, finished.seq_len, "heldout", max_rows=3)
    model = toy.ToyTarget(AutoModelForCausalLM.from_pretrained(finished.out_dir))
    nats, size = 0.0, 0
    with torch.no_grad():
        for row in (rows[i] for i in range(3)):
            nats += float(model(**{key: value[None] for key, value in row.items()})["loss_sum"])
            kept = [token for token in row["labels"].tolist() if token not in (IGNORE, tokenizer.eos_token_id)]
            size += sum(len(tokenizer.convert_ids_to_tokens(token)) for token in kept)
        measured = toy.bits_per_byte(model, rows, toy.token_bytes(tokenizer))
    assert measured == pytest.approx(nats / size / math.log(2), rel=1e-5)
