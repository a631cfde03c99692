"""Weights of linear layers in the order that a CPU reads fastest, where that is found to be faster."""

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

ROWS = 8  # the row count the layout is chosen for; it serves 1 to 32 rows nearly as well
TIMED_ROWS = (1, 4, 16)  # of plain decoding, of a chain and of a tree
COLD = 64 * 2**20  # bytes of weights that are read in turn, so that none is in a processor's caches
SMALL = 2**20  # bytes of a layer that is packed without measuring: its time is not that of reading weights
REPEATS = 3  # after a first one that does not count

Choose = Callable[[Sequence[nn.Linear]], bool]


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


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch has the layout for weights of `dtype` on `device`, and a processor fast with it."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    fast = dtype == torch.float32 or (dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported())
    return fast and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def pack_linears(module: nn.Module, choose: Choose = lambda _: True) -> None:
    """Replace `nn.Linear`s inside `module` by their packed form, for inference.

    choose: whether to, of all layers of one shape. The module no longer holds the plain weights of those that are
    packed; whatever else shares its submodules gets the packed ones too.
    """
    linears = {id(child): child for child in module.modules() if isinstance(child, nn.Linear)}
    by_shape: dict[tuple[torch.Size, bool], list[nn.Linear]] = {}
    for linear in linears.values():
        by_shape.setdefault((linear.weight.shape, linear.bias is None), []).append(linear)
    packed: dict[int, PackedLinear] = {}
    for alike in by_shape.values():
        if choose(alike):
            packed |= {id(linear): PackedLinear(linear) for linear in alike}
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if id(child) in packed:
                setattr(parent, name, packed[id(child)])


@torch.inference_mode()
def faster_packed(linears: Sequence[nn.Linear], clock: Callable[[], float] = time.perf_counter) -> bool:
    """Whether layers of one shape are faster packed than plain, here and now, over passes of `TIMED_ROWS` rows.

    Both are timed in turn over as many of the layers as exceed the caches, or over one again and again where it is the
    only one. The mean of the ratios decides. Takes some tens of milliseconds, and the memory of a packed copy of those.
    """
    weight = linears[0].weight
    if weight.nbytes < SMALL:
        return True
    sample = list(linears[: math.ceil(COLD / weight.nbytes)])
    layouts: tuple[Sequence[nn.Module], Sequence[nn.Module]] = (sample, [PackedLinear(linear) for linear in sample])
    logarithms = []
    for rows in TIMED_ROWS:
        x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(1 + REPEATS):
            for layers, taken in zip(layouts, seconds, strict=True):
                started = clock()
                for layer in layers:
                    layer(x)
                taken.append(clock() - started)
        plain, packed = (statistics.median(taken[1:]) for taken in seconds)
        logarithms.append(math.log(plain / packed))
    return statistics.mean(logarithms) > 0
