"""Training a small LM: stopped and resumed, in micro batches, on a full disk, with other settings."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data_prep.text.settings import DataConfig
from draft_models.card import CARD_FILE, add_report
from draft_models.small_lm.model import TRAINING_FILE
from outrider.errors import UserError
from tests.tiny import save_target
from tests.train.jobs import FIT, finetuning, interrupted_at, same, weights
from train.core.driver import BEST_FOLDER
from train.parts.heldout import Decoding
from train.recipes.small_lm import finetune_drafter
from train.settings.drafters import DrafterConfig


@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.slow
def test_a_run_that_was_stopped_ends_with_the_same_bits(
    tmp_path: Path, target: Path, small: Path, corpus: DataConfig, lora: int
) -> None:
    """With on-policy steps, and with the best weights after the stop or before it."""
    fit = replace(FIT, steps=8, save_every=2, eval_every=3)
    run = finetuning(target, corpus, tmp_path / "stopped", fit=fit, lora_rank=lora, on_policy=0.5,
                     drafter=DrafterConfig(path=str(small)))  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        interrupted_at(6, lambda: finetune_drafter(run))
    assert not (tmp_path / "stopped" / "config.json").exists()
    finetune_drafter(replace(run, resume=True))
    finetune_drafter(replace(run, out_dir=str(tmp_path / "whole")))
    assert same(weights(tmp_path / "stopped"), weights(tmp_path / "whole"))
    reports = [json.loads((tmp_path / name / TRAINING_FILE).read_text()) for name in ("stopped", "whole")]
    assert reports[0]["step"] == reports[1]["step"]
    last = [load_file(tmp_path / name / "checkpoint-8" / "model.safetensors") for name in ("stopped", "whole")]
    assert same(*last)


@pytest.mark.slow
def test_accumulation_equals_one_batch(tmp_path: Path, target: Path, small: Path, corpus: DataConfig) -> None:
    run = finetuning(target, corpus, tmp_path / "whole", drafter=DrafterConfig(path=str(small)), on_policy=0.5)
    finetune_drafter(run)
    finetune_drafter(replace(run, out_dir=str(tmp_path / "parts"), fit=replace(FIT, micro_batch_rows=1)))
    assert_close_to_the_same(tmp_path / "whole", tmp_path / "parts", small)


def assert_close_to_the_same(one: Path, other: Path, start: Path) -> None:
    first, second, untrained = weights(one), weights(other), weights(start)
    assert any((first[name] - untrained[name]).abs().max() > 1e-3 for name in first)
    for name in first:
        torch.testing.assert_close(
            second[name], first[name], rtol=1e-4, atol=3e-4
        )  # Adam makes steps of lr = 3e-3 of tiny gradients too


def test_a_full_disk_leaves_the_best_and_the_checkpoint(
    tmp_path: Path, target: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    taus = iter([1.5, 2.5])
    monkeypatch.setattr(Decoding, "__call__", lambda *_: {"tau": next(taus)})
    real = os.replace
    run = finetuning(target, corpus, tmp_path / "out", fit=replace(FIT, eval_every=2))

    def full(source: str, destination: str) -> None:
        if str(destination).endswith("best/model.safetensors") and Path(destination).exists():
            raise OSError(28, "No space left on device")
        real(source, destination)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match="No space left on device"):
        finetune_drafter(run)
    assert [p.name for p in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]
    assert [p.name for p in (tmp_path / "out" / BEST_FOLDER).iterdir()] == ["model.safetensors"]
    monkeypatch.setattr(os, "replace", real)
    taus = iter([2.5])
    finetune_drafter(replace(run, resume=True))
    assert json.loads((tmp_path / "out" / TRAINING_FILE).read_text())["step"] == 4


@pytest.mark.slow
def test_resume_with_other_settings_is_refused(tmp_path: Path, target: Path, small: Path, corpus: DataConfig) -> None:
    shutil.copytree(small, tmp_path / "small")
    run = finetuning(target, corpus, tmp_path / "out", drafter=DrafterConfig(path=str(tmp_path / "small")))
    finetune_drafter(run)
    for change in ({"objective": "reverse_kl"}, {"decode_tokens": 9}, {"fit": replace(FIT, eval_every=2)}):
        with pytest.raises(UserError, match=r"objective=|decode_tokens=|eval_every="):
            finetune_drafter(replace(run, resume=True, **change))
    text = tmp_path / "text.jsonl"
    text.write_text(Path(corpus.path[0]).read_text().replace("quick", "quiet"))
    with pytest.raises(UserError, match="data_key="):
        finetune_drafter(replace(run, resume=True, data=replace(corpus, path=str(text))))
    with pytest.raises(UserError, match=r"target\.weights="):
        finetune_drafter(replace(run, resume=True, target=str(save_target(tmp_path / "target", seed=1, kv_heads=2))))
    stored = (tmp_path / "small" / "model.safetensors").read_bytes()
    save_target(tmp_path / "small", seed=4, num_hidden_layers=2)
    with pytest.raises(UserError, match=r"drafter_model\.tensors\.lm_head="):
        finetune_drafter(replace(run, resume=True))
    (tmp_path / "small" / "model.safetensors").write_bytes(stored)
    for model, named in (("small", "drafter_model"), ("edited", "target")):
        folder = tmp_path / model if model == "small" else shutil.copytree(target, tmp_path / model)
        described = (folder / "config.json").read_text()
        (folder / "config.json").write_text(described.replace('"rope_theta": 10000.0', '"rope_theta": 500000.0'))
        changed = str(folder) if model == "edited" else run.target
        with pytest.raises(
            UserError, match=rf"{named}\.config\.rope_parameters\.rope_theta=500000\.0 \(was 10000\.0\)"
        ):
            finetune_drafter(replace(run, resume=True, target=changed))
        (folder / "config.json").write_text(described)
    before = weights(tmp_path / "out")
    add_report(tmp_path / "out", "# Measured since\n")
    finetune_drafter(replace(run, resume=True))  # finished: left alone
    card = (tmp_path / "out" / CARD_FILE).read_text()
    assert "Measured since" in card
    assert f"small_lm={tmp_path / 'out'} " in card  # as it was given
    (tmp_path / "out" / TRAINING_FILE).unlink()
    (tmp_path / "out" / "model.safetensors").unlink()
    finetune_drafter(replace(run, resume=True))  # trained, but not exported to the end
    assert same(before, weights(tmp_path / "out"))
    assert "Measured since" not in (tmp_path / "out" / CARD_FILE).read_text()
