"""Layers whose weights stay as they are stored: codes of 4 to 8 bits with a scale for each group of inputs.

Their outputs are those of the decoded weights. An engine may multiply by the codes themselves (`engines.cpu.by_codes`).
`CodedRows` are the rows of a weight as a file has them; `decode` makes floats of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from outrider.draft_models.formats.gguf_codes import CodedRows

BLOCK = 2**22  # bytes of weights that are decoded at a time: they stay in the CPU's cache until they are multiplied
ROUNDED = 32  # inputs that are rounded with one scale, as the kernels of `engines.cpu.by_codes` read them
LARGEST_BYTE, LEAST = 127.0, 1e-30  # of rounded inputs; groups of inputs below `LEAST` are rounded to 0


class CodedLinear(nn.Module):
    """A linear layer without gradient. The rows of its weight are those of `parts`, which may have several code kinds.

    bias: [out] or None. dtype: that of activations; the weights are exact in float32.
    """

    bias: nn.Parameter | None
    like: Tensor  # empty: a buffer that says the dtype of activations, and is moved and cast with the module

    def __init__(self, parts: Sequence["CodedRows"], bias: Tensor | None, dtype: torch.dtype):
        super().__init__()
        self.parts = tuple(parts)
        self.out_features, self.in_features = sum(map(len, parts)), parts[0].inputs
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def weight(self) -> Tensor:
        """The decoded weight float32 [out, in]."""
        return torch.cat([part.decode() for part in self.parts])

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]. Weights are decoded a block of rows at a time, and multiplied in float32."""
        block_rows = max(1, BLOCK // (4 * self.in_features))  # 4 bytes a float32
        wide_inputs = as_multiplied(x)
        outputs = [
            F.linear(wide_inputs, coded_rows.decode(row_begin, row_begin + block_rows).to(wide_inputs))
            for coded_rows in self.parts
            for row_begin in range(0, len(coded_rows), block_rows)
        ]
        output = torch.cat(outputs, -1)  # [..., out]
        return (output if self.bias is None else output + self.bias.to(wide_inputs)).to(x.dtype)


def as_multiplied(x: Tensor) -> Tensor:
    """x [..., in] as products with codes read it, in float32 or float64. bfloat16s are rounded to integers of 8 bits
    where the CPU multiplies these fast, as engines do there."""
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and torch.cpu._is_vnni_supported():
        return round_to_bytes(x.float())
    return x if x.dtype == torch.float64 else x.float()


def round_to_bytes(x: Tensor) -> Tensor:
    """x [..., in], each `ROUNDED` inputs as integers up to ±127 times a scale. It has no gradient.

    Processors multiply integers of 8 bits by codes two to three times as fast as bfloat16s (`engines.cpu.by_codes`).
    """
    groups = x.unflatten(-1, (-1, ROUNDED))
    absmax = groups.abs().amax(-1, keepdim=True)
    factor = torch.where(absmax < LEAST, 0.0, absmax.new_tensor(LARGEST_BYTE) / absmax)  # number / tensor rounds twice
    return ((groups * factor).round() * (absmax / LARGEST_BYTE)).flatten(-2)


class CodedEmbedding(nn.Module):
    """An embedding, with `nn.Embedding`'s attributes, of rows as they are stored; outputs have the dtype of `like`."""

    like: Tensor  # as in `CodedLinear`

    def __init__(self, rows: "CodedRows", dtype: torch.dtype):
        super().__init__()
        self.rows, self.num_embeddings, self.embedding_dim, self.padding_idx = rows, len(rows), rows.inputs, None
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] → [..., in]. Decodes their rows."""
        return self.rows.decode_at(tokens.flatten()).view(*tokens.shape, -1).to(self.like.dtype)


def keep_codes(
    model: PreTrainedModel, rows_of: "Callable[[str], CodedRows | None]", name_of: Mapping[str, str], dtype: torch.dtype
) -> dict[str, str]:
    """Replace the linear layers and the embedding of `model` whose weights `rows_of` has. The model is on meta.

    rows_of: name in the file → rows, or None. name_of: the model's tensors → names in the file. dtype: of activations.
    Returns the part of `name_of` still to be read. A tied head gets the embedding's rows; the config is then untied.
    """
    unread_names, modules = dict(name_of), dict(model.named_modules())
    head, embed = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = model.config.tie_word_embeddings  # then the embedding can be coded only if the head can be, too
    head_takes_rows = is_tied and type(head) is nn.Linear
    embedding_takes_rows = type(embed) is nn.Embedding and (head_takes_rows or not is_tied)
    for name, stored_name in name_of.items():
        module_name, _, param_name = name.rpartition(".")
        module = modules.get(module_name)  # a file may hold more than the model
        linear = module if type(module) is nn.Linear else None
        is_embedding = module is embed and embedding_takes_rows
        if param_name != "weight" or not (linear or is_embedding) or (coded_rows := rows_of(stored_name)) is None:
            continue
        if linear:
            model.set_submodule(module_name, CodedLinear([coded_rows], linear.bias, dtype))
        else:
            model.set_input_embeddings(CodedEmbedding(coded_rows, dtype))
            if head_takes_rows:
                model.set_output_embeddings(CodedLinear([coded_rows], head.bias, dtype))
                model.config.tie_word_embeddings = False
                model.all_tied_weights_keys = {}  # transformers' record of tied weights
        del unread_names[name]
    return unread_names
