"""Tensors in files, read when they are used: safetensors, and torch's older pickles (.bin), one or several by an index.

No code of a pickle runs. transformers loads a model of such files as a whole only, not layer by layer.
"""

import hashlib
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from pickle import UnpicklingError
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.base.errors import UserError, reason
from outrider.base.files import read_mapping

if TYPE_CHECKING:
    from outrider.draft_models.formats.gguf_codes import CodedRows

CONFIG_FILE, GENERATION_FILE, TOKENIZER_FILE = "config.json", "generation_config.json", "tokenizer_config.json"
HEAD = "lm_head.weight"  # the output head, which may be tied to the embedding
QUANT_FILE = "hf_quant_config.json"  # ModelOpt's description of a quantisation, beside config.json or in place of it
DESCRIPTIONS = (  # patterns of the files next to the weights that describe a model and its tokenizer
    CONFIG_FILE, "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*",
    "merges.txt", "chat_template*", "*.model", "*.tiktoken", "tekken.json", "*processor_config.json", QUANT_FILE,
)  # fmt: skip
TYPES = {  # by their names in safetensors headers
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor of a model in files, not read yet. dtype, shape: of the result of `read`.

    codes: a call gives the quantised rows as the file stores them; None where they cannot be multiplied so.
    """

    dtype: torch.dtype
    shape: Sequence[int]
    read: Callable[[], Tensor]
    codes: "Callable[[], CodedRows | None]" = lambda: None

    def __getitem__(self, index: object) -> Tensor:  # transformers indexes the tensors that it reads
        return self.read()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self, byte_ranges: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """Its bytes at each (first byte, number of bytes); no others of a mapped safetensors file are read."""
        all_bytes = self.read().reshape(-1).view(torch.uint8).numpy().data
        for offset, piece_bytes in byte_ranges:
            yield all_bytes[offset : offset + piece_bytes]


def open_safetensors(path: str) -> Mapping[str, Stored]:
    """The tensors of a safetensors file. Raises `UserError`, also for a type that is not in `TYPES`."""
    with name_unreadable(path, "safetensors file"):
        handle = safe_open(path, framework="pt")  # compares its header with the length of the file
        slices = {name: handle.get_slice(name) for name in handle.offset_keys()}
        headers = {name: (tensor.get_dtype(), tensor.get_shape()) for name, tensor in slices.items()}
    for name, (dtype, _) in headers.items():
        if dtype not in TYPES:
            expected = f"expected one of {', '.join(TYPES)}; give the model in another format"
            raise UserError(f"{path}: tensor {name!r} has type {dtype}: {expected}")
    return {n: Stored(TYPES[dtype], shape, partial(handle.get_tensor, n)) for n, (dtype, shape) in headers.items()}


def open_pickled(path: str) -> Mapping[str, Stored]:
    """The tensors of a `torch.save` file, read by torch's weights-only loader, which runs no code from it.

    Files of torch 1.6 or later are mapped into memory; older ones are read whole. An output head tied to the embedding
    is omitted, as in safetensors: the same model then has the same tensors in both formats. Raises `UserError`.
    """
    with name_unreadable(path, "file of tensors (torch.save)"):
        try:
            state_dict = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except UnpicklingError as error:
            lines = str(error).splitlines()  # one names the class or function that the file asks for
            cause = next((line for line in lines if "GLOBAL" in line), next(iter(lines), "no reason given"))
            raise UserError(
                f"{path}: torch's weights-only loader refuses it ({cause}): it is damaged, or its pickle holds more "
                "than tensors and could run code. Fetch it again, or get the model as safetensors"
            ) from None
    problem = "no mapping" if not isinstance(state_dict, Mapping) else _first_non_tensor(state_dict)
    if problem:
        raise UserError(f"{path}: expected a mapping of names to dense tensors, found {problem}; save its state_dict()")
    head = state_dict.get(HEAD)
    layouts = [(x.data_ptr(), x.shape, x.stride()) for name, x in state_dict.items() if "lm_head" not in name]
    is_tied = head is not None and (head.data_ptr(), head.shape, head.stride()) in layouts
    return {
        name: Stored(tensor.dtype, [*tensor.shape], partial(tensor.clone, memory_format=torch.contiguous_format))
        for name, tensor in state_dict.items()
        if not (is_tied and name == HEAD)
    }


def _first_non_tensor(state_dict: Mapping[object, object]) -> str | None:
    for name, value in state_dict.items():
        if not isinstance(value, Tensor):
            return f"{name!r}: {type(value).__name__}"
        if not isinstance(name, str) or value.layout is not torch.strided or value.dtype not in TYPES.values():
            return f"{name!r}: {value.dtype}"
    return None


@contextmanager
def name_unreadable(path: str, file_kind: str) -> Iterator[None]:
    """Context manager: any error in reading the file at `path` becomes a `UserError` that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # SafetensorError for a bad header or a missing tensor, OSError for the rest
        raise UserError(f"{path}: not a readable {file_kind} ({reason(error)}); fetch it again") from None


def read_with_digest(path: Path, recorded_sha256: object, remedy: str) -> bytes:
    """The content of a file. Raises `UserError` if it is missing, or its sha256 (hex) is not the recorded one."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: missing or not readable ({error.strerror}); {remedy}") from None
    if hashlib.sha256(content).hexdigest() != recorded_sha256:
        raise UserError(f"{path}: truncated or altered (its sha256 is not the recorded one); {remedy}")
    return content


@dataclass(frozen=True)
class WeightFormat:
    """A format of weights, with the file names that transformers gives to a checkpoint of this format."""

    name: str
    single: str  # the name of the file of a checkpoint that has only one
    suffix: str  # of every file's name
    open_file: Callable[[str], Mapping[str, Stored]]

    @property
    def index(self) -> str:
        """The name of the index, which maps tensors to files."""
        return f"{self.single}.index.json"

    def file_of(self, index: Path) -> dict[str, str]:
        """Tensor name → file name, from an index. Raises `UserError`, also for a file outside the directory.

        A symlink in the directory may lead anywhere.
        """
        file_kind, remedy = f"index of {self.name}", "fetch the checkpoint again"
        weight_map = read_mapping(index, file_kind, remedy).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index}: damaged {file_kind} (no weight_map of tensor and file names); {remedy}")
        for name, file in weight_map.items():
            is_valid = isinstance(file, str) and file.endswith(self.suffix) and "\0" not in file
            if not is_valid or PurePath(file).is_absolute() or ".." in PurePath(file).parts:
                raise UserError(
                    f"{index}: damaged {file_kind} (weight_map.{name}={file!r}: expected a {self.suffix} file in its "
                    f"directory); {remedy}"
                )
        return weight_map

    def open_part(
        self, source: str, file_name: str, path: str | None, listed_names: Iterable[str], other_names: Iterable[str]
    ) -> Mapping[str, Stored]:
        """The tensors of a `file_name` of the model in `source`. path: where the file is; None: it is missing.

        listed_names, other_names: the tensors that the index has in this file, and in others. Raises `UserError` if the
        file is missing or differs from the index. An index may list a tied head, which is omitted, as a tensor.
        """
        if path is None:
            raise UserError(f"{source}: {file_name} is named in {self.index} but missing; fetch the checkpoint again")
        tensors = self.open_file(path)
        missing_names = [name for name in listed_names if name not in tensors and (self is SAFETENSORS or name != HEAD)]
        extra_names = [name for name in other_names if name in tensors]
        faults = [f"no tensor {name!r}" for name in missing_names] + [f"tensor {name!r}" for name in extra_names]
        if faults:
            raise UserError(f"{path}: holds {faults[0]}, which is not what {self.index} says; fetch it again")
        return tensors


SAFETENSORS = WeightFormat("safetensors", "model.safetensors", ".safetensors", open_safetensors)
PICKLES = WeightFormat("torch files", "pytorch_model.bin", ".bin", open_pickled)
