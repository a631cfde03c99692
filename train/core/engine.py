"""The training engine: one process, DDP, DeepSpeed or FSDP, as the launcher asks, through Accelerate.

Differences between these that Accelerate leaves to its caller are handled here and nowhere else in the loop. A batch of
rows (sequences of tokens) is split into micro batches: over processes, and on each over the passes of a step.
"""

import math
import os
from pathlib import Path

import torch
from accelerate import Accelerator, utils
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from outrider.base.errors import UserError, reason, warn
from outrider.base.processes import join_processes
from outrider.train.core import sharding
from outrider.train.core.optimizers import build_optimizer
from outrider.train.core.sharding import load_trained
from outrider.train.core.training import Student
from outrider.train.settings.fit import FitConfig

OPTIMIZER_FILE = f"{utils.OPTIMIZER_NAME}.bin"


class TrainingEngine:
    """A model prepared for training, with its optimizer.

    module: the wrapped model, to call and to accumulate over instead of `model`. optimizer: its `step` applies the
    accumulated gradients. Construct it on every process. It modifies `model` if parameters are sharded. Raises
    `UserError` if the config, the launcher and the model are incompatible.
    """

    def __init__(self, model: Student, config: FitConfig) -> None:
        mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if mixed_precision != "no":
            warn(f"mixed_precision={mixed_precision} in the launcher's config has no effect; fit.precision decides")
        process_count = join_processes().num_processes
        micro_rows = config.micro_rows(process_count)
        accumulation_steps = config.batch_rows // (micro_rows * process_count)
        plugin = utils.GradientAccumulationPlugin(num_steps=accumulation_steps, sync_with_dataloader=False)
        log_with = "wandb" if config.wandb.is_on() else None
        # Without mixed precision, as `fit` autocasts: with the launcher's, DeepSpeed and FSDP hold bf16 weights.
        self.accelerator = Accelerator(mixed_precision="no", gradient_accumulation_plugin=plugin, log_with=log_with)
        backend = self.accelerator.distributed_type
        self._deepspeed, self._fsdp = backend == utils.DistributedType.DEEPSPEED, backend == utils.DistributedType.FSDP
        if self._fsdp and self.accelerator.state.fsdp_plugin.fsdp_version != 2:
            raise UserError("fsdp_version=1: only FSDP2 can be trained with; see conf/accelerate/fsdp.yaml")
        utils.set_seed(config.seed)  # for dropout, if the model has any
        self.model = model
        self._max_norm = config.max_grad_norm or math.inf
        model.zero_grad()
        names = {type(module).__name__ for module in model.modules() if isinstance(module, GradientCheckpointingLayer)}
        vars(model)["_no_split_modules"] = sorted(names)  # where FSDP's TRANSFORMER_BASED_WRAP looks for them
        batch_config = {
            "train_micro_batch_size_per_gpu": micro_rows,
            "gradient_accumulation_steps": accumulation_steps,
            "train_batch_size": config.batch_rows,
            "gradient_clipping": config.max_grad_norm,
        }
        with sharding.deepspeed_config(self.accelerator, batch_config):
            self.module, self.optimizer = self.accelerator.prepare(model, build_optimizer(model, config))
        self._full_rates = [group["lr"] for group in self.optimizer.param_groups]

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

        Call it on every process. Frozen weights are excluded: `Accelerator.save_state` would include them under FSDP.
        The empty lists below stand for weights, schedulers and data loaders.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self._fsdp:
            plugin = self.accelerator.state.fsdp_plugin
            utils.save_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.module, str(folder))
        elif self._deepspeed:
            self.module.save_checkpoint(str(folder), exclude_frozen_parameters=True)
        save_accelerator_state(str(folder), [], self._optimizers, [], [], self._rank, self.accelerator.step)

    def load(self, checkpoint: Path) -> None:
        """Restore the weights, optimizer state and RNG states that `save_trained` and `save` wrote.

        Call it on every process. Raises `UserError` if they are unreadable or belong to another model.
        """
        advice = "continue under the strategy that wrote it (conf/accelerate), DeepSpeed's on as many GPUs"
        if self._optimizers and not (checkpoint / OPTIMIZER_FILE).exists():
            problem = f"no {OPTIMIZER_FILE} there, as if it was made by DeepSpeed or FSDP"
            raise UserError(f"{checkpoint}: {problem}; {advice}")
        if not self._deepspeed:
            load_trained(self.model, checkpoint)
        try:
            self._load_sharded(checkpoint)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # DeepSpeed and FSDP raise many types
            raise UserError(f"{checkpoint}: cannot be continued here ({reason(error)}); {advice}") from None
        remedy = f"remove {checkpoint}: resume=true goes on before it"
        try:
            attributes = load_accelerator_state(str(checkpoint), [], self._optimizers, [], [], self._rank)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch raises many types for damaged files
            raise UserError(f"{checkpoint / OPTIMIZER_FILE}: not readable ({reason(error)}); {remedy}") from None
        rng_file = checkpoint / f"{utils.RNG_STATE_NAME}_{self._rank}.pkl"  # none if there were fewer processes
        if rng_file.exists() and "step" not in attributes:  # Accelerate goes on without it
            raise UserError(f"{rng_file}: not readable; {remedy}")

    def _load_sharded(self, checkpoint: Path) -> None:
        """What a strategy restores by itself; DeepSpeed stores its own copy of the weights."""
        if self._deepspeed and self.module.load_checkpoint(str(checkpoint), load_module_strict=False)[0] is None:
            raise UserError("it holds no state of DeepSpeed")  # [0]: the path of what was loaded
        if self._fsdp:
            plugin = self.accelerator.state.fsdp_plugin
            utils.load_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.module, str(checkpoint))

    @property
    def _optimizers(self) -> list[AcceleratedOptimizer]:
        """The optimizers that are saved in one file, not by FSDP or DeepSpeed."""
        return [] if self._fsdp or self._deepspeed else [self.optimizer]

    @property
    def _rank(self) -> int:
        return self.accelerator.process_index
