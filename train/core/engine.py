"""What trains a model under whatever a launcher asks for: one process, DDP, DeepSpeed or FSDP, through Accelerate.

The differences between these that Accelerate leaves to its caller are here, and nowhere else in the loop.
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
    """A model that is prepared for training, with its optimizer.

    module: what to call and to accumulate over in the model's place. optimizer: steps once the gradients of a step
    are there. Make it on every process. It changes `model` where parameters are shared out. Raises `UserError` where
    the config, the launcher and the model do not go together.
    """

    def __init__(self, model: nn.Module, config: FitConfig) -> None:
        asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if asked != "no":
            warn(f"mixed_precision={asked} in the launcher's config has no effect; fit.precision decides")
        processes = join_processes().num_processes
        micro = config.micro_rows(processes)
        accumulated = config.batch_rows // (micro * processes)
        self.accelerator = Accelerator(
            mixed_precision="no",  # `fit` casts by itself: with the launcher's, DeepSpeed and FSDP hold bf16 weights
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulated, sync_with_dataloader=False),
            log_with=tracker_of(config.wandb),
        )
        kind = self.accelerator.distributed_type
        self._deepspeed, self._fsdp = kind == DistributedType.DEEPSPEED, kind == DistributedType.FSDP
        if self._fsdp and self.accelerator.state.fsdp_plugin.fsdp_version != 2:
            raise UserError("fsdp_version=1: only FSDP2 can be trained with; see conf/accelerate/fsdp.yaml")
        if config.optimizer == "muon" and (self._deepspeed or self._fsdp):
            raise UserError("optimizer=muon: works on whole matrices; use adamw with DeepSpeed and FSDP, or DDP")
        set_seed(config.seed)  # of dropout, where a model has any
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
        """Whether the last backward of a step updates the weights already, as Accelerate has DeepSpeed do."""
        return self._deepspeed

    def set_rates(self, scale: float) -> None:
        """Set every learning rate to `scale` times the one the optimizer was made with."""
        for group, rate in zip(self.optimizer.param_groups, self._full_rates, strict=True):
            group["lr"] = rate * scale

    @property
    def rate(self) -> float:
        """The learning rate of the first parameter group."""
        return self.optimizer.param_groups[0]["lr"]

    def clip(self) -> float | None:
        """Clip the gradient to `max_grad_norm`; returns its norm before, that of the global batch.

        None where DeepSpeed does not tell it.
        """
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self._max_norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return None if norm is None else float(norm)

    def save(self, folder: Path) -> None:
        """Put what goes on changing beside the weights into `folder`: the optimizer's state, the random numbers'.

        Call it on every process. Frozen weights, which DeepSpeed would add, are left out.
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
        """Take up weights, optimizer state and random numbers where `save_trained` and `save` left them.

        Call it on every process. Raises `UserError` where they are not readable or are another model's.
        """
        if self._deepspeed:  # which keeps weights of its own
            found, _ = self.module.load_checkpoint(str(checkpoint), load_module_strict=False)
            if found is None:
                raise UserError(f"{checkpoint}: holds no state of DeepSpeed; continue under the launcher that wrote it")
        else:
            load_trained(self.model, checkpoint)
            self._load_optimizer(checkpoint)
        file = self._random_file(checkpoint)
        if file.exists():  # else another number of processes has written it
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
    except Exception as error:  # torch has many for what is damaged
        remedy = f"remove {checkpoint}: resume=true goes on before it"
        raise UserError(f"{file}: not readable ({reason(error)}); {remedy}") from None


# What torch's weights-only loader must know to read NumPy's random state; the first restores an array.
_NUMPY: list[Any] = [np.empty(0).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype(np.uint32))]


class _RandomStates(TypedDict):
    python: tuple[object, ...]
    numpy: dict[str, object] | tuple[str, np.ndarray, int, int, float]
    cpu: Tensor
    cuda: NotRequired[Tensor]


def _random_states() -> _RandomStates:
    states: _RandomStates = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  (what somebody else's model may draw from)
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
