"""The tensors of a GGUF file under Hugging Face's names, in their order of rows, and dequantised."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig

from draft_models.targets.gguf_config import IGNORED, gguf_config, head_counts
from draft_models.targets.gguf_file import GgufFile, TensorPlace, open_gguf
from draft_models.targets.stored_tensors import StoredTensor, tensor_pieces
from outrider.errors import UserError

# ggml's names → those of Hugging Face's Llama, Mistral, Qwen2 and Qwen3. The second table: within layer n ("blk.n.").
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_WITHIN = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLAIN = {"F32": (np.float32, torch.float32), "F16": (np.float16, torch.float16), "BF16": (np.int16, torch.bfloat16)}


def load_package() -> Any:
    """The `gguf` package. Raises `UserError` where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UserError("reading a GGUF file needs the gguf package: pip install 'outrider[gguf]'") from None
    return gguf


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file. Quantised ones are float32 once read, the others are of their own type.

    order: None, or for each row of Hugging Face's the row of the file.
    """

    path: Path
    place: TensorPlace
    kind: Any  # gguf.GGMLQuantizationType
    stored_row: int  # bytes of a row in the file
    order: NDArray[np.intp] | None

    @property
    def type_name(self) -> str:
        """The type it is read in, as in a safetensors header."""
        return self.kind.name if self.kind.name in _PLAIN else "F32"

    @property
    def shape(self) -> list[int]:
        """Its shape."""
        return list(self.place.shape)

    @property
    def nbytes(self) -> int:
        """Its size once read."""
        return math.prod(self.place.shape) * _PLAIN[self.type_name][1].itemsize

    def read(self) -> Tensor:
        """All of it."""
        return self._rows(0, self._memory.shape[0]).reshape(self.place.shape)

    def pieces(self, places: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """The bytes of what is read at each (first byte, how many); only the rows they lie in are dequantised."""
        size = self._columns * _PLAIN[self.type_name][1].itemsize
        for at, count in places:
            first, stop = at // size, -(-(at + count) // size)
            yield from tensor_pieces(self._rows(first, stop), [(at - first * size, count)])

    @cached_property
    def _memory(self) -> NDArray[Any]:
        """The file's bytes, [rows, bytes of a row]."""
        rows = math.prod(self.place.shape[:-1])
        if self.order is not None and len(self.place.shape) == 1:
            rows = self.place.shape[0]  # a bias, reordered like the rows of its matrix
        return np.memmap(self.path, np.uint8, "r", self.place.begin, (rows, self.stored_row))

    @property
    def _columns(self) -> int:
        return math.prod(self.place.shape) // self._memory.shape[0]

    def _rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) in Hugging Face's order, [stop − start, columns]."""
        raw = self._memory[start:stop] if self.order is None else self._memory[self.order[start:stop]]
        raw = np.ascontiguousarray(raw)
        if self.kind.name in _PLAIN:
            kept, kind = _PLAIN[self.kind.name]
            return torch.from_numpy(raw.view(kept).copy()).view(kind)
        return torch.from_numpy(load_package().quants.dequantize(raw, self.kind)).reshape(stop - start, -1)


def open_gguf_tensors(path: str) -> Mapping[str, StoredTensor]:
    """The tensors of a GGUF file by Hugging Face's names; none is read yet.

    Raises `UserError` for an architecture, a tensor or a quantisation that is not known here, and where the file ends
    before its last tensor does.
    """
    file = open_gguf(Path(path))
    config = gguf_config(file)
    found = {hugging_face_name(file, n): _located(file, place) for n, place in file.tensors.items() if n not in IGNORED}
    expected = _expected_names(config)
    for name in sorted(expected ^ found.keys()):
        what = "holds no tensor" if name in expected else "has a tensor that its metadata know nothing of:"
        raise UserError(f"{file.path}: {what} {name!r} (Hugging Face's name); fetch it again, or convert it again")
    return found


def _expected_names(config: PreTrainedConfig) -> set[str]:
    """The names of all tensors of a model of `config`."""
    matrices, norms = [*_WITHIN.values()], {"self_attn.q_norm", "self_attn.k_norm"}
    inner = {f"{name}.weight" for name in matrices if name not in norms or config.model_type == "qwen3"}
    biased = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"] if config.model_type == "qwen2" else []
    if getattr(config, "attention_bias", False):
        biased = [name for name in matrices if name.startswith("self_attn.") and name not in norms]
    if getattr(config, "mlp_bias", False):
        biased += [name for name in matrices if name.startswith("mlp.")]
    inner |= {f"{name}.bias" for name in biased}
    outside = set(_OUTSIDE.values()) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return outside | {f"model.layers.{index}.{name}" for index in range(config.num_hidden_layers) for name in inner}


def hugging_face_name(file: GgufFile, name: str) -> str:
    """The name of a tensor in a Hugging Face model. Raises `UserError` for one that such a model does not have."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    block, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    inner, _, last = rest.rpartition(".")
    if block != "blk" or not index.isdecimal() or inner not in _WITHIN or last not in ("weight", "bias"):
        raise UserError(
            f"{file.path}: tensor {name!r} belongs to no model that Outrider runs; convert the original model's "
            "directory with transformers, if it is one"
        )
    return f"model.layers.{int(index)}.{_WITHIN[inner]}.{last}"


def _located(file: GgufFile, place: TensorPlace) -> GgufTensor:
    kind, stored_row = _row_size(file, place)
    if place.begin + math.prod(place.shape[:-1]) * stored_row > file.path.stat().st_size:
        raise UserError(f"{file.path}: ends within tensor {place.name!r}; fetch it again")
    order = _order(file, place)
    if order is not None and len(place.shape) == 1:
        stored_row //= place.shape[0]
    return GgufTensor(file.path, place, kind, stored_row, order)


def _row_size(file: GgufFile, place: TensorPlace) -> tuple[Any, int]:
    """The type of a tensor and the bytes of one of its rows. Raises `UserError` where it cannot be dequantised."""
    gguf, kind = load_package(), None
    try:
        kind = gguf.GGMLQuantizationType(place.kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if kind.name not in _PLAIN:
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        raise UserError(
            f"{file.path}: tensor {place.name!r} is quantised as {kind.name if kind else place.kind}, which the gguf "
            "package cannot undo; take a file of another quantisation, or a newer gguf"
        ) from None
    if len(place.shape) > 2 or place.shape[-1] % block or 0 in place.shape:
        raise UserError(
            f"{file.path}: tensor {place.name!r} of shape {list(place.shape)}: expected one or two dimensions, "
            f"and rows of whole blocks of {block} values ({kind.name}); fetch it again"
        )
    return kind, place.shape[-1] // block * size


def _order(file: GgufFile, place: TensorPlace) -> NDArray[np.intp] | None:
    """For each row of a Llama's q or k projection in Hugging Face's order, the row of the file; None elsewhere.

    Hugging Face rotates value i of a head with value i + half, llama.cpp the neighbours 2i and 2i + 1. So its converter
    moved row i of a Llama's head to 2i, and row i + half to 2i + 1. Qwen's rows are stored as they were.
    """
    heads = dict(zip(("attn_q", "attn_k"), head_counts(file), strict=True)).get("".join(place.name.split(".")[2:3]))
    if file.metadata["general.architecture"] != "llama" or heads is None:
        return None
    rows = place.shape[0]
    if rows % (2 * heads):
        raise UserError(f"{file.path}: tensor {place.name!r} has {rows} rows: expected {heads} heads of an even size")
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
