"""A model as it was published: the interface for reading it, and a Hugging Face directory with files of tensors.

The files are safetensors or torch's older pickles (.bin), one or several with an index. Weights of fp8 or packed
integers are dequantised.
"""

import hashlib
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path, PurePath
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.base.errors import UserError, reason
from outrider.base.files import read_mapping, write_json
from outrider.base.words import listed
from outrider.draft_models.formats.packed_weights import PackedLayer, packed_layers, packing_of

if TYPE_CHECKING:
    from outrider.draft_models.formats.gguf_codes import CodedRows

CONFIG_FILE, GENERATION_FILE, TOKENIZER_FILE = "config.json", "generation_config.json", "tokenizer_config.json"
HEAD = "lm_head.weight"
QUANT_FILE = "hf_quant_config.json"  # ModelOpt's description of a quantisation, beside config.json or in place of it
# Suffixes to the name of an fp8 weight: the factors of its blocks; the factor of the whole tensor, as ModelOpt has it.
SCALES, SCALE = "_scale_inv", "_scale"
# ModelOpt's factors of activations, which are not quantised here.
_ACTIVATION_SCALES = (".input_scale", ".k_scale", ".v_scale")
# The files next to the weights that describe a model and its tokenizer.
DESCRIPTIONS = (
    CONFIG_FILE, "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*",
    "merges.txt", "chat_template*", "*.model", "*.tiktoken", QUANT_FILE,
)  # fmt: skip
# Torch's types by their names in safetensors headers.
TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor of a model in files, not read yet. dtype, shape: of the result of `read`."""

    dtype: torch.dtype
    shape: Sequence[int]
    read: Callable[[], Tensor]

    def __getitem__(self, index: object) -> Tensor:  # transformers indexes the tensors that it reads
        return self.read()

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def codes(self) -> "CodedRows | None":
        """Its rows as the file stores them, where they can be multiplied as they are."""
        return None

    def pieces(self, ranges: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """Its bytes at each (first byte, number of bytes); no others of a mapped safetensors file are read."""
        content = self.read().reshape(-1).view(torch.uint8).numpy().data
        for at, size in ranges:
            yield content[at : at + size]


@dataclass(frozen=True)
class PackedTensor(Stored):
    """The weight of a layer of packed integers, float32 when it is read."""

    layer: PackedLayer

    @property
    def codes(self) -> "CodedRows | None":
        """See `PackedLayer.codes`."""
        return self.layer.codes()


class Original(Protocol):
    """A model as it was published. All members raise `UserError` if it is damaged or not supported."""

    @property
    def source(self) -> str:
        """Its name: a path or Hub name."""

    @property
    def files(self) -> Mapping[str, Path]:
        """All its files, by their names in the model."""

    @property
    def quantised(self) -> bool:
        """Whether its stored weights are quantised."""

    @property
    def by_transformers(self) -> bool:
        """Whether transformers reads its weights itself."""

    def tensors(self) -> Mapping[str, Stored]:
        """Its tensors by Hugging Face's names; none is read yet."""

    def describe(self, folder: Path) -> None:
        """Write everything except the weights to the empty `folder`: config, tokenizer, generation config."""

    def prove_decoding(self) -> None:
        """Raise `UserError` unless quantised tensors are decoded as the format's own package does."""


def open_safetensors(path: str) -> Mapping[str, Stored]:
    """The tensors of a safetensors file. Raises `UserError`, also for a type that is not in `TYPES`."""
    with naming_unreadable(path, "safetensors file"):
        handle = safe_open(path, framework="pt")  # compares its header with the length of the file
        slices = {name: handle.get_slice(name) for name in handle.offset_keys()}
        described = {name: (tensor.get_dtype(), tensor.get_shape()) for name, tensor in slices.items()}
    for name, (kind, _) in described.items():
        if kind not in TYPES:
            expected = f"expected one of {', '.join(TYPES)}; give the model in another format"
            raise UserError(f"{path}: tensor {name!r} has type {kind}: {expected}")
    return {n: Stored(TYPES[kind], shape, partial(handle.get_tensor, n)) for n, (kind, shape) in described.items()}


def open_pickled(path: str) -> Mapping[str, Stored]:
    """The tensors of a `torch.save` file, read by torch's weights-only loader, which runs no code from it.

    Files of torch 1.6 or later are mapped into memory; older ones are read whole. An output head tied to the embedding
    is omitted, as in safetensors: the same model then has the same tensors in both formats. Raises `UserError`.
    """
    with naming_unreadable(path, "file of tensors (torch.save)"):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except UnpicklingError as error:
            raise UserError(_pickle_refusal(path, str(error))) from None
    wrong = "no mapping" if not isinstance(content, Mapping) else _first_non_tensor(content)
    if wrong:
        raise UserError(f"{path}: expected a mapping of names to dense tensors, found {wrong}; save its state_dict()")
    head = content.get(HEAD)
    held = [(x.data_ptr(), x.shape, x.stride()) for name, x in content.items() if "lm_head" not in name]
    tied = head is not None and (head.data_ptr(), head.shape, head.stride()) in held
    return {
        name: Stored(tensor.dtype, [*tensor.shape], partial(tensor.clone, memory_format=torch.contiguous_format))
        for name, tensor in content.items()
        if not (tied and name == HEAD)
    }


def _pickle_refusal(path: str, message: str) -> str:
    lines = [line for line in message.splitlines() if "GLOBAL" in line]  # the class or function that the file asks for
    return (
        f"{path}: torch's weights-only loader refuses it ({(lines or message.splitlines() or ['no reason given'])[0]}):"
        " it is damaged, or its pickle holds more than tensors and could run code. Fetch it again, or get the model as "
        "safetensors"
    )


def _first_non_tensor(content: Mapping[object, object]) -> str | None:
    for name, value in content.items():
        if not isinstance(value, Tensor):
            return f"{name!r}: {type(value).__name__}"
        if not isinstance(name, str) or value.layout is not torch.strided or value.dtype not in TYPES.values():
            return f"{name!r}: {value.dtype}"
    return None


@contextmanager
def naming_unreadable(path: str, what: str) -> Iterator[None]:
    """Context manager: any error in reading the file at `path` becomes a `UserError` that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # SafetensorError for a bad header or a missing tensor, OSError for the rest
        raise UserError(f"{path}: not a readable {what} ({reason(error)}); fetch it again") from None


def read_with_digest(path: Path, sha256: object, remedy: str) -> bytes:
    """The content of a file whose digest is recorded elsewhere. Raises `UserError` if it is missing or another."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: missing or not readable ({error.strerror}); {remedy}") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"{path}: truncated or altered (its sha256 is not the recorded one); {remedy}")
    return content


@dataclass(frozen=True)
class WeightFormat:
    """A format of weights, with the file names that transformers gives to a checkpoint of this format."""

    name: str
    single: str
    suffix: str
    open_file: Callable[[str], Mapping[str, Stored]]

    @property
    def index(self) -> str:
        """The name of the index, which maps tensors to files."""
        return f"{self.single}.index.json"

    def file_of(self, index: Path) -> dict[str, str]:
        """Tensor name → file name, from an index. Raises `UserError`, also for a file outside the directory.

        A symlink in the directory may lead anywhere.
        """
        what, remedy = f"index of {self.name}", "fetch the checkpoint again"
        weight_map = read_mapping(index, what, remedy).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index}: damaged {what} (no weight_map of tensor and file names); {remedy}")
        for name, file in weight_map.items():
            inside = isinstance(file, str) and file.endswith(self.suffix) and "\0" not in file
            if not inside or PurePath(file).is_absolute() or ".." in PurePath(file).parts:
                raise UserError(
                    f"{index}: damaged {what} (weight_map.{name}={file!r}: expected a {self.suffix} file in its "
                    f"directory); {remedy}"
                )
        return weight_map

    def open_part(
        self, source: str, file: str, path: str | None, names: Iterable[str], elsewhere: Iterable[str]
    ) -> Mapping[str, Stored]:
        """The tensors of a `file` of the model in `source`, which is at `path`.

        Raises `UserError` if it is missing, has not all of `names` or has one of `elsewhere`. An index may list a tied
        head, which is omitted, as a separate tensor.
        """
        if path is None:
            raise UserError(f"{source}: {file} is named in {self.index} but missing; fetch the checkpoint again")
        held = self.open_file(path)
        lacking = [name for name in names if name not in held and (self is SAFETENSORS or name != HEAD)]
        wrong = [f"no tensor {name!r}" for name in lacking] + [f"tensor {name!r}" for name in elsewhere if name in held]
        if wrong:
            raise UserError(f"{path}: holds {wrong[0]}, which is not what {self.index} says; fetch it again")
        return held


SAFETENSORS = WeightFormat("safetensors", "model.safetensors", ".safetensors", open_safetensors)
PICKLES = WeightFormat("torch files", "pytorch_model.bin", ".bin", open_pickled)


@dataclass(frozen=True)
class FolderModel:
    """The model in `folder`, whose weights are files of `kind`; `source` is its name."""

    source: str
    folder: Path
    kind: WeightFormat

    @property
    def files(self) -> Mapping[str, Path]:
        """The files of its weights and its descriptions."""
        names = [*(path.name for path in self._descriptions()), *self._by_file()]
        return {name: self.folder / name for name in names if (self.folder / name).exists()}

    @property
    def quantised(self) -> bool:
        """Whether its weights are fp8 with scales or packed integers, according to its description."""
        return is_quantised(self.folder / CONFIG_FILE, self.folder / QUANT_FILE)

    @property
    def by_transformers(self) -> bool:
        """True for pickles: it has no forward with fp8 on a CPU."""
        return self.kind is PICKLES

    def tensors(self) -> Mapping[str, Stored]:
        """Its tensors by name; fp8 tensors become float32 when read. Raises `UserError`."""
        tensors: dict[str, Stored] = {}
        by_file = self._by_file()
        for file, names in by_file.items():
            path = self.folder / file
            elsewhere = [name for other_file, inside in by_file.items() if other_file != file for name in inside]
            held = self.kind.open_part(self.source, file, str(path) if path.exists() else None, names, elsewhere)
            tensors |= {name: held[name] for name in names or held if name in held}
        if packing := packing_of(quantisation_of(self.folder / CONFIG_FILE)):
            layers = packed_layers(packing, tensors, self.source)
            used = {name + suffix for name in layers for suffix in (*packing[3:], ".weight_shape")}
            tensors = {name: stored for name, stored in tensors.items() if name not in used}
            for name, layer in layers.items():
                tensors[f"{name}.weight"] = PackedTensor(torch.float32, layer.shape, layer.read, layer)
            return tensors
        suffix = fp8_scales(self.folder / CONFIG_FILE, self.folder / QUANT_FILE) or SCALES
        scaled = {name for name in tensors if name + suffix in tensors}
        block = self._block() if scaled and suffix == SCALES else None
        for name in scaled:
            weight, scales = tensors[name], tensors[name + suffix]
            read = partial(apply_scales, weight, scales, block, f"{self.source}: {name}")
            tensors[name] = Stored(torch.float32, weight.shape, read)
        unused = {SCALES: (SCALES,), SCALE: (f".weight{SCALE}", *_ACTIVATION_SCALES)}[suffix]
        weights = {name: stored for name, stored in tensors.items() if not name.endswith(unused)}
        require_weights(self.source, weights, config=self.folder / CONFIG_FILE)
        return weights

    def describe(self, folder: Path) -> None:
        """Copy everything except the weights, without the description of a quantisation if they are fp8."""
        for path in self._descriptions():
            if path.name != QUANT_FILE:
                shutil.copyfile(path, folder / path.name)
        if self.quantised:
            described = read_mapping(self.folder / CONFIG_FILE, "description of a model", "fetch the model again")
            described.pop("quantization_config", None)
            write_json(folder / CONFIG_FILE, described)

    def prove_decoding(self) -> None:
        """Nothing: `apply_scales` is the definition of fp8 with scales."""

    def _descriptions(self) -> list[Path]:
        files = [path for path in self.folder.iterdir() if path.is_file()]
        return sorted(path for path in files if any(fnmatch(path.name, pattern) for pattern in DESCRIPTIONS))

    def _by_file(self) -> dict[str, list[str]]:
        """The tensors in each file according to the index; a single file wins over an index; its list is empty."""
        index = self.folder / self.kind.index
        if (self.folder / self.kind.single).exists() or not index.exists():
            return {self.kind.single: []}
        names_of: dict[str, list[str]] = {}
        for name, file in self.kind.file_of(index).items():
            names_of.setdefault(file, []).append(name)
        return names_of

    def _block(self) -> tuple[int, int]:
        """Rows and columns per scale, from config.json. Raises `UserError`."""
        block = quantisation_of(self.folder / CONFIG_FILE, self.folder / QUANT_FILE).get("weight_block_size")
        if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
            raise UserError(
                f"{self.source}: has scales of fp8 weights, but quantization_config.weight_block_size={block!r} in "
                "config.json: expected rows and columns; give the model in another format"
            )
        return block[0], block[1]


def require_weights(name: str, held: Mapping[str, Stored], config: Path | str | None = None) -> None:
    """Raise `UserError` if a weight of the model `name` is `held` as codes, which need scales: integers, or floats of
    8 bits. config: the path of its config.json, if transformers reads it: it may know the codes."""
    codes = [tensor for tensor, stored in held.items() if _is_code(tensor, stored)]
    if codes and not _is_read_by_transformers(config):
        kind = next(kind for kind, dtype in TYPES.items() if dtype == held[codes[0]].dtype)
        raise UserError(
            f"{name}: {listed(codes)}: weights stored as codes ({kind}), and no description of a quantisation that is "
            f"read here (quantization_config in {CONFIG_FILE}); give the model it was made from, or a GGUF file of it"
        )


def _is_code(name: str, stored: Stored) -> bool:
    if stored.dtype.is_floating_point:
        return stored.dtype.itemsize == 1
    return name.endswith(("weight", "_proj")) or (name.endswith("bias") and len(stored.shape) == 1)  # a mask has 4


def _is_read_by_transformers(config: Path | str | None) -> bool:
    """Whether a config.json describes a quantisation that transformers knows; with others it passes over the scales."""
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        return config is not None and AutoHfQuantizer.supports_quant_method(quantisation_of(Path(config)))
    except (ValueError, TypeError):  # it names no method, or what is no name
        return False


def is_quantised(config: Path, quant: Path) -> bool:
    """Whether a model has quantised weights that are read here. Raises `UserError` for a damaged description."""
    return packing_of(quantisation_of(config)) is not None or fp8_scales(config, quant) is not None


def fp8_scales(config: Path, quant: Path) -> str | None:
    """The suffix of the scales of a model with fp8 weights; None if it is no such. Raises `UserError`."""
    quantised = quantisation_of(config, quant)
    if quantised.get("quant_method") == "fp8" and quantised.get("weight_block_size"):
        return SCALES
    return SCALE if quantised.get("quant_algo") == "FP8" else None


def quantisation_of(config: Path, quant: Path = Path()) -> Mapping[str, object]:
    """What config.json says of a quantisation, else ModelOpt's `QUANT_FILE`; empty: nothing. Raises `UserError`."""
    for file, key in (config, "quantization_config"), (quant, "quantization"):
        here = os.path.isfile(file)  # also false for a name that no file can have
        quantised = read_mapping(file, "description of a model", "fetch the model again").get(key) if here else None
        if not isinstance(quantised or {}, dict):
            raise UserError(f"{file}: {key}={quantised!r}: expected a mapping; fetch the model again")
        if isinstance(quantised, dict) and quantised:
            return quantised
    return {}


def apply_scales(stored: Stored, stored_scales: Stored, block: tuple[int, int] | None, what: str) -> Tensor:
    """The stored weight [n, m] times the scale of each of its blocks, in float32; block None: times its one scale.

    scales: [⌈n / block rows⌉, ⌈m / block columns⌉]; the last blocks may be partial. Raises `UserError` naming `what`.
    """
    weight, scales = stored.read(), stored_scales.read()
    if not weight.is_floating_point() or weight.itemsize > 1:
        raise UserError(f"{what}: has scales, and is {weight.dtype}: expected floats of 8 bits; fetch the model again")
    expected = [-(-size // side) for size, side in zip(weight.shape, block, strict=True)] if block else [1]
    if list(scales.shape or [1]) != expected:
        raise UserError(f"{what}: scales of shape {list(scales.shape)}: expected {expected}; fetch the model again")
    if block is None:
        return weight.float() * scales.float()
    rows = scales.float().repeat_interleave(block[0], 0)[: weight.shape[0]]
    return weight.float() * rows.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
