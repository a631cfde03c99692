"""Linear layers in oneDNN's blocked layout."""

import torch
from torch import Tensor, nn

ROWS = 8  # the row count for which the blocked layout is chosen; it is nearly as good for 1 to 32 rows


class PackedLinear(nn.Module):
    """A linear layer without gradient whose weight is in oneDNN's blocked layout.

    PyTorch's plain path hands few-row products to a BLAS. Many BLAS libraries read a [out, in] weight well below memory
    bandwidth and get slower with every row. A weight in blocked layout is read once, for any number of rows.
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

    __call__ = forward  # it has no hooks, and looking for them takes as long as a small operation
