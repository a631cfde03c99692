# mypy: allow-untyped-defs
"""Fused kernels for the operations between a decoder layer's matrix products, for passes of few rows on a GPU.

Such a pass reads each weight once, and its products are bound by that. The operations between them move little data,
but in PyTorch they take some twenty launches per layer, each of which costs a microsecond or two. Rounding is the same
as in the operations that these kernels replace: values that were rounded to the model's dtype still are.

The arguments of a `…_kernel` are pointers to the tensors that the function after the kernel passes, their strides and
their sizes, in numbers. Importing this needs Triton, which comes with PyTorch's builds for CUDA.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# The first four numbers determine how `attend` splits its work: the speed and the order of sums, nothing else.
KEYS, BYTES = 64, 2**14  # at most: keys, and bytes of keys, that a program of `attend` processes at a time
PROGRAMS = 264  # programs that occupy a GPU of some hundred SMs: keys are split among at most as many
JOINED = 2**15  # numbers that a program of `_join_kernel` keeps in registers, at most
_SMALLEST = 16  # rows, columns and depth of a matrix product on tensor cores


@triton.jit
def _norm_kernel(x, added, weight, summed, normed, eps, width: tl.constexpr, block: tl.constexpr, adds: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, block)
    inside = columns < width
    dtype = x.dtype.element_ty
    value = tl.load(x + row * width + columns, mask=inside, other=0.0)
    if adds:
        value = (value.to(tl.float32) + tl.load(added + row * width + columns, mask=inside, other=0.0)).to(dtype)
        tl.store(summed + row * width + columns, value, mask=inside)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    rounded = (wide * scale).to(dtype)
    scaled = rounded.to(tl.float32) * tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(normed + row * width + columns, scaled.to(dtype), mask=inside)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · round(x / rms(x)) for x [..., d]."""
    normed = torch.empty_like(x)
    _launch_norm(x, x, weight, x, normed, eps, adds=False)
    return normed


def add_and_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + added, `norm` of the sum), x and added [..., d]."""
    summed, normed = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, added, weight, summed, normed, eps, adds=True)
    return summed, normed


def _launch_norm(
    x: Tensor, added: Tensor, weight: Tensor, summed: Tensor, normed: Tensor, eps: float, *, adds: bool
) -> None:
    assert all(tensor.is_contiguous() for tensor in (x, added, weight))
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    grid, warps = (x.numel() // width,), min(16, max(1, block // 256))
    _norm_kernel[grid](x, added, weight, summed, normed, eps, width=width, block=block, adds=adds, num_warps=warps)


# A program handles one head of one token: it normalises and rotates queries and keys, and stores keys and values.
@triton.jit
def _place_kernel(
    heads, cos, sin, scales, slots, query, keys, values, eps,
    key_head_stride, key_slot_stride, value_head_stride, value_slot_stride,
    queries, query_heads: tl.constexpr, key_heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
    rotates: tl.constexpr, norms: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    half: tl.constexpr = width // 2
    columns = tl.arange(0, block)
    inside = columns < half
    all_heads: tl.constexpr = query_heads + 2 * key_heads
    dtype = heads.dtype.element_ty
    head_start = heads + (row * all_heads + head) * width
    low = tl.load(head_start + columns, mask=inside, other=0.0)
    high = tl.load(head_start + half + columns, mask=inside, other=0.0)
    if head < query_heads + key_heads:
        if norms:
            wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
            squares = tl.sum(wide_low * wide_low, 0) + tl.sum(wide_high * wide_high, 0)
            scale = 1.0 / tl.sqrt(squares / width + eps)
            scale_low = tl.load(scales + head * width + columns, mask=inside, other=0.0).to(tl.float32)
            scale_high = tl.load(scales + head * width + half + columns, mask=inside, other=0.0).to(tl.float32)
            low = ((wide_low * scale).to(dtype).to(tl.float32) * scale_low).to(dtype)
            high = ((wide_high * scale).to(dtype).to(tl.float32) * scale_high).to(dtype)
        if rotates:
            rotary_index = row * width + columns
            cos_low = tl.load(cos + rotary_index, mask=inside, other=0.0).to(tl.float32)
            cos_high = tl.load(cos + rotary_index + half, mask=inside, other=0.0).to(tl.float32)
            sin_low = tl.load(sin + rotary_index, mask=inside, other=0.0).to(tl.float32)
            sin_high = tl.load(sin + rotary_index + half, mask=inside, other=0.0).to(tl.float32)
            wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
            turned_low, turned_high = (wide_high * sin_low).to(dtype), (wide_low * sin_high).to(dtype)
            low = ((wide_low * cos_low).to(dtype).to(tl.float32) - turned_low.to(tl.float32)).to(dtype)
            high = ((wide_high * cos_high).to(dtype).to(tl.float32) + turned_high.to(tl.float32)).to(dtype)
    if head < query_heads:
        out = query + (head * queries + row) * width
    else:
        slot = tl.load(slots + row)
        if head < query_heads + key_heads:
            out = keys + (head - query_heads) * key_head_stride + slot * key_slot_stride
        else:
            out = values + (head - query_heads - key_heads) * value_head_stride + slot * value_slot_stride
    tl.store(out + columns, low, mask=inside)
    tl.store(out + half + columns, high, mask=inside)


def rotate_and_store(
    heads: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    scales: Tensor | None,
    eps: float,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Return queries [1, H, Q, D], normalised and rotated; write keys, likewise, and values to their slots of a cache.

    heads [1, Q, H + 2·G, D]: queries, keys and values, concatenated, from one product. rotary: cos and sin [1, Q, D].
    scales [H + G, D]: weights of the norms of each head; None without norms. slots [Q]; keys, values
    [1, G, capacity, D], contiguous in the last axis.
    """
    _, n_queries, all_heads, width = heads.shape
    key_heads = keys.shape[1]
    query_heads = all_heads - 2 * key_heads
    query = heads.new_empty(1, query_heads, n_queries, width)
    cos, sin = rotary if rotary is not None else (heads, heads)
    assert all(tensor.is_contiguous() for tensor in (heads, cos, sin))
    _place_kernel[(n_queries, all_heads)](
        heads, cos, sin, heads if scales is None else scales, slots, query, keys, values, eps,
        keys.stride(1), keys.stride(2), values.stride(1), values.stride(2),
        n_queries, query_heads=query_heads, key_heads=key_heads, width=width, block=triton.next_power_of_2(width // 2),
        rotates=rotary is not None, norms=scales is not None, num_warps=1,
    )  # fmt: skip
    return query


@triton.jit
def _gate_kernel(joined, out, width, block: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    dtype = joined.dtype.element_ty
    gate = tl.load(joined + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joined + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * width + columns, (active * up).to(dtype), mask=inside)


def gate(joined: Tensor) -> Tensor:
    """silu(first half) · second half of joined [..., 2·n]: [..., n]."""
    width, rows = joined.shape[-1] // 2, joined.numel() // joined.shape[-1]
    assert joined.is_contiguous()
    out = joined.new_empty(*joined.shape[:-1], width)
    block = 1024
    _gate_kernel[(rows, triton.cdiv(width, block))](joined, out, width, block=block, num_warps=4)
    return out


# A program attends from up to `block` rows of a key head, its query heads' tokens, to one split of the keys, `turns` ·
# `step` of them. It keeps a running softmax: the largest score so far, the sum of the weights, and the weighted values,
# both scaled by e^−peak. `_join_kernel` joins the splits of one row by the same rule.
@triton.jit
def _attend_kernel(
    query, keys, values, mask, partial, peaks, sums, scale,
    key_head_stride, key_stride, value_head_stride, value_stride, mask_stride,
    queries, key_count, rows, turns: tl.constexpr,
    group: tl.constexpr, width: tl.constexpr, depth: tl.constexpr, block: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    key_head, split, row_block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    row = row_block * block + tl.arange(0, block)
    valid = row < rows
    group_head, token = row // queries, row % queries
    dimension = tl.arange(0, depth)
    in_head = dimension < width
    start = ((key_head * group + group_head) * queries + token) * width
    q = tl.load(query + start[:, None] + dimension[None, :], mask=valid[:, None] & in_head[None, :], other=0.0)
    peak = tl.full([block], float("-inf"), tl.float32)
    weight_sum = tl.zeros([block], tl.float32)
    value_sum = tl.zeros([block, depth], tl.float32)
    for turn in range(turns):
        position = (split * turns + turn) * step + tl.arange(0, step)
        seen = position < key_count
        k = tl.load(
            keys + key_head * key_head_stride + position[None, :] * key_stride + dimension[:, None],
            mask=seen[None, :] & in_head[:, None], other=0.0,
        )  # fmt: skip
        scores = tl.dot(q, k, input_precision="ieee") * scale
        mask_values = tl.load(
            mask + token[:, None] * mask_stride + position[None, :], mask=valid[:, None] & seen[None, :], other=0.0
        )
        scores = tl.where(seen[None, :], scores + mask_values.to(tl.float32), float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        rescale = tl.exp(peak - new_peak)
        weights = tl.exp(scores - new_peak[:, None])
        weight_sum = weight_sum * rescale + tl.sum(weights, 1)
        v = tl.load(
            values + key_head * value_head_stride + position[:, None] * value_stride + dimension[None, :],
            mask=seen[:, None] & in_head[None, :], other=0.0,
        )  # fmt: skip
        value_sum = value_sum * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = new_peak
    out_row = (key_head * splits + split) * rows + row
    tl.store(partial + out_row[:, None] * width + dimension[None, :], value_sum, mask=valid[:, None] & in_head[None, :])
    tl.store(peaks + out_row, peak, mask=valid)
    tl.store(sums + out_row, weight_sum, mask=valid)


@triton.jit
def _join_kernel(
    partial, peaks, sums, out, splits, rows, queries, heads,
    group: tl.constexpr, width: tl.constexpr, depth: tl.constexpr, padded_splits: tl.constexpr,
):  # fmt: skip
    key_head, row = tl.program_id(0), tl.program_id(1)
    split = tl.arange(0, padded_splits)
    is_split = split < splits
    split_rows = (key_head * splits + split) * rows + row
    peak = tl.load(peaks + split_rows, mask=is_split, other=float("-inf"))
    split_weight = tl.exp(peak - tl.max(peak, 0))
    total = tl.sum(tl.load(sums + split_rows, mask=is_split, other=0.0) * split_weight, 0)
    dimension = tl.arange(0, depth)
    in_head = dimension < width
    split_outputs = tl.load(
        partial + split_rows[:, None] * width + dimension[None, :], mask=is_split[:, None] & in_head[None, :], other=0.0
    )
    mixed = tl.sum(split_outputs * split_weight[:, None], 0) / total
    head, token = key_head * group + row // queries, row % queries
    tl.store(out + (token * heads + head) * width + dimension, mixed.to(out.dtype.element_ty), mask=in_head)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of few rows over many keys, which are split among programs whose results are joined: [1, Q, H, D].

    query [1, H, Q, D] contiguous; keys, values [1, G, K, D], contiguous in the last axis; mask [1, 1, Q, K], additive.
    Scores and sums are in float32; the attention weights have the dtype of the values.
    """
    _, query_heads, n_queries, width = query.shape
    key_heads, key_count = keys.shape[1], keys.shape[2]
    heads_per_key, depth = query_heads // key_heads, max(_SMALLEST, triton.next_power_of_2(width))
    rows, itemsize = heads_per_key * n_queries, query.element_size()
    block = min(64 // itemsize, max(_SMALLEST, triton.next_power_of_2(rows)))  # at most 32 rows in 16 bits, 16 in 32
    key_step = max(_SMALLEST, min(KEYS, BYTES // (depth * itemsize)))
    row_blocks, steps = triton.cdiv(rows, block), triton.cdiv(key_count, key_step)
    turns = triton.cdiv(steps, max(1, min(steps, PROGRAMS // (key_heads * row_blocks), JOINED // depth)))
    splits = triton.cdiv(steps, turns)
    partial_outputs = query.new_empty(key_heads, splits, rows, width, dtype=torch.float32)
    peaks = query.new_empty(key_heads, splits, rows, dtype=torch.float32)
    sums, out = torch.empty_like(peaks), query.new_empty(1, n_queries, query_heads, width)
    assert query.is_contiguous()
    assert all(tensor.stride(3) == 1 for tensor in (keys, values, mask))
    _attend_kernel[(key_heads, splits, row_blocks)](
        query, keys, values, mask, partial_outputs, peaks, sums, scale,
        keys.stride(1), keys.stride(2), values.stride(1), values.stride(2), mask.stride(2), n_queries, key_count, rows,
        turns=turns, group=heads_per_key, width=width, depth=depth, block=block, step=key_step, num_warps=2 * itemsize,
    )  # fmt: skip
    padded_splits = triton.next_power_of_2(splits)
    _join_kernel[(key_heads, rows)](
        partial_outputs, peaks, sums, out, splits, rows, n_queries, query_heads, group=heads_per_key,
        width=width, depth=depth, padded_splits=padded_splits, num_warps=max(1, padded_splits * depth // 4096),
    )  # fmt: skip
    return out


def try_all(device: torch.device | str, dtype: torch.dtype) -> None:
    """Run every kernel once. Raises any error of Triton if it cannot build them for `device`."""
    x = torch.ones(1, 1, 32, device=device, dtype=dtype)
    summed, _ = add_and_norm(norm(x, x[0, 0], 0.0), gate(torch.cat([x, x], -1)), x[0, 0], 0.0)
    heads, cache = summed.repeat(1, 3, 1)[:, None], x.new_zeros(2, 1, 1, 64, 32)
    slots = torch.zeros(1, dtype=torch.long, device=device)
    query = rotate_and_store(heads, (x, x), heads[0, 0, :2].contiguous(), 0.0, slots, cache[0], cache[1])
    attend(query, cache[0], cache[1], x.new_zeros(1, 1, 1, 64), 1.0)
