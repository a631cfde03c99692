"""EESD training goes on where it was killed, and with nothing but what it began with."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_prep.text.settings import DataConfig
from draft_models.card import CARD_FILE, add_report
from draft_models.early_exit.checkpoint import META_FILE, WEIGHTS_FILE
from outrider.errors import UserError
from outrider.run_dirs import LOCK_FILE
from outrider.versions import code_version
from tests.tiny import save_target
from tests.train import jobs
from tests.train.jobs import distilling, kill_when, launch, same
from train.core import run_dir
from train.recipes.early_exit import train_early_exit
from train.settings.drafters import EesdConfig

FIT = replace(jobs.FIT, steps=6)


def weights(out_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(out_dir / WEIGHTS_FILE)


@pytest.mark.slow
def test_sigkill_then_resume_ends_with_the_same_bits(
    tmp_path: Path, corpus: DataConfig, capsys: pytest.CaptureFixture
) -> None:
    path = save_target(tmp_path / "target")
    long = replace(FIT, steps=60, save_every=10)
    killed = tmp_path / "killed"
    job = launch("train/eesd.py", distilling(path, corpus, killed, fit=long))
    refused: list[str] = []

    def second_is_refused() -> bool:
        """Once there is a checkpoint: another training into the same directory."""
        if list(killed.glob("checkpoint-*")):
            with pytest.raises(UserError, match=rf"process {job.pid} on .*train/eesd\.py") as error:
                train_early_exit(distilling(path, corpus, killed, fit=replace(long, seed=3, lr=1.0), resume=True))
            refused.append(str(error.value))
        return bool(refused)

    kill_when(second_is_refused, job)
    assert refused
    assert not (killed / META_FILE).exists()
    capsys.readouterr()
    train_early_exit(distilling(path, corpus, killed, fit=long, resume=True))
    assert f"taken over from a run that did not end by itself: process {job.pid} on " in capsys.readouterr().out
    assert {path.name for path in killed.glob(".*")} == {LOCK_FILE}
    train_early_exit(distilling(path, corpus, tmp_path / "whole", fit=long))
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))


def test_a_finished_drafter_is_left_alone(tmp_path: Path, corpus: DataConfig, capsys: pytest.CaptureFixture) -> None:
    run = distilling(save_target(tmp_path / "target"), corpus, tmp_path / "eesd", resume=True)
    train_early_exit(run)
    before = weights(tmp_path / "eesd")
    add_report(tmp_path / "eesd", "# Measured since\n")
    train_early_exit(run)
    assert capsys.readouterr().out.endswith(f"{tmp_path / 'eesd'}: finished already\n")
    card = (tmp_path / "eesd" / CARD_FILE).read_text()
    assert "Measured since" in card
    assert f"checkpoint={tmp_path / 'eesd'} " in card  # as it was given
    for file in (CARD_FILE, WEIGHTS_FILE):
        (tmp_path / "eesd" / file).unlink()
    train_early_exit(run)  # trained, but not saved to the end
    assert same(before, weights(tmp_path / "eesd"))
    assert (tmp_path / "eesd" / CARD_FILE).exists()


def test_resume_with_other_text_or_target_is_refused(tmp_path: Path, corpus: DataConfig) -> None:
    path = save_target(tmp_path / "target")
    train_early_exit(distilling(path, corpus, tmp_path / "eesd"))
    text = tmp_path / "text.jsonl"
    text.write_text(Path(corpus.path[0]).read_text().replace("quick", "quiet"))
    with pytest.raises(UserError, match="data_key"):
        train_early_exit(distilling(path, replace(corpus, path=str(text)), tmp_path / "eesd", resume=True))
    other = save_target(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match=r"target\.weights"):
        train_early_exit(distilling(other, corpus, tmp_path / "eesd", resume=True))


def test_a_resumed_run_has_the_target_it_began_with(tmp_path: Path, corpus: DataConfig) -> None:
    """What it reads, to the byte, and how the config says it is to be run; the teacher by a sample."""
    path = save_target(tmp_path / "target")
    plain, kl = distilling(path, corpus, tmp_path / "plain"), distilling(path, corpus, tmp_path / "kl", objective="kl")
    for run in (plain, kl):
        train_early_exit(run)
    stored = load_file(path / "model.safetensors")
    described = (path / "config.json").read_text()

    def refused(run: EesdConfig, message: str) -> None:
        with pytest.raises(UserError, match=rf"was made with other settings: .*{message}"):
            train_early_exit(replace(run, resume=True))

    read, unread = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (1, 2))
    touched = stored[read].clone()
    touched[5, 7] += 1e-5
    save_file({**stored, read: touched}, path / "model.safetensors", metadata={"format": "pt"})
    refused(plain, r"trained_on\.model\.layers\.1=")
    save_file({**stored, unread: -stored[unread]}, path / "model.safetensors", metadata={"format": "pt"})
    refused(kl, r"target\.tensors\.model\.layers\.2=")
    train_early_exit(replace(plain, resume=True))  # which has not read it
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(described.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    refused(plain, r"target\.config\.rms_norm_eps=1e-05 \(was 1e-06\)")


def test_another_version_of_the_code_goes_on(tmp_path: Path, corpus: DataConfig) -> None:
    path = save_target(tmp_path / "target")
    whole, cut = (
        distilling(path, corpus, tmp_path / name, decode_prompts=1, decode_tokens=4) for name in ("whole", "cut")
    )
    train_early_exit(whole)
    train_early_exit(cut)
    shutil.rmtree(tmp_path / "cut" / "checkpoint-6")
    record = tmp_path / "cut" / "checkpoint-4" / run_dir.RUN_FILE
    before = json.loads(record.read_text())
    assert before["code"] == code_version()
    record.write_text(json.dumps({**before, "code": ["0.1+abc", "of an earlier version"]}))
    train_early_exit(replace(cut, resume=True))
    assert json.loads((tmp_path / "cut" / "checkpoint-6" / run_dir.RUN_FILE).read_text()) == before
    assert same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
