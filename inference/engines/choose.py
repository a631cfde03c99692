"""The runtime for a device."""

import torch

from inference.core.runtime import Eager, Runtime
from inference.engines.graphs.cuda_graphs import Graphed


def make_runtime(name: str, device: torch.device) -> Runtime:
    """The runtime called `name` (auto | eager | graphed); auto is graphed on CUDA and eager elsewhere."""
    graphed = name == "graphed" or (name == "auto" and device.type == "cuda")
    return Graphed() if graphed else Eager()
