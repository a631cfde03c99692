"""The memory for the KV caches of all texts of a loaded target and its drafters."""

from collections.abc import Mapping, Sized
from typing import cast

from torch import nn

from outrider.draft_models.targets.stack import LayerStack, WholeModel
from outrider.draft_models.targets.target import Target
from outrider.inference.core.batch import CacheBudget
from outrider.inference.drafters.shaped import bare
from outrider.inference.loading.memory_plan import free_bytes, position_bytes


def budget_of(target: Target, drafters: Mapping[str, object], most: int | None) -> CacheBudget:
    """The budget of `most` bytes; None: of half of the memory that is free now."""
    size = target.dtype.itemsize
    total = position_bytes(target.config, size)
    for model in map(bare, drafters.values()):
        if isinstance(model, LayerStack | WholeModel):
            total += position_bytes(model.config, size)
        elif isinstance(model, nn.Module):  # layers like the target's
            total += position_bytes(target.config, size, len(cast(Sized, model.layers)))
    return CacheBudget(total, free_bytes(target.device) // 2 if most is None else most)
