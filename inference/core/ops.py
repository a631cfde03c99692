"""What a decode loop asks of logits, and of the rows of a round, besides passes.

Between two passes of a target the caches are cold: a small operation of PyTorch's takes five times what it takes alone.
So an engine may have faster functions under the same names. One returns None for what it does not handle, and PyTorch
does it. They are looked for on first use: importing this module loads no engine.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from outrider.errors import warn

ENGINES = {"cpu": "inference.engines.cpu.choices"}  # by type of device, the module that has faster functions


def largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """`scores.max(-1)` of [n, V]: the largest of each row and its first place, or a NaN and its place."""
    found: tuple[Tensor, Tensor] | None = _faster("largest", scores.device)(scores)
    if found is None:
        values, places = scores.max(-1)
        return values, places
    return found


def likeliest(logits: Tensor) -> Tensor:
    """The token [n] with the largest of each row of logits [n, V]; −1 where that is NaN or infinite."""
    found: Tensor | None = _faster("likeliest", logits.device)(logits)
    if found is None:
        values, tokens = logits.max(-1)
        difference = values - values  # NaN where they are not finite
        return tokens.masked_fill_(difference != difference, -1)
    return found


def likeliest_children(
    logits: Tensor, weights: Sequence[float], count: int, sharpness: float = 1.0
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The `count` largest of weights [n] · softmax(sharpness · logits [n, V]), descending: values, rows, columns, each
    [count] or, where there are not so many, fewer.

    Values are in float32, and 0 beyond those above 0. None where no engine does it in one step.
    """
    found: tuple[Tensor, Tensor, Tensor] | None = _faster("likeliest_children", logits.device)(
        logits, weights, count, sharpness
    )
    return found


def ancestor_mask(
    ancestors: Sequence[int], past: int, columns: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """An additive mask [1, 1, n, past + columns]: row i sees the first `past` columns and, of those after them, the
    ones whose bit is set in ancestors[i]. None where no engine makes it in one step."""
    found: Tensor | None = _faster("ancestor_mask", device)(ancestors, past, columns, dtype)
    return found


def _faster(name: str, device: torch.device) -> Callable[..., Any]:
    return _engine_function(device.type, name)


@cache
def _engine_function(device_type: str, name: str) -> Callable[..., Any]:
    """An engine's function, or one that returns None where there is no engine, or where it cannot be loaded."""
    if device_type in ENGINES:
        try:
            return getattr(import_module(ENGINES[device_type]), name)
        except (ImportError, OSError, RuntimeError) as error:
            warn(f"decoding on {device_type} goes by PyTorch alone, which is slower: {error}")
    return _nothing


def _nothing(*_: object) -> None:
    return None
