"""Operations on logits and rows (tokens of a pass) between the passes of a decode loop.

Between target passes the hardware caches are cold, and a small PyTorch operation takes five times as long as alone. So
the CPU engine has faster functions of the same names (`engines.cpu.choices`). Such a function returns None for cases
that it does not handle, which PyTorch handles. The engine is loaded on first use, not when this module is imported.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from outrider.base.errors import warn


def row_maxima(scores: Tensor) -> tuple[Tensor, Tensor]:
    """`scores.max(-1)` of [n, V]: the largest of each row and its first index, or NaN and its index."""
    maxima: tuple[Tensor, Tensor] | None = _faster("row_maxima", scores.device, scores)
    values, indices = scores.max(-1) if maxima is None else maxima
    return values, indices


def likeliest(logits: Tensor) -> Tensor:
    """The argmax token [n] of each row of logits [n, V]; −1 if the maximum is NaN or infinite."""
    tokens: Tensor | None = _faster("likeliest", logits.device, logits)
    if tokens is None:
        maxima, tokens = logits.max(-1)
        zero_or_nan = maxima - maxima  # NaN where they are not finite
        return tokens.masked_fill_(zero_or_nan != zero_or_nan, -1)
    return tokens


def likeliest_children(
    logits: Tensor, weights: Sequence[float], count: int, sharpness: float = 1.0
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The `count` largest of weights [n] · softmax(sharpness · logits [n, V]), descending: values (float32), rows,
    columns, each [count], or fewer if n · V is smaller; values may be 0. None if no engine finds them in one step."""
    return _faster("likeliest_children", logits.device, logits, weights, count, sharpness)


def ancestor_mask(
    ancestor_bits: Sequence[int], past: int, column_count: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """The additive ancestor mask [1, 1, n, past + column_count]: row i sees the first `past` columns, and the later
    columns whose bit is set in ancestor_bits[i]. None if no engine builds the mask in one step."""
    return _faster("ancestor_mask", device, ancestor_bits, past, column_count, dtype)


def _faster(name: str, device: torch.device, *arguments: object) -> Any:
    """The result of the engine's function `name`; None without an engine, and for cases that it does not handle."""
    engine = _cpu_engine() if device.type == "cpu" else None
    return None if engine is None else getattr(engine, name)(*arguments)


@cache
def _cpu_engine() -> ModuleType | None:
    try:
        return import_module("outrider.inference.engines.cpu.choices")
    except (ImportError, OSError, RuntimeError) as error:
        warn(f"decoding on a CPU goes by PyTorch alone, which is slower: {error}")
        return None
