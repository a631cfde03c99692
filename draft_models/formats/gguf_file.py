"""A GGUF file: its metadata and the locations of its tensors, according to ggml's specification (ggml's docs/gguf.md).

The reader of the `gguf` package takes 54 s for a file of 262,144 tokens with scores and merges, and this parser 1.2 s.
That reader also follows a damaged length to the end of memory.
"""

import mmap
import os
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, overload

from outrider.base.errors import UserError

MetadataValue = bool | int | float | str | list["MetadataValue"]
ValueType = TypeVar("ValueType", bool, int, float, str, list[MetadataValue])
MAGIC, SUFFIX = b"GGUF", ".gguf"
VERSIONS = (2, 3)
AS_WRITTEN = "loaded_as_written"  # key in the config of a tokenizer that is loaded from tokenizer.json alone
MOST_LAYERS = 2**12  # of a model in any format
_DAMAGED = "fetch it again"
# The specification's numbers of the types of metadata values; of numbers and booleans with their codes in `struct`.
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOAT_TYPES = (0, 1, 28, 30)  # ggml's type numbers of float32, float16, float64 and bfloat16
_SHORTEST = 24  # minimum bytes of a file: magic, version and two counts
_MISSING = object()


@dataclass(frozen=True)
class TensorLocation:
    """The location of a tensor. shape: outermost dimension first, as in torch. ggml_type: ggml's number of its type."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    begin: int  # byte offset in the file


@dataclass(frozen=True)
class GgufFile:
    """The contents of a GGUF file without tensor data. metadata: numbers, strings and lists, by key."""

    path: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, TensorLocation]

    @overload
    def get(self, key: str, kind: type[ValueType]) -> ValueType: ...
    @overload
    def get(self, key: str, kind: type[ValueType], default: ValueType) -> ValueType: ...
    @overload
    def get(self, key: str, kind: type[ValueType], default: None) -> ValueType | None: ...
    def get(self, key: str, kind: type, default: object = _MISSING) -> object:
        """The value of `key`, which must have type `kind` (float: any number). Raises `UserError` naming both."""
        value = self.metadata.get(key, default)
        if value is _MISSING:
            raise UserError(f"{self.path}: says no {key}; convert the model again with a current llama.cpp")
        accepted = (int, float) if kind is float else kind
        if value is not default and (not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool)):
            raise UserError(f"{self.path}: {key}={_excerpt(value)}: expected {kind.__name__}; {_DAMAGED}")
        return value

    def texts(self, key: str) -> list[str]:
        """The list of strings under `key`. Raises `UserError`."""
        array = self.get(key, list)
        texts = [text for text in array if isinstance(text, str)]
        if len(texts) < len(array):
            raise UserError(f"{self.path}: {key}: expected texts only; {_DAMAGED}")
        return texts


def find_gguf(source: str) -> Path | None:
    """The path of the GGUF file `source`, or of the only GGUF file in the directory `source`; else None.

    None too for a directory with a Hugging Face model. Raises `UserError` for a file of another format, and for several
    GGUF files.
    """
    path = Path(source)
    if os.path.isfile(path):
        if not is_gguf(path):
            raise UserError(
                f"{source}: a file, but not a GGUF file; give one, a Hugging Face model directory or a Hub name"
            )
        return path
    if not os.path.isdir(path) or (path / "config.json").exists():
        return None
    candidates = sorted(file for file in path.glob(f"*{SUFFIX}") if file.is_file())
    if len(candidates) > 1:
        names = ", ".join(file.name for file in candidates)
        raise UserError(f"{source}: holds several GGUF files ({names}); give one of them, with its name")
    return candidates[0] if candidates else None


def open_gguf(path: Path) -> GgufFile:
    """The contents of the file at `path`; reads no tensor. Raises `UserError`, also if the file ends too early."""
    if path.stat().st_size < _SHORTEST or not is_gguf(path):
        raise UserError(f"{path}: not a GGUF file (it does not begin with {MAGIC.decode()}); {_DAMAGED}")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _Parser(path, content).file()


def is_gguf(path: Path) -> bool:
    """Whether the file `path` begins with GGUF's magic bytes."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class _Parser:
    """Parses a file sequentially. at: position in bytes. what: the current part, named in errors."""

    def __init__(self, path: Path, content: mmap.mmap):
        self.path, self.content, self.at, self.what = path, content, len(MAGIC), "header"

    def file(self) -> GgufFile:
        version = self.integer("I")
        if version not in VERSIONS:
            raise UserError(
                f"{self.path}: GGUF version {version}, supported: {VERSIONS} in little-endian; convert the model again"
            )
        tensor_count, key_count = self.integer("Q"), self.integer("Q")
        metadata: dict[str, MetadataValue] = {}
        for _ in range(key_count):
            key = self.name("metadata", metadata)
            metadata[key] = self.value(self.integer("I"))
        locations: dict[str, TensorLocation] = {}
        for _ in range(tensor_count):
            name = self.name("list of tensors", locations)
            dim_count = self.integer("I")
            if not 1 <= dim_count <= 4:
                raise self.damage_error(f"{dim_count} dimensions")
            shape = tuple(self.integer("Q") for _ in range(dim_count))[::-1]  # innermost first in the file
            locations[name] = TensorLocation(name, shape, self.integer("I"), self.integer("Q"))
        self.what, alignment = "general.alignment", metadata.get("general.alignment", 32)  # 32: as specified
        if not isinstance(alignment, int) or alignment < 1:
            raise self.damage_error(repr(alignment))
        data_start = -(-self.at // alignment) * alignment  # the next multiple of `alignment`
        file_locations = {name: replace(loc, begin=data_start + loc.begin) for name, loc in locations.items()}
        return GgufFile(self.path, metadata, file_locations)

    def name(self, section: str, earlier_names: Collection[str]) -> str:
        """The name of the next key or tensor, which is none of `earlier_names`."""
        self.what = section
        self.what = name = self.text()
        if name in earlier_names:
            raise self.damage_error("it twice")
        return name

    def value(self, value_type: int) -> MetadataValue:
        if value_type in _SCALARS:
            return self.numbers(_SCALARS[value_type], 1)[0]
        if value_type == _STRING:
            return self.text()
        if value_type != _ARRAY:
            raise self.damage_error(f"a value of type {value_type}")
        entry_type, entry_count = self.integer("I"), self.integer("Q")
        if entry_type in _SCALARS:
            return self.numbers(_SCALARS[entry_type], entry_count)
        if entry_type != _STRING:
            raise self.damage_error(f"a list of values of type {entry_type}")
        return [*self.texts(entry_count)]

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, text_count: int) -> list[str]:
        """The next `text_count` strings, each after its length in 8 bytes: hundreds of thousands, so in one loop."""
        content, offset, file_end, texts = self.content, self.at, len(self.content), []
        for _ in range(text_count):
            text_start = offset + 8
            offset = text_start + int.from_bytes(content[offset:text_start], "little")
            if offset > file_end:
                raise UserError(f"{self.path}: ends within {self.what}; {_DAMAGED}")
            texts.append(content[text_start:offset].decode("utf-8", "replace"))
        self.at = offset
        return texts

    def integer(self, struct_code: str) -> int:
        return int.from_bytes(self.take(struct.calcsize(f"<{struct_code}")), "little")

    def numbers(self, struct_code: str, count: int) -> list[MetadataValue]:
        return [*struct.unpack(f"<{count}{struct_code}", self.take(count * struct.calcsize(f"<{struct_code}")))]

    def take(self, byte_count: int) -> bytes:
        """The next `byte_count` bytes. Raises `UserError` beyond the end of the file, where damaged lengths lead."""
        if self.at + byte_count > len(self.content):
            raise UserError(f"{self.path}: ends within {self.what}; {_DAMAGED}")
        self.at += byte_count
        return self.content[self.at - byte_count : self.at]

    def damage_error(self, fault: str) -> UserError:
        return UserError(f"{self.path}: damaged at {self.what} (found {fault}); {_DAMAGED}")


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}…"
