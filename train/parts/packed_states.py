"""Vectors as int8 numbers, 32 to a scale of float16: 34 bytes for 64 of float16.

A hidden state has a few values that are a hundred times the others. A scale for each few values confines what they
cost. The error of a value is at most 1/254 of the largest one beside it, and what float16 rounds off the scale.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP = 32
_SCALE_BYTES = 2


def packed_width(width: int) -> int:
    """Bytes of a vector of `width` values."""
    return -(-width // GROUP) * (GROUP + _SCALE_BYTES)


def pack(vectors: Tensor) -> Tensor:
    """vectors [..., H] as int8 [..., `packed_width(H)`].

    Raises `OverflowError` where a scale is beyond float16, or a value no number.
    """
    groups = F.pad(vectors.float(), (0, -vectors.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half()
    if not bool(scales.isfinite().all()):
        raise OverflowError
    numbers = (groups / scales.float()).nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([numbers, scales.view(torch.int8)], -1).flatten(-2)


def unpack(packed: Tensor, width: int) -> Tensor:
    """What `pack` made of vectors of `width` values, float32 [..., width]."""
    groups = packed.unflatten(-1, (-1, GROUP + _SCALE_BYTES))
    scales = groups[..., GROUP:].contiguous().view(torch.float16)
    return (groups[..., :GROUP] * scales.float()).flatten(-2)[..., :width]
