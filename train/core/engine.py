"""The training engine: one process, DDP, DeepSpeed or FSDP, as the launcher asks, through Accelerate.

Differences between these that Accelerate leaves to its caller are handled here and nowhere else in the loop.
"""

import math
import os
import random
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    GradientAccumulationPlugin,
    load_fsdp_optimizer,
    save_fsdp_optimizer,
    set_seed,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from outrider.errors import UserError, reason, warn
from outrider.processes import join_processes
from train.core import sharding
from train.core.optimizers import build_optimizer
from train.core.progress import tracker_of
from train.core.trained_weights import load_trained
from train.settings.fit import FitConfig

OPTIMIZER_FILE = "optimizer.pt"


class Engine:
    """A model prepared for training, with its optimizer.

    module: the wrapped model, to call and to accumulate over instead of `model`. optimizer: its `step` applies the
    accumulated gradients. Construct it on every process. It modifies `model` if parameters are sharded. Raises
    `UserError` if the config, the launcher and the model are incompatible.
    """

    def __init__(self, model: nn.Module, config: FitConfig) -> None:
        asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if asked != "no":
            warn(f"mixed_precision={asked} in the launcher's config has no effect; fit.precision decides")
        processes = join_processes().num_processes
        micro = config.micro_rows(processes)
        accumulated = config.batch_rows // (micro * processes)
        self.accelerator = Accelerator(
            mixed_precision="no",  # `fit` autocasts: with the launcher's setting, DeepSpeed and FSDP hold bf16 weights
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulated, sync_with_dataloader=False),
            log_with=tracker_of(config.wandb),
        )
        kind = self.accelerator.distributed_type
        self._deepspeed, self._fsdp = kind == DistributedType.DEEPSPEED, kind == DistributedType.FSDP
        if self._fsdp and self.accelerator.state.fsdp_plugin.fsdp_version != 2:
            raise UserError("fsdp_version=1: only FSDP2 can be trained with; see conf/accelerate/fsdp.yaml")
        if config.optimizer == "muon" and (self._deepspeed or self._fsdp):
            raise UserError("optimizer=muon: works on whole matrices; use adamw with DeepSpeed and FSDP, or DDP")
        set_seed(config.seed)  # for dropout, if the model has any
        self.model = model
        self._max_norm = config.max_grad_norm or math.inf
        model.zero_grad()
        sharding.mark_layers(model)
        batch = {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulated,
            "train_batch_size": config.batch_rows,
            "gradient_clipping": config.max_grad_norm,
        }
        with sharding.deepspeed_config(self.accelerator, batch):
            self.module, self.optimizer = self.accelerator.prepare(model, build_optimizer(model, config))
        self._full_rates = [group["lr"] for group in self.optimizer.param_groups]

    @property
    def updates_in_backward(self) -> bool:
        """True if the last backward of a step already updates the weights, as with DeepSpeed under Accelerate."""
        return self._deepspeed

    def set_rates(self, scale: float) -> None:
        """Set every learning rate to `scale` times its initial value."""
        for group, rate in zip(self.optimizer.param_groups, self._full_rates, strict=True):
            group["lr"] = rate * scale

    @property
    def rate(self) -> float:
        """The learning rate of the first parameter group."""
        return self.optimizer.param_groups[0]["lr"]

    def clip(self) -> float | None:
        """Clip the gradient to `max_grad_norm`; returns its norm before clipping, over the global batch.

        None if DeepSpeed does not report it.
        """
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self._max_norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return None if norm is None else float(norm)

    def save(self, folder: Path) -> None:
        """Save the optimizer state and the RNG states to `folder`.

        Call it on every process. Frozen weights, which DeepSpeed would include, are excluded.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self._fsdp:
            plugin = self.accelerator.state.fsdp_plugin
            save_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.module, str(folder))
        elif self._deepspeed:
            self.module.save_checkpoint(str(folder), exclude_frozen_parameters=True)
        elif self.accelerator.is_main_process:
            torch.save(self.optimizer.state_dict(), folder / OPTIMIZER_FILE)
        torch.save(_random_states(), self._random_file(folder))

    def load(self, checkpoint: Path) -> None:
        """Restore the weights, optimizer state and RNG states that `save_trained` and `save` wrote.

        Call it on every process. Raises `UserError` if they are unreadable or belong to another model.
        """
        if self._deepspeed:  # it stores its own copy of the weights
            found, _ = self.module.load_checkpoint(str(checkpoint), load_module_strict=False)
            if found is None:
                raise UserError(f"{checkpoint}: holds no state of DeepSpeed; continue under the launcher that wrote it")
        else:
            load_trained(self.model, checkpoint)
            self._load_optimizer(checkpoint)
        file = self._random_file(checkpoint)
        if file.exists():  # else the checkpoint was written by another number of processes
            with torch.serialization.safe_globals(_NUMPY):
                _set_random_states(cast(_RandomStates, _read(file, checkpoint)))

    def _load_optimizer(self, checkpoint: Path) -> None:
        if self._fsdp:
            plugin = self.accelerator.state.fsdp_plugin
            load_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.module, str(checkpoint))
        else:
            self.optimizer.load_state_dict(_read(checkpoint / OPTIMIZER_FILE, checkpoint))

    def _random_file(self, folder: Path) -> Path:
        one = self.accelerator.num_processes == 1
        return folder / ("rng_state.pth" if one else f"rng_state_{self.accelerator.process_index}.pth")


def _read(file: Path, checkpoint: Path) -> dict[str, object]:
    try:
        found: dict[str, object] = torch.load(file, map_location="cpu", weights_only=True)
        return found
    except Exception as error:  # torch raises many types for damaged files
        remedy = f"remove {checkpoint}: resume=true goes on before it"
        raise UserError(f"{file}: not readable ({reason(error)}); {remedy}") from None


# Types that torch's weights-only loader must allow to read NumPy's RNG state; the first one rebuilds an array.
_NUMPY: list[Any] = [np.empty(0).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype(np.uint32))]


class _RandomStates(TypedDict):
    python: tuple[object, ...]
    numpy: dict[str, object] | tuple[str, np.ndarray, int, int, float]
    cpu: Tensor
    cuda: NotRequired[Tensor]


def _random_states() -> _RandomStates:
    states: _RandomStates = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  (third-party model code may draw from it)
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: _RandomStates) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["cpu"])
    cuda = states.get("cuda")
    if torch.cuda.is_available() and cuda is not None:
        torch.cuda.set_rng_state(cuda)
