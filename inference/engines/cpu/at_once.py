"""Layers and products on a CPU by `inference.engines.cpu`: the parts of a model that it can run, and their calls."""

import ctypes
import math
import mmap
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.draft_models.targets.int8 import Int8Linear, Linear
from outrider.draft_models.targets.target import Band, LayerCache, Mask
from outrider.inference.core.cache import KVCache
from outrider.inference.engines.cpu import entries
from outrider.inference.engines.cpu.layout import WeightLayout, call, most_threads, out_of_panels
from outrider.inference.engines.cpu.linear import PANEL
from outrider.inference.engines.cpu.passes import LayerShape
from outrider.inference.engines.cpu.recorded import settle
from outrider.inference.engines.cpu.vectors import LANES

LARGE = 2 * 2**20  # bytes of a large page on most machines
_COLLAPSE = 25  # of Linux 6.1 and later: move existing memory to large pages now


def in_large_pages(tensor: Tensor) -> Tensor:
    """`tensor`, contiguous and on a CPU, with its memory in large pages as far as the system provides them."""
    begin = -(-tensor.data_ptr() // LARGE) * LARGE
    size = (tensor.data_ptr() + tensor.nbytes) // LARGE * LARGE - begin
    if sys.platform == "linux" and size > 0:
        advise = ctypes.CDLL(None).madvise
        for advice in (mmap.MADV_HUGEPAGE, _COLLAPSE):  # a refusal changes nothing
            advise(ctypes.c_void_p(begin), ctypes.c_size_t(size), ctypes.c_int(advice))
    return tensor


ONE_BY_ONE, AT_ONCE = "one by one", "at once"
WIDTHS = (1, 2, 4, 8, 16, 32)  # rows of the passes that are measured
SEEN = 2**20  # most rows × positions of a call: the workspace for scores has one float per head for each
TOGETHER = 64  # most rows of a call for a norm and a product: every thread has its own copy of all of them
COLD = 64 * 2**20  # bytes of weights that are read in turn by a timing, so that none is in a cache
SMALL = 2**19  # bytes of a layer below which call overhead dominates
SOME = 256  # positions by which the workspace grows
REPEATS = 3  # after one warm-up
_FLOATS = (entries.SCALES, entries.BIASES, entries.NORMS, entries.HEAD_NORMS, entries.EPS)


def fits_panels(linear: object) -> TypeGuard[Linear]:
    """Whether the kernels can multiply by this layer's weight on a CPU."""
    if isinstance(linear, Int8Linear):
        kind, device = linear.scale.dtype, linear.codes.device
    elif type(linear) is nn.Linear:
        kind, device = linear.weight.dtype, linear.weight.device
    else:
        return False
    whole = linear.out_features % PANEL == 0
    return whole and device.type == "cpu" and kind in (torch.float32, torch.bfloat16)


def _scales(linear: Linear) -> Tensor:
    return linear.scale.float() if isinstance(linear, Int8Linear) else torch.ones(linear.out_features)


def _biases(linear: Linear) -> Tensor:
    return torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach().float()


class PanelLinear(nn.Module):
    """A linear layer without gradient that uses `products`, made of one that `fits_panels`. Sums are in float32."""

    def __init__(self, linear: Linear):
        super().__init__()
        self.shape = (linear.out_features, linear.in_features)
        self._dtype = linear.scale.dtype if isinstance(linear, Int8Linear) else linear.weight.dtype
        self.layout = WeightLayout.of([linear], self._dtype)
        self._panels = in_large_pages(self.layout.panels(linear))
        self._scales, self._biases = _scales(linear), _biases(linear)
        self.bias = linear.bias
        self._function = self.layout.entry(entries.product_entry)
        self._normed = self.layout.entry(entries.head_entry)
        table = [0] * entries.TABLE
        table[entries.OUTPUTS], table[entries.INPUTS] = self.shape
        self._table = table

    @property
    def weight(self) -> Tensor:
        """A plain copy [out, in]."""
        plain = out_of_panels(self._panels, self.shape[0], self.layout.together).to(self._dtype)
        return plain * self._scales.to(self._dtype)[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]. If `x` has another dtype, it computes in that dtype, as `precise` does."""
        if x.dtype != self._dtype:
            return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        return self._call(self._function, x, self.layout.operand(x.reshape(-1, self.shape[1])))

    __call__ = forward

    def after(self, weight: Tensor, eps: float, x: Tensor) -> Tensor | None:
        """`forward` of weight · round(x / rms(x)) in one call; None if unsupported, as for an x of another dtype."""
        size = self.shape[1]
        rows = x.numel() // size
        if x.dtype != self._dtype or weight.dtype != x.dtype or size % LANES or rows == 0:
            return None
        if rows > TOGETHER:
            parts = [self.after(weight, eps, part) for part in x.reshape(rows, size).split(TOGETHER)]
            return torch.cat([part for part in parts if part is not None]).view(*x.shape[:-1], -1)
        work = torch.full((1 + most_threads() * (2 + self.layout.parts * rows) * size,), eps)
        table = {entries.NORMS: weight.data_ptr(), entries.WORK: work.data_ptr()}
        return self._call(self._normed, x, x.contiguous(), table)

    def _call(self, entry: int, x: Tensor, operand: Tensor, more: dict[int, int] | None = None) -> Tensor:
        """Outputs [..., out] of an entry for x [..., in], passed as `operand`; more: other items of its table."""
        out = x.new_empty(*x.shape[:-1], self.shape[0])
        table = self._table.copy()
        table[entries.WEIGHTS], table[entries.SCALES] = self._panels.data_ptr(), self._scales.data_ptr()
        table[entries.BIASES] = self._biases.data_ptr()
        table[entries.X], table[entries.OUT] = operand.data_ptr(), out.data_ptr()
        table[entries.ROWS] = x.numel() // self.shape[1]
        for place, number in (more or {}).items():
            table[place] = number
        call(entry, table, self._panels.nbytes)
        return out


class LayersAtOnce:
    """Consecutive layers of one shape, any range of which runs in one call if a pass has few rows.

    layout: of its weights, which are a second copy in addition to the layers' own.
    """

    def __init__(self, layers: Sequence[Any]):
        first = layers[0]
        self._dtype = dtype_of(first)
        self._first = first.layer_idx
        self._shape = LayerShape(
            first.qkv.in_features, first.heads, first.rotated - first.heads, first.head_dim, first.down.in_features
        )
        linears = [linear for layer in layers for linear in layer.products]
        self.layout = WeightLayout.of(linears, self._dtype)
        sizes = [linear.out_features * linear.in_features for linear in first.products]
        self._weights = in_large_pages(torch.empty(len(layers), sum(sizes), dtype=self.layout.stored))
        # Layer by layer, so that there is no third copy of a large model.
        for row, layer in zip(self._weights, layers, strict=True):
            for part, linear in zip(row.split(sizes), layer.products, strict=True):
                part.copy_(self.layout.panels(linear))
        ones = torch.ones(first.rotated, first.head_dim)
        head_eps = -1.0 if first.head_scale is None else first.head_eps
        self._floats = (  # in the order of `_FLOATS`
            torch.stack([torch.cat([_scales(linear) for linear in layer.products]) for layer in layers]),
            torch.stack([torch.cat([_biases(linear) for linear in layer.products]) for layer in layers]),
            torch.stack(
                [torch.stack([layer.attention_norm.weight, layer.mlp_norm.weight]) for layer in layers]
            ).float(),
            torch.stack([ones if layer.head_scale is None else layer.head_scale.float() for layer in layers]),
            torch.tensor([first.attention_norm.eps, head_eps, first.head_dim**-0.5]),
        )
        self._function = self.layout.entry(entries.layers_entry)
        table = [0] * entries.TABLE
        table[entries.LAYERS] = len(layers)
        table[entries.INPUTS], table[entries.HEADS], table[entries.KEY_HEADS] = self._shape[:3]
        table[entries.WIDTH], table[entries.INNER] = self._shape[3:]
        self._table = table  # addresses are filled in at each use: a copy of this object has others
        self._workspace_sizes: dict[tuple[int, int, int], int] = {}

    def chosen(self, layers: Sequence[Any]) -> str:
        """The measured faster way through `layers`, `AT_ONCE` or `ONE_BY_ONE`; or the recorded one.

        It is used for all passes after a text, of few rows or many, as the two round differently.
        """
        hidden, inner = self._shape.hidden, self._shape.inner
        question = f"{len(layers)} layers of {hidden} and {inner} in {str(self._dtype).removeprefix('torch.')}"
        return settle(question, (ONE_BY_ONE, AT_ONCE), lambda: AT_ONCE if self.is_faster(layers) else ONE_BY_ONE)

    @torch.inference_mode()  # with gradients `run` would do nothing, which takes no time
    def is_faster(self, layers: Sequence[Any], clock: Callable[[], float] = time.perf_counter) -> bool:
        """Whether passes of `WIDTHS` rows are faster at once than layer by layer, by the mean of log times.

        Uses as many `layers` as exceed the caches. If a layer is so small that call overhead dominates, it is not
        measured: at once is faster then.
        """
        size = self._weights[0].nbytes
        if size < SMALL:
            return True
        count = min(len(layers), math.ceil(COLD / size))
        like = torch.zeros(1, 1, self._shape.hidden, dtype=self._dtype)
        turned = torch.ones(1, 1, self._shape.width, dtype=self._dtype)
        gained = 0.0
        for rows in WIDTHS:
            hidden, table = like.expand(1, rows, -1).contiguous(), turned.expand(1, rows, -1).contiguous()
            mask = torch.zeros(1, 1, rows, rows + 1, dtype=self._dtype)
            seconds: tuple[list[float], list[float]] = ([], [])
            for _ in range(1 + REPEATS):
                cache = KVCache(range(self._first, self._first + count), rows + 1)
                cache.length = 1  # after a text
                started = clock()
                done = self.run(hidden, 0, count, (table, table), mask, cache)
                between = clock()
                assert done is not None
                for layer in layers[:count]:
                    layer.one_by_one(hidden, mask, (table, table), cache)
                seconds[0].append(between - started)
                seconds[1].append(clock() - between)
            gained += math.log(statistics.median(seconds[1][1:]) / statistics.median(seconds[0][1:]))
        return gained > 0

    @classmethod
    def of(cls, layers: Sequence[Any]) -> "LayersAtOnce | None":
        """For `layers`, `inference.engines.fused_layers.FusedLayer`s; None if the kernels cannot run them."""
        able = layers and all(layer.gates_by_silu for layer in layers)
        if not able or not all(fits_panels(part) for layer in layers for part in layer.products):
            return None
        kinds = {
            (
                type(layer.qkv), layer.heads, layer.rotated, layer.head_dim, layer.up.out_features, layer.head_eps,
                layer.attention_norm.eps, layer.mlp_norm.eps, layer.head_scale is None, dtype_of(layer),
                layer.layer_idx - place,
            )
            for place, layer in enumerate(layers)
        }  # fmt: skip
        return cls(layers) if len(kinds) == 1 and layers[0].head_dim % LANES == 0 else None

    def run(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        rotary: tuple[Tensor, Tensor] | None,
        mask: Mask,
        cache: LayerCache | None,
    ) -> Tensor | None:  # fmt: skip
        """Run layers start … stop − 1 on hidden [1, R, d] → [1, R, d]; None if the pass is not supported.

        rotary, mask, cache: as a layer receives them. Supported are passes after a text over a `KVCache`, without
        gradients, with all tensors in the layers' dtype. A prompt, whose rows see no earlier text, is not supported.
        """
        batch, rows, _ = hidden.shape
        if batch != 1 or not isinstance(cache, KVCache) or cache.fixed is not None:
            return None
        if rotary is None or isinstance(mask, Band) or torch.is_grad_enabled():
            return None
        if rows > 1 and (mask is None or cache.length == 0):
            return None
        given = (hidden, rotary[0], *([] if mask is None else [mask]))
        if not all(tensor.dtype == self._dtype for tensor in given):
            return None
        kept = cache.whole(self._shape.key_heads, self._shape.width, hidden)
        if kept is None:
            return None
        first, past = cache.layers.start - self._first, cache.length
        most = max(1, SEEN // (past + rows))
        done = []
        for begin in range(0, rows, most):  # later calls see the keys and values of earlier ones
            end = min(rows, begin + most)
            own = None if mask is None else mask[:, :, begin:end, : past + end].contiguous()
            place = (rotary[0][:, begin:end], rotary[1][:, begin:end])
            more = {
                entries.MASK: 0 if own is None else own.data_ptr(),
                entries.FIRST: first,
                entries.PAST: past + begin,
            }
            done.append(self._call(hidden[:, begin:end], start, stop, place, kept[:, :, None], past + end, more))
        return done[0] if len(done) == 1 else torch.cat(done, dim=1)

    def run_each(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], kept: Tensor, slots: Tensor) -> Tensor:
        """Run all layers on one more token of each of R sequences, hidden [R, d] → [R, d]; any number of rows.

        kept [L, 2, S, G, positions, D]: the KV cache of S sequences, to which the rows' keys and values are written.
        slots int64 [R, 2]: each row's sequence, and the number of earlier positions in it. rotary: cos and sin [R, D].
        All have the layers' dtype and are contiguous.
        """
        past = int(slots[:, 1].max())
        more = {entries.SLOTS: slots.data_ptr(), entries.PAST: past}
        return self._call(hidden, 0, len(self._weights), rotary, kept, past + 1, more)

    def _call(
        self, hidden: Tensor, start: int, stop: int, rotary: tuple[Tensor, Tensor], kept: Tensor, positions: int,
        more: dict[int, int],
    ) -> Tensor:  # fmt: skip
        """Run layers start … stop − 1 on rows hidden [..., d] of up to `positions` positions; kept: see `run_each`."""
        hidden = hidden.contiguous()
        rows, threads = hidden.numel() // self._shape.hidden, most_threads()
        out = torch.empty_like(hidden)
        cos, sin = rotary[0].contiguous(), rotary[1].contiguous()
        work = torch.empty(self._workspace_size(rows, threads, positions))
        table = self._table.copy()
        table[entries.WEIGHTS] = self._weights.data_ptr()
        for place, tensor in zip(_FLOATS, self._floats, strict=True):
            table[place] = tensor.data_ptr()
        table[entries.X], table[entries.OUT] = hidden.data_ptr(), out.data_ptr()
        table[entries.COS], table[entries.SIN] = cos.data_ptr(), sin.data_ptr()
        table[entries.CACHE], table[entries.WORK] = kept.data_ptr(), work.data_ptr()
        table[entries.CACHED], table[entries.SEQUENCES], table[entries.CAPACITY] = kept.shape[0], *kept.shape[2:5:2]
        table[entries.START], table[entries.STOP], table[entries.ROWS] = start, stop, rows
        table[entries.MOST] = threads
        for number, value in more.items():
            table[number] = value
        call(self._function, table, self._weights[0].nbytes * (stop - start))
        return out

    def _workspace_size(self, rows: int, threads: int, positions: int) -> int:
        """The workspace of a pass over `positions` positions in floats, rounded up; cached, as computing it is slow."""
        size = (rows, threads, -(-positions // SOME) * SOME)
        if size not in self._workspace_sizes:
            self._workspace_sizes[size] = sum(entries.workspace_sizes(self._shape, *size, self.layout.parts))
        return self._workspace_sizes[size]


def dtype_of(layer: Any) -> torch.dtype:
    """The dtype in which a fused layer computes."""
    dtype: torch.dtype = layer.attention_norm.weight.dtype
    return dtype
