"""The file of an n-gram table: arrays in a safetensors file, mapped into memory; its metadata describe the table.

A directory with `table.safetensors` holds a table. The arrays are those of each `Level`, named as "3.keys", and those
of `Suffixes`, named as "suffixes.tokens". The file is written under another name first, so it is always complete.

Opening compares types and lengths with those that follow from the table's size. It does not hash the arrays: `verified`
does.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from outrider.base.errors import UserError, reason, require
from outrider.base.files import parse_json, require_writable
from outrider.base.settings import construct
from outrider.draft_models.ngrams.kernels import require_vocabulary

TABLE_FILE = "table.safetensors"
_FORMAT = 3
_FORMER = "table.json"  # of formats 1 and 2
_AGAIN = "build it again with outrider build-trigrams"
_TYPES: dict[str, np.dtype] = {"U16": np.dtype(np.uint16), "U32": np.dtype(np.uint32), "U64": np.dtype(np.uint64)}
Arrays = Mapping[str, np.ndarray]  # by name


@dataclass(frozen=True)
class Header:
    """The metadata of a table. facts: see `TrigramTable`. sha256: of the bytes of all arrays, by ascending names."""

    format: int
    vocabulary: int
    tokenizer: str
    facts: dict[str, Any]
    sha256: str

    def __post_init__(self) -> None:
        require(self.format == _FORMAT, "format", self.format, f"{_FORMAT}, which this version reads")
        require_vocabulary(self.vocabulary)
        for key in ("tokens", "documents"):
            require(type(self.facts.get(key)) is int, f"facts.{key}", self.facts.get(key), "an integer")
        construct(list[dict[str, Any]], self.facts.get("merged", []), "facts.merged")


def map_table(path: Path) -> tuple[Header, Arrays]:
    """The metadata and the arrays of the table in directory `path`. The arrays are mapped read-only, nothing is loaded.

    Raises `UserError` for a file that is missing, cut off, of another format or without usable metadata.
    """
    file = path / TABLE_FILE
    if (path / _FORMER).exists() and not file.exists():
        raise UserError(f"{path}: n-gram table of a former format ({_FORMER}); {_AGAIN}")
    try:
        with safe_open(file, "np") as stored:  # compares its header with the length of the file
            metadata = stored.metadata() or {}
            slices = {name: stored.get_slice(name) for name in stored.offset_keys()}
            described = [(name, one.get_dtype(), one.get_shape()) for name, one in slices.items()]
        content = np.asarray(np.memmap(file, np.uint8, "r"))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: no readable n-gram table ({reason(error)}); {_AGAIN}") from None
    try:
        header = construct(Header, parse_json(metadata.get("ngrams", "")))
        arrays, start = {}, 8 + int.from_bytes(content[:8], "little")
        for name, kind, shape in described:  # safetensors leaves no gaps
            require(kind in _TYPES and len(shape) == 1, name, (kind, shape), f"one row of {', '.join(_TYPES)}")
            stop = start + _TYPES[kind].itemsize * shape[0]
            arrays[name], start = content[start:stop].view(_TYPES[kind]), stop
    except UserError as error:
        raise damaged(path, str(error)) from None
    return header, arrays


def verified(path: Path) -> None:
    """Raise `UserError` unless the arrays of the table in `path` are those that were written. Reads all of them."""
    header, arrays = map_table(path)
    if _digest(arrays) != header.sha256:
        raise damaged(path, "its arrays are altered: another sha256")


def damaged(path: Path | str, fault: str) -> UserError:
    """The error for a table in `path` that is not as it was written."""
    return UserError(f"{path}: damaged n-gram table ({fault}); {_AGAIN}")


def read_header(path: Path) -> Header:
    """The metadata of the table in `path`. Raises `UserError`."""
    return map_table(path)[0]


def table_digest(path: Path) -> str:
    """A digest that identifies the content of the table in `path`, as it was written. Raises `UserError`."""
    return hashlib.sha256(json.dumps(asdict(read_header(path)), sort_keys=True).encode()).hexdigest()


def write_table(path: Path, vocabulary: int, tokenizer: str, facts: Mapping[str, Any], arrays: Arrays) -> None:
    """Write a table to the new directory `path`, completely or not at all. Raises `UserError`.

    Arrays that are mapped from files are not loaded by safetensors from 0.8 on.
    """
    require_no_table(path)
    require_writable(path.parent)
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    header = Header(_FORMAT, vocabulary, tokenizer, dict(facts), _digest(arrays))
    try:
        staging.mkdir()
        save_file(dict(arrays), staging / TABLE_FILE, {"ngrams": json.dumps(asdict(header))})
        (staging / TABLE_FILE).chmod(staging.stat().st_mode & 0o666)  # safetensors lets only the owner read
        os.replace(staging, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be written ({reason(error)}); free space or choose another") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def require_no_table(path: Path) -> None:
    """Raise `UserError` if `path` exists as a table, a file or a non-empty directory."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        what = "an n-gram table" if any((path / name).exists() for name in (TABLE_FILE, _FORMER)) else "other things"
        raise UserError(f"{path}: holds {what} already; choose another directory or remove it")


def _digest(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
