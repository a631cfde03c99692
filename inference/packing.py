"""Weights laid out for decoding on a CPU, where one to a few dozen rows meet every matrix of the target."""

import torch
from torch import Tensor, nn

ROWS = 8  # the row count the layout is chosen for; it serves 1 to 32 rows nearly as well


class PackedLinear(nn.Module):
    """A linear layer without gradient whose weight is in oneDNN's blocked layout.

    PyTorch's plain path hands few-row products to a BLAS that reads a [out, in] weight at well under memory
    speed and gets slower with every row; the blocked layout reads it once, whatever the number of rows.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch has the layout for weights of `dtype` on `device`."""
    available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return device.type == "cpu" and dtype == torch.float32 and available


def pack_linears(module: nn.Module) -> None:
    """Replace every `nn.Linear` inside `module` by its packed form, for inference.

    The module no longer holds the plain weights; whatever else shares its submodules gets the packed ones too.
    """
    packed: dict[int, PackedLinear] = {}
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                if id(child) not in packed:
                    packed[id(child)] = PackedLinear(child)
                setattr(parent, name, packed[id(child)])
