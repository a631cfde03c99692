"""Attention for every pass of this toolkit: grouped heads are never repeated, masks are explicit."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

ATTENTION = "outrider"  # the name under which transformers' layers find `grouped_attention`
# For the few queries of a decoding pass: PyTorch's fused attention, or its two products and the softmax one by one.
# Fused kernels for a mask put all keys of a head on one processor of a GPU, which leaves most of it idle then.
KERNELS = ("fused", "products")
_kernel = "fused"


@contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Attention over a filled cache is computed with `name`, one of `KERNELS`, inside."""
    global _kernel
    before, _kernel = _kernel, name
    try:
        yield
    finally:
        _kernel = before


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, called by transformers' attention modules.

    query [B, H, Q, D]; key, value [B, H/G, K, D]; attention_mask [B or 1, 1, Q, K] (bool with True = attend,
    or additive) or None. Returns ([B, Q, H, D], None). The G query heads that share a key head are laid side
    by side along the query axis, so keys and values are read once and never copied. Without a mask a single
    query sees every key, and Q = K queries are causal; a mask is required for 1 < Q < K, where "no mask"
    has no safe meaning.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError("attention with a soft cap or sinks is not supported")
    batch, heads, queries, width = query.shape
    key_heads, keys = key.shape[1], key.shape[2]
    group = heads // key_heads
    causal = attention_mask is None and queries > 1
    if causal and queries != keys:
        raise ValueError(f"attention over a filled cache needs a mask: {queries} queries, {keys} keys")
    if causal:
        out = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, scale=scaling, is_causal=True, enable_gqa=group > 1
        )
        return out.transpose(1, 2), None
    if group > 1:
        query = query.reshape(batch, key_heads, group * queries, width)
        if attention_mask is not None and queries > 1:
            rows = attention_mask.shape[0]
            attention_mask = attention_mask.expand(rows, group, queries, keys).reshape(rows, 1, -1, keys)
    attend = _by_products if _kernel == "products" and not dropout else F.scaled_dot_product_attention
    out = attend(query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling)
    return out.reshape(batch, heads, queries, width).transpose(1, 2), None


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, scale: float | None
) -> Tensor:
    """`scaled_dot_product_attention` without dropout, its softmax in float32; additive masks only."""
    scores = (query * (scale if scale is not None else query.shape[-1] ** -0.5)) @ key.transpose(-1, -2)
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)  # so that the model's own forward works with it too
# PyTorch's first choice on Hopper and Blackwell. It prepares a plan for every length of text it meets, which takes tens
# of milliseconds a decoded token, and was wrong or not a number for some masks (pytorch #169849, #193893, #196678).
torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def stock_attention(model: PreTrainedModel) -> Iterator[None]:
    """`model` with transformers' own attention; it may share its layers with the runtime, which uses ours."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)


def packed_mask(documents: Tensor) -> Tensor:
    """Which positions of a packed row see which: causal, and only inside one document.

    documents [B, T] numbers the document of each position, −1 is padding. Returns bool [B, 1, T, T], True =
    attend. Padding sees padding, so that no softmax row is empty.
    """
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return (causal & (documents[:, :, None] == documents[:, None, :]))[:, None]
