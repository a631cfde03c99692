"""The runtime for a device."""

import torch

from inference.core.target_session import Runtime


def make_runtime(name: str, device: torch.device) -> Runtime:
    """The runtime called `name` (auto | eager | graphed); auto is graphed on CUDA and eager elsewhere."""
    if name == "graphed" or (name == "auto" and device.type == "cuda"):
        from inference.engines.graphs.cuda_graphs import Graphed  # an engine is loaded only where it is used

        return Graphed()
    return Runtime()
