"""The n-gram table of ADED (arXiv 2407.12021): successors and counts of contexts of 1 to 3 tokens, memory-mapped.

P(w_n | w_1 … w_{n−1}) = C(w_1 … w_n) / C(w_1 … w_{n−1}). C(context) counts the occurrences of the context that a token
follows in the same document. So the probabilities of a context sum to 1, or to less if rare successors were left out.
Example: "a b" was followed by c three times and by d once; then P(c | a b) = 3/4.

A context is stored as one integer. Each token takes `token_bits` bits, as many as the vocabulary needs, the latest
token lowest. Example: with a vocabulary of 1,000 a token takes 10 bits, and the context (3, 7) is 3 · 2^10 + 7. The
context's key is `mix(packed, key_bits)` with key_bits = (n−1)·token_bits, a bijection on integers of that width. So
contexts have distinct, evenly spread keys, whose top bits index the buckets. All ids of a context must be below
`vocabulary`.

A directory with `table.safetensors` holds a table. Its arrays are those of each `Level`, named as "3.keys", and those
of `Suffixes`, named as "suffixes.tokens"; its metadata are a `Header`. The file is written under another name first, so
it is always complete. Opening compares types and lengths with those that follow from the table's size. It does not hash
the arrays: `require_unaltered` does.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from outrider.base.errors import UserError, reason, require
from outrider.base.files import digest_of, parse_json, require_writable
from outrider.base.settings import construct
from outrider.draft_models.ngrams import kernels
from outrider.draft_models.ngrams.suffixes import Suffixes, find_suffix_fault, join_documents, sort_suffixes

ARRAYS = ("buckets", "keys", "starts", "totals", "tokens", "counts")  # of a `Level`
ORDERS = (2, 3, 4)
TABLE_FILE = "table.safetensors"
_FORMAT = 3
_AGAIN = "build it again with outrider build-trigrams"
_TYPES: dict[str, np.dtype] = {"U16": np.dtype(np.uint16), "U32": np.dtype(np.uint32), "U64": np.dtype(np.uint64)}
Arrays = Mapping[str, np.ndarray]  # by name
Facts = dict[str, Any]  # of a table, see `TrigramTable`


class Level(NamedTuple):
    """The n-grams of one order n, in contexts of n − 1 tokens. Memory-mapped arrays are read-only.

    bits: of a token in a key. shift: key >> shift is the bucket of a key.
    buckets: uint32 [2^b + 1]. The contexts whose key begins with the b bits i are buckets[i] … buckets[i+1] − 1.
    keys: uint64 [C], ascending. totals: uint32 [C], the count of all successors, left-out ones included.
    starts: uint32 or uint64 [C + 1]. The successors of context c are starts[c] … starts[c+1] − 1.
    tokens: uint16 or uint32 [S], counts: uint32 [S]; by context, then count descending, then token ascending.
    """

    order: int
    bits: int
    shift: int
    buckets: np.ndarray
    keys: np.ndarray
    starts: np.ndarray
    totals: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray

    @property
    def key_bits(self) -> int:
        """Width of a packed context and of its key."""
        return (self.order - 1) * self.bits

    def find_fault(self, vocabulary: int) -> str:
        """Why compiled look-up could not rely on the arrays, or ""."""
        for array_name, expected in level_types(self.order, vocabulary, len(self.keys), len(self.tokens)).items():
            array = getattr(self, array_name)
            if (array.dtype, len(array)) != expected:
                return f"{array_name} are {len(array)} of {array.dtype}, expected {expected[1]} of {expected[0]}"
        arrays = (self.starts, self.totals, self.tokens, self.counts)
        fault = kernels.find_level_fault(self.buckets, self.shift, self.keys, self.key_bits, *arrays, vocabulary)
        return kernels.FAULTS[fault]

    def grams(self) -> kernels.Grams:
        """All n-grams, in the order of (key, token)."""
        keys = np.repeat(self.keys, np.diff(self.starts))
        sort_order = np.lexsort((self.tokens, keys))
        return kernels.Grams(keys, self.tokens[sort_order].astype(np.uint32), self.counts[sort_order])


@dataclass(frozen=True)
class TrigramTable:
    """n-gram levels by order, over token ids below `vocabulary`. tokenizer: a digest of the tokenizer's vocabulary.

    facts: the origin of the counts: tokens, documents, min_count, max_successors, corpus; for a merged table tokens,
    documents and `merged`, the facts of each table.
    suffixes: a suffix array of the corpus; None: it was not kept.
    """

    vocabulary: int
    tokenizer: str
    levels: dict[int, Level]
    facts: Facts
    suffixes: Suffixes | None = None

    def __post_init__(self) -> None:
        kernels.require_vocabulary(self.vocabulary)

    @classmethod
    def from_documents(
        cls,
        documents: Iterable[Sequence[int]],
        orders: Sequence[int],
        vocabulary: int,
        tokenizer: str,
        min_count: int = 1,
        max_successors: int | None = None,
        corpus: object = None,
        suffixes: bool = False,
    ) -> "TrigramTable":
        """Count documents (token ids each) in memory, without n-grams of fewer than `min_count` occurrences, and with
        only the `max_successors` most frequent successors of a context (None: all). corpus: recorded in `facts`.
        suffixes: whether a suffix array is made too."""
        kernels.require_vocabulary(vocabulary)
        require(set(orders) <= set(ORDERS), "orders", tuple(orders), f"some of {ORDERS}")
        document_ids = [np.asarray(document, np.uint32) for document in documents]
        largest_id = int(max((document.max(initial=0) for document in document_ids), default=0))
        require(largest_id < vocabulary, "token id", largest_id, f"below the vocabulary of {vocabulary}")
        bits = kernels.token_bits(vocabulary)
        levels = {}
        for order in sorted(orders):
            grams = kernels.count_grams([kernels.context_grams(document, order, bits) for document in document_ids])
            limits = min_count, max_successors or vocabulary
            levels[order] = make_level(order, vocabulary, kernels.group_contexts(*grams, *limits))
        facts: Facts = {"tokens": sum(map(len, document_ids)), "documents": len(document_ids)}
        facts |= {"min_count": min_count, "max_successors": max_successors, "corpus": corpus}
        suffix_array = sort_suffixes(join_documents(document_ids, vocabulary), vocabulary) if suffixes else None
        return cls(vocabulary, tokenizer, levels, facts, suffix_array)

    @classmethod
    def open(cls, folder: Path | str) -> "TrigramTable":
        """Map a saved table into memory. Raises `UserError` unless the table is complete and valid."""
        header, arrays = map_table(Path(folder))
        orders, bits = [order for order in ORDERS if f"{order}.keys" in arrays], kernels.token_bits(header.vocabulary)
        try:
            levels = {order: _join_level(order, bits, *(arrays[f"{order}.{n}"] for n in ARRAYS)) for order in orders}
            fields = [arrays[f"suffixes.{name}"] for name in Suffixes._fields if "suffixes.order" in arrays]
        except KeyError as error:
            raise table_damage(folder, f"no array {error}") from None
        table = cls(header.vocabulary, header.tokenizer, levels, header.facts, Suffixes(*fields) if fields else None)
        if unknown_names := sorted(arrays.keys() - table.arrays.keys()):
            raise table_damage(folder, f"arrays {', '.join(unknown_names)}")
        for order, level in levels.items():
            if fault := level.find_fault(header.vocabulary):
                raise table_damage(folder, f"order {order}: {fault}")
        if table.suffixes is not None and (fault := find_suffix_fault(table.suffixes, header.vocabulary)):
            raise table_damage(folder, f"suffixes: {fault}")
        return table

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by the names that they have in a file."""
        arrays = {f"{order}.{name}": getattr(self.levels[order], name) for order in self.levels for name in ARRAYS}
        suffix_arrays = {} if self.suffixes is None else self.suffixes._asdict()
        return arrays | {f"suffixes.{name}": array for name, array in suffix_arrays.items()}

    def save(self, folder: Path | str) -> None:
        """Write the table to a new directory, completely or not at all. Raises `UserError`.

        safetensors from 0.8 on does not load arrays that are mapped from files.
        """
        table_dir, arrays = Path(folder), self.arrays
        require_no_table(table_dir)
        require_writable(table_dir.parent)
        temp_dir = table_dir.with_name(f".{table_dir.name}.{os.getpid()}")
        header = Header(_FORMAT, self.vocabulary, self.tokenizer, self.facts, _digest_arrays(arrays))
        try:
            temp_dir.mkdir()
            save_file(arrays, temp_dir / TABLE_FILE, {"ngrams": json.dumps(asdict(header))})
            (temp_dir / TABLE_FILE).chmod(temp_dir.stat().st_mode & 0o666)  # safetensors lets only the owner read
            os.replace(temp_dir, table_dir)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{table_dir}: cannot be written ({reason(error)}); free space or choose another") from None
        finally:
            shutil.rmtree(temp_dir, ignore_errors=True)

    def require_tokenizer(self, vocab_digest: str, option: str) -> None:
        """Raise `UserError` unless the table was built with the vocabulary of this digest. option: begins the error."""
        if vocab_digest != self.tokenizer:
            raise UserError(
                f"{option}: the n-gram table was built with another tokenizer (vocabulary {self.tokenizer[:12]}, "
                f"this one is {vocab_digest[:12]}); build it again with tokenizer= the target's"
            )

    def require_rows(self, row_count: int, option: str) -> None:
        """Raise `UserError` if the table could draft an id of `row_count` or more; its tokenizer may have more ids."""
        suffixes, has_more_ids = self.suffixes, self.vocabulary > row_count
        has_larger = has_more_ids and any(bool((level.tokens >= row_count).any()) for level in self.levels.values())
        if has_larger or (has_more_ids and suffixes is not None and suffixes.starts[row_count] < suffixes.starts[-1]):
            raise UserError(f"{option}: it holds ids beyond the target's {row_count}; build it from other texts")

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def make_level(order: int, vocabulary: int, grouped: Sequence[np.ndarray], starts: np.ndarray | None = None) -> Level:
    """The level of these `Grouped` contexts. starts: where `Level.starts` are written; None: a new array."""
    keys, successor_counts, totals, tokens, counts = grouped
    array_types = level_types(order, vocabulary, len(keys), len(tokens))
    starts = np.empty(len(keys) + 1, array_types["starts"][0]) if starts is None else starts
    starts[0] = 0
    np.cumsum(successor_counts, dtype=starts.dtype, out=starts[1:])
    buckets = np.zeros(array_types["buckets"][1], np.uint32)
    tokens = tokens.astype(kernels.token_type(vocabulary), copy=False)
    level = _join_level(order, kernels.token_bits(vocabulary), buckets, keys, starts, totals, tokens, counts)
    kernels.count_buckets(keys, level.shift, buckets)
    return level


def _join_level(order: int, bits_per_token: int, buckets: np.ndarray, *arrays: np.ndarray) -> Level:
    bucket_bits = (len(buckets) - 1).bit_length() - 1  # there are 2^bucket_bits buckets, and one more entry
    return Level(order, bits_per_token, (order - 1) * bits_per_token - bucket_bits, buckets, *arrays)


def level_types(order: int, vocabulary: int, n_contexts: int, n_successors: int) -> dict[str, tuple[np.dtype, int]]:
    """Type and length of each array of a level. A bucket has 1 to 2 contexts."""
    key_bits, u4 = (order - 1) * kernels.token_bits(vocabulary), np.dtype(np.uint32)
    bucket_bits = min(max(n_contexts.bit_length() - 1, 0), key_bits)
    return {
        "buckets": (u4, 2**bucket_bits + 1),
        "keys": (np.dtype(np.uint64), n_contexts),
        "starts": (np.dtype(np.uint32 if n_successors < 2**32 else np.uint64), n_contexts + 1),
        "totals": (u4, n_contexts),
        "tokens": (kernels.token_type(vocabulary), n_successors),
        "counts": (u4, n_successors),
    }


def level_bytes(order: int, vocabulary: int, contexts: int, successors: int) -> int:
    return sum(kind.itemsize * length for kind, length in level_types(order, vocabulary, contexts, successors).values())


@dataclass(frozen=True)
class Header:
    """The metadata of a table. facts: see `TrigramTable`. sha256: of the bytes of all arrays, by ascending names."""

    format: int
    vocabulary: int
    tokenizer: str
    facts: Facts
    sha256: str

    def __post_init__(self) -> None:
        require(self.format == _FORMAT, "format", self.format, f"{_FORMAT}, which this version reads")
        kernels.require_vocabulary(self.vocabulary)
        for key in ("tokens", "documents"):
            require(type(self.facts.get(key)) is int, f"facts.{key}", self.facts.get(key), "an integer")
        construct(list[Facts], self.facts.get("merged", []), "facts.merged")


def map_table(path: Path) -> tuple[Header, Arrays]:
    """The metadata and the arrays of the table in directory `path`. The arrays are mapped read-only, nothing is loaded.

    Raises `UserError` for a file that is missing, cut off, of another format or without usable metadata.
    """
    file = path / TABLE_FILE
    try:
        with safe_open(file, "np") as tensors_file:  # compares its header with the length of the file
            metadata = tensors_file.metadata() or {}
            slices = {name: tensors_file.get_slice(name) for name in tensors_file.offset_keys()}
            descriptions = [(name, view.get_dtype(), view.get_shape()) for name, view in slices.items()]
        file_bytes = np.asarray(np.memmap(file, np.uint8, "r"))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: no readable n-gram table ({reason(error)}); {_AGAIN}") from None
    try:
        header = construct(Header, parse_json(metadata.get("ngrams", "")))
        arrays, begin_byte = {}, 8 + int.from_bytes(file_bytes[:8], "little")  # after the header
        for name, dtype, shape in descriptions:  # by offset; safetensors leaves no gaps
            require(dtype in _TYPES and len(shape) == 1, name, (dtype, shape), f"one row of {', '.join(_TYPES)}")
            end_byte = begin_byte + _TYPES[dtype].itemsize * shape[0]
            arrays[name], begin_byte = file_bytes[begin_byte:end_byte].view(_TYPES[dtype]), end_byte
    except UserError as error:
        raise table_damage(path, str(error)) from None
    return header, arrays


def require_unaltered(folder: Path) -> None:
    """Raise `UserError` unless the arrays of the table in `folder` are those that were written. Reads all of them."""
    header, arrays = map_table(folder)
    if _digest_arrays(arrays) != header.sha256:
        raise table_damage(folder, "its arrays are altered: another sha256")


def table_damage(folder: Path | str, fault: str) -> UserError:
    """The error for a table in `folder` that is not as it was written."""
    return UserError(f"{folder}: damaged n-gram table ({fault}); {_AGAIN}")


def table_digest(folder: Path) -> str:
    """A digest that identifies the content of the table in `folder`, as it was written. Raises `UserError`."""
    return digest_of(asdict(map_table(folder)[0]))


def require_no_table(path: Path) -> None:
    """Raise `UserError` if `path` is a table, a file, a link, a mount point or a directory with files."""
    if path.is_symlink() or path.is_mount():  # a finished directory cannot take its place
        raise UserError(f"{path}: is a link or a mount point; choose a directory in it")
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        what = "an n-gram table" if (path / TABLE_FILE).exists() else "other things"
        raise UserError(f"{path}: holds {what} already; choose another directory or remove it")


def _digest_arrays(arrays: Arrays) -> str:
    hasher = hashlib.sha256()
    for name in sorted(arrays):
        hasher.update(np.ascontiguousarray(arrays[name]).data)
    return hasher.hexdigest()
