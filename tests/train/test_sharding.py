"""Launchers that share parameters out train what one process trains, and their checkpoints hold what is trained."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.commands import launch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from outrider.base.errors import UserError
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.early_exit.checkpoint import WEIGHTS_FILE
from outrider.train.core import sharding
from outrider.train.core.sharding import trained_parameters
from outrider.train.eagle3 import train_eagle3
from outrider.train.eesd import train_early_exit
from outrider.train.finetune_drafter import finetune_drafter
from outrider.train.settings.drafters import DrafterConfig
from tests.forked import Fork
from tests.launched import free_port, launched
from tests.tiers import typical_where
from tests.train import sharded_job
from tests.train.fit_job import TinyModel
from tests.train.jobs import FIT, command, distilling, finetuning, heading, log

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
    """What two processes of a launcher say."""
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
        if gpus:
            run_job([], folder, "alone", gpus=gpus)
        else:
            job = Fork(["-m", "tests.train.sharded_job", folder, "alone"])
            said = job.communicate(timeout=300)
            assert job.returncode == 0, said
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


def curve(run: Path, name: str) -> dict[float, float]:
    """What was logged as `name`, by step; the latest where a step was done again."""
    return {line["step"]: line[name] for line in log(run) if name in line}


def forked(config: Path, folder: Path) -> str:
    """What the same processes say that are told what the launcher would tell them, without their imports."""
    words = [f"--config_file={config}", "--num_processes=2", "script.py"]
    asked, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))

    def work(state: PartialState) -> None:
        said = (folder / f"said-{state.process_index}.txt").open("w", buffering=1)
        os.dup2(said.fileno(), 1)
        sys.stdout = sys.stderr = said
        AcceleratorState._reset_state()  # of what was trained here before
        sharded_job.main(str(folder))

    statuses = launched(2, work, launch.prepare_multi_gpu_env(asked))
    said = "".join(path.read_text() for path in sorted(folder.glob("said-*.txt")))
    assert statuses == [0, 0], said
    return said


@pytest.mark.parametrize(("processes", "gpus"), [(2, ""), pytest.param(1, "0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("strategy", typical_where("forked fsdp".__eq__, ["zero2", "zero3", "fsdp", "forked fsdp"]))
@pytest.mark.slow
def test_processes_that_share_equal_one(
    alone: Callable[[str], Path], tmp_path: Path, target: Path, corpus: DataConfig, strategy: str, processes: int,
    gpus: str,
) -> None:  # fmt: skip
    """All in one launch: the tiny model, and where all weights are shared out what the commands train."""
    if gpus and "fsdp" not in strategy:
        pytest.importorskip("deepspeed")  # which installs without a GPU, but is not in every image that has one
    config = ROOT / "conf/accelerate" / f"{strategy.split()[-1]}.yaml"
    if strategy == "zero3":
        config = share_everything(tmp_path)
    commands = {} if strategy == "zero2" or gpus else reference_runs(tmp_path, target, corpus)
    (tmp_path / "commands.json").write_text(json.dumps([*commands.values()]))
    if strategy == "forked fsdp" and not gpus:
        out = forked(config, tmp_path)
    else:
        out = run_job(launcher(config, processes), tmp_path, gpus=gpus)
    assert f"sharded {{{strategy != 'zero2'}}}" in out
    assert "refused optimizer=muon: works on whole matrices" in out
    check_tiny(tmp_path, alone(gpus))
    if commands:
        pairs = {name: (tmp_path / name, tmp_path / f"{name}-alone") for name in commands}
        # The frozen weights are shared out as well, which decoding needs while training, and the export at its end.
        check_same(*pairs["adapters"], ["eval_tau"])
        check_same(*pairs["early_exit"], ["eval_tau", "eval_top1", "eval_top1_target"], WEIGHTS_FILE)
        # An EAGLE-3 head reads embedding and head of the target beside their modules.
        check_same(*pairs["steps"], ["eval_tau", "eval_agree_1", "eval_agree_3"])
        # A head's matrix that is not trained is shared out too, and saved with it.
        check_same(*pairs["frozen"], [])
        for name in ("adapters", "early_exit"):
            assert max(curve(tmp_path / name, "eval_tau").values()) > 1
        head, before = (load_file(path / "model.safetensors")["lm_head.weight"] for path in pairs["frozen"])
        assert torch.equal(head, before)
        after, start = (load_file(path / "model.safetensors") for path in (tmp_path / "adapters", target))
        assert any((after[name] - start[name]).abs().max() > 1e-2 for name in start)


def check_tiny(together: Path, alone: Path) -> None:
    """The same curves and weights as one process; a resumed run to the bit; checkpoints of what is trained."""
    start = trained_parameters(TinyModel(torch.float32))
    for run, reference, tolerance in (("whole", "whole", 1e-6), ("resumed", "whole", 1e-6), ("bf16", "bf16", 2e-3)):
        ours, theirs = together / run, alone / reference
        for name in ("loss", "lr", "grad_norm", "eval_loss"):
            assert curve(ours, name) == pytest.approx(curve(theirs, name), rel=10 * tolerance)
        trained = load_file(ours / "trained.safetensors")
        for name, value in load_file(theirs / "trained.safetensors").items():
            torch.testing.assert_close(trained[name], value, rtol=0, atol=tolerance)
            assert (value - start[name]).abs().max() > 5 * tolerance

    whole, resumed = (load_file(together / run / "trained.safetensors") for run in ("whole", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in start)
    checkpoint = together / "whole" / "checkpoint-3"
    assert load_file(checkpoint / "model.safetensors").keys() == start.keys()
    for file in checkpoint.rglob("*.pt"):
        assert "embedding" not in str(torch.load(file, weights_only=False).get("module", "")), file
    assert not (checkpoint / "pytorch_model_fsdp.bin").exists()


def reference_runs(folder: Path, target: Path, corpus: DataConfig) -> dict[str, list[str]]:
    """Train adapters and an early exit here, into NAME-alone; the command lines that do the same into NAME."""
    adapters = finetuning(
        target, corpus, folder / "adapters-alone", fit=replace(FIT, lr=1.5e-2, eval_every=2, log_every=1),
        drafter=DrafterConfig(path=str(target)), lora_rank=2, objective="cross_entropy",
    )  # fmt: skip
    finetune_drafter(adapters)
    exits = distilling(
        target, corpus, folder / "early_exit-alone", decode_prompts=2, decode_tokens=8, objective="forward_kl",
        fit=replace(FIT, lr=2e-2, eval_every=2, log_every=1),
    )  # fmt: skip
    train_early_exit(exits)
    steps = heading(target, corpus, folder / "steps-alone", fit=replace(FIT, lr=2e-2, eval_every=2, log_every=1))
    train_eagle3(steps)
    frozen = replace(steps, train_head=False, fit=replace(FIT, steps=2), out_dir=str(folder / "frozen-alone"))
    train_eagle3(frozen)
    runs = {"frozen": ("eagle3", frozen), "steps": ("eagle3", steps)}
    runs |= {"adapters": ("finetune_drafter", adapters), "early_exit": ("eesd", exits)}
    return {name: command(module, config, folder / name) for name, (module, config) in runs.items()}


def check_same(together: Path, alone: Path, curves: Sequence[str], file: str = "model.safetensors") -> None:
    """The same evaluations, about the same losses and weights."""
    for name in curves:
        assert curve(together, name) == curve(alone, name)
    assert curve(together, "loss") == pytest.approx(curve(alone, "loss"), rel=1e-4)
    one, other = (load_file(folder / file) for folder in (alone, together))
    torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)


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
