"""One file of tensors, in the formats of torch: safetensors, and the pickles (.bin) that came before them."""

import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.errors import UserError, reason

# Torch's types under the names that safetensors' headers give them.
TYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}


class StoredTensor(Protocol):
    """A tensor in a file. What is said of it, and its bytes, are the same whatever the format of the file."""

    @property
    def type_name(self) -> str:
        """Its type as in a safetensors header, as "BF16"."""

    @property
    def shape(self) -> list[int]:
        """Its shape."""

    @property
    def nbytes(self) -> int:
        """Its size, once read."""

    def read(self) -> Tensor:
        """All of it."""

    def pieces(self, places: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Its bytes at each (first byte, how many)."""


@dataclass(frozen=True)
class SafeTensor:
    """A tensor of a safetensors file, of which only the bytes asked for are read."""

    path: str
    name: str
    type_name: str
    shape: list[int]
    begin: int  # in the file
    end: int
    handle: Any

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.end - self.begin

    def read(self) -> Tensor:
        """All of it."""
        tensor: Tensor = self.handle.get_tensor(self.name)
        return tensor

    def pieces(self, places: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Its bytes at each (first byte, how many). Raises `UserError` where the file ends before them."""
        with open(self.path, "rb", buffering=0) as file:
            for at, size in places:
                file.seek(self.begin + at)
                piece = file.read(size)
                if len(piece) != size:
                    raise UserError(f"{self.path}: ends within tensor {self.name!r}; fetch it again")
                yield piece


def open_safetensors(path: str) -> Mapping[str, StoredTensor]:
    """The tensors of a safetensors file. Raises `UserError`."""
    with readable(path, "safetensors file"):
        handle = safe_open(path, framework="pt")  # proves that the header is sound
        with open(path, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + size + at for at in entry["data_offsets"])
            found[name] = SafeTensor(path, name, entry["dtype"], entry["shape"], begin, end, handle)
    return found


@dataclass(frozen=True)
class PickledTensor:
    """A tensor of a .bin file. Where torch could map the file, its bytes are read when they are looked at."""

    tensor: Tensor

    @property
    def type_name(self) -> str:
        """Its type as in a safetensors header."""
        return TYPE_NAMES[self.tensor.dtype]

    @property
    def shape(self) -> list[int]:
        """Its shape."""
        return list(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.tensor.nbytes

    def read(self) -> Tensor:
        """All of it, no longer bound to the file."""
        return self.tensor.clone(memory_format=torch.contiguous_format)

    def pieces(self, places: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Its bytes at each (first byte, how many)."""
        return tensor_pieces(self.tensor, places)


def open_pickled(path: str) -> Mapping[str, StoredTensor]:
    """The tensors of a file that `torch.save` wrote, read by torch's weights-only loader, which runs no code in it.

    Files of torch 1.6 or later are mapped into memory, and of a tensor only what is looked at is read. Older ones are
    read whole. An output head that is only another name of the embedding is left out, as safetensors leave it out: the
    same model then has the same tensors in both formats. Raises `UserError`.
    """
    with readable(path, "file of tensors (torch.save)"):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except UnpicklingError as error:
            raise UserError(_refused(path, str(error))) from None
    wrong = "no mapping" if not isinstance(content, Mapping) else _first_other(content)
    if wrong:
        raise UserError(f"{path}: expected a mapping of names to dense tensors, found {wrong}; save its state_dict()")
    head = content.get("lm_head.weight")
    if head is not None and any(_same_memory(head, other) for name, other in content.items() if "lm_head" not in name):
        content = {name: tensor for name, tensor in content.items() if name != "lm_head.weight"}
    return {name: PickledTensor(tensor) for name, tensor in content.items()}


def _refused(path: str, said: str) -> str:
    told = [line for line in said.splitlines() if "GLOBAL" in line]  # which class or function the file asks for
    return (
        f"{path}: torch's weights-only loader refuses it ({(told or said.splitlines() or ['no reason given'])[0]}): it "
        "is damaged, or its pickle holds more than tensors and could run code. Fetch it again, or get the model as "
        "safetensors"
    )


def _first_other(content: Mapping[Any, Any]) -> str | None:
    for name, value in content.items():
        plain = isinstance(name, str) and isinstance(value, Tensor) and value.layout is torch.strided
        if not plain or value.dtype not in TYPE_NAMES:
            return f"{name!r}: {value.dtype if isinstance(value, Tensor) else type(value).__name__}"
        held = value.untyped_storage().nbytes()
        if value.nbytes > held:  # a view that repeats its memory: a small file would become any size once it is read
            return f"{name!r}: shape {list(value.shape)} in {held} bytes"
    return None


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def tensor_pieces(tensor: Tensor, places: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """The bytes of a tensor, row after row, at each (first byte, how many)."""
    flat = tensor.contiguous().flatten().view(torch.uint8)
    for at, size in places:
        yield flat[at : at + size].numpy().tobytes()


@contextmanager
def readable(path: str, what: str) -> Iterator[None]:
    """Within it, whatever goes wrong with the file at `path` becomes a `UserError` that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # its own class for a bad header and a missing tensor, OSError for the rest
        raise UserError(f"{path}: not a readable {what} ({reason(error)}); fetch it again") from None
