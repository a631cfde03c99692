"""MTP heads are refitted on a target's answers, from its own directory back to one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.data_prep.restore_mtp import SHARD_FILE, restore_mtp
from outrider.data_prep.settings import RestoreConfig
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.mtp.checkpoint import open_mtp
from outrider.draft_models.targets.open_target import load_config
from outrider.inference.drafters.eagle3.drafter import Eagle3DraftModel
from outrider.inference.drafters.mtp.drafter import MtpPlugin
from outrider.train.eagle3 import train_eagle3
from outrider.train.settings.drafters import Eagle3Config
from tests.gguf_files import save_plain_target, write_gguf
from tests.mtp_heads import FAMILIES, head_weights, stored_tensors, write_head
from tests.refusals import refusal
from tests.tiny import open_stack, save_target
from tests.train.jobs import FIT, heading, log, refitting, require_lossless, same, save_responses

HEAD = stored_tensors("qwen", head_weights(FAMILIES["gguf"]), offset=0.0)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tuned target with a peaked distribution, which lost its head."""
    return save_target(tmp_path_factory.mktemp("models") / "tuned", "qwen3", kv_heads=2, peak=8.0)


def restore(tuned: Path, base: Path, out: Path) -> Path:
    restore_mtp(RestoreConfig(target=str(tuned), base=str(base), out_dir=str(out)))
    return out


def test_a_refitted_head_drafts_better_and_goes_back(
    tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The target gets its base's head, which is refitted on its answers, and then the new head."""
    base = save_target(tmp_path / "base", "qwen3", kv_heads=2, seed=5, num_nextn_predict_layers=1)
    save_file({**load_file(base / "model.safetensors"), **HEAD}, base / "model.safetensors", {"format": "pt"})
    whole, out, answers = (
        restore(tuned, base, tmp_path / "whole"),
        tmp_path / "out",
        save_responses(tuned, tmp_path / "a"),
    )
    fit = replace(FIT, steps=48, lr=5e-3, eval_every=8, log_every=6, save_every=None)
    train_eagle3(heading(whole, answers, out, start="target", intermediate=None, fit=fit, eval_rows=8))
    assert "(evaluate-checkpoint mtp=… doctor=true)" in capsys.readouterr().err
    losses = [line["loss"] for line in log(out) if "loss" in line]
    assert losses[-1] < 0.9 * losses[0]
    evaluated = [line for line in log(out) if "eval_tau" in line]
    assert evaluated[-1]["eval_tau_analytic"] > evaluated[0]["eval_tau_analytic"]
    assert MtpPlugin().training_record(str(out)).seconds > 0
    written = load_file(out / "model.safetensors")
    assert written.keys() == HEAD.keys()
    assert not same(written, HEAD)
    again = restore(tuned, out, tmp_path / "again")
    assert same(load_file(again / SHARD_FILE), written)
    head = open_mtp(str(again), load_config(str(again))).load(torch.float32)
    model, stack = open_stack(tuned)
    head.use_target(stack)
    require_lossless(Eagle3DraftModel(head), model, stack)


@pytest.mark.parametrize("spelling", ["mimo", "deepseek", "speculators"])
def test_next_to_no_training_writes_the_file_that_was_read(tmp_path: Path, corpus: DataConfig, spelling: str) -> None:
    """With all that was in it, and nothing more."""
    target = save_target(tmp_path / "target", FAMILIES[spelling].architecture, kv_heads=2, use_sliding_window=False)
    tensors = stored_tensors(spelling, head_weights(FAMILIES[spelling]))
    start = write_head(tmp_path / "start", spelling, tensors)
    (Path(start) / "config.json").write_text('{"model_type": "a", "quantization_config": {}, "b": {"c": 1}}')
    fit = replace(FIT, steps=1, lr=1e-12)
    run = refitting(target, corpus, tmp_path / "out", start=start, fit=fit, decode_prompts=1)
    train_eagle3(run)
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors"), tensors, rtol=0, atol=1e-9)
    assert '"c": 1' in (text := (tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in text


def test_what_an_mtp_head_has_decided_is_refused(tuned: Path, tmp_path: Path, corpus: DataConfig) -> None:
    run, gguf = refitting(tuned, corpus, tmp_path / "out"), tmp_path / "target.gguf"
    write_gguf(save_plain_target(tmp_path / "plain"), gguf, "Q8_0")
    reading: Any = replace(run.reading, target_norm=False)
    for changes, message in (
        (
            {"dialect": "speculators"},
            "dialect='speculators': expected 'specforge', its default: an MTP head is written",
        ),
        ({"reading": reading}, r"reading\.target_norm=False: expected None, its default: an MTP head is written"),
        ({"train_head": False}, "train_head=False: expected true, as the logits' matrix of this MTP head"),
        ({"taps": (1, 2, 3)}, r"taps=\(1, 2, 3\): expected \(\), its default: start="),
        ({"version": "3"}, r"version='3': expected '3.1', its default: start="),
        ({"start": "target"}, "no tensors of an MTP head there"),
        ({"start": "target", "target": str(gguf)}, "start=target: a GGUF file, to which no head is written; give the"),
        ({"start": "target", "revision": "a"}, "revision='a': expected null with start=target"),
    ):
        refusal(message, lambda changed=changes: train_eagle3(replace(run, **changed)))
    assert isinstance(run, Eagle3Config)
    assert not (tmp_path / "out").exists()
