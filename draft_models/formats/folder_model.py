"""A Hugging Face directory of tensors that are quantised or pickled: its weights are dequantised when they are read.

A `Stored` is a tensor in a file, of which type and shape are known; its `read` loads it. Three kinds of quantised
weights are read: fp8 with a scale for each block, ModelOpt's fp8 with a scale for each tensor, and packed integers.
transformers is not used for them: on a CPU its version 5 ignores ModelOpt's scales, and in an fp8 weight whose last
blocks are partial its numbers are off by up to 21 % of the largest.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Union

import torch
from torch import Tensor

from outrider.base.errors import UserError
from outrider.base.files import read_mapping, write_json
from outrider.base.words import list_words
from outrider.draft_models.formats.packed_weights import Packing, packed_layers, packing_of, runs_as_stored
from outrider.draft_models.formats.stored_tensors import (
    CONFIG_FILE,
    DESCRIPTIONS,
    PICKLES,
    QUANT_FILE,
    TYPES,
    Stored,
    WeightFormat,
)

if TYPE_CHECKING:
    from outrider.draft_models.formats.gguf_model import GgufModel

# Suffixes to the name of an fp8 weight: the factors of its blocks; the factor of the whole tensor, as ModelOpt has it.
_BLOCK_SCALES, _TENSOR_SCALE = "_scale_inv", "_scale"
_ACTIVATION_SCALES = (".input_scale", ".k_scale", ".v_scale")  # ModelOpt's; activations are not quantised here


@dataclass(frozen=True)
class FolderModel:
    """The model in `folder`, whose weights are safetensors files or pickles (`weight_format`).

    source: its name, a path or Hub name. All members raise `UserError` if the model is damaged or not supported.
    """

    source: str
    folder: Path
    weight_format: WeightFormat

    @property
    def files(self) -> Mapping[str, Path]:
        """The files of its weights and its descriptions, by name."""
        file_names = [*(path.name for path in self._descriptions()), *self._by_file()]
        return {name: self.folder / name for name in file_names if (self.folder / name).exists()}

    @property
    def quantised(self) -> bool:
        """Whether its weights are fp8 with scales or packed integers, according to its description."""
        return is_quantised(self.folder / CONFIG_FILE, self.folder / QUANT_FILE)

    @property
    def coded(self) -> bool:
        """Whether a CPU multiplies its weights as they are stored; fp8 is decoded."""
        return runs_as_stored(quantisation_of(self.folder / CONFIG_FILE))

    @property
    def transformers_reads_weights(self) -> bool:
        """Whether transformers reads the weights when it loads the whole model, as it does pickles."""
        return self.weight_format is PICKLES

    def tensors(self) -> Mapping[str, Stored]:
        """Its tensors by name, none read yet; quantised tensors become float32 when read."""
        tensors = self._open_tensors()
        if packing := packing_of(quantisation_of(self.folder / CONFIG_FILE)):
            return self._join_packed(tensors, packing)
        return self._apply_fp8_scales(tensors)

    def _open_tensors(self) -> dict[str, Stored]:
        """The tensors as they are stored, scales included."""
        tensors: dict[str, Stored] = {}
        names_by_file = self._by_file()
        for file, names in names_by_file.items():
            path = self.folder / file
            elsewhere = [name for other_file, inside in names_by_file.items() if other_file != file for name in inside]
            part = self.weight_format.open_part(  # raises unless all `names` and none of `elsewhere` are in the file
                self.source, file, str(path) if path.exists() else None, names, elsewhere
            )
            tensors |= {name: part[name] for name in names or part if name in part}  # a pickle lacks a tied head
        return tensors

    def _join_packed(self, tensors: Mapping[str, Stored], packing: Packing) -> dict[str, Stored]:
        """`tensors` with one weight in place of the tensors of each packed layer."""
        layers = packed_layers(packing, tensors, self.source)
        packed_names = {name + suffix for name in layers for suffix in (*packing.suffixes, ".weight_shape")}
        weights = {name: stored for name, stored in tensors.items() if name not in packed_names}
        for name, layer in layers.items():
            weights[f"{name}.weight"] = Stored(torch.float32, layer.shape, layer.read, layer.codes)
        return weights

    def _apply_fp8_scales(self, tensors: dict[str, Stored]) -> dict[str, Stored]:
        """`tensors` with each fp8 weight times its scales, without the scales. Raises `UserError` for other codes."""
        scale_suffix = fp8_scales(self.folder / CONFIG_FILE, self.folder / QUANT_FILE) or _BLOCK_SCALES
        scaled_names = {name for name in tensors if name + scale_suffix in tensors}
        block_dims = self._read_block() if scaled_names and scale_suffix == _BLOCK_SCALES else None
        for name in scaled_names:
            weight, scales = tensors[name], tensors[name + scale_suffix]
            read = partial(apply_scales, weight, scales, block_dims, f"{self.source}: {name}")
            tensors[name] = Stored(torch.float32, weight.shape, read)
        modelopt_suffixes = (f".weight{_TENSOR_SCALE}", *_ACTIVATION_SCALES)
        dropped_suffixes = (_BLOCK_SCALES,) if scale_suffix == _BLOCK_SCALES else modelopt_suffixes
        weights = {name: stored for name, stored in tensors.items() if not name.endswith(dropped_suffixes)}
        require_weights(self.source, weights, config=self.folder / CONFIG_FILE)
        return weights

    def describe(self, folder: Path) -> None:
        """Copy everything except the weights to the empty `folder`, without what describes a quantisation."""
        for path in self._descriptions():
            if path.name != QUANT_FILE:
                shutil.copyfile(path, folder / path.name)
        if self.quantised:
            config = read_mapping(self.folder / CONFIG_FILE, "description of a model", "fetch the model again")
            config.pop("quantization_config", None)
            write_json(folder / CONFIG_FILE, config)

    def prove_decoding(self) -> None:
        """Check how weights are decoded: nothing to do, since `apply_scales` is the definition of fp8 with scales."""

    def _descriptions(self) -> list[Path]:
        files = [path for path in self.folder.iterdir() if path.is_file()]
        return sorted(path for path in files if any(fnmatch(path.name, pattern) for pattern in DESCRIPTIONS))

    def _by_file(self) -> dict[str, list[str]]:
        """The tensors' names in each file, by the index. A single file wins over an index; its list is empty: all."""
        index_path = self.folder / self.weight_format.index
        if (self.folder / self.weight_format.single).exists() or not index_path.exists():
            return {self.weight_format.single: []}
        names_by_file: dict[str, list[str]] = {}
        for name, file in self.weight_format.file_of(index_path).items():
            names_by_file.setdefault(file, []).append(name)
        return names_by_file

    def _read_block(self) -> tuple[int, int]:
        """Rows and columns per scale, from config.json. Raises `UserError`."""
        block = quantisation_of(self.folder / CONFIG_FILE, self.folder / QUANT_FILE).get("weight_block_size")
        if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
            raise UserError(
                f"{self.source}: has scales of fp8 weights, but quantization_config.weight_block_size={block!r} in "
                "config.json: expected rows and columns; give the model in another format"
            )
        return block[0], block[1]


Original = Union[FolderModel, "GgufModel"]  # a model as it was published


def require_weights(name: str, tensors: Mapping[str, Stored], config: Path | str | None = None) -> None:
    """Raise `UserError` if one of the `tensors` of the model `name` is codes, which need scales.

    Codes are integers, or floats of 8 bits. config: the path of config.json, for a model that transformers loads, which
    may know the codes.
    """
    codes = [tensor_name for tensor_name, stored in tensors.items() if _is_code(tensor_name, stored)]
    if codes and not _transformers_dequantises(config):
        kind = next(kind for kind, dtype in TYPES.items() if dtype == tensors[codes[0]].dtype)
        raise UserError(
            f"{name}: {list_words(codes)}: weights stored as codes ({kind}), and no description of a quantisation that "
            f"is read here (quantization_config in {CONFIG_FILE}); give the model it was made from, or a GGUF file of "
            "it"
        )


def _is_code(name: str, stored: Stored) -> bool:
    if stored.dtype.is_floating_point:
        return stored.dtype.itemsize == 1  # a float of 8 bits
    is_bias = name.endswith("bias") and len(stored.shape) == 1  # GPT-2's masks, of 4 dimensions, are called "bias" too
    return name.endswith(("weight", "_proj")) or is_bias  # matrices of experts are called "…_proj"


def _transformers_dequantises(config_path: Path | str | None) -> bool:
    """Whether a config.json describes a quantisation that transformers knows: it ignores the scales of others."""
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        return config_path is not None and AutoHfQuantizer.supports_quant_method(quantisation_of(Path(config_path)))
    except (ValueError, TypeError):  # no name of a method is there, or a name that is no string
        return False


def is_quantised(config_path: Path, quant_path: Path) -> bool:
    """Whether a model has quantised weights that are read here. Raises `UserError` for a damaged description."""
    return packing_of(quantisation_of(config_path)) is not None or fp8_scales(config_path, quant_path) is not None


def fp8_scales(config_path: Path, quant_path: Path) -> str | None:
    """The suffix of the names of scales in a model with fp8 weights; None for other models. Raises `UserError`."""
    quant_config = quantisation_of(config_path, quant_path)
    if quant_config.get("quant_method") == "fp8" and quant_config.get("weight_block_size"):
        return _BLOCK_SCALES
    return _TENSOR_SCALE if quant_config.get("quant_algo") == "FP8" else None


def quantisation_of(config_path: Path, quant_file: Path = Path()) -> Mapping[str, object]:
    """The description of a quantisation in config.json, else in ModelOpt's `QUANT_FILE`; empty without one.

    Raises `UserError` for a damaged description.
    """
    for file, key in (config_path, "quantization_config"), (quant_file, "quantization"):
        if not os.path.isfile(file):  # also of a name that no file can have
            continue
        quant_config = read_mapping(file, "description of a model", "fetch the model again").get(key) or {}
        if not isinstance(quant_config, dict):
            raise UserError(f"{file}: {key}={quant_config!r}: expected a mapping; fetch the model again")
        if quant_config:
            return quant_config
    return {}


def apply_scales(stored: Stored, stored_scales: Stored, block_dims: tuple[int, int] | None, label: str) -> Tensor:
    """The stored weight [n, m] times the scale of each of its blocks, in float32.

    block_dims: rows and columns of a block; None: the tensor has one scale. stored_scales: [⌈n / rows⌉, ⌈m / columns⌉];
    the last blocks may be partial. Raises `UserError` naming `label`.
    """
    weight, scales = stored.read(), stored_scales.read()
    if not weight.is_floating_point() or weight.itemsize > 1:
        raise UserError(f"{label}: has scales, and is {weight.dtype}: expected floats of 8 bits; fetch the model again")
    scale_shape = [-(-size // side) for size, side in zip(weight.shape, block_dims, strict=True)] if block_dims else [1]
    if list(scales.shape or [1]) != scale_shape:
        raise UserError(f"{label}: scales of shape {list(scales.shape)}: expected {scale_shape}; fetch the model again")
    if block_dims is None:
        return weight.float() * scales.float()
    row_scales = scales.float().repeat_interleave(block_dims[0], 0)[: weight.shape[0]]
    return weight.float() * row_scales.repeat_interleave(block_dims[1], 1)[:, : weight.shape[1]]
