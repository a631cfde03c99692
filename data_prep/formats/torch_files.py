"""Files of tensors: safetensors, and torch's older pickles (.bin); and the index of several files."""

import json
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from pickle import UnpicklingError

import torch
from safetensors import safe_open
from torch import Tensor

from data_prep.formats.original import HEAD, Stored
from outrider.errors import UserError, reason
from outrider.files import read_mapping

# Torch's types by their names in safetensors headers.
TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class SafeTensor:
    """A tensor of a safetensors file, of which only the requested bytes are read.

    type_name: its type in the header, such as "BF16". begin, end: byte offsets in the file.
    """

    path: str
    name: str
    type_name: str
    shape: list[int]
    begin: int
    end: int
    load: Callable[[str], Tensor]

    def __getitem__(self, whole: object) -> Tensor:  # transformers indexes the tensors that it reads
        return self.load(self.name)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.end - self.begin

    def read(self) -> Tensor:
        """The whole tensor."""
        return self.load(self.name)

    def pieces(self, places: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Its bytes at each (first byte, number of bytes). Raises `UserError` if the file ends too early."""
        with open(self.path, "rb", buffering=0) as file:
            for at, size in places:
                file.seek(self.begin + at)
                piece = file.read(size)
                if len(piece) != size:
                    raise UserError(f"{self.path}: ends within tensor {self.name!r}; fetch it again")
                yield piece


def open_safetensors(path: str) -> Mapping[str, SafeTensor]:
    """The tensors of a safetensors file. Raises `UserError`."""
    with readable(path, "safetensors file"):
        handle = safe_open(path, framework="pt")  # checks that the header is valid
        with open(path, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + size + at for at in entry["data_offsets"])
            found[name] = SafeTensor(path, name, entry["dtype"], entry["shape"], begin, end, handle.get_tensor)
    return found


def _stored(path: str) -> Mapping[str, Stored]:
    """The same as `Stored` tensors, for conversion. Raises `UserError` for a type that is not in `TYPES`."""
    held = open_safetensors(path)
    for name, one in held.items():
        if one.type_name not in TYPES:
            expected = f"expected one of {', '.join(TYPES)}; give the model in another format"
            raise UserError(f"{path}: tensor {name!r} has type {one.type_name}: {expected}")
    return {name: Stored(TYPES[one.type_name], one.shape, one.read) for name, one in held.items()}


def open_pickled(path: str) -> Mapping[str, Stored]:
    """The tensors of a `torch.save` file, read by torch's weights-only loader, which runs no code from it.

    Files of torch 1.6 or later are mapped into memory; older ones are read whole. An output head tied to the embedding
    is omitted, as in safetensors: the same model then has the same tensors in both formats. Raises `UserError`.
    """
    with readable(path, "file of tensors (torch.save)"):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except UnpicklingError as error:
            raise UserError(_refused(path, str(error))) from None
    wrong = "no mapping" if not isinstance(content, Mapping) else _first_other(content)
    if wrong:
        raise UserError(f"{path}: expected a mapping of names to dense tensors, found {wrong}; save its state_dict()")
    head = content.get(HEAD)
    held = [(one.data_ptr(), one.shape, one.stride()) for name, one in content.items() if "lm_head" not in name]
    tied = head is not None and (head.data_ptr(), head.shape, head.stride()) in held
    return {
        name: Stored(one.dtype, one.shape, partial(one.clone, memory_format=torch.contiguous_format))
        for name, one in content.items()
        if not (tied and name == HEAD)
    }


def _refused(path: str, said: str) -> str:
    told = [line for line in said.splitlines() if "GLOBAL" in line]  # the class or function that the file asks for
    return (
        f"{path}: torch's weights-only loader refuses it ({(told or said.splitlines() or ['no reason given'])[0]}): it "
        "is damaged, or its pickle holds more than tensors and could run code. Fetch it again, or get the model as "
        "safetensors"
    )


def _first_other(content: Mapping[object, object]) -> str | None:
    for name, value in content.items():
        if not isinstance(value, Tensor):
            return f"{name!r}: {type(value).__name__}"
        if not isinstance(name, str) or value.layout is not torch.strided or value.dtype not in TYPES.values():
            return f"{name!r}: {value.dtype}"
        held = value.untyped_storage().nbytes()
        if value.nbytes > held:  # a view that repeats its memory: a small file could become arbitrarily large when read
            return f"{name!r}: shape {list(value.shape)} in {held} bytes"
    return None


@contextmanager
def readable(path: str, what: str) -> Iterator[None]:
    """Context manager: any error in reading the file at `path` becomes a `UserError` that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # SafetensorError for a bad header or a missing tensor, OSError for the rest
        raise UserError(f"{path}: not a readable {what} ({reason(error)}); fetch it again") from None


@dataclass(frozen=True)
class Kind:
    """A format of weights, with transformers' file names of a checkpoint in it."""

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
        found = read_mapping(index, what, remedy).get("weight_map")
        if not isinstance(found, dict) or not found:
            raise UserError(f"{index}: damaged {what} (no weight_map of tensor and file names); {remedy}")
        for name, file in found.items():
            inside = isinstance(file, str) and file.endswith(self.suffix) and "\0" not in file
            if not inside or PurePath(file).is_absolute() or ".." in PurePath(file).parts:
                raise UserError(
                    f"{index}: damaged {what} (weight_map.{name}={file!r}: expected a {self.suffix} file in its "
                    f"directory); {remedy}"
                )
        return found

    def missing(self, source: str, file: str) -> UserError:
        """The error for a missing file."""
        return UserError(f"{source}: {file} is named in {self.index} but missing; fetch the checkpoint again")

    def require(self, path: str, held: Collection[str], names: Iterable[str], elsewhere: Iterable[str]) -> None:
        """Raise `UserError` unless the file at `path` has all of `names` and none of `elsewhere`; it has `held`."""
        lacking = next((name for name in names if name not in held), None)
        if lacking is not None:
            raise UserError(f"{path}: holds no tensor {lacking!r}, which {self.index} says it does; fetch it again")
        if (twice := next((name for name in elsewhere if name in held), None)) is not None:
            raise UserError(
                f"{path}: holds tensor {twice!r}, which {self.index} says another file does; fetch it again"
            )


SAFETENSORS = Kind("safetensors", "model.safetensors", ".safetensors", _stored)
PICKLES = Kind("torch files", "pytorch_model.bin", ".bin", open_pickled)
