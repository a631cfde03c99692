"""The int8 model of a target: the weight of every linear layer as integers up to ±127 (codes), with one scale per row.

It is a different target from the original, and every method decodes with it under `dtype=int8`. Activations, norms,
biases and embeddings stay floats. The scheme is the usual one of weight-only quantisation: symmetric, per output row,
round to nearest (called vector-wise in LLM.int8(), arXiv 2208.07339, section 2).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.base.errors import UserError
from outrider.base.words import list_words
from outrider.draft_models.targets.coded import CodedLinear

LARGEST = 127  # largest code: −128 is unused, so that a weight and its opposite get opposite codes
BLOCK = 2**24  # bytes of codes converted to floats at a time: small enough for the C library's heap to reuse


class Int8Linear(nn.Module):
    """A linear layer without gradient: output i is scale[i] · Σ_j codes[i, j] · x[j], plus bias[i].

    codes: int8 [out, in]. scale: [out], in the dtype of activations. bias: [out] or None.

    The scale is applied to the sum. A product of code and scale would be rounded to 16 bits again, which would change
    the weights. The codes themselves are exact in bfloat16. An `x` of another dtype is multiplied in that dtype.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None):
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.out_features, self.in_features = codes.shape

    @property
    def weight(self) -> Tensor:
        """The dequantised weight [out, in], in floats."""
        return self.codes.to(self.scale.dtype) * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]. The codes are converted to floats in every call, a block of rows at a time."""
        block_rows = max(1, BLOCK // (self.in_features * x.element_size()))
        block_outputs = [F.linear(x, code_block.to(x.dtype)) for code_block in self.codes.split(block_rows)]
        product = block_outputs[0] if len(block_outputs) == 1 else torch.cat(block_outputs, -1)
        return apply_scale(product, self.scale.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


Linear = nn.Linear | Int8Linear | CodedLinear  # a layer of a loaded model, before `engines.packing` changes its layout


def apply_scale(product: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The output of a layer [..., out] from the `product` with its codes, which is overwritten."""
    return product.mul_(scale) if bias is None else torch.addcmul(bias, product, scale)


def quantise_rows(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes int8 [out, in] and scale [out] in `dtype` of a finite weight [out, in]. The codes are the nearest ones for
    the scale as stored, so that rounding of the scale adds nothing to their error."""
    weight = weight.detach().float()
    scale = (weight.abs().amax(1) / LARGEST).to(dtype)
    scale = torch.where(scale > 0, scale, 1)  # a row of zeros
    codes = (weight / scale.float()[:, None]).round_().clamp_(-LARGEST, LARGEST)
    return codes.to(torch.int8), scale


def quantise(model: nn.Module, dtype: torch.dtype, label: str) -> None:
    """Convert a frozen `model` in place to its int8 model, which computes in `dtype`. label: begins errors.

    The head is quantised like the other layers, even if it is tied to the embedding: in a small model it is a fifth of
    the bytes read per token. The embedding stays in floats, since a token reads only one row of it.

    Raises `UserError` for weights outside linear layers (see `require_linear`), or not finite.
    """
    require_linear(model, label)
    int8_by_id: dict[int, Int8Linear] = {}
    for parent_name, parent in list(model.named_modules()):
        for child_name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                if id(child) not in int8_by_id:
                    int8_by_id[id(child)] = _quantise_linear(child, dtype, f"{label}: {parent_name}.{child_name}")
                setattr(parent, child_name, int8_by_id[id(child)])
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # not buffers: rotary frequencies are float32 in any model


def _quantise_linear(linear: nn.Linear, dtype: torch.dtype, label: str) -> Int8Linear:
    if not linear.weight.isfinite().all():
        raise UserError(
            f"{label}: dtype=int8 has no numbers for weights that are NaN or infinite; fetch the model again"
        )
    bias = None if linear.bias is None else linear.bias.detach().to(dtype)
    return Int8Linear(*quantise_rows(linear.weight, dtype), bias)


def require_linear(model: nn.Module, label: str) -> None:
    """Raise `UserError` unless every matrix of `model` is a linear layer's or an embedding; it may be on meta."""
    unsupported = [
        f"{path} ({type(module).__name__})"
        for path, module in model.named_modules()
        if type(module) is not nn.Linear and not isinstance(module, nn.Embedding)
        if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
    ]
    if unsupported:
        raise UserError(
            f"{label}: dtype=int8 quantises linear layers, and these of its modules hold weights of another kind: "
            f"{list_words(unsupported)}. Decode with dtype=fast"
        )


def int8_bytes(model: nn.Module, itemsize: int) -> int:
    """The bytes of the int8 model of `model`, which may be on meta; other weights take `itemsize` bytes per number."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    code_bytes = sum(linear.weight.numel() + itemsize * linear.out_features for linear in linears)  # codes, scales
    embedding_ids = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}  # floats, even if tied
    linear_ids = {id(linear.weight) for linear in linears} - embedding_ids
    return code_bytes + itemsize * sum(weight.numel() for weight in model.parameters() if id(weight) not in linear_ids)
