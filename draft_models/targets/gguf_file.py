"""A GGUF file: its metadata and where its tensors lie, as ggml's specification (docs/gguf.md) lays them out.

Read here and not by the `gguf` package, whose reader makes two arrays of every token of the vocabulary.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from outrider.errors import UserError

MAGIC, SUFFIX = b"GGUF", ".gguf"
VERSIONS = (2, 3)
_DAMAGED = "fetch it again"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST = 2**32  # of anything that is counted: a larger number is damage
_DEEPEST = 4  # arrays within arrays
_PLAIN = (0, 1, 28, 30)  # ggml's numbers of float32, float16, float64 and bfloat16
_MISSING = object()


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies. shape: outermost dimension first, as torch has it. kind: ggml's number of its type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    begin: int  # byte of the file


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file says. metadata: numbers, texts and lists, by key."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorPlace]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = _MISSING) -> Any:
        """The value of `key`, which must be of type `kind`. Raises `UserError` naming file and key."""
        value = self.metadata.get(key, default)
        if value is _MISSING:
            raise UserError(f"{self.path}: says no {key}; convert the model again with a current llama.cpp")
        if value is not default and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join(one.__name__ for one in kinds)
            raise UserError(f"{self.path}: {key}={_shown(value)}: expected {expected}; {_DAMAGED}")
        return value

    @property
    def quantised(self) -> bool:
        """Whether any tensor is of fewer bits than floats have."""
        return any(place.kind not in _PLAIN for place in self.tensors.values())

    def texts(self, key: str) -> list[str]:
        """The list of texts under `key`. Raises `UserError`."""
        found: list[str] = self.get(key, list)
        if not all(isinstance(one, str) for one in found):
            raise UserError(f"{self.path}: {key}: expected texts only; {_DAMAGED}")
        return found


def find_gguf(source: str) -> Path | None:
    """The GGUF file that `source` is, or that lies in the directory `source` in place of a Hugging Face model.

    Raises `UserError` for another file, and where there are several.
    """
    path = Path(source)
    if path.is_file():
        if not is_gguf(path):
            raise UserError(
                f"{source}: a file, but not a GGUF file; give one, a Hugging Face model directory or a Hub name"
            )
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(file for file in path.glob(f"*{SUFFIX}") if file.is_file())
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise UserError(f"{source}: holds several GGUF files ({names}); give one of them, with its name")
    return found[0] if found else None


def open_gguf(path: Path) -> GgufFile:
    """What the file at `path` says; no tensor is read. Raises `UserError`, also where the file ends too early."""
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(f"{path}: not readable ({error.strerror}); {_DAMAGED}") from None
    return _parsed(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=4)
def _parsed(path: Path, _modified: int, size: int) -> GgufFile:
    if size < 24 or not is_gguf(path):
        raise UserError(f"{path}: not a GGUF file (it does not begin with {MAGIC.decode()}); {_DAMAGED}")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _Parser(path, content).file()


def is_gguf(path: Path) -> bool:
    """Whether the file `path` begins as a GGUF file does."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class _Parser:
    """Walks over a file from its first byte; `what` is named where it ends or makes no sense."""

    def __init__(self, path: Path, content: mmap.mmap):
        self.path, self.content, self.at, self.what = path, content, len(MAGIC), "header"

    def file(self) -> GgufFile:
        version = self.number("I")
        if version not in VERSIONS:
            raise UserError(
                f"{self.path}: GGUF version {version}, supported: {VERSIONS} in little-endian; convert the model again"
            )
        count, keys = self.count(), self.count()
        metadata = {}
        for _ in range(keys):
            self.what = "metadata"
            self.what = key = self.text()
            metadata[key] = self.value(self.number("I"))
        return GgufFile(self.path, metadata, self.tensors(count, metadata))

    def tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, TensorPlace]:
        found = []
        for _ in range(count):
            self.what = "list of tensors"
            self.what = name = self.text()
            dimensions = self.number("I")
            if not 1 <= dimensions <= 4:
                raise self.damaged(f"{dimensions} dimensions")
            shape = tuple(self.count() for _ in range(dimensions))[::-1]
            found.append(TensorPlace(name, shape, self.number("I"), self.number("Q")))
        step = metadata.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1:
            raise UserError(f"{self.path}: general.alignment={step!r}: expected a positive integer; {_DAMAGED}")
        start = -(-self.at // step) * step
        return {one.name: TensorPlace(one.name, one.shape, one.kind, start + one.begin) for one in found}

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and depth < _DEEPEST:
            inner, count = self.number("I"), self.count()
            if inner in _SCALARS:
                return list(self.unpack(f"<{count}{_SCALARS[inner]}"))
            return [self.value(inner, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise self.damaged(f"a value of type {kind}")
        return self.number(_SCALARS[kind])

    def text(self) -> str:
        size = self.count()
        return self.take(size).decode("utf-8", errors="replace")

    def count(self) -> int:
        found = self.number("Q")
        if found >= _MOST:
            raise self.damaged(f"a length of {found}")
        return int(found)

    def number(self, letter: str) -> Any:
        return self.unpack("<" + letter)[0]

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.content):
            raise UserError(f"{self.path}: ends within {self.what}; {_DAMAGED}")
        self.at += size
        return self.content[self.at - size : self.at]

    def damaged(self, found: str) -> UserError:
        return UserError(f"{self.path}: damaged at {self.what} (found {found}); {_DAMAGED}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}…"
