"""The model in a GGUF file: its tensors, dequantised, in the names and layout of transformers.

Example: ggml's tensor "blk.0.attn_q.weight" of a Llama is "model.layers.0.self_attn.q_proj.weight" in transformers. The
file has the rows of each head in another order, because ggml rotates other pairs of rows. transformers' own map of
names (`tensor_names`) and its `TensorProcessor` of the family (ggml's name of the architecture; the processor is called
`layout` here) undo both. A `_TensorSource` joins the tensors of the file that make one of transformers' tensors. A
`Stored` is the result before it is read: dtype, shape, `read()`, and `codes()`, the quantised rows as the file has them
or None. `CODE_KINDS` has the quantisations that are decoded here; the gguf package decodes all others.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from outrider.base.errors import UserError, reason
from outrider.base.progress import track_progress
from outrider.draft_models.formats.gguf_codes import CODE_KINDS, CodedRows, decode_rows
from outrider.draft_models.formats.gguf_config import NO_WEIGHTS, gguf_config, require_family
from outrider.draft_models.formats.gguf_file import FLOAT_TYPES, GgufFile, TensorLocation, open_gguf
from outrider.draft_models.formats.gguf_tokenizer import gguf_tokenizer
from outrider.draft_models.formats.save_model import save_parts
from outrider.draft_models.formats.stored_tensors import HEAD, Stored

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # ggml's types that are not quantised
_COMPARED = 64  # rows of each tensor that `prove_decoding` compares, evenly spread


def load_package() -> ModuleType:
    """The `gguf` package. Raises `UserError` if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UserError("a GGUF file needs the gguf package: pip install 'outrider[gguf]'") from None
    return gguf


@dataclass(frozen=True)
class GgufModel:
    """The model in the GGUF file at `path`, with the public members of `FolderModel`. source: its name in messages."""

    source: str
    path: Path
    transformers_reads_weights: ClassVar[bool] = False  # transformers would decode all tensors at once

    @cached_property
    def file(self) -> GgufFile:
        return open_gguf(self.path)

    @property
    def files(self) -> Mapping[str, Path]:
        return {"model.gguf": self.path}

    @property
    def quantised(self) -> bool:
        """Whether any of its tensors is quantised."""
        return any(tensor.ggml_type not in FLOAT_TYPES for tensor in self.file.tensors.values())

    @property
    def coded(self) -> bool:
        """Whether a CPU multiplies its weights as they are stored: the quantised ones are matrices of `CODE_KINDS`."""
        coded_tensors = [tensor for tensor in self.file.tensors.values() if tensor.ggml_type not in FLOAT_TYPES]
        kinds = {_type_and_row_bytes(self.file, tensor)[0].name for tensor in coded_tensors}
        return bool(kinds) and kinds <= CODE_KINDS.keys() and all(len(tensor.shape) == 2 for tensor in coded_tensors)

    def tensors(self) -> Mapping[str, Stored]:
        """Its tensors by Hugging Face's names: float32 if they are quantised, else in their own type.

        Raises `UserError` as `_sources` does.
        """
        return {name: source.make_stored() for name, source in self._sources.items()}

    def prove_decoding(self) -> None:
        """Raise `UserError` unless rows of every tensor are decoded here bit for bit as by the gguf package."""
        task = f"comparing the decoding of {self.source}"
        for name, tensor in track_progress(self.file.tensors.items(), task, "tensors"):
            ggml_type, raw_rows = _type_and_row_bytes(self.file, tensor)[0], _map_rows(self.file, tensor)
            if ggml_type.name in CODE_KINDS:
                sample = raw_rows[:: max(1, len(raw_rows) // _COMPARED)]
                weights = decode_rows(ggml_type.name, torch.from_numpy(np.ascontiguousarray(sample))).numpy()
                if not np.array_equal(weights, load_package().quants.dequantize(sample, ggml_type), equal_nan=True):
                    raise UserError(
                        f"{self.source}: tensor {name!r} ({ggml_type.name}) is decoded to other numbers than the gguf "
                        "package has; report this, and convert the model by that package meanwhile"
                    )

    @cached_property
    def _sources(self) -> "Mapping[str, _TensorSource]":
        """Where its tensors are in the file, by Hugging Face's names.

        Raises `UserError` for an unsupported architecture, tensor or quantisation, for tensors that overlap, and if the
        file ends before its last tensor does.
        """
        file = self.file
        for tensor, next_loc in pairwise(sorted(file.tensors.values(), key=lambda location: location.begin)):
            if _end_of(file, tensor) > next_loc.begin:
                raise UserError(f"{file.path}: tensors {tensor.name!r} and {next_loc.name!r} overlap; fetch it again")
        model, family = _model_on_meta(file), require_family(file)
        hf_name_of = tensor_names(model, family)
        for name in sorted(hf_name_of.keys() ^ (file.tensors.keys() - NO_WEIGHTS)):  # names that one side lacks
            problem = "holds no tensor" if name in hf_name_of else f"has a tensor that {family} models have not:"
            raise UserError(f"{file.path}: {problem} {name!r}; fetch it again, or convert it again")
        layout = TENSOR_PROCESSORS.get(family, TensorProcessor)(config=model.config.to_dict())
        by_name: dict[str, list[TensorLocation]] = {}
        for name, hf_name in hf_name_of.items():
            by_name.setdefault(hf_name, []).append(file.tensors[name])
        state = model.state_dict()
        return {name: _TensorSource(file, name, tuple(state[name].shape), by_name[name], layout) for name in by_name}

    def describe(self, folder: Path) -> None:
        """Write config, generation config and tokenizer according to its metadata.

        Raises `UserError`, also for a file whose tensors cannot be read.
        """
        config = gguf_config(self.file)
        save_parts(folder, gguf_tokenizer(self.file), config, GenerationConfig.from_model_config(config))
        self.tensors()


class NextnBlock(GgufModel):
    """Only a file's blocks for multi-token prediction, those with a tensor `blk.N.nextn.…`, by ggml's names.

    All architectures. The order of rows is the file's, which is transformers' in all architectures but Llama.
    """

    @cached_property
    def _sources(self) -> "Mapping[str, _TensorSource]":
        tensors, identity = self.file.tensors, TensorProcessor()
        block_prefixes = tuple({name.partition("nextn.")[0] for name in tensors if ".nextn." in name})
        locations = {name: loc for name, loc in tensors.items() if name.startswith(block_prefixes)}
        return {name: _TensorSource(self.file, name, loc.shape, [loc], identity) for name, loc in locations.items()}


def _model_on_meta(file: GgufFile) -> PreTrainedModel:
    """The model that the metadata describe, without weights. Raises `UserError`."""
    config = gguf_config(file)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # any error of an architecture for an unexpected config
        raise UserError(f"{file.path}: its metadata describe no model ({reason(error)}); fetch it again") from error


def tensor_names(model: PreTrainedModel, family: str) -> dict[str, str]:
    """ggml's name → Hugging Face's name, for every tensor of `model`, whose architecture ggml calls `family`.

    Two of ggml's names may map to one of Hugging Face's: there, gates and values of experts are one matrix.
    """
    load_package()
    state, tied_name = model.state_dict(), HEAD if model.config.tie_word_embeddings else None
    layout = TENSOR_PROCESSORS.get(family, TensorProcessor)()
    # Without submodules: transformers would search each of them, for seconds, and find the same names again.
    stub = SimpleNamespace(state_dict=lambda: state, named_children=list)
    weights_map = get_gguf_hf_weights_map(stub, layout, family, model.config.num_hidden_layers)
    hf_names = {name: key for name, key in weights_map.items() if key in state and key != tied_name}
    # transformers' map lacks the suffix of experts' names
    return {name if name.endswith((".weight", ".bias")) else f"{name}.weight": key for name, key in hf_names.items()}


@dataclass(frozen=True)
class MappedTensor(Stored):
    """A tensor of a GGUF file; a quantised one is float32 when it is read."""

    def pieces(self, byte_ranges: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """Its decoded bytes at each (first byte, number of bytes).

        Of a coded tensor only the rows with these bytes are decoded. Example: a row of 100 inputs has 400 bytes, so the
        200 bytes from byte 900 on are in row 2, from its byte 100 on.
        """
        coded_rows = self.codes()
        if coded_rows is None:
            yield from super().pieces(byte_ranges)
            return
        row_bytes = 4 * coded_rows.inputs
        for first_byte, piece_bytes in byte_ranges:
            first_row, end_row = first_byte // row_bytes, -(-(first_byte + piece_bytes) // row_bytes)
            decoded_bytes = coded_rows.decode(first_row, end_row).reshape(-1).view(torch.uint8).numpy().data
            offset = first_byte - first_row * row_bytes
            yield decoded_bytes[offset : offset + piece_bytes]


@dataclass(frozen=True)
class _TensorSource:
    """Hugging Face's tensor `name` of `shape`, made from the file's tensors `parts` by transformers' `layout`.

    There are several parts where transformers has one matrix for two of ggml's tensors (see `tensor_names`).
    """

    file: GgufFile
    name: str
    shape: tuple[int, ...]
    parts: Sequence[TensorLocation]
    layout: TensorProcessor

    def make_stored(self) -> Stored:
        """The tensor, not read yet. Raises `UserError` if it is outside the file, or has another size there."""
        file_bytes = self.file.path.stat().st_size
        for loc in self.parts:
            if math.prod(loc.shape) * len(self.parts) != math.prod(self.shape):
                raise self._misshapen(loc)
            if _end_of(self.file, loc) > file_bytes:
                raise UserError(f"{self.file.path}: ends within tensor {loc.name!r}; fetch it again")
        type_names = {_type_and_row_bytes(self.file, loc)[0].name for loc in self.parts}
        dtype = _PLAIN.get(type_names.pop(), torch.float32) if len(type_names) == 1 else torch.float32
        return MappedTensor(dtype, [*self.shape], lambda: self.read().to(dtype), lambda: self.codes)

    @cached_property
    def codes(self) -> CodedRows | None:
        """The weight as the file stores it, if its codes can be multiplied and `layout` moves whole rows only."""
        loc = self.parts[0]
        ggml_type, _ = _type_and_row_bytes(self.file, loc)
        if len(self.parts) > 1 or len(self.shape) != 2 or ggml_type.name not in CODE_KINDS:
            return None
        if (row_order := self._row_order(loc)) is None:
            return None
        raw_rows, is_same_order = _map_rows(self.file, loc), np.array_equal(row_order, np.arange(len(row_order)))
        return CodedRows(ggml_type.name, raw_rows if is_same_order else raw_rows[row_order])

    def _row_order(self, loc: TensorLocation) -> NDArray[np.int64] | None:
        """The row of `loc` at each index of the result [rows]; None if `layout` changes more than the order of rows.

        `layout` is tried on a matrix whose row i is (i, i + 0.5). Example: it returns (0, 0.5), (2, 2.5), (1, 1.5); the
        order is 0, 2, 1.
        """
        probe = np.arange(loc.shape[0], dtype=np.float64)[:, None] + np.array([0, 0.5])
        keys: dict[str, str] = {loc.name.removesuffix(".weight"): self.name}
        moved = self.layout.process(probe, loc.name, tensor_key_mapping=keys, parsed_parameters={"tensors": {}}).weights
        if moved is None or moved.shape != probe.shape:
            return None
        row_order = np.rint(moved[:, 0]).astype(np.int64)
        is_permutation = np.array_equal(np.sort(row_order), np.arange(len(probe)))
        return row_order if is_permutation and np.array_equal(moved, probe[row_order]) else None

    def read(self) -> Tensor:
        """The tensor in float32, which can hold every value of the other types."""
        joined: dict[str, dict[str, Tensor]] = {"tensors": {}}
        for loc in self.parts:
            name_map = {loc.name.removesuffix(".weight"): self.name}
            try:
                processed = self.layout.process(
                    _dequantise(self.file, loc), loc.name, tensor_key_mapping=name_map, parsed_parameters=joined
                )
            except ValueError:  # numpy's, of rows that do not divide into heads
                raise self._misshapen(loc) from None
            if processed.name is not None:  # else `layout` has put the part into `joined`
                joined["tensors"][self.name] = torch.from_numpy(np.ascontiguousarray(processed.weights))
        return joined["tensors"][self.name].reshape(self.shape)

    def _misshapen(self, loc: TensorLocation) -> UserError:
        return UserError(
            f"{self.file.path}: tensor {loc.name!r} of shape {list(loc.shape)}, of which {list(self.shape)} is to "
            "be made by the metadata; fetch it again"
        )


def _end_of(file: GgufFile, tensor: TensorLocation) -> int:
    """The position of the first byte after a tensor."""
    return tensor.begin + math.prod(tensor.shape[:-1]) * _type_and_row_bytes(file, tensor)[1]


def _dequantise(file: GgufFile, tensor: TensorLocation) -> NDArray[np.float32]:
    """A tensor of the file as float32, in ggml's layout."""
    ggml_type, raw_rows = _type_and_row_bytes(file, tensor)[0], _map_rows(file, tensor)
    if ggml_type.name in CODE_KINDS:
        return decode_rows(ggml_type.name, torch.from_numpy(raw_rows)).numpy().reshape(tensor.shape)
    return load_package().quants.dequantize(np.array(raw_rows), ggml_type).reshape(tensor.shape)


def _map_rows(file: GgufFile, tensor: TensorLocation) -> NDArray[np.uint8]:
    """The bytes of a tensor by rows [rows, bytes]; they are read when they are used."""
    shape = math.prod(tensor.shape[:-1]), _type_and_row_bytes(file, tensor)[1]
    return np.memmap(file.path, np.uint8, "c", tensor.begin, shape)  # copy on write: PyTorch wants writable memory


def _type_and_row_bytes(file: GgufFile, tensor: TensorLocation) -> tuple["GGMLQuantizationType", int]:
    """The type of a tensor and the bytes per row. Raises `UserError` if it cannot be dequantised."""
    gguf, kind = load_package(), None
    try:
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        block_weights, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if kind.name not in _PLAIN:  # tried on a block of zeros
            gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        raise UserError(
            f"{file.path}: tensor {tensor.name!r} is quantised as {kind.name if kind else tensor.ggml_type}, which the "
            "gguf package cannot undo; take a file of another quantisation, or a newer gguf"
        ) from None
    if tensor.shape[-1] % block_weights:
        raise UserError(
            f"{file.path}: tensor {tensor.name!r} of shape {list(tensor.shape)}: expected rows of whole blocks of "
            f"{block_weights} values ({kind.name}); fetch it again"
        )
    return kind, tensor.shape[-1] // block_weights * block_bytes
