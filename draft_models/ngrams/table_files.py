"""The file format of an n-gram table: its arrays' types and lengths, table.json, and the checks on opening.

`table.json` describes the table, with the sha256 of every array and of itself. All of them are checked whenever a table
is opened. That reads the arrays once, which look-up needs in memory anyway.

Digests detect damage. `fault_of` also checks that the arrays fit together, since compiled look-up relies on it. A file
that changes while it is mapped goes unnoticed, but nothing beyond an array is read.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draft_models.ngrams.kernels import FAULTS, fault_of
from outrider.errors import UserError, require
from outrider.files import read_json, sealed, unsealed
from outrider.settings import construct

FORMAT = 2
TABLE_FILE = "table.json"  # a directory with this file holds a complete table
ARRAYS = ("buckets", "keys", "starts", "totals", "tokens", "counts")  # as in `draft_models.ngrams.table.Level`
SUFFIX_ARRAYS = ("tokens", "order", "starts")  # as in `draft_models.ngrams.suffixes.Suffixes`
ORDERS = (2, 3, 4)
MAX_VOCABULARY = 2**21  # so that the context of a 4-gram fits 63 bits
_AGAIN = "build it again with outrider build-trigrams"
Described = tuple[str, int, str]  # an array's type, length and sha256


@dataclass(frozen=True)
class Header:
    """What table.json holds. levels: what is known of each array, by order and name.

    suffixes: the same for the arrays of the suffix array; empty without one.
    """

    format: int
    vocabulary: int
    tokenizer: str
    facts: dict[str, Any]
    levels: dict[str, dict[str, Described]]
    suffixes: dict[str, Described] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_vocabulary(self.vocabulary)
        for key in ("tokens", "documents"):
            require(type(self.facts.get(key)) is int, f"facts.{key}", self.facts.get(key), "an integer")
        construct(list[dict[str, Any]], self.facts.get("merged", []), "facts.merged")
        orders = set(map(str, ORDERS))
        require(set(self.levels) <= orders, "levels", sorted(self.levels), "some of " + ", ".join(sorted(orders)))
        for order, arrays in self.levels.items():
            require(set(arrays) == set(ARRAYS), f"levels.{order}", sorted(arrays), ", ".join(ARRAYS))
            expected = _expected(int(order), self.vocabulary, arrays["keys"][1], arrays["tokens"][1])
            for name, described in arrays.items():
                require(described[:2] == expected[name], f"levels.{order}.{name}", described, str(expected[name]))
        names = set(self.suffixes)
        require(names in (set(), set(SUFFIX_ARRAYS)), "suffixes", sorted(names), ", ".join(SUFFIX_ARRAYS) + " or none")
        for name, (kind, length, _) in self.suffixes.items():
            wanted = _suffix_types(self.vocabulary, self.suffixes["tokens"][1])[name]
            require((kind, length) == wanted, f"suffixes.{name}", (kind, length), str(wanted))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        described = [*self.suffixes.values(), *(known for arrays in self.levels.values() for known in arrays.values())]
        return sum(np.dtype(known[0]).itemsize * known[1] for known in described)


def open_arrays(path: Path) -> tuple[Header, dict[int, list[np.ndarray]], list[np.ndarray]]:
    """The table in `path`: table.json, the arrays by order as in `ARRAYS`, and those of `SUFFIX_ARRAYS`, if any.

    They are mapped into memory, read-only.

    Raises `UserError` for anything but a whole, sound table.
    """
    header = read_header(path)
    files = {(order, name): path / array_file(int(order), name) for order in header.levels for name in ARRAYS}
    for (order, name), file in files.items():
        kind, length = header.levels[order][name][:2]
        _require_size(file, np.dtype(kind).itemsize * length)
    for name, (kind, length, _) in header.suffixes.items():
        _require_size(path / suffix_file(name), np.dtype(kind).itemsize * length)
    levels = {}
    for order in header.levels:
        arrays = [_map(files[order, name], *header.levels[order][name]) for name in ARRAYS]
        fault = _fault(int(order), header.vocabulary, *arrays)
        if fault:
            raise UserError(f"{path}: damaged n-gram table (order {order}: {fault}); {_AGAIN}")
        levels[int(order)] = arrays
    suffixes = [_map(path / suffix_file(name), *header.suffixes[name]) for name in SUFFIX_ARRAYS if header.suffixes]
    return header, levels, suffixes


def read_header(path: Path) -> Header:
    """table.json of the table in `path`. Raises `UserError` if it is missing, invalid or damaged."""
    what = "n-gram table"
    values = read_json(path / TABLE_FILE, what, _AGAIN)
    version = values.get("format") if isinstance(values, dict) else None
    if version != FORMAT:
        raise UserError(f"{path}: {what} of format {version}, this version reads {FORMAT}; {_AGAIN}")
    try:
        return construct(Header, unsealed(values))
    except UserError as error:
        raise UserError(f"{path}: damaged {what} ({TABLE_FILE}: {error}); {_AGAIN}") from None


def table_digest(path: Path) -> str:
    """A digest that identifies the content of the table in `path`, without checking it. Raises `UserError`."""
    read_header(path)
    return hashlib.sha256((path / TABLE_FILE).read_bytes()).hexdigest()


def publish(
    staging: Path,
    path: Path,
    vocabulary: int,
    tokenizer: str,
    arrays: Mapping[int, Mapping[str, Described]],
    facts: Mapping[str, object],
    suffixes: Mapping[str, Described] | None = None,
) -> None:
    """Turn a directory with all array files into the table `path`: sync, describe, rename. Raises `OSError`."""
    levels: Any = {str(order): dict(arrays[order]) for order in sorted(arrays)}
    values = asdict(Header(FORMAT, vocabulary, tokenizer, dict(facts), levels, dict(suffixes or {})))
    header = sealed({key: value for key, value in values.items() if key != "suffixes" or value})
    (staging / TABLE_FILE).write_text(json.dumps(header, indent=1, sort_keys=True) + "\n", "utf-8")
    for file in staging.iterdir():
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())
    os.replace(staging, path)


def describe(array: np.ndarray) -> Described:
    """The entry of table.json for an array."""
    return array.dtype.str, len(array), hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def array_file(order: int, name: str) -> str:
    """File of the array `name` of a level."""
    return f"order{order}_{name}.bin"


def suffix_file(name: str) -> str:
    """File of the array `name` of the suffix array."""
    return f"suffix_{name}.bin"


def require_no_table(path: Path) -> None:
    """Raise `UserError` if `path` exists as a table, a file or a non-empty directory."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists():
        what = "an n-gram table" if (path / TABLE_FILE).exists() else "other things"
        raise UserError(f"{path}: holds {what} already; choose another directory or remove it")


def _require_size(file: Path, expected: int) -> None:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise UserError(f"{file}: no readable part of an n-gram table ({error.strerror}); {_AGAIN}") from None
    if size != expected:
        raise UserError(
            f"{file.parent}: damaged n-gram table ({file.name} has {size} bytes, expected {expected}); {_AGAIN}"
        )


def _map(file: Path, kind: str, length: int, sha256: str | None = None) -> np.ndarray:
    try:
        with open(file, "rb") as handle:
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if length else b""
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: no readable part of an n-gram table ({error}); {_AGAIN}") from None
    array = np.frombuffer(mapped, kind, length)
    if sha256 is not None and sha256 != describe(array)[2]:
        raise UserError(f"{file.parent}: damaged n-gram table ({file.name} is altered: another sha256); {_AGAIN}")
    return array


def _fault(order: int, vocabulary: int, *arrays: np.ndarray) -> str:
    buckets, keys, starts, totals, tokens, counts = arrays
    width = (order - 1) * token_bits(vocabulary)
    shift = width - ((len(buckets) - 1).bit_length() - 1)
    return FAULTS[fault_of(buckets, shift, keys, width, starts, totals, tokens, counts, vocabulary)]


# ------------------------------------------------------------------------------------------------ types and lengths


def _expected(order: int, vocabulary: int, contexts: int, successors: int) -> dict[str, tuple[str, int]]:
    """Type and length of each array of a level."""
    u4, u8 = np.dtype(np.uint32).str, np.dtype(np.uint64).str
    return {
        "buckets": (u4, 2 ** bucket_bits(contexts, order, vocabulary) + 1),
        "keys": (u8, contexts),
        "starts": (start_type(successors).str, contexts + 1),
        "totals": (u4, contexts),
        "tokens": (token_type(vocabulary).str, successors),
        "counts": (u4, successors),
    }


def level_bytes(order: int, vocabulary: int, contexts: int, successors: int) -> int:
    """Bytes of the arrays of a level."""
    expected = _expected(order, vocabulary, contexts, successors)
    return sum(np.dtype(kind).itemsize * length for kind, length in expected.values())


def _suffix_types(vocabulary: int, tokens: int) -> dict[str, tuple[str, int]]:
    """Type and length of each array of the suffix array."""
    u4 = np.dtype(np.uint32).str
    return {"tokens": (token_type(vocabulary + 1).str, tokens), "order": (u4, tokens), "starts": (u4, vocabulary + 1)}


def count_buckets(chunks: Iterable[np.ndarray], contexts: int, order: int, vocabulary: int) -> np.ndarray:
    """`Level.buckets` of ascending keys, given in chunks: 1 to 2 of `contexts` keys in a bucket."""
    bits = bucket_bits(contexts, order, vocabulary)
    shift = np.uint64((order - 1) * token_bits(vocabulary) - bits)
    buckets = np.zeros(2**bits + 1, np.uint32)
    for keys in chunks:
        numbers, counts = np.unique(keys >> shift, return_counts=True)
        buckets[1:][numbers] += counts.astype(np.uint32)
    return np.cumsum(buckets, out=buckets)


def bucket_bits(contexts: int, order: int, vocabulary: int) -> int:
    """The number of top bits of a key that are its bucket's index."""
    return min(max(contexts.bit_length() - 1, 0), (order - 1) * token_bits(vocabulary))


def start_type(successors: int) -> np.dtype:
    """The type of `Level.starts`."""
    return np.dtype(np.uint32 if successors < 2**32 else np.uint64)


def token_type(vocabulary: int) -> np.dtype:
    """The type of `Level.tokens`."""
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)


def token_bits(vocabulary: int) -> int:
    """Bits per token in a packed context."""
    return max(1, (vocabulary - 1).bit_length())


def require_vocabulary(vocabulary: int) -> None:
    """Raise `UserError` unless token ids below `vocabulary` fit the packing."""
    require(1 <= vocabulary <= MAX_VOCABULARY, "vocabulary", vocabulary, f"1 to {MAX_VOCABULARY} tokens")
