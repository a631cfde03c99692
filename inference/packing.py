"""Linear layers laid out as a CPU reads them fastest; which layout that is, is measured where the model is loaded."""

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

ROWS = 8  # the row count the blocked layout is chosen for; it serves 1 to 32 rows nearly as well
TIMED_ROWS = (1, 4, 16)  # of plain decoding, of a chain and of a tree
COLD = 64 * 2**20  # bytes of weights that are read in turn, so that none is in a processor's caches
SMALL = 2**20  # bytes of a layer that is blocked without measuring: its time is not that of reading weights
REPEATS = 3  # after a first one that does not count

Choose = Callable[[Sequence[nn.Linear]], str]


class PackedLinear(nn.Module):
    """A linear layer without gradient whose weight is in oneDNN's blocked layout.

    PyTorch's plain path hands few-row products to a BLAS. Many a BLAS reads a [out, in] weight at well under memory
    speed and gets slower with every row. The blocked layout reads it once, whatever the number of rows.
    """

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
        return self._product(x, self.packed, self.bias, "none", [], "")

    __call__ = forward  # as nothing hangs hooks on it, whose search takes as long as a small operation


class HalvedLinear(nn.Module):
    """A float32 linear layer without gradient whose weight is kept in float16, for one that `fits_half`.

    The weights of a checkpoint in 16 bits are float32 only to be multiplied. FBGEMM widens them in registers. So the
    product is that of float32, and half the bytes are read.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach(), linear.bias)
        product = torch.ops.quantized.linear_dynamic_fp16.default
        self._product = getattr(product, "_op", product)  # itself, without a search for subclasses: 5 µs a call

    @property
    def weight(self) -> Tensor:
        """A plain copy [out, in], float32."""
        return torch.ops.quantized.linear_unpack_fp16(self.packed)[0]

    @property
    def bias(self) -> Tensor | None:
        return torch.ops.quantized.linear_unpack_fp16(self.packed)[1]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]."""
        return self._product(x, self.packed)

    __call__ = forward


LAYOUTS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "plain": lambda linear: linear,
    "blocked": PackedLinear,
    "halved": lambda linear: HalvedLinear(linear) if fits_half(linear.weight) else PackedLinear(linear),
}


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch has layouts for weights of `dtype` on `device`, and a processor fast with them."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    fast = dtype == torch.float32 or (dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported())
    return fast and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def can_halve(dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch multiplies float32 by weights that are kept in float16."""
    has_it = hasattr(torch.ops.quantized, "linear_prepack_fp16") and torch.backends.quantized.engine in (
        "x86",
        "fbgemm",
    )
    return has_it and dtype == torch.float32 and torch.cpu._is_avx2_supported()


def fits_half(weight: Tensor) -> bool:
    """Whether float16 holds a float32 weight [out, in]: no row is off by more than float32's own precision, 2⁻²³.

    A bfloat16 has fewer digits than a float16 and fits, unless it is beyond 65504. Of one below 2⁻¹⁷ the last digits
    are lost, which are nothing beside the rest of its row.
    """
    lost = torch.linalg.vector_norm(weight - weight.half().float(), dim=1)
    return bool((lost <= 2**-23 * torch.linalg.vector_norm(weight, dim=1)).all())  # false for what is not finite


def pack_linears(module: nn.Module, choose: Choose = lambda _: "blocked") -> None:
    """Replace `nn.Linear`s inside `module` by another layout of them, for inference.

    choose: which of `LAYOUTS`, of all layers of one shape. The module no longer holds the plain weights of those that
    are replaced; whatever else shares its submodules gets the new ones too.
    """
    # Of a subclass the forward is another: a router of experts returns their choice.
    linears = {id(child): child for child in module.modules() if type(child) is nn.Linear}
    by_shape: dict[tuple[torch.Size, bool], list[nn.Linear]] = {}
    for linear in linears.values():
        by_shape.setdefault((linear.weight.shape, linear.bias is None), []).append(linear)
    laid_out: dict[int, nn.Module] = {}
    for alike in by_shape.values():
        lay_out = LAYOUTS[choose(alike)]
        laid_out |= {id(linear): lay_out(linear) for linear in alike}
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if id(child) in laid_out:
                setattr(parent, name, laid_out[id(child)])


@torch.inference_mode()
def fastest_layout(linears: Sequence[nn.Linear], clock: Callable[[], float] = time.perf_counter) -> str:
    """Which of `LAYOUTS` is fastest for layers of one shape, here and now, over passes of `TIMED_ROWS` rows.

    They are timed in turn over as many of the layers as exceed the caches, or over one again and again where it is the
    only one. The mean of the logarithms decides. Takes some tens of milliseconds, and the memory of copies of those.
    """
    weight = linears[0].weight
    if weight.nbytes < SMALL:
        return "blocked"
    sample = list(linears[: math.ceil(COLD / weight.nbytes)])
    tried: dict[str, Sequence[nn.Module]] = {"plain": sample, "blocked": [PackedLinear(linear) for linear in sample]}
    if can_halve(weight.dtype) and all(fits_half(linear.weight) for linear in sample):
        tried["halved"] = [HalvedLinear(linear) for linear in sample]
    logarithms: dict[str, float] = dict.fromkeys(tried, 0.0)
    for rows in TIMED_ROWS:
        x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
        seconds: dict[str, list[float]] = {name: [] for name in tried}
        for _ in range(1 + REPEATS):
            for name, layers in tried.items():
                started = clock()
                for layer in layers:
                    layer(x)
                seconds[name].append(clock() - started)
        for name, taken in seconds.items():
            logarithms[name] += math.log(statistics.median(taken[1:]))
    return min(logarithms, key=lambda name: logarithms[name])
