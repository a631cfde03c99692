"""One process of a launcher that may share a model out: trains the tiny one, then what commands train.

See test_sharding.py. All in one process, since starting it takes longer than all of its trainings.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from outrider.base.errors import UserError
from outrider.base.processes import join_processes
from outrider.commands import main_of
from outrider.train.core import sharding
from outrider.train.core.fit import fit
from outrider.train.core.sharding import trained_parameters
from tests.train.fit_job import TinyModel, tiny_config, tiny_rows


def train(out_dir: Path, *, precision: str = "fp32", resume: bool = False) -> set[bool]:
    """Six steps, evaluated on the main process alone; leaves trained.safetensors. Was the model ever shared out?"""
    main, sharded = join_processes().is_main_process, set()

    class Watched(TinyModel):
        def begin_step(self, step: int) -> None:
            sharded.add(any(map(sharding.is_sharded, self.parameters())))

    rows, model = tiny_rows(), Watched(torch.float32)
    config = tiny_config(
        steps=6, optimizer="adamw", save_every=3, eval_every=3, log_every=1, micro_batch_rows=2, precision=precision
    )

    def evaluate(_: int) -> dict[str, float]:
        device = next(model.parameters()).device
        batch = {key: torch.stack([row[key] for row in rows[:5]]).to(device) for key in rows[0]}
        return {"loss": float(model(**batch)["loss_sum"])} if main else {}

    fit(model, rows, config, out_dir, evaluate=evaluate, resume=resume)
    if main:
        trained = {name: p.detach().cpu().contiguous() for name, p in trained_parameters(model).items()}
        save_file(trained, out_dir / "trained.safetensors")
    return sharded


def adjust_launcher() -> None:
    """FSDP on CPU processes, which accelerate has for accelerators only; DeepSpeed on them without a compiler."""
    if torch.cuda.is_available():
        return
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        from deepspeed import ops

        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return
    original = AcceleratorState.__init__

    def with_gpus(self: AcceleratorState, *args: object, **options: object) -> None:
        if not AcceleratorState._shared_state:  # later ones find the answer of the first
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        original(self, *args, **options)

    AcceleratorState.__init__ = with_gpus


def run_command(name: str, *overrides: str) -> None:
    """A command's entry, with these words on its command line.

    As in a process of its own: transformers hears of ZeRO-3 when the training begins, after the models were loaded, and
    FSDP of the layers to share out.
    """
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state()
    sys.argv = [name, *overrides]
    main_of(name)()


def main(folder: str, alone: str = "") -> None:
    """alone: what no launcher is needed for. Else also the commands in the folder's commands.json."""
    torch.set_num_threads(1)
    adjust_launcher()
    state, out = join_processes(), Path(folder)
    sharded = train(out / "whole")
    if alone:
        train(out / "bf16", precision="bf16")
        return
    if state.is_main_process:
        print("sharded", sharded)
        shutil.copytree(out / "whole", out / "resumed")
        shutil.rmtree(out / "resumed" / "checkpoint-6")
    state.wait_for_everyone()
    train(out / "resumed", resume=True)
    train(out / "bf16", precision="bf16")
    for words in json.loads((out / "commands.json").read_text()):
        run_command(*words)
    try:
        fit(TinyModel(torch.float32), tiny_rows(), tiny_config(), out / "muon")
    except UserError as error:
        print("refused", error)


if __name__ == "__main__":
    main(*sys.argv[1:])
