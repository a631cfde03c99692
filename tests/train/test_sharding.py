"""Launchers that share parameters out train what one process trains, and their checkpoints hold what is trained."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from data_prep.settings import DataConfig
from draft_models.checkpoint import WEIGHTS_FILE
from outrider.errors import UserError
from tests.launched import free_port
from tests.train.fit_job import TinyModel
from tests.train.jobs import FIT, distilling, finetuning, finish, launch
from train import sharding
from train.early_exit import train_early_exit
from train.settings import DrafterConfig
from train.small_lm import finetune_drafter
from train.trained_weights import trained_parameters

ROOT = Path(__file__).parent.parent.parent
ZERO3 = {  # conf/accelerate/zero3.yaml leaves parameters of fewer than 100,000 elements whole
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def launcher(config: Path, processes: int) -> list[str]:
    options = [f"--config_file={config}", f"--num_processes={processes}", f"--main_process_port={free_port()}"]
    return ["-m", "accelerate.commands.launch", *options]


def run_job(start: list[str], folder: Path, *arguments: str, gpus: str) -> str:
    run = subprocess.run(
        [sys.executable, *start, ROOT / "tests/train/sharded_job.py", folder, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": gpus, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, cwd=ROOT, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of the same runs by one process without a launcher, with these GPUs."""

    @functools.cache
    def run(gpus: str) -> Path:
        folder = tmp_path_factory.mktemp("alone")
        run_job([], folder, "alone", gpus=gpus)
        return folder

    return run


def share_everything(folder: Path) -> Path:
    """A launcher's config for ZeRO-3 that shares even tiny parameters out."""
    engine, config = folder / "engine.json", folder / "zero3.yaml"
    engine.write_text(json.dumps(ZERO3))
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 1\n"
        f"deepspeed_config: {{deepspeed_config_file: {engine}, zero3_init_flag: false}}\n"
    )
    return config


def curve(run: Path, name: str) -> dict[int, float]:
    """What was logged as `name`, by step; the latest where a step was done again."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


@pytest.mark.parametrize(("processes", "gpus"), [(2, ""), pytest.param(1, "0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_processes_that_share_equal_one(
    alone: Callable[[str], Path], tmp_path: Path, strategy: str, processes: int, gpus: str
) -> None:
    config = ROOT / "conf/accelerate" / f"{strategy}.yaml"
    if strategy == "zero3":
        config = share_everything(tmp_path)
    out = run_job(launcher(config, processes), tmp_path, gpus=gpus)
    assert f"sharded {{{strategy != 'zero2'}}}" in out
    assert "refused optimizer=muon: works on whole matrices" in out

    start = trained_parameters(TinyModel(torch.float32))
    for run, reference, tolerance in (("whole", "whole", 1e-6), ("resumed", "whole", 1e-6), ("bf16", "bf16", 2e-3)):
        ours, theirs = tmp_path / run, alone(gpus) / reference
        for name in ("loss", "lr", "grad_norm", "eval_loss"):
            assert curve(ours, name) == pytest.approx(curve(theirs, name), rel=10 * tolerance)
        trained = load_file(ours / "trained.safetensors")
        for name, value in load_file(theirs / "trained.safetensors").items():
            torch.testing.assert_close(trained[name], value, rtol=0, atol=tolerance)
            assert (value - start[name]).abs().max() > 5 * tolerance

    whole, resumed = (load_file(tmp_path / run / "trained.safetensors") for run in ("whole", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in start)
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert load_file(checkpoint / "model.safetensors").keys() == start.keys()
    for file in checkpoint.rglob("*.pt"):
        assert "embedding" not in str(torch.load(file, weights_only=False).get("module", "")), file
    assert not (checkpoint / "pytorch_model_fsdp.bin").exists()


def test_what_the_loop_decides_is_filled_into_deepspeeds_config_and_never_overrules_it() -> None:
    given = {"train_batch_size": "auto", "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
    plugin = SimpleNamespace(deepspeed_config=given, hf_ds_config=SimpleNamespace(config=given))
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, deepspeed_plugin=plugin)
    with sharding.deepspeed_config(accelerator, {"train_batch_size": 8, "gradient_clipping": 1.0}):
        assert plugin.deepspeed_config is plugin.hf_ds_config.config
        assert plugin.deepspeed_config == {**given, "train_batch_size": 8}
    assert plugin.deepspeed_config is plugin.hf_ds_config.config is given
    assert given["train_batch_size"] == "auto"  # for the next run of this process
    with (
        pytest.raises(UserError, match=r"gradient_clipping=1\.0: the settings of `fit` make it 0\.5; write auto"),
        sharding.deepspeed_config(accelerator, {"gradient_clipping": 0.5}),
    ):
        pass


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_adapters_are_watched_and_merged_where_all_weights_are_shared_out(
    tmp_path: Path, target: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """The frozen weights are shared out as well, which decoding needs while training, and the export at its end."""
    fit = replace(FIT, lr=2e-2, eval_every=2, log_every=1)
    run = finetuning(target, corpus, tmp_path / "one", fit=fit, drafter=DrafterConfig(path=str(target)), lora_rank=2,
                     objective="cross_entropy")  # fmt: skip
    finetune_drafter(run)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    two = replace(run, out_dir=str(tmp_path / "two"))
    config = share_everything(tmp_path) if strategy == "zero3" else ROOT / "conf/accelerate/fsdp.yaml"
    finish(launch("tests/train/finetune_job.py", two, *launcher(config, 2)))
    assert curve(tmp_path / "two", "eval_tau") == curve(tmp_path / "one", "eval_tau")
    assert max(curve(tmp_path / "two", "eval_tau").values()) > 1
    assert curve(tmp_path / "two", "loss") == pytest.approx(curve(tmp_path / "one", "loss"), rel=1e-4)
    folders = (tmp_path / "one", tmp_path / "two", target)
    one, other, start = (load_file(folder / "model.safetensors") for folder in folders)
    assert any((one[name] - start[name]).abs().max() > 1e-2 for name in start)
    torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_early_exits_are_watched_where_all_weights_are_shared_out(
    tmp_path: Path, target: Path, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    run = distilling(target, corpus, tmp_path / "one", decode_prompts=2, decode_tokens=8, objective="kl")
    run = replace(run, fit=replace(run.fit, lr=2e-2, eval_every=3, log_every=1))
    train_early_exit(run)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    two = replace(run, out_dir=str(tmp_path / "two"))
    config = share_everything(tmp_path) if strategy == "zero3" else ROOT / "conf/accelerate/fsdp.yaml"
    finish(launch("tests/train/eesd_job.py", two, *launcher(config, 2)))
    for name in ("eval_tau", "eval_top1", "eval_top1_target"):
        assert curve(tmp_path / "two", name) == curve(tmp_path / "one", name)
    assert max(curve(tmp_path / "two", "eval_tau").values()) > 1
    assert curve(tmp_path / "two", "loss") == pytest.approx(curve(tmp_path / "one", "loss"), rel=1e-4)
    one, other = (load_file(tmp_path / name / WEIGHTS_FILE) for name in ("one", "two"))
    torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)
