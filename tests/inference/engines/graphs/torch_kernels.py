"""What the engine's `triton_kernels` compute, by PyTorch's operations: a stand-in where there is no GPU."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.draft_models.targets.attention import grouped_attention, use_kernel
from outrider.inference.engines import fused_layers
from outrider.inference.engines.graphs import attention_kernels


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight


def add_and_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x + added, norm(x + added, weight, eps)


def rotate_and_store(
    heads: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    scales: Tensor | None,
    eps: float,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    turned = heads.shape[2] - keys.shape[1]
    rotated, value = heads[:, :, :turned], heads[:, :, turned:]
    if scales is not None:
        rotated = norm(rotated, scales, eps)
    if rotary is not None:
        low, high = rotated.chunk(2, -1)
        cos, sin = (table[:, :, None] for table in rotary)
        rotated = rotated * cos + torch.cat([-high, low], -1) * sin
    query, key = rotated.split([turned - keys.shape[1], keys.shape[1]], 2)
    keys.index_copy_(2, slots, key.transpose(1, 2))
    values.index_copy_(2, slots, value.transpose(1, 2))
    return query.transpose(1, 2).contiguous()


def gate(joined: Tensor) -> Tensor:
    first, second = joined.chunk(2, -1)
    return F.silu(first) * second


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    with use_kernel("products"):
        return grouped_attention(torch.nn.Module(), query, keys, values, mask, scaling=scale)[0]


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Have fixed-shape passes run these in place of Triton's kernels."""
    for module in (attention_kernels, fused_layers):
        patch.setattr(module, "triton_kernels", lambda device, dtype: sys.modules[__name__])
