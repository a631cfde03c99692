"""The cache of packed rows: an entry's files, completeness check and lock."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from filelock import FileLock, Timeout

from outrider.errors import UserError, require
from outrider.settings import read_as

META_FILE = "meta.json"
ARRAYS = ("tokens", "documents", "supervised")  # one .bin each, [rows, seq_len]
COUNTS = (
    "records",
    "rows",
    "tokens",
    "supervised",
    "clipped",
    "empty",
    "unsupervised",
    "malformed",
    "unreadable",
    "dropped_rows",
    "refused",
)


Kind = Literal["bool", "uint8", "uint16", "uint32", "int8", "int16", "int32"]


@dataclass(frozen=True)
class Meta:
    """The content of an entry's `META_FILE`: its key, counts, the types of its arrays, and the `first` of `Counts`."""

    key: str
    seq_len: int
    counts: dict[str, int]
    types: dict[str, Kind]
    first: str = ""

    def __post_init__(self) -> None:
        require(set(self.counts) >= set(COUNTS), "counts", sorted(self.counts), ", ".join(COUNTS))
        require(min(self.counts.values()) >= 0, "counts", self.counts, "numbers ≥ 0")
        require(set(self.types) == set(ARRAYS), "types", sorted(self.types), ", ".join(ARRAYS))
        for name in ("rows", "supervised"):
            require(self.counts[name] >= 1, f"counts.{name}", self.counts[name], "at least 1")


def read_meta(folder: Path) -> Meta:
    """The `Meta` of an entry. Raises `UserError` if it is damaged."""
    return read_as(Meta, folder / META_FILE, "entry of the cache", "remove its directory")


def map_arrays(folder: Path) -> list[np.ndarray]:
    """The arrays of an entry, memory-mapped. Raises `ValueError` where a file is not of its size."""
    meta = read_meta(folder)
    rows = meta.counts["rows"]
    flat = [np.memmap(folder / f"{name}.bin", meta.types[name], "r") for name in ARRAYS]
    return [array.reshape(rows, meta.seq_len) for array in flat]


def is_complete(folder: Path, key: str) -> bool:
    """Whether the entry of `key` exists, and each file has the size that it was written with."""
    try:
        return read_meta(folder).key == key and bool(map_arrays(folder))
    except (OSError, ValueError, UserError):
        return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock an entry: one process at a time builds it; the others wait."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("data: another process is building these rows; waiting for it", flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def storage_errors(cache: Path) -> Iterator[None]:
    """Convert errors of writing the cache to `UserError`."""
    try:
        yield
    except OSError as error:  # reading raises UserError itself, so this is a write error
        raise UserError(
            f"cache_dir={cache}: cannot be written ({error.strerror or error}); free space there or choose "
            "another with data.cache_dir=DIRECTORY"
        ) from error
