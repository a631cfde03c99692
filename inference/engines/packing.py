"""Preparation of models for decoding: layers are fused, and linear ones get the layout that a CPU reads fastest.

The layout is measured when the model is loaded, or as recorded by a run that is resumed. The layouts: "plain", as
PyTorch; "blocked", oneDNN's; "panels", of our compiled kernels (`PanelLinear`), which also run all decoder layers of a
model "at once", in one call (`LayersAtOnce`). An `Int8Linear` holds int8 codes and a scale of each output, a
`CodedLinear` quantised weights as a GGUF file stores them.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.base.errors import UserError
from outrider.draft_models.targets.coded import CodedEmbedding, CodedLinear, as_multiplied
from outrider.draft_models.targets.int8 import Int8Linear, Linear, apply_scale
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.engines.cpu.at_once import (
    COLD_BYTES,
    ONE_BY_ONE,
    REPEATS,
    LayersAtOnce,
    PanelLinear,
    dtype_of_linear,
    fits_panels,
)
from outrider.inference.engines.cpu.recorded import can_pack, settle
from outrider.inference.engines.fused_layers import FusedLayer, frozen_linear, fuse_layers

ROWS = 8  # the row count for which oneDNN's blocked layout is chosen; it is nearly as good for 1 to 32 rows
TIMED_ROWS = (1, 4, 16)  # of plain decoding, of a chain and of a tree
FEWEST = 16  # layers that are timed in turn, including copies if needed, unless fewer exceed the caches
CODES_ROUND = 3e-5  # tolerance in standard deviations of the outputs: rounding of sums in float32
BFLOAT16_ROUNDS = 2**-7  # further relative tolerance for outputs in bfloat16
SMALL = 2**17  # smaller layers, in bytes, are blocked without measuring: call overhead dominates in any layout

Choose = Callable[[Sequence[Linear]], str]  # layers of one shape → the name of one of the `LAYOUTS`


class PackedLinear(nn.Module):
    """A linear layer without gradient whose weight is in oneDNN's blocked layout. PyTorch's plain path hands few-row
    products to a BLAS. Many BLAS libraries read a [out, in] weight well below memory bandwidth and get slower with
    every row. A weight in blocked layout is read once, for any number of rows."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self._product = torch.ops.mkldnn._linear_pointwise.default

    @property
    def weight(self) -> Tensor:
        """A plain copy [out, in]."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]."""
        return self._product(x, self.packed, self.bias, "none", [], "")  # no activation after it

    __call__ = forward  # it has no hooks, and looking for them takes as long as a small operation


class WidenedLinear(nn.Module):
    """An int8 layer in a layout for floats: the codes are widened to floats of 2 or 4 bytes, which is exact."""

    def __init__(self, linear: Int8Linear, lay_out: Callable[[nn.Linear], nn.Module]):
        super().__init__()
        self.product: Any = lay_out(frozen_linear(linear.codes.to(linear.scale.dtype)))
        self.scale, self.bias = linear.scale, linear.bias

    @property
    def weight(self) -> Tensor:
        """The dequantised weight [out, in]."""
        codes: Tensor = self.product.weight
        return codes * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]."""
        return apply_scale(self.product(x), self.scale, self.bias)

    __call__ = forward


def _block_weight(linear: Linear) -> nn.Module:
    if isinstance(linear, CodedLinear):
        return linear
    return WidenedLinear(linear, PackedLinear) if isinstance(linear, Int8Linear) else PackedLinear(linear)


LAYOUTS: dict[str, Callable[[Linear], nn.Module]] = {
    "plain": lambda linear: linear,
    "blocked": _block_weight,
    "panels": lambda linear: PanelLinear(linear) if fits_panels(linear) else _block_weight(linear),
}


def pack_linears(module: nn.Module, pick_layout: Choose = lambda _: "blocked") -> None:
    """Replace `nn.Linear`s and `Int8Linear`s inside `module` by layers with another layout, for inference. The plain
    weights of replaced layers are freed. Another module that shares a submodule gets its new layers too."""
    linears_by_shape: dict[tuple[object, ...], list[Linear]] = {}
    for linear in module.modules():
        # Subclasses have another forward: a router of experts returns their choice.
        if type(linear) is nn.Linear or isinstance(linear, Int8Linear | CodedLinear):
            shape = (type(linear), linear.out_features, linear.in_features, linear.bias is None)
            linears_by_shape.setdefault(shape, []).append(linear)
    replacement_by_id: dict[int, nn.Module] = {}
    for shape_linears in linears_by_shape.values():
        make_layer = LAYOUTS[pick_layout(shape_linears)]
        replacement_by_id |= {id(linear): make_layer(linear) for linear in shape_linears}
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if id(child) in replacement_by_id:
                setattr(parent, name, replacement_by_id[id(child)])


def pack_codes(model: nn.Module) -> None:
    """`pack_linears` for the layers of `model` whose weights are codes; other modules with them share the panels. As
    `model` is the reference of others, the panels are compared (see `compare_panels`)."""
    for linear in [module for module in model.modules() if isinstance(module, CodedLinear)]:
        compare_panels(linear)
    pack_linears(model, lambda linears: "panels" if isinstance(linears[0], CodedLinear) else "plain")


@torch.inference_mode()
def compare_panels(linear: CodedLinear) -> None:
    """Raise `UserError` unless the panels of a layer's codes give the products of its decoded weights, in float32 and
    in the layer's dtype, in which other instructions may multiply."""
    for coded_rows in linear.parts:
        x = torch.randn(1, coded_rows.inputs, generator=torch.Generator().manual_seed(coded_rows.inputs))
        dtype_inputs = [x, x.to(linear.like.dtype)]
        expected = CodedLinear([coded_rows], None, torch.float32)(torch.cat([as_multiplied(x) for x in dtype_inputs]))
        for x, outputs in zip(dtype_inputs, expected, strict=True):
            layer = CodedLinear([coded_rows], None, x.dtype)
            tolerance = CODES_ROUND * outputs.std() + (x.dtype == torch.bfloat16) * BFLOAT16_ROUNDS * outputs.abs()
            if not fits_panels(layer) or ((PanelLinear(layer)(x)[0] - outputs).abs() < tolerance).all():
                continue
            raise UserError(
                "the target's codes, as they were laid out, are other weights than those that its file stores: the "
                "memory or the runtime is faulty; load it again, and report it if it stays so"
            )


def choose_layout(linears: Sequence[Linear], device: torch.device, *, panels: bool = True) -> str:
    """The `find_fastest_layout` of layers of one shape on `device`, or the recorded one (see `settle`). panels: whether
    to try "panels" too. This layout is for few rows, for which decoder layers have other kernels."""
    first_linear = linears[0]
    if isinstance(first_linear, CodedLinear):  # PyTorch has no product with codes
        return "panels"
    dtype = dtype_of_linear(first_linear)
    layouts = ["plain"]
    if can_pack(device, dtype):
        layouts = [name for name in LAYOUTS if name != "panels" or (panels and fits_panels(first_linear))]
    kind = "int8 " if isinstance(first_linear, Int8Linear) else ""
    question = f"{first_linear.out_features}×{first_linear.in_features} {kind}in {str(dtype).removeprefix('torch.')}"
    question += "" if panels else " (in layers)"
    return settle(question, layouts, lambda: layouts[0] if len(layouts) == 1 else find_fastest_layout(linears, layouts))


@torch.inference_mode()
def find_fastest_layout(
    linears: Sequence[Linear],
    layout_names: Sequence[str],
    clock: Callable[[], float] = time.perf_counter,
    *,
    small: int = SMALL,
) -> str:
    """Measure which of `layout_names` is fastest for layers of one shape, over passes of `TIMED_ROWS` rows.

    small: layers of fewer bytes of weights are "blocked" without a measurement.
    Layouts are timed in turn over as many of the layers as exceed the caches. If there are fewer, copies are added, up
    to `FEWEST` in total. So no weight is in a cache, as in decoding. The mean of the logarithms decides. This takes at
    most some tenths of a second, and the memory of copies of these layers.
    """
    first = linears[0]
    dtype = dtype_of_linear(first)
    nbytes = first.out_features * first.in_features * dtype.itemsize  # int8 codes as floats: some layouts store them so
    if nbytes < small:
        return "blocked"
    layer_count = math.ceil(COLD_BYTES / nbytes)
    layers = list(linears[:layer_count])
    layers += [copy.deepcopy(layers[index % len(layers)]) for index in range(len(layers), min(layer_count, FEWEST))]
    layers_by_layout = {name: [LAYOUTS[name](linear) for linear in layers] for name in layout_names}
    log_sum_by_layout: dict[str, float] = dict.fromkeys(layers_by_layout, 0.0)
    for row_count in TIMED_ROWS:
        x = torch.ones(row_count, first.in_features, dtype=dtype)
        for name, repeat_seconds in _time_in_turn(layers_by_layout, x, clock).items():
            log_sum_by_layout[name] += math.log(statistics.median(repeat_seconds))
    return min(log_sum_by_layout, key=lambda name: log_sum_by_layout[name])


def _time_in_turn(
    layers_by_layout: Mapping[str, Sequence[nn.Module]], x: Tensor, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """The seconds that all layers of a layout take for x [rows, in], `REPEATS` times after a warm-up, by layout."""
    seconds_by_layout: dict[str, list[float]] = {name: [] for name in layers_by_layout}
    for _ in range(1 + REPEATS):
        for name, layers in layers_by_layout.items():
            started = clock()
            for layer in layers:
                layer(x)
            seconds_by_layout[name].append(clock() - started)
    return {name: layout_seconds[1:] for name, layout_seconds in seconds_by_layout.items()}


def lay_out(model: nn.Module, device: torch.device) -> None:
    """Make `model`, which is on `device`, ready to decode by fusing its layers. On a CPU, layers run at once and
    weights are packed if that is faster or recorded (see `engines.cpu.recorded`)."""
    fuse_layers(model)
    if isinstance(model, LayerStack) and model.draft_vocabulary is not None and isinstance(model.head, nn.Linear):
        weight, bias = model.head.weight.detach(), model.head.bias
        token_count = len(model.draft_vocabulary.tokens)  # the last output, for all other tokens, is never proposed
        model.head = frozen_linear(weight[:token_count], None if bias is None else bias.detach()[:token_count])
    holders_and_layers = run_at_once(model)
    if device.type != "cpu":
        return
    layer_linear_ids = {id(linear) for _, layers in holders_and_layers for layer in layers for linear in layer.products}

    def layout(linears: Sequence[Linear]) -> str:
        return choose_layout(linears, device, panels=id(linears[0]) not in layer_linear_ids)

    # First the products of layers, whose speed one by one decides whether these layers run at once.
    pack_linears(model, lambda linears: layout(linears) if id(linears[0]) in layer_linear_ids else "plain")
    _bind(model)
    for holder, layers in holders_and_layers:
        if isinstance(holder.at_once, LayersAtOnce) and holder.at_once.choose_way(layers) == ONE_BY_ONE:
            holder.at_once = None  # frees its copy of the weights
    # If the layers compute a row bit for bit independently of other rows, the head must do so, too.
    if isinstance(model, LayerStack) and model.at_once is not None and fits_panels(model.head):
        model.head = PanelLinear(model.head)
    pack_linears(model, lambda linears: "plain" if id(linears[0]) in layer_linear_ids else layout(linears))
    _bind(model)


def multiply_by_codes(stack: LayerStack) -> None:
    """Let the layers of `stack` multiply by their codes, in passes of many rows too. Head and embedding are floats."""
    dtype = stack.dtype
    if isinstance(stack.head, CodedLinear):
        stack.head = frozen_linear(stack.head.weight.to(dtype), stack.head.bias)
    if isinstance(stack.embed_tokens, CodedEmbedding):
        weight = stack.embed_tokens.rows.decode().to(dtype)
        stack.embed_tokens = nn.Embedding(len(weight), weight.shape[1], _weight=weight, _freeze=True)
    if any(isinstance(module, CodedLinear) for module in stack.layers.modules()):
        fuse_layers(stack)
        pack_linears(stack.layers, lambda linears: "panels" if isinstance(linears[0], CodedLinear) else "plain")
        _bind(stack)


def run_at_once(model: nn.Module) -> list[tuple[LayerStack | FusedLayer, list[FusedLayer]]]:
    """Let the layers of `model` run at once if they can: a stack's together, others individually. Returns the new
    holders, a stack or a layer, each with the layers that it runs at once. Earlier holders are left out, because their
    weights may have another layout by now."""
    fused = [module for module in model.modules() if isinstance(module, FusedLayer)]
    holders_and_layers: list[tuple[LayerStack | FusedLayer, list[FusedLayer]]] = [(layer, [layer]) for layer in fused]
    if isinstance(model, LayerStack):
        # One mask and one rotary table (`table`: its index) must serve all layers.
        layers_are_alike = len(set(model.windows)) == 1 and len({call.table for call in model.spec.calls}) == 1
        holders_and_layers = [(model, fused)] if layers_are_alike and len(fused) == len(model.layers) else []
    holders_and_layers = [(holder, layers) for holder, layers in holders_and_layers if holder.at_once is None]
    for holder, layers in holders_and_layers:
        holder.at_once = LayersAtOnce.of(layers)
    return [(holder, layers) for holder, layers in holders_and_layers if holder.at_once is not None]


def _bind(model: nn.Module) -> None:
    """Let fused layers use the modules that replaced theirs."""
    for module in model.modules():
        if isinstance(module, FusedLayer):
            module.bind()
