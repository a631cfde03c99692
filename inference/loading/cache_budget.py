"""The memory for the KV caches of all texts of a loaded target and its drafters."""

from collections.abc import Mapping, Sized

import psutil
import torch
from torch import nn
from transformers import PreTrainedConfig

from outrider.draft_models.targets.model_spec import key_heads
from outrider.draft_models.targets.stack import LayerStack, WholeModel
from outrider.draft_models.targets.target import Target
from outrider.inference.core.batch import CacheBudget


def budget_of(target: Target, drafters: Mapping[str, object], most: int | None) -> CacheBudget:
    """The budget of `most` bytes; None: of half of the memory that is free now."""
    size = target.dtype.itemsize
    total = position_bytes(target.config, size)
    for model in (getattr(model, "drafter", model) for model in drafters.values()):  # without a calibration head
        if isinstance(model, LayerStack | WholeModel):
            total += position_bytes(model.config, size)
        elif isinstance(model, nn.Module) and isinstance(layers := getattr(model, "layers", None), Sized):
            total += position_bytes(target.config, size, len(layers))
    return CacheBudget(total, free_bytes(target.device) // 2 if most is None else most)


def position_bytes(config: PreTrainedConfig, itemsize: int, layers: int | None = None) -> int:
    """Bytes of the keys and values of one position in `layers` layers, by default all."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    count = config.num_hidden_layers if layers is None else layers
    return 2 * count * key_heads(config) * width * itemsize


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that are free now."""
    return int(torch.cuda.mem_get_info()[0] if device.type == "cuda" else psutil.virtual_memory().available)
