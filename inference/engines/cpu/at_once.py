"""Layers and linear layers on a CPU by compiled functions: the parts of a model that these can run, and their calls.

A panel is the weights of `PANEL` outputs, laid out as a kernel reads them. An entry is the address of a compiled
function. It gets a table of addresses and numbers, whose indices `entries` defines. Coded weights are quantised ones
as a file stores them.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.draft_models.targets.coded import CodedLinear
from outrider.draft_models.targets.int8 import Int8Linear, Linear
from outrider.draft_models.targets.target import Band, LayerCache, Mask, TextMasks
from outrider.inference.core import batch
from outrider.inference.core.cache import KVCache
from outrider.inference.engines.cpu import entries
from outrider.inference.engines.cpu.large_pages import in_large_pages
from outrider.inference.engines.cpu.layout import WeightLayout, call, most_threads, out_of_panels
from outrider.inference.engines.cpu.passes import LayerShape
from outrider.inference.engines.cpu.recorded import settle
from outrider.inference.engines.cpu.vectors import LANES, PANEL

if TYPE_CHECKING:
    from outrider.inference.engines.fused_layers import FusedLayer

ONE_BY_ONE, AT_ONCE = "one by one", "at once"
WIDTHS = (1, 2, 4, 8, 16, 32)  # rows of the passes that are measured
MAX_SEEN = 2**20  # most rows × positions of a call: the workspace for scores has one float per head for each
MAX_ROWS = 64  # most rows of a call for a norm and a product: every thread has its own copy of all of them
COLD_BYTES = 64 * 2**20  # bytes of weights that are read in turn by a timing, so that none is in a cache
SMALL_BYTES = 2**19  # bytes of a layer below which call overhead dominates
ROUND_TO = 256  # positions by which the workspace grows
REPEATS = 3  # after one warm-up
_FLOAT_KEYS = (entries.SCALES, entries.BIASES, entries.NORMS, entries.HEAD_NORMS, entries.EPS)


def fits_panels(linear: object) -> TypeGuard[Linear]:
    """Whether the kernels can multiply by this layer's weight on a CPU."""
    if isinstance(linear, CodedLinear):
        are_panels = all(len(part) % PANEL == 0 and part.raw.device.type == "cpu" for part in linear.parts)
        return are_panels and linear.like.dtype in (torch.float32, torch.bfloat16)
    if isinstance(linear, Int8Linear):
        dtype, device = linear.scale.dtype, linear.codes.device
    elif type(linear) is nn.Linear:
        dtype, device = linear.weight.dtype, linear.weight.device
    else:
        return False
    return linear.out_features % PANEL == 0 and device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)


def _scales(linear: Linear) -> Tensor:
    return linear.scale.float() if isinstance(linear, Int8Linear) else torch.ones(linear.out_features)


def _biases(linear: Linear) -> Tensor:
    return torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach().float()


class PanelLinear(nn.Module):
    """A linear layer without gradient, made of one that `fits_panels`. Sums are in float32."""

    def __init__(self, linear: Linear):
        super().__init__()
        self.shape = (linear.out_features, linear.in_features)
        self._dtype = dtype_of_linear(linear)
        self.layout = WeightLayout.of([linear], self._dtype)
        self._coded = linear if isinstance(linear, CodedLinear) else None
        self._panels = in_large_pages(self.layout.panels(linear))
        self._bytes = bytes_of_codes([linear]) or self._panels.nbytes  # few bytes are read in one thread (see `call`)
        self._scales, self._biases = _scales(linear), _biases(linear)
        self.bias = linear.bias
        self._function = self.layout.entry(entries.product_entry)
        self._normed = self.layout.entry(entries.head_entry)
        self._table = [0] * entries.TABLE
        self._table[entries.OUTPUTS], self._table[entries.INPUTS] = self.shape

    @property
    def weight(self) -> Tensor:
        """A plain copy [out, in]."""
        if self._coded is not None:
            return self._coded.weight.to(self._dtype)
        unscaled_weight = out_of_panels(self._panels, self.shape[0], self.layout.together).to(self._dtype)
        return unscaled_weight * self._scales.to(self._dtype)[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]. An `x` of another dtype is multiplied in that dtype (see `lossless.precise`)."""
        if x.dtype != self._dtype and self._coded is not None:
            return self._coded(x)
        if x.dtype != self._dtype:
            return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        return self._call(self._function, x, self.layout.operand(x.reshape(-1, self.shape[1])))

    __call__ = forward  # without a search for hooks

    def after(self, norm_weight: Tensor, eps: float, x: Tensor) -> Tensor | None:
        """`forward` of norm_weight · round(x / rms(x)) in one call; None if it is unsupported, as for another dtype."""
        input_size = self.shape[1]
        rows = x.numel() // input_size
        if x.dtype != self._dtype or norm_weight.dtype != x.dtype or input_size % LANES or rows == 0:
            return None
        if rows > MAX_ROWS:
            outputs = [self.after(norm_weight, eps, part) for part in x.reshape(rows, input_size).split(MAX_ROWS)]
            return torch.cat([part for part in outputs if part is not None]).view(*x.shape[:-1], -1)
        # As `head_entry` lays it out: first epsilon, then the memory of each thread.
        workspace = torch.full((1 + most_threads() * (2 + self.layout.parts * rows) * input_size,), eps)
        extra_values = {entries.NORMS: norm_weight.data_ptr(), entries.WORK: workspace.data_ptr()}
        return self._call(self._normed, x, x.contiguous(), extra_values)

    def _call(self, entry: int, x: Tensor, operand: Tensor, extra_values: dict[int, int] | None = None) -> Tensor:
        """Outputs [..., out] of an entry for x [..., in], passed as `operand`. extra_values: of its table."""
        out = x.new_empty(*x.shape[:-1], self.shape[0])
        table = self._table.copy()
        table[entries.WEIGHTS], table[entries.SCALES] = self._panels.data_ptr(), self._scales.data_ptr()
        table[entries.BIASES] = self._biases.data_ptr()
        table[entries.X], table[entries.OUT] = operand.data_ptr(), out.data_ptr()
        table[entries.ROWS] = x.numel() // self.shape[1]
        for table_index, value in (extra_values or {}).items():
            table[table_index] = value
        call(entry, table, self._bytes)
        return out


class RowSpan(NamedTuple):
    """Consecutive rows of a text for one call."""

    rows: int
    past: int  # positions of the text before them
    keys_address: int  # the address of the first layer's keys; the cache may begin at a later layer
    value_offset: int  # bytes from a layer's keys to its values
    slots: int  # of the cache
    mask: Tensor | None  # [1, 1, rows, past + rows]


def _group_parts(spans: Sequence[RowSpan]) -> list[list[RowSpan]]:
    """`spans` in order, as many in each call as `MAX_SEEN` allows."""
    calls: list[list[RowSpan]] = []
    call_rows = call_positions = 0
    for span in spans:
        call_rows, call_positions = call_rows + span.rows, max(call_positions, span.past + span.rows)
        if not calls or call_rows * call_positions > MAX_SEEN:
            call_rows, call_positions = span.rows, span.past + span.rows
            calls.append([])
        calls[-1].append(span)
    return calls


class LayersAtOnce:
    """Consecutive layers of one shape, any range of which runs in one call if a pass has few rows.

    layout: the layout of the weights. They are a second copy; the layers keep their own.
    """

    def __init__(self, layers: Sequence["FusedLayer"]):
        first = layers[0]
        self._dtype = dtype_of(first)
        self._first = first.layer_idx
        self._shape = LayerShape(  # rotated: heads of queries and keys
            first.qkv.in_features, first.heads, first.rotated - first.heads, first.head_dim, first.down.in_features
        )
        linears = [linear for layer in layers for linear in layer.products]
        self.layout = WeightLayout.of(linears, self._dtype)
        weight_counts = [self.layout.numbers(linear) for linear in first.products]
        self._weights = in_large_pages(torch.empty(len(layers), sum(weight_counts), dtype=self.layout.weight_dtype))
        self._coded = [linear.parts for linear in linears if isinstance(linear, CodedLinear)]  # keeps them alive
        self._bytes = bytes_of_codes(first.products) or self._weights[0].nbytes
        # Layer by layer, so that there is no third copy of a large model.
        for layer_weights, layer in zip(self._weights, layers, strict=True):
            for weight_slice, linear in zip(layer_weights.split(weight_counts), layer.products, strict=True):
                weight_slice.copy_(self.layout.panels(linear))
        ones = torch.ones(first.rotated, first.head_dim)
        head_eps = -1.0 if first.head_scale is None else first.head_eps  # < 0: no norms of queries and keys
        self._floats = (  # in the order of `_FLOAT_KEYS`
            torch.stack([torch.cat([_scales(linear) for linear in layer.products]) for layer in layers]),
            torch.stack([torch.cat([_biases(linear) for linear in layer.products]) for layer in layers]),
            torch.stack(
                [torch.stack([layer.attention_norm.weight, layer.mlp_norm.weight]) for layer in layers]
            ).float(),
            torch.stack([ones if layer.head_scale is None else layer.head_scale.float() for layer in layers]),
            torch.tensor([first.attention_norm.eps, head_eps, first.head_dim**-0.5]),
        )
        self._function = self.layout.entry(entries.layers_entry)
        self._table = table = [0] * entries.TABLE  # addresses are filled in at each use: a copy has others
        table[entries.LAYERS] = len(layers)
        table[entries.INPUTS], table[entries.HEADS], table[entries.KEY_HEADS] = self._shape[:3]
        table[entries.WIDTH], table[entries.INNER] = self._shape[3:]
        self._workspace_sizes: dict[tuple[int, int, int], int] = {}

    def choose_way(self, layers: Sequence["FusedLayer"]) -> str:
        """The measured faster way through `layers`, `AT_ONCE` or `ONE_BY_ONE`; or the recorded one.

        The two round differently, so the chosen way runs all passes, of few rows or many.
        """
        if self.layout.way == "codes":  # PyTorch has no product with codes
            return AT_ONCE
        hidden_dim, mlp_dim = self._shape.hidden, self._shape.inner
        choice_key = f"{len(layers)} layers of {hidden_dim} and {mlp_dim} in {str(self._dtype).removeprefix('torch.')}"
        return settle(choice_key, (ONE_BY_ONE, AT_ONCE), lambda: AT_ONCE if self.is_faster(layers) else ONE_BY_ONE)

    @torch.inference_mode()  # with gradients `run` would do nothing, which takes no time
    def is_faster(self, layers: Sequence["FusedLayer"], clock: Callable[[], float] = time.perf_counter) -> bool:
        """Whether passes of `WIDTHS` rows are faster at once than layer by layer, by the mean of log times.

        Uses as many `layers` as exceed the caches. If a layer is so small that call overhead dominates, it is not
        measured: at once is faster then.
        """
        layer_bytes = self._weights[0].nbytes
        if layer_bytes < SMALL_BYTES:
            return True
        layer_count = min(len(layers), math.ceil(COLD_BYTES / layer_bytes))
        zero_row = torch.zeros(1, 1, self._shape.hidden, dtype=self._dtype)
        one_row = torch.ones(1, 1, self._shape.width, dtype=self._dtype)
        log_speedup = 0.0
        for rows in WIDTHS:
            hidden, rotary_rows = zero_row.expand(1, rows, -1).contiguous(), one_row.expand(1, rows, -1).contiguous()
            mask = torch.zeros(1, 1, rows, rows + 1, dtype=self._dtype)
            seconds: tuple[list[float], list[float]] = ([], [])  # at once, layer by layer
            for _ in range(1 + REPEATS):
                cache = KVCache(range(self._first, self._first + layer_count), rows + 1)
                cache.length = 1  # as after a text of one token
                started = clock()
                output = self.run(hidden, 0, layer_count, (rotary_rows, rotary_rows), mask, cache)
                middle_time = clock()
                assert output is not None
                for layer in layers[:layer_count]:
                    layer.one_by_one(hidden, mask, (rotary_rows, rotary_rows), cache)
                seconds[0].append(middle_time - started)
                seconds[1].append(clock() - middle_time)
            log_speedup += math.log(statistics.median(seconds[1][1:]) / statistics.median(seconds[0][1:]))
        return log_speedup > 0

    @classmethod
    def of(cls, layers: Sequence["FusedLayer"]) -> "LayersAtOnce | None":
        """For `layers`, `inference.engines.fused_layers.FusedLayer`s; None if the kernels cannot run them."""
        is_supported = layers and all(layer.gates_by_silu for layer in layers)
        if not is_supported or not all(fits_panels(linear) for layer in layers for linear in layer.products):
            return None
        signatures = {
            (
                type(layer.qkv), layer.heads, layer.rotated, layer.head_dim, layer.up.out_features, layer.head_eps,
                layer.attention_norm.eps, layer.mlp_norm.eps, layer.head_scale is None, dtype_of(layer),
                layer.layer_idx - index,
            )
            for index, layer in enumerate(layers)
        }  # fmt: skip
        return cls(layers) if len(signatures) == 1 and layers[0].head_dim % LANES == 0 else None

    def run(
        self, hidden: Tensor, start: int, stop: int, rotary: tuple[Tensor, Tensor] | None, mask: Mask,
        cache: LayerCache | None,
    ) -> Tensor | None:  # fmt: skip
        """Run layers start … stop − 1 on hidden [1, R, d] → [1, R, d]; None if the pass is not supported.

        rotary, mask, cache: as a layer receives them. A supported pass follows one text or several (`TextMasks`), each
        in its own `KVCache`. It has no gradients, and all its tensors have the layers' dtype. A prompt has up to
        `batch.PIECE` rows: the attention of many is faster in PyTorch.
        """
        if hidden.shape[0] != 1 or rotary is None or torch.is_grad_enabled():
            return None
        if not all(tensor.dtype == self._dtype for tensor in (hidden, rotary[0])):
            return None
        if isinstance(mask, TextMasks):
            row_spans_by_text = [self._spans(*text) for text in zip(mask.rows, mask.masks, mask.caches, strict=True)]
        else:
            row_spans_by_text = [self._spans(hidden.shape[1], mask, cache)]
        outputs, row_begin = [], 0
        if not all(row_spans_by_text):
            return None
        # Later calls see the keys of earlier ones.
        for call_spans in _group_parts([span for text in row_spans_by_text for span in text]):
            row_slice = slice(row_begin, row_begin := row_begin + sum(span.rows for span in call_spans))
            call_rotary = (rotary[0][:, row_slice], rotary[1][:, row_slice])
            outputs.append(self._call(hidden[:, row_slice], start, stop, call_rotary, call_spans))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _spans(self, rows: int, mask: Mask, cache: LayerCache | None) -> "list[RowSpan]":
        """The rows of a text, split for one call or several; empty if they are not supported."""
        if not isinstance(cache, KVCache) or cache.fixed is not None or isinstance(mask, Band | TextMasks):
            return []
        if (rows > 1 and mask is None) if cache.length else rows > batch.PIECE:  # a prompt's first piece has no mask
            return []
        if mask is not None and mask.dtype != self._dtype:
            return []
        buffer = cache.buffer(rows, self._shape.key_heads, self._shape.width, torch.empty(0, dtype=self._dtype))
        if buffer is None:
            return []
        value_offset, past_length = buffer.stride(1) * buffer.itemsize, cache.length
        keys_address = buffer.data_ptr() - 2 * value_offset * (cache.layers.start - self._first)
        max_rows = max(1, MAX_SEEN // (past_length + rows))
        spans = []
        for begin in range(0, rows, max_rows):
            end = min(rows, begin + max_rows)
            span_mask = None if mask is None else mask[:, :, begin:end, : past_length + end].contiguous()
            spans.append(RowSpan(end - begin, past_length + begin, keys_address, value_offset, cache.slots, span_mask))
        return spans

    def _call(
        self, hidden: Tensor, start: int, stop: int, rotary: tuple[Tensor, Tensor], spans: "Sequence[RowSpan]"
    ) -> Tensor:  # fmt: skip
        """Run layers start … stop − 1 on hidden [..., d]: the rows of the first span, then those of the next."""
        hidden = hidden.contiguous()
        rows, threads = hidden.numel() // self._shape.hidden, most_threads()
        out = torch.empty_like(hidden)
        cos, sin = rotary[0].contiguous(), rotary[1].contiguous()
        span_infos, begin = [], 0  # columns: see `passes.BEGIN`
        for span in spans:
            mask_ptr = 0 if span.mask is None else span.mask.data_ptr()
            span_infos.append((begin, span.rows, span.keys_address, span.value_offset, span.slots, span.past, mask_ptr))
            begin += span.rows
        span_table = torch.tensor(span_infos)
        position_count = max(span.past + span.rows for span in spans)
        work = torch.empty(self._workspace_size(rows, threads, position_count))
        table = self._table.copy()
        table[entries.WEIGHTS] = self._weights.data_ptr()
        for table_index, tensor in zip(_FLOAT_KEYS, self._floats, strict=True):
            table[table_index] = tensor.data_ptr()
        table[entries.X], table[entries.OUT] = hidden.data_ptr(), out.data_ptr()
        table[entries.COS], table[entries.SIN] = cos.data_ptr(), sin.data_ptr()
        table[entries.TEXTS], table[entries.COUNT] = span_table.data_ptr(), len(spans)
        table[entries.WORK], table[entries.POSITIONS] = work.data_ptr(), position_count
        table[entries.START], table[entries.STOP], table[entries.ROWS] = start, stop, rows
        table[entries.MOST] = threads
        call(self._function, table, self._bytes * (stop - start))
        return out

    def _workspace_size(self, rows: int, threads: int, positions: int) -> int:
        """The workspace of a pass over `positions` positions in floats, rounded up; cached, as computing it is slow."""
        shape = (rows, threads, -(-positions // ROUND_TO) * ROUND_TO)
        if shape not in self._workspace_sizes:
            self._workspace_sizes[shape] = sum(entries.workspace_sizes(self._shape, *shape, self.layout.parts))
        return self._workspace_sizes[shape]


def dtype_of_linear(linear: Linear) -> torch.dtype:
    """The dtype in which a linear layer computes."""
    if isinstance(linear, CodedLinear):
        return linear.like.dtype
    return linear.scale.dtype if isinstance(linear, Int8Linear) else linear.weight.dtype


def bytes_of_codes(linears: Sequence[Linear]) -> int:
    """Bytes of the layers' weights as a file stores them; 0 if they are no codes."""
    return sum(part.raw.nbytes for linear in linears if isinstance(linear, CodedLinear) for part in linear.parts)


def dtype_of(layer: "FusedLayer") -> torch.dtype:
    """The dtype in which a fused layer computes."""
    return cast(torch.dtype, layer.attention_norm.weight.dtype)
