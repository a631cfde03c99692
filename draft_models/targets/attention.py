"""Attention for every pass of this toolkit: grouped key/value heads are never repeated, masks are explicit.

A mask is a tensor, or one of two kinds that are never made as a whole. A `Band` is causal: query i of a row sees the
keys first_keys[i] to i, and its `blocks` (see `QueryBlock`) say which queries become one tensor mask at a time.
`TextMasks` are the masks of a pass over the tokens of several texts, each of which sees the keys of its own text only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from outrider.draft_models.targets.target import Band, Mask, QueryBlock, TextMasks

ATTENTION = "outrider"  # the name under which transformers' layers find `grouped_attention`
# For the few queries of a decoding pass: PyTorch's fused attention, or its two products and the softmax separately.
# Fused kernels with a mask process all keys of a head on one SM of a GPU, so few queries leave most SMs idle.
KERNELS = ("fused", "products")
# A kernel of an engine: queries [1, H, Q, D], contiguous, keys and values [1, G, K, D], an additive mask [1, 1, Q, K]
# and the scale of the scores → [1, Q, H, D].
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
_kernel: str | Kernel = "fused"


@dataclass(frozen=True)
class KernelChoice:
    """The kernel, of those that run on the device, that was fastest when `width` queries see `keys` cache positions.

    heads, key_heads, head_dim: of the attention to which this applies.
    """

    heads: int
    key_heads: int
    head_dim: int
    width: int
    keys: int
    kernel: str


@contextmanager
def use_kernel(kernel: str | Kernel) -> Iterator[None]:
    """Context manager: attention over a filled cache uses `kernel`, one of `KERNELS` or an engine's own."""
    global _kernel
    old_kernel, _kernel = _kernel, kernel
    try:
        yield
    finally:
        _kernel = old_kernel


class KeysChangedError(Exception):
    """A layer attends to other keys and values than its cache returned, so `TextMasks` cannot split them by text."""


def grouped_attention(
    module: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, called by transformers' attention modules.

    query [B, H, Q, D]; key, value [B, G, K, D] of G key heads. attention_mask is one of: bool [B or 1, 1, Q, K] with
    True = attend; the same as an additive mask; a `Band`, with any Q and K that its blocks name; `TextMasks`; None.
    Returns the output [B, Q, H, D] and None.

    softcap: scores become softcap · tanh(score / softcap) (Gemma 2). s_aux [H]: the score of an attention sink, which
    takes part in the softmax and has no value (gpt-oss).

    Without a mask a single query sees every key, and Q = K queries are causal. For 1 < Q < K a mask is required,
    because "no mask" would be ambiguous.
    """
    if isinstance(attention_mask, Band | TextMasks):
        options = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "s_aux": s_aux}
        if isinstance(attention_mask, TextMasks):
            return _attend_by_texts(module, query, key, value, attention_mask, **options), None
        return _attend_by_blocks(module, query, key, value, attention_mask, **options), None
    q_len, kv_len = query.shape[2], key.shape[2]
    is_causal = attention_mask is None and q_len > 1
    if is_causal and q_len != kv_len:
        raise ValueError(f"attention over a filled cache needs a mask: {q_len} queries, {kv_len} keys")
    if softcap is not None or s_aux is not None:
        if is_causal:
            attention_mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril()[None, None]
        out = _attend_by_capped_scores(query, key, value, attention_mask, dropout, scaling, softcap, s_aux)
        return out.transpose(1, 2), None
    if is_causal:
        is_grouped = query.shape[1] > key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, scale=scaling, is_causal=True, enable_gqa=is_grouped
        )
        return out.transpose(1, 2), None
    return _attend_to_cache(query, key, value, attention_mask, dropout, scaling), None


def _attend_to_cache(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scaling: float | None
) -> Tensor:
    """`grouped_attention` of queries with a mask, or of a single query, by the kernel in use: [B, Q, H, D].

    H/G query heads share a key head. They are concatenated along the query axis, so keys and values are read once and
    never copied.
    """
    batch, query_heads, q_len, head_dim = query.shape
    key_heads, kv_len = key.shape[1], key.shape[2]
    heads_per_key = query_heads // key_heads
    fits_kernel = (batch, value.shape[3]) == (1, head_dim) and not dropout  # what a `Kernel` takes
    if callable(_kernel) and mask is not None and fits_kernel:
        scale = scaling if scaling is not None else head_dim**-0.5
        return _kernel(query.contiguous(), key, value, mask, scale)
    if heads_per_key > 1:
        query = query.reshape(batch, key_heads, heads_per_key * q_len, head_dim)
        if mask is not None and q_len > 1:  # the mask of one query broadcasts
            mask_batch = mask.shape[0]
            mask = mask.expand(mask_batch, heads_per_key, q_len, kv_len).reshape(mask_batch, 1, -1, kv_len)
    attend = _attend_by_products if _kernel == "products" and not dropout else F.scaled_dot_product_attention
    out = attend(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return out.reshape(batch, query_heads, q_len, -1).transpose(1, 2)


def _attend_by_texts(
    module: object, query: Tensor, key: Tensor, value: Tensor, texts: TextMasks, **options: Any
) -> Tensor:
    """`grouped_attention` of each text's queries over its own keys: [1, ΣQ, H, D].

    texts.entries: the keys and values of all new rows, as the cache returned them, then those of each text's cache.
    Raises `KeysChangedError` if key or value is not what the cache returned.
    """
    (joint_key, joint_value), *text_entries = texts.entries
    if key is not joint_key or value is not joint_value:
        raise KeysChangedError
    inputs = zip(query.split(texts.rows, dim=2), text_entries, texts.masks, strict=True)
    return torch.cat([grouped_attention(module, q, *entries, mask, **options)[0] for q, entries, mask in inputs], dim=1)


def _attend_by_blocks(module: object, query: Tensor, key: Tensor, value: Tensor, band: Band, **options: Any) -> Tensor:
    """`grouped_attention` with a `Band`: [B, T, H, D]."""
    rows_per_group = len(query) // len(band.blocks)  # rows with the same blocks
    row_groups = zip(band.blocks, *(x.split(rows_per_group) for x in (query, key, value, band.first_keys)), strict=True)
    outputs = [
        _attend_alike_rows(module, queries, keys, values, replace(band, first_keys=starts, blocks=(blocks,)), **options)
        for blocks, queries, keys, values, starts in row_groups
    ]
    return torch.cat(outputs)


def _attend_alike_rows(module: object, query: Tensor, key: Tensor, value: Tensor, band: Band, **options: Any) -> Tensor:
    """`_attend_by_blocks` of rows with the same blocks, one block of queries after another.

    Masks over more than `BLOCK` keys are not kept for the backward pass, which recomputes them. Keys and values
    are split at the ends of all ranges, since the gradient of a slice is as long as the tensor that it is cut from.
    Example: blocks that see the keys 0 to 2 and 1 to 4 join the pieces 0, 1 to 2, and 3 to 4.
    """

    def attend(block: QueryBlock, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return grouped_attention(module, queries, keys, values, band.block(block), **options)[0]

    (blocks,) = band.blocks
    ranges_by_block = [_key_ranges(block, band.extra_keys) for block in blocks]
    range_edges = sorted({0, key.shape[2], *chain(*chain(*ranges_by_block))})
    kv_pieces = [x.split([end - begin for begin, end in pairwise(range_edges)], 2) for x in (key, value)]
    queries_by_block = query.split([block.end - block.begin for block in blocks], 2)
    outputs = []
    for block, queries, block_ranges in zip(blocks, queries_by_block, ranges_by_block, strict=True):
        attend_inputs, attend_fn = (queries, *(_join_ranges(x, block_ranges) for x in kv_pieces)), attend
        is_long = attend_inputs[1].shape[2] > band.BLOCK
        if is_long and torch.is_grad_enabled() and any(x.requires_grad for x in attend_inputs):
            attend_fn = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=bool(options["dropout"]))
        outputs.append(attend_fn(block, *attend_inputs))
    return torch.cat(outputs, dim=1)


def _key_ranges(block: QueryBlock, front: int) -> list[tuple[int, int]]:
    """The ranges (begin, end) of keys that a block of queries sees, counted from the first of the `front` extra keys.

    An empty range is left out: it may lie beyond the keys, which may be fewer than the queries.
    """
    ranges = (block.first_key, block.key_end), (block.second_key, block.end)
    return [(0, front), *((front + begin, front + end) for begin, end in ranges if begin < end)]


def _join_ranges(pieces: Sequence[Tensor], ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The positions in `ranges` of a tensor [B, H, K, D], which is split along K into `pieces`, at least at all ends of
    `ranges`."""
    piece_ends = [*zip(pieces, accumulate(piece.shape[2] for piece in pieces), strict=True)]  # each piece and its end
    return torch.cat([piece for start, stop in ranges for piece, end in piece_ends if start < end <= stop], 2)


def _attend_by_products(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, scale: float | None
) -> Tensor:
    """`scaled_dot_product_attention` without dropout; additive masks only.

    Scores, masks and softmax are in float32, as in fused kernels, or in float64 if the input is. Only the inputs and
    the attention weights are in 16 bits.
    """
    scale = scale if scale is not None else query.shape[-1] ** -0.5
    scores = _score_keys(query, key)
    scores = scores * scale if attn_mask is None else torch.add(attn_mask, scores, alpha=scale)
    return scores.softmax(-1).to(value.dtype) @ value


def _attend_by_capped_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with a soft cap or sinks, which no fused kernel supports: [B, H, Q, D]. A mask is bool or additive.

    Scores and softmax are in float32 or better, as in `_attend_by_products`.
    """
    batch, heads, q_len, head_dim = query.shape
    key_heads, kv_len = key.shape[1], key.shape[2]
    flat = query.reshape(batch, key_heads, -1, head_dim)
    scores = _score_keys(flat, key).view(batch, heads, q_len, kv_len) * (scale if scale is not None else head_dim**-0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        sink_scores = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, q_len, 1)
        scores = torch.cat([scores, sink_scores], dim=-1)
    weights = scores.softmax(-1)[..., :kv_len].to(value.dtype)
    weights = F.dropout(weights, dropout)
    return (weights.view(batch, key_heads, -1, kv_len) @ value).view(batch, heads, q_len, -1)


def _score_keys(query: Tensor, key: Tensor) -> Tensor:
    """QKᵀ [B, H, Q, K], never rounded to 16 bits."""
    if query.dtype not in (torch.bfloat16, torch.float16):
        return query @ key.mT
    if not query.is_cuda:
        return query.float() @ key.float().mT
    # The product itself outputs float32: converting the keys first would write and read them once more.
    return torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT, out_dtype=torch.float32).unflatten(0, query.shape[:2])


# transformers' layers expect a contiguous result.
AttentionInterface.register(ATTENTION, lambda *args, **kw: (grouped_attention(*args, **kw)[0].contiguous(), None))
AttentionMaskInterface.register(ATTENTION, sdpa_mask)  # so that the model's own forward works with it too


def leave_out_cudnn() -> None:
    """Turn cuDNN's attention off in this process, for every model: results are compared with the target's own forward.

    PyTorch prefers cuDNN's on Hopper and Blackwell. It builds a plan for every new length of text, which takes tens of
    milliseconds per decoded token, and it was wrong or NaN for some masks (pytorch #169849, #193893, #196678).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def stock_attention_name(model: PreTrainedModel) -> str:
    """The attention that transformers uses for `model` by default. Gemma 2 has no sdpa in transformers."""
    return "sdpa" if model._supports_sdpa else "eager"


@contextmanager
def stock_attention(model: PreTrainedModel, attention_name: str | None = None) -> Iterator[None]:
    """Context manager: `model` uses transformers' attention `attention_name`; None: that of `stock_attention_name`.

    The layers may be shared with the runtime, which uses ours.
    """
    implementation = model.config._attn_implementation
    if implementation == ATTENTION:  # a model that does not support ours has transformers' own already
        model.set_attn_implementation(attention_name or stock_attention_name(model))
    try:
        yield
    finally:
        if implementation == ATTENTION:
            model.set_attn_implementation(implementation)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask [1, 1, Q, K] for scores, from `visible`, bool [Q, K] with True = attend."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[None, None]


def packed_band(document_ids: Tensor, window: int | None = None, *, band_class: type[Band] = Band) -> Band:
    """The mask of packed rows: causal, and only inside one document.

    document_ids [B, T]: the document number of each position, −1 for padding; documents must be contiguous. Padding
    sees padding, so that no softmax row is empty. window: in tokens. band_class: `Band`, or one with another `BLOCK`.

    On a CPU its blocks end where documents do. A GPU prefers few blocks, of all rows.
    """
    positions = torch.arange(document_ids.shape[1], device=document_ids.device)
    is_document_start = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    first_keys = torch.where(is_document_start, positions, 0).cummax(1).values
    if window is not None:
        first_keys = torch.maximum(first_keys, positions - (window - 1))
    if document_ids.device.type == "cpu":
        document_edges = [[*row.nonzero()[:, 0].tolist(), len(row)] for row in is_document_start]
        return band_class(first_keys, tuple(map(band_class.cut, document_edges, first_keys.tolist())))
    return band_class(first_keys, (band_class.cut([0, document_ids.shape[1]], first_keys.amin(0).tolist()),))
