"""Commands whose target is split over processes leave what one leaves. Run by test_split_training.py."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from data_prep.responses.generate import generate_responses
from data_prep.responses.settings import GenerateConfig
from data_prep.text.settings import DataConfig
from draft_models.eagle3.card import TRAINING_FILE
from draft_models.early_exit.checkpoint import read_meta
from outrider.processes import join_processes
from tests.launched import launched
from tests.tiny import save_target
from tests.train import jobs
from train.calibration import calibrate
from train.eagle3_head import train_eagle3
from train.early_exit import train_early_exit
from train.settings import CalibrateConfig
from train.small_lm import finetune_drafter


def run(command: Callable[[Any], None], config: Any, processes: int) -> None:
    """`command` by that many processes of a launcher."""

    def work(_: object) -> None:
        join_processes.cache_clear()
        AcceleratorState._reset_state()
        command(config)

    assert launched(processes, work) == [0] * processes


def drafter(out_dir: Path) -> dict[str, torch.Tensor]:
    files = sorted(out_dir.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def losses(out_dir: Path) -> list[float]:
    return [line["loss"] for line in jobs.log(out_dir) if "loss" in line]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), kv_heads=2)


@pytest.fixture
def corpus(tmp_path: Path) -> DataConfig:
    return jobs.write_corpus(tmp_path)


@pytest.mark.parametrize(("processes", "train_head"), [(2, True), (4, False)])
def test_an_early_exit_distilled_from_a_split_target(
    target: Path, corpus: DataConfig, tmp_path: Path, processes: int, train_head: bool
) -> None:
    """Losses, τ and weights, whether groups share the rows out or there is one; with decoding and without."""
    decoded = 2 if train_head else 0
    options = {"objective": "kl", "decode_prompts": decoded, "decode_tokens": 8, "train_head": train_head}
    one = jobs.distilling(target, corpus, tmp_path / "one", **options)
    split = replace(one, tensor_parallel=2, minutes=1000, out_dir=str(tmp_path / "split"))
    run(train_early_exit, one, 1)
    run(train_early_exit, split, processes)
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    expected, got = drafter(tmp_path / "one"), drafter(tmp_path / "split")
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-3, atol=2e-5)
    metrics = [read_meta(folder).training["metrics"] for folder in (tmp_path / "one", tmp_path / "split")]
    assert metrics[0].keys() == metrics[1].keys() >= {"top1"}
    assert metrics[0].get("tau") == metrics[1].get("tau")
    last = [line["tokens_per_s"] > 0 for line in jobs.log(tmp_path / "split") if "tokens_per_s" in line]
    assert last
    assert all(last)


def test_an_evaluation_without_decoding_takes_the_whole_group(target: Path, corpus: DataConfig, tmp_path: Path) -> None:
    """What is watched of a target that runs along needs all the processes that hold it, also where nothing decodes."""
    one = jobs.distilling(target, corpus, tmp_path / "one", objective="kl_tv", fit=replace(jobs.FIT, eval_every=2))
    split = replace(one, tensor_parallel=2, out_dir=str(tmp_path / "split"))
    run(train_early_exit, one, 1)
    run(train_early_exit, split, 4)
    found = []
    for folder in (tmp_path / "one", tmp_path / "split"):
        lines = [line for line in jobs.log(folder) if "eval_top1" in line]
        assert [line["step"] for line in lines] == [2, 4]
        found.append([line["eval_tau_analytic"] for line in lines])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_a_small_lm_distilled_from_a_split_target(target: Path, corpus: DataConfig, tmp_path: Path) -> None:
    one = jobs.finetuning(target, corpus, tmp_path / "one", on_policy=0.5)
    split = replace(one, tensor_parallel=2, out_dir=str(tmp_path / "split"))
    run(finetune_drafter, one, 1)
    run(finetune_drafter, split, 2)
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    expected, got = drafter(tmp_path / "one"), drafter(tmp_path / "split")
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(("processes", "kept"), [(4, False), (2, True)])
def test_an_eagle3_head_on_a_split_target(
    target: Path, corpus: DataConfig, tmp_path: Path, processes: int, kept: bool
) -> None:
    """Losses, τ and weights, of two groups that share the rows out and of one; by way of a folder of states too."""
    one = jobs.heading(target, corpus, tmp_path / "one")
    features = {"features": str(tmp_path / "features"), "features_dtype": "float32"} if kept else {}
    split = replace(one, tensor_parallel=2, out_dir=str(tmp_path / "split"), **features)
    run(train_eagle3, one, 1)
    run(train_eagle3, split, processes)
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    expected, got = drafter(tmp_path / "one"), drafter(tmp_path / "split")
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-3, atol=2e-5)
    metrics = [json.loads((tmp_path / name / TRAINING_FILE).read_text())["metrics"] for name in ("one", "split")]
    assert metrics[0]["tau"] == metrics[1]["tau"]
    assert metrics[0]["agree_1"] == metrics[1]["agree_1"]


def test_a_calibration_head_of_a_split_target(target: Path, corpus: DataConfig, tmp_path: Path) -> None:
    """The tokens that were tested, and what became of them."""
    captured, drafted = [], tmp_path / "drafter"
    run(train_early_exit, jobs.distilling(target, corpus, drafted, fit=replace(jobs.FIT, steps=2)), 1)
    for name, processes in (("one", 1), ("split", 2)):
        made = shutil.copytree(drafted, tmp_path / f"drafter_{name}")
        config = CalibrateConfig(
            checkpoint=str(made), data=corpus, fit=replace(jobs.FIT, batch_rows=2, save_every=None), prompts=10,
            heldout_prompts=4, seq_len=48, new_tokens=12, max_draft=4, tensor_parallel=processes,
            out_dir=str(tmp_path / name),
        )  # fmt: skip
        run(calibrate, config, processes)
        files = sorted((tmp_path / name / "captured").glob("*/*.safetensors"))
        captured.append({(file.parent.name, file.name): load_file(file) for file in files})
    one, split = captured
    assert one.keys() == split.keys()
    for key, tensors in one.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(split[key][name], tensor, rtol=1e-4, atol=1e-4)


def test_responses_of_a_split_target(target: Path, corpus: DataConfig, tmp_path: Path) -> None:
    """By two groups of two: the answers of one process, each written once; with a time limit too."""
    one = GenerateConfig(
        target=str(target), data=replace(corpus, heldout_fraction=0.8), max_new_tokens=10, batch_size=4, shard_size=4,
        out_dir=str(tmp_path / "one"),
    )  # fmt: skip
    split = replace(one, tensor_parallel=2, minutes=1000, out_dir=str(tmp_path / "split"))
    run(generate_responses, one, 1)
    run(generate_responses, split, 4)
    answers = []
    for folder in (tmp_path / "one", tmp_path / "split"):
        lines = [line for file in folder.glob("responses-*.jsonl") for line in file.read_text().splitlines()]
        answers.append(sorted(map(json.loads, lines), key=lambda line: line["id"]))
    assert answers[0] == answers[1]
    assert len(answers[0]) > 4
