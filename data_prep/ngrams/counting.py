"""Out-of-core counting of n-grams: shards of token ids → a table's arrays, in nearly constant memory.

For each order there are two passes. First, blocks of n-grams are sorted and counted, each to a sorted run on disk.
Then the runs are merged, one range of keys after another, and written as the table's arrays. Only `Level.buckets` is
held whole, 2 to 4 bytes a context. Keys are evenly spread (`draft_models.ngrams.kernels.mix`), so ranges of equal width
have about equal sizes. The table's bytes do not depend on the size of blocks and ranges.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.ngrams.blocks import blocks
from data_prep.ngrams.token_shards import Shards
from draft_models.ngrams.kernels import Grams, group, merge_grams
from draft_models.ngrams.table_files import Described, array_file, count_buckets, start_type, token_bits, token_type
from outrider.compiled import kept
from outrider.errors import require
from outrider.progress import Stage

_NARROW_BYTES, _WIDE_BYTES = 36, 96  # memory per n-gram of a block, see `_aggregate`
_MERGE_BYTES = 80  # memory per n-gram of a range: read, merged, grouped
_LARGEST_BLOCK, _LARGEST_RANGE = 2**24, 2**22  # larger is not faster
_PARTITIONS = 10  # runs can be cut at 2^10 keys
_CHUNK = 2**20  # values of a finished array held at once
_U4: np.dtype = np.dtype(np.uint32)
_U8: np.dtype = np.dtype(np.uint64)
_RUN_TYPES = {"keys": _U8, "tokens": _U4, "counts": _U4}  # the fields of Grams


class _Runs(NamedTuple):
    """Sorted runs, one after another in one file per field of `Grams`; bounds int64 [runs, partitions + 1]: where each
    run's partitions of the key space begin.

    narrow: the token's bits if tokens are in the low bits of keys and have no file; else 0.
    """

    folder: Path
    bounds: np.ndarray
    narrow: int


def count_order(
    shards: Shards, order: int, vocabulary: int, work: Path, memory: int, min_count: int, max_successors: int | None
) -> dict[str, Described]:
    """Write the array files of one order to work/table. Returns their entries of table.json, by name.

    memory: bytes for blocks and ranges; at least a shard's ids and a 1024th of the n-grams are held at once. Temporary
    files are in work/runs.
    """
    runs = _write_runs(shards, order, vocabulary, memory, work / "runs")
    limits = (min_count, max_successors or vocabulary)
    grouped = (group(*grams, *limits) for grams in _merged(runs, memory, f"merging order {order}"))
    found = write_level(grouped, order, vocabulary, work)
    for file in (work / "runs").iterdir():
        file.unlink()
    return found


def write_level(parts: Iterable[Sequence[np.ndarray]], order: int, vocabulary: int, work: Path) -> dict[str, Described]:
    """Write the array files of one order, given as parts of `Grouped` by ascending keys, to work/table.

    Returns their entries of table.json, by name. Uses a temporary file in work/runs.
    """
    table, lengths = work / "table", work / "runs" / "lengths"
    paths = {name: table / array_file(order, name) for name in ("keys", "totals", "tokens", "counts")}
    types = {"keys": _U8, "lengths": _U4, "totals": _U4, "tokens": token_type(vocabulary), "counts": _U4}
    with _Files({**paths, "lengths": lengths}, types, described=paths) as files:
        for grouped in parts:
            for name, array in zip(("keys", "lengths", "totals", "tokens", "counts"), grouped, strict=True):
                files.append(name, array)
        found, contexts, successors = files.described(), files.sizes["keys"], files.sizes["tokens"]
    found |= _write_starts(lengths, table / array_file(order, "starts"), start_type(successors))
    lengths.unlink()
    require(contexts < 2**32, "orders", contexts, f"fewer than 2^32 contexts of order {order}; raise min_count")
    buckets = count_buckets(_chunks(paths["keys"], _U8), contexts, order, vocabulary)
    with _Files.of_one("buckets", table / array_file(order, "buckets"), buckets.dtype) as files:
        files.append("buckets", buckets)
        found |= files.described()
    return found


def _write_runs(shards: Shards, order: int, vocabulary: int, memory: int, folder: Path) -> _Runs:
    bits = token_bits(vocabulary)
    key_bits = (order - 1) * bits
    narrow = order * bits <= 64
    capacity = min(memory // (_NARROW_BYTES if narrow else _WIDE_BYTES), _LARGEST_BLOCK)
    cuts = min(_PARTITIONS, key_bits)
    edges = np.arange(1, 2**cuts, dtype=np.uint64) << np.uint64(key_bits - cuts)
    bounds, written = [], 0
    stage = Stage(f"counting order {order}", shards.tokens, "tokens")
    fields = [name for name in Grams._fields if not (narrow and name == "tokens")]
    with stage, _Files({name: folder / name for name in fields}, _RUN_TYPES) as files:
        for keys, tokens in blocks(shards, order, bits, narrow, capacity, stage):
            grams = _aggregate(keys, tokens, bits, narrow)
            stored = grams._replace(keys=(grams.keys << np.uint64(bits)) | grams.tokens) if narrow else grams
            for name in fields:
                files.append(name, getattr(stored, name))
            bounds.append(written + np.r_[0, np.searchsorted(grams.keys, edges), len(grams.keys)])
            written += len(grams.keys)
    return _Runs(folder, np.array(bounds, np.int64).reshape(len(bounds), 2**cuts + 1), bits if narrow else 0)


def _aggregate(keys: np.ndarray, tokens: np.ndarray, bits: int, narrow: bool) -> Grams:
    """Sort and count a block; reorders its arrays.

    If key and token do not fit into 64 bits, the key's rank in the block replaces it while sorting.
    """
    if narrow:
        keys.sort()
        size, counts = _run_lengths(keys)
        distinct = keys[:size]
        return Grams(distinct >> np.uint64(bits), (distinct & np.uint64(2**bits - 1)).astype(np.uint32), counts)
    contexts, ranks = np.unique(keys, return_inverse=True)
    pairs = (ranks.astype(np.uint64) << np.uint64(bits)) | tokens
    del ranks
    pairs.sort()
    size, counts = _run_lengths(pairs)
    distinct = pairs[:size]
    return Grams(contexts[distinct >> np.uint64(bits)], (distinct & np.uint64(2**bits - 1)).astype(np.uint32), counts)


@kept
def _run_lengths(values: np.ndarray) -> tuple[int, np.ndarray]:
    """Move the distinct values of a sorted array to its front; (their number, uint32 counts)."""
    size = 0
    for i in range(len(values)):
        if i == 0 or values[i] != values[i - 1]:
            size += 1
    counts = np.zeros(size, np.uint32)
    last = -1
    for i in range(len(values)):
        if last < 0 or values[i] != values[last]:
            last += 1
            values[last] = values[i]
        counts[last] += np.uint32(1)
    return size, counts


def _merged(runs: _Runs, memory: int, title: str) -> Iterator[Grams]:
    """The sum of all runs, one range of keys after another."""
    sizes = np.diff(runs.bounds, axis=1).sum(axis=0)
    largest = min(memory // _MERGE_BYTES, _LARGEST_RANGE)
    with Stage(title, int(sizes.sum()), "n-grams") as stage:
        begin = 0
        while begin < len(sizes):
            end, rows = begin + 1, int(sizes[begin])
            while end < len(sizes) and rows + sizes[end] <= largest:
                rows += int(sizes[end])
                end += 1
            parts = [_read_run(runs, int(row[begin]), int(row[end])) for row in runs.bounds]
            while len(parts) > 1:
                parts = [
                    Grams(*merge_grams(parts[i], parts[i + 1])) if i + 1 < len(parts) else parts[i]
                    for i in range(0, len(parts), 2)
                ]
            yield from parts
            stage.advance(rows)
            begin = end


def _read_run(runs: _Runs, begin: int, end: int) -> Grams:
    def read(name: str) -> np.ndarray:
        kind = _RUN_TYPES[name]
        return np.fromfile(runs.folder / name, kind, end - begin, offset=begin * kind.itemsize)

    keys, counts, bits = read("keys"), read("counts"), np.uint64(runs.narrow)
    if not runs.narrow:
        return Grams(keys, read("tokens"), counts)
    return Grams(keys >> bits, (keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.uint32), counts)


# -------------------------------------------------------------------------------------------------- array files


class _Files:
    """Growing array files; `sizes`: values in each so far. described: the files that become part of a table."""

    def __init__(
        self, paths: dict[str, Path], types: dict[str, np.dtype], described: Collection[str] = frozenset()
    ) -> None:
        self._stack = ExitStack()
        self._handles = {name: self._stack.enter_context(path.open("wb")) for name, path in paths.items()}
        self._types = types
        self._digests = {name: hashlib.sha256() for name in described}
        self.sizes = dict.fromkeys(paths, 0)

    @classmethod
    def of_one(cls, name: str, path: Path, dtype: np.dtype) -> "_Files":
        return cls({name: path}, {name: dtype}, {name})

    def append(self, name: str, values: np.ndarray) -> None:
        content = np.ascontiguousarray(values, self._types[name]).data
        self._handles[name].write(content)
        self.sizes[name] += len(values)
        if name in self._digests:
            self._digests[name].update(content)

    def described(self) -> dict[str, Described]:
        """Their entries of table.json."""
        return {
            name: (self._types[name].str, self.sizes[name], digest.hexdigest())
            for name, digest in self._digests.items()
        }

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _chunks(path: Path, dtype: np.dtype) -> Iterator[np.ndarray]:
    """The values of an array file, `_CHUNK` at a time."""
    with open(path, "rb") as handle:
        while len(values := np.fromfile(handle, dtype, _CHUNK)):
            yield values


def _write_starts(lengths: Path, path: Path, dtype: np.dtype) -> dict[str, Described]:
    """Turn lengths into `Level.starts`; returns its entry of table.json."""
    with _Files.of_one("starts", path, dtype) as files:
        files.append("starts", np.zeros(1, dtype))
        last = 0
        for chunk in _chunks(lengths, _U4):
            starts = last + np.cumsum(chunk, dtype=np.int64)
            files.append("starts", starts)
            last = int(starts[-1])
        return files.described()
