"""Operations on logits and rows between the passes of a decode loop.

Between target passes the hardware caches are cold, and a small PyTorch operation takes five times as long as alone. So
an engine may provide faster functions of the same names. Such a function returns None for cases that it does not
handle; PyTorch handles those. They are loaded on first use: importing this module loads no engine.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from outrider.errors import warn

ENGINES = {"cpu": "inference.engines.cpu.choices"}  # by device type: the module of faster functions


def largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """`scores.max(-1)` of [n, V]: the largest of each row and its first index, or NaN and its index."""
    found: tuple[Tensor, Tensor] | None = _faster("largest", scores.device)(scores)
    if found is None:
        values, places = scores.max(-1)
        return values, places
    return found


def likeliest(logits: Tensor) -> Tensor:
    """The argmax token [n] of each row of logits [n, V]; −1 if the maximum is NaN or infinite."""
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
    [count], or fewer if n · V is smaller.

    Values are in float32; if fewer than `count` are above 0, the others are 0. None if no engine does it in one step.
    """
    found: tuple[Tensor, Tensor, Tensor] | None = _faster("likeliest_children", logits.device)(
        logits, weights, count, sharpness
    )
    return found


def ancestor_mask(
    ancestors: Sequence[int], past: int, columns: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """The additive ancestor mask [1, 1, n, past + columns]: row i sees the first `past` columns and those later ones
    whose bit is set in ancestors[i]. None if no engine builds it in one step."""
    found: Tensor | None = _faster("ancestor_mask", device)(ancestors, past, columns, dtype)
    return found


def _faster(name: str, device: torch.device) -> Callable[..., Any]:
    return _engine_function(device.type, name)


@cache
def _engine_function(device_type: str, name: str) -> Callable[..., Any]:
    """An engine's function; without an engine, or if it cannot be loaded, a function that returns None."""
    if device_type in ENGINES:
        try:
            return getattr(import_module(ENGINES[device_type]), name)
        except (ImportError, OSError, RuntimeError) as error:
            warn(f"decoding on {device_type} goes by PyTorch alone, which is slower: {error}")
    return lambda *_: None
