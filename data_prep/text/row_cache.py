"""The cache of packed rows: an entry's files, completeness check and lock."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from outrider.errors import UserError, require
from outrider.settings import read_as

META_FILE = "meta.json"
ARRAYS = ("tokens", "documents", "supervised")  # one .npy each, [rows, seq_len]
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
)


class ArrayFile:
    """A .npy file that grows by whole rows; the shape in its header is filled in at the end."""

    def __init__(self, path: Path, dtype: np.dtype, width: int) -> None:
        self._file = path.open("wb")
        self._dtype, self._width, self._rows = dtype, width, 0

    def __enter__(self) -> "ArrayFile":
        self._write_header()
        return self

    def append(self, rows: np.ndarray) -> None:
        """Append rows [n, width]."""
        self._file.write(rows.astype(self._dtype).tobytes())
        self._rows += len(rows)

    def _write_header(self) -> None:
        # numpy leaves room in the header for the first axis to grow, so its length does not change
        shape = (self._rows, self._width)
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)

    def __exit__(self, *_: object) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()


@dataclass(frozen=True)
class Meta:
    """The content of an entry's `META_FILE`: its key, counts, and the size of each file."""

    key: str
    seq_len: int
    counts: dict[str, int]
    sizes: dict[str, int]

    def __post_init__(self) -> None:
        require(set(self.counts) >= set(COUNTS), "counts", sorted(self.counts), ", ".join(COUNTS))
        require(min(self.counts.values()) >= 0, "counts", self.counts, "numbers ≥ 0")
        for name in ("rows", "supervised"):
            require(self.counts[name] >= 1, f"counts.{name}", self.counts[name], "at least 1")


def read_meta(folder: Path) -> Meta:
    """The `Meta` of an entry. Raises `UserError` if it is damaged."""
    meta: Meta = read_as(Meta, folder / META_FILE, "entry of the cache", "remove its directory")
    return meta


def is_complete(folder: Path, key: str) -> bool:
    """Whether the entry of `key` exists, and each file has the size and row count it was written with."""
    try:
        meta = read_meta(folder)
        paths = [folder / f"{name}.npy" for name in ARRAYS]
        sizes = {path.name: path.stat().st_size for path in paths}
        shapes = {np.load(path, mmap_mode="r").shape for path in paths}
    except (OSError, ValueError, UserError):
        return False
    return meta.key == key and meta.sizes == sizes and shapes == {(meta.counts["rows"], meta.seq_len)}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A lock: one process at a time builds an entry; the others wait."""
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
    """Errors of writing the cache become a `UserError`."""
    try:
        yield
    except OSError as error:  # reading raises UserError itself, so this is an error of writing
        raise UserError(
            f"cache_dir={cache}: cannot be written ({error.strerror or error}); free space there or choose "
            "another with data.cache_dir=DIRECTORY"
        ) from error
