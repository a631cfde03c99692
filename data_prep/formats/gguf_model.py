"""The model in a GGUF file: its tensors, dequantised, with Hugging Face's names and order of rows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from data_prep.formats.gguf_config import IGNORED, gguf_config, head_counts, require_family
from data_prep.formats.gguf_file import GgufFile, TensorPlace, open_gguf
from data_prep.formats.gguf_tokenizer import gguf_tokenizer
from data_prep.formats.original import HEAD, Stored
from outrider.errors import UserError, reason

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_PLAIN = {"F32": (np.float32, torch.float32), "F16": (np.float16, torch.float16), "BF16": (np.int16, torch.bfloat16)}


def load_package() -> ModuleType:
    """The `gguf` package. Raises `UserError` if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UserError("a GGUF file needs the gguf package: pip install 'outrider[gguf]'") from None
    return gguf


@dataclass(frozen=True)
class GgufModel:
    """The model in the GGUF file at `path`; `source` is its name."""

    source: str
    path: Path

    @cached_property
    def file(self) -> GgufFile:
        """The file's metadata and tensor locations."""
        return open_gguf(self.path)

    @property
    def files(self) -> Mapping[str, Path]:
        """Its only file."""
        return {"model.gguf": self.path}

    @property
    def quantised(self) -> bool:
        """Whether any of its tensors is quantised."""
        return self.file.quantised

    def tensors(self) -> Mapping[str, Stored]:
        """Its tensors by Hugging Face's names: float32 if they are quantised, else in their own type.

        Raises `UserError` for an unsupported architecture, tensor or quantisation, for tensors that overlap, and if the
        file ends before its last tensor does.
        """
        file = self.file
        for one, following in pairwise(sorted(file.tensors.values(), key=lambda place: place.begin)):
            if one.begin + math.prod(one.shape[:-1]) * _row_size(file, one)[1] > following.begin:
                raise UserError(f"{file.path}: tensors {one.name!r} and {following.name!r} overlap; fetch it again")
        held = {name: _located(file, place) for name, place in file.tensors.items() if name not in IGNORED}
        names = _names(file)
        for name in sorted(names.keys() ^ held.keys()):
            what = "holds no tensor" if name in names else "has a tensor that its metadata know nothing of:"
            raise UserError(f"{file.path}: {what} {name!r}; fetch it again, or convert it again")
        return {theirs: held[name] for name, theirs in names.items()}

    def describe(self, folder: Path) -> None:
        """Write config, generation config and tokenizer according to its metadata.

        Raises `UserError`, also for a file whose tensors cannot be read.
        """
        config = gguf_config(self.file)
        gguf_tokenizer(self.file).save_pretrained(folder)
        config.save_pretrained(folder)
        GenerationConfig.from_model_config(config).save_pretrained(folder)
        self.tensors()


def _names(file: GgufFile) -> dict[str, str]:
    """ggml's name → Hugging Face's name, for every tensor of the model that the metadata describe."""
    config = gguf_config(file)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # any error of an architecture for an unexpected config
        raise UserError(f"{file.path}: its metadata describe no model ({reason(error)}); fetch it again") from error
    return tensor_names(model, require_family(file))


def tensor_names(model: PreTrainedModel, family: str) -> dict[str, str]:
    """ggml's name → Hugging Face's name, for every tensor of `model`, whose architecture ggml calls `family`."""
    gguf, config = load_package(), model.config
    architecture = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    known = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    parts = (name.rpartition(".") for name in model.state_dict() if not (name == HEAD and config.tie_word_embeddings))
    return {f"{known.get_name(stem)}.{last}": f"{stem}.{last}" for stem, _, last in parts}


def _located(file: GgufFile, place: TensorPlace) -> Stored:
    kind, row = _row_size(file, place)
    heads = _rotated_heads(file, place)
    rows = math.prod(place.shape[:-1])
    if place.begin + rows * row > file.path.stat().st_size:
        raise UserError(f"{file.path}: ends within tensor {place.name!r}; fetch it again")
    dtype = _PLAIN[kind.name][1] if kind.name in _PLAIN else torch.float32
    return Stored(dtype, place.shape, partial(_read, file.path, place, kind, (rows, row), heads))


def _read(
    path: Path, place: TensorPlace, kind: "GGMLQuantizationType", stored: tuple[int, int], heads: int | None
) -> Tensor:
    """A tensor in Hugging Face's order of rows. stored: the number of rows in the file, and bytes per row."""
    raw = np.ascontiguousarray(np.memmap(path, np.uint8, "r", place.begin, stored))
    if kind.name in _PLAIN:
        plain, dtype = _PLAIN[kind.name]
        tensor = torch.from_numpy(raw.view(plain).copy()).view(dtype)
    else:
        tensor = torch.from_numpy(load_package().quants.dequantize(raw, kind))
    tensor = tensor.reshape(place.shape)
    return tensor if heads is None else _in_halves(tensor, heads)


def _in_halves(tensor: Tensor, heads: int) -> Tensor:
    """A Llama's q or k projection [heads · size, …] in Hugging Face's order of rows.

    Hugging Face rotates value i of a head with value i + half, llama.cpp rotates neighbours 2i and 2i + 1. So its
    converter moved row i of a Llama's head to 2i, and row i + half to 2i + 1. Qwen's rows are stored unchanged.
    """
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _row_size(file: GgufFile, place: TensorPlace) -> tuple["GGMLQuantizationType", int]:
    """The type of a tensor and the bytes per row. Raises `UserError` if it cannot be dequantised."""
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


def _rotated_heads(file: GgufFile, place: TensorPlace) -> int | None:
    """The number of heads of a Llama's q or k projection; None for any other tensor."""
    heads = dict(zip(("attn_q", "attn_k"), head_counts(file), strict=True)).get("".join(place.name.split(".")[2:3]))
    if file.metadata["general.architecture"] != "llama" or heads is None:
        return None
    if place.shape[0] % (2 * heads):
        raise UserError(
            f"{file.path}: tensor {place.name!r} has {place.shape[0]} rows: expected {heads} heads of an even size"
        )
    return heads
