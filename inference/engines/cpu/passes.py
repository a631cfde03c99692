# mypy: allow-untyped-defs
"""Decoder layers over few rows, compiled: one call runs a range of layers, in parallel in a team of threads.

Such a pass reads each weight once, which is the lower bound of its time. In PyTorch a layer is some forty operations
and views of a microsecond or more each, and products of one row that a library does not parallelise at all. Here every
thread runs all layers. It computes its part of each product's outputs and of each head's attention, and waits for the
others when it needs their results. Results are rounded to bfloat16 at the same points as in the operations that this
replaces. A row is one token of the pass. A row of a chain, whose rows follow one another, gets the same result as
alone, bit for bit; rows of a tree have a mask. A panel has the weights of `PANEL` (16) outputs.
"""

from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from outrider.inference.engines.cpu.attention import AttentionTask, attend
from outrider.inference.engines.cpu.attention_amx import attend_by_amx
from outrider.inference.engines.cpu.by_amx import STEP, by_amx
from outrider.inference.engines.cpu.by_codes import by_codes
from outrider.inference.engines.cpu.by_vectors import by_vectors
from outrider.inference.engines.cpu.elementwise import add_row, gate_row, norm_row
from outrider.inference.engines.cpu.numbers import array_of, kernel, put, rounded, wait, wide
from outrider.inference.engines.cpu.vectors import PANEL, Linear, weights_in


def product(linear, x, rows, begin, end, in_bf16, out):
    """Compute out[r, c] for outputs begin … end − 1: scale of c · (x[r] · weights of c) + bias of c.

    begin and end are multiples of `PANEL`. in_bf16: round to bfloat16. The dtype of the weights (see `Linear`) selects
    the kernel when a call is compiled:

        weights                               kernel      x [rows, inputs]
        uint64, bfloat16s for AMX             by_amx      bfloat16; if [3 · rows, inputs], row r is the sum of x[r],
                                                          x[rows + r] and x[2 · rows + r]
        int64, addresses of panels of codes   by_codes    float32 or bfloat16
        uint32, pairs of bfloat16s            by_vectors  float32 or bfloat16
        another                               by_vectors  float32
    """


@overload(product)
def _product_of(linear, x, rows, begin, end, in_bf16, out):
    multiply = {types.uint64: by_amx, types.int64: by_codes}.get(linear.types[0].dtype, by_vectors)
    return lambda linear, x, rows, begin, end, in_bf16, out: multiply(linear, x, rows, begin, end, in_bf16, out)


@kernel
def part(outputs, rank, threads):
    """The begin and end of a thread's outputs, in whole panels."""
    panels = outputs // PANEL
    return panels * rank // threads * PANEL, panels * (rank + 1) // threads * PANEL


@kernel
def stored_numbers(outputs, inputs, in_number):
    """How many numbers hold a linear layer's weights, `in_number` in each; 0: codes, by two addresses a panel."""
    return 2 * (outputs // PANEL) if in_number == 0 else outputs * inputs // in_number


class LayerShape(NamedTuple):
    """Sizes of every layer. hidden: d; heads, key_heads: H, G; width: D, of a head; inner: n, of the MLP."""

    hidden: int
    heads: int
    key_heads: int
    width: int
    inner: int


class Layers(NamedTuple):
    """The L layers of a model, along the first axis. A layer has four products, whose weights, scales and biases stand
    one after the other in this order: the joint one of queries, keys and values [(H + 2G)·D, d], the attention's output
    [d, H·D], gate and up [2n, d], down [d, n]."""

    weights: np.ndarray  # [L, …], each product's as in `Linear`
    scales: np.ndarray  # float32 [L, outputs of all products]
    biases: np.ndarray  # as scales
    norms: np.ndarray  # float32 [L, 2, d], the weights of the norms before attention and before the MLP
    head_norms: np.ndarray  # float32 [L, H + G, D], the weights of the norms of queries and keys


# Columns of `PassRows.texts`: a text's first row and number of rows; the address of layer 0's keys; the bytes from a
# layer's keys to its values, and from these to the next layer's keys; the positions for which the cache has memory; the
# number of positions before the first row; the address of the mask, or 0 for a chain.
BEGIN, ROWS, KEYS, VALUE_OFFSET, SLOTS, PAST, MASK = range(7)


class PassRows(NamedTuple):
    """The R rows of a pass, those of several texts, one text after another."""

    cos: np.ndarray  # [R, D]
    sin: np.ndarray  # [R, D]
    texts: np.ndarray  # int64 [texts, 7], see `BEGIN`


class Workspace(NamedTuple):
    """The workspace of a thread, float32; x of a product may be bfloat16 instead, or have 3R rows (see `product`). All
    threads share the arrays without an axis T."""

    rank: int  # the thread's number
    threads: int  # T
    heads: np.ndarray  # [R, (H + 2G)·D], queries, keys and values
    mixed: np.ndarray  # [R, H·D], outputs of the attention: x of the second product
    joined: np.ndarray  # [R, max(d, 2n)], outputs of the later products
    inner: np.ndarray  # [R, n], silu(gate) · up: x of the last product
    normed: np.ndarray  # [T, R, d], outputs of a norm: x of the first and the third product
    scores: np.ndarray  # as in `AttentionTask`
    sums: np.ndarray  # as in `AttentionTask`
    near: np.ndarray  # [T, `attention.NEAR`, D], a thread's keys or values for the attention, widened to float32
    hidden: np.ndarray  # [R, d], hidden states
    arrived: np.ndarray  # int64 [1], the counter of `wait`, 0 before a pass


@kernel
def norm(x, rows, weight, eps, in_bf16, out):
    """out[r] = weight · round(x[r] / rms(x[r]))."""
    for row in range(rows):
        norm_row(x, row, row, weight, eps, in_bf16, out)


@kernel
def rotate(head, cos, sin, weight, eps, in_bf16):
    """Rotate a query's or key's head [D] in place, by cos and sin of its position; normalise it first if eps ≥ 0."""
    width = head.shape[0]
    if eps >= np.float32(0.0):
        square_sum = np.float32(0.0)
        for i in range(width):
            square_sum += head[i] * head[i]
        scale = np.float32(1.0) / np.sqrt(square_sum / np.float32(width) + eps)
        for i in range(width):
            head[i] = rounded(rounded(head[i] * scale, in_bf16) * weight[i], in_bf16)
    half = width // 2
    for i in range(half):
        low, high = head[i], head[half + i]
        rotated_low = rounded(low * wide(cos[i]), in_bf16) - rounded(high * wide(sin[i]), in_bf16)
        rotated_high = rounded(high * wide(cos[half + i]), in_bf16) + rounded(low * wide(sin[half + i]), in_bf16)
        head[i], head[half + i] = rounded(rotated_low, in_bf16), rounded(rotated_high, in_bf16)


@kernel
def add(linear, x, hidden, in_bf16, work):
    """hidden += the linear layer's outputs for x, in this thread's columns."""
    rows = hidden.shape[0]
    begin, end = part(hidden.shape[1], work.rank, work.threads)
    product(linear, x, rows, begin, end, in_bf16, work.joined)
    for row in range(rows):
        if begin < end:
            add_row(hidden, work.joined, row, begin, end, in_bf16)


@kernel
def rotate_and_store(shape, layer, pass_rows, weight, head_eps, work):
    """Rotate queries and keys and write keys and values to the cache, for this thread's part of all rows' heads."""
    heads, key_heads, width = shape.heads, shape.key_heads, shape.width
    (cos, sin, texts), rank, threads = pass_rows, work.rank, work.threads
    in_bf16, all_heads, text_index = cos.itemsize == 2, heads + 2 * key_heads, 0
    vector_count = all_heads * work.heads.shape[0]
    for index in range(vector_count * rank // threads, vector_count * (rank + 1) // threads):
        row, head = index // all_heads, index % all_heads
        vector = work.heads[row, head * width : (head + 1) * width]
        if head < heads + key_heads:
            rotate(vector, cos[row], sin[row], weight[head], head_eps, in_bf16)
        if head >= heads:
            while row >= texts[text_index, BEGIN] + texts[text_index, ROWS]:
                text_index += 1
            is_value = np.int64(head >= heads + key_heads)
            address = texts[text_index, KEYS] + (2 * layer + is_value) * texts[text_index, VALUE_OFFSET]
            cache = array_of(address, (key_heads, texts[text_index, SLOTS], width), cos)
            cache_row = cache[(head - heads) % key_heads, texts[text_index, PAST] + row - texts[text_index, BEGIN]]
            for i in range(width):
                put(cache_row, i, vector[i], in_bf16)


def _attend(weights, task, begin, end, in_bf16, out):
    """`attend`, by AMX (Intel's matrix registers) if products with these weights are and the cache is of bfloat16s."""


@overload(_attend)
def _way_of(weights, task, begin, end, in_bf16, out):
    if weights.dtype != types.uint64 or task.types[1].dtype != types.uint16:
        return lambda weights, task, begin, end, in_bf16, out: attend(task, begin, end, in_bf16, out)

    def by_amx_where_heads_fit(weights, task, begin, end, in_bf16, out):
        if task.keys.shape[2] % STEP == 0:
            attend_by_amx(task, begin, end, in_bf16, out)
        else:
            attend(task, begin, end, in_bf16, out)

    return by_amx_where_heads_fit


@kernel
def attend_all(weights, shape, layer, pass_rows, scale, in_bf16, work):
    """Write the attention outputs of this thread's part of all rows' query heads to `work.mixed`."""
    (cos, _, texts), rank, threads = pass_rows, work.rank, work.threads
    queries, near = work.heads[:, : shape.heads * shape.width], work.near[rank]
    query_heads, rows, width = shape.heads, work.heads.shape[0], shape.width
    first_query, end_query = query_heads * rows * rank // threads, query_heads * rows * (rank + 1) // threads
    text_index = 0
    while first_query < end_query:
        row, text_rows = texts[text_index, BEGIN], texts[text_index, ROWS]
        begin, end = query_heads * row, min(end_query, query_heads * (row + text_rows))
        if first_query >= end:
            text_index += 1
            continue
        cache_shape, value_offset = (shape.key_heads, texts[text_index, SLOTS], width), texts[text_index, VALUE_OFFSET]
        keys = array_of(texts[text_index, KEYS] + 2 * layer * value_offset, cache_shape, cos)
        values = array_of(texts[text_index, KEYS] + (2 * layer + 1) * value_offset, cache_shape, cos)
        seen = texts[text_index, PAST] + text_rows
        mask_shape = (text_rows, seen if texts[text_index, MASK] != 0 else np.int64(0))
        mask = array_of(texts[text_index, MASK], mask_shape, cos)
        task = AttentionTask(queries, keys, values, seen, mask, scale, work.scores, work.sums, near, row, text_rows)
        _attend(weights, task, first_query - begin, end - begin, in_bf16, work.mixed)
        first_query = end


@kernel
def gate(linear, inner, in_bf16, work):
    """work.inner = silu(gate) · up, in this thread's columns; the linear layer has the gates first."""
    rows, normed = work.joined.shape[0], work.normed[work.rank]
    begin, end = part(inner, work.rank, work.threads)
    product(linear, normed, rows, begin, end, in_bf16, work.joined)
    product(linear, normed, rows, inner + begin, inner + end, in_bf16, work.joined)
    for row in range(rows):
        if begin < end:
            gate_row(work.joined, row, inner, begin, end, in_bf16, work.inner)


@kernel
def run(shape, layers, start, stop, pass_rows, numbers, work):
    """Run a thread: layers start … stop − 1 over work.hidden, in place.

    Masks [rows, past + rows] and keys and values [layers, 2, G, positions, D] are of the type of cos and sin of
    `pass_rows`: float32, or the bits of bfloat16, and then hidden is rounded to bfloat16 (`in_bf16`). numbers float32:
    the norms' eps; that of the norms of queries and keys, < 0 without these norms; the scale of query · key.
    """
    eps, head_eps, scale = numbers[0], numbers[1], numbers[2]
    hidden_size, inner_size, attention_size = shape.hidden, shape.inner, shape.heads * shape.width
    rank, threads, hidden = work.rank, work.threads, work.hidden
    rows, in_bf16, normed = hidden.shape[0], pass_rows.cos.itemsize == 2, work.normed[rank]
    qkv_size = attention_size + 2 * shape.key_heads * shape.width
    # where the second, third and fourth product begin in a layer's weights; where the second and third end in scales
    pack_size = weights_in(layers.weights)
    out_begin = stored_numbers(qkv_size, hidden_size, pack_size)
    up_begin = out_begin + stored_numbers(hidden_size, attention_size, pack_size)
    down_begin = up_begin + stored_numbers(2 * inner_size, hidden_size, pack_size)
    out_end, up_end = qkv_size + hidden_size, qkv_size + hidden_size + 2 * inner_size
    wait_count = 0  # how often all threads have waited for each other
    for layer in range(start, stop):
        weights, scales, biases = layers.weights[layer], layers.scales[layer], layers.biases[layer]
        norm(hidden, rows, layers.norms[layer, 0], eps, in_bf16, normed)
        qkv = Linear(weights[:out_begin], hidden_size, scales[:qkv_size], biases[:qkv_size])
        begin, end = part(qkv_size, rank, threads)
        product(qkv, normed, rows, begin, end, in_bf16, work.heads)
        wait(work.arrived, threads, wait_count + 1)
        rotate_and_store(shape, layer, pass_rows, layers.head_norms[layer], head_eps, work)
        wait(work.arrived, threads, wait_count + 2)
        attend_all(weights, shape, layer, pass_rows, scale, in_bf16, work)
        wait(work.arrived, threads, wait_count + 3)
        out = Linear(weights[out_begin:up_begin], attention_size, scales[qkv_size:out_end], biases[qkv_size:out_end])
        add(out, work.mixed, hidden, in_bf16, work)
        wait(work.arrived, threads, wait_count + 4)
        norm(hidden, rows, layers.norms[layer, 1], eps, in_bf16, normed)
        gate_up = Linear(weights[up_begin:down_begin], hidden_size, scales[out_end:up_end], biases[out_end:up_end])
        gate(gate_up, inner_size, in_bf16, work)
        wait(work.arrived, threads, wait_count + 5)
        down = Linear(weights[down_begin:], inner_size, scales[up_end:], biases[up_end:])
        add(down, work.inner, hidden, in_bf16, work)
        wait(work.arrived, threads, wait_count + 6)
        wait_count += 6
