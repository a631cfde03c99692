"""Counting n-grams out of core: shards of token ids → the n-gram table, in memory that does not grow with the corpus.

For each order there are two passes. First, blocks of n-grams are sorted and counted, each to a sorted run on disk.
Then the runs are merged, one range of keys after another, and written as the table's arrays. Keys are evenly spread
(`draft_models.ngrams.kernels.mix`), so ranges of equal width are of about equal size. The table's bytes do not depend
on the size of blocks and ranges.
"""

import hashlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from tqdm import tqdm

from data_prep.ngrams.blocks import blocks
from data_prep.ngrams.token_shards import Encoder, Shards, open_encoder, passages, read_shard, tokenise
from data_prep.settings import TrigramConfig
from data_prep.text.sources import read_records
from draft_models.ngrams.kernels import Grams, group, merge_grams
from draft_models.ngrams.suffixes import SORT_BYTES, separated, sort_suffixes
from draft_models.ngrams.table import TrigramTable, merge, prune, prune_to, write_suffixes
from draft_models.ngrams.table_files import (
    TABLE_FILE,
    Described,
    array_file,
    count_buckets,
    publish,
    require_no_table,
    require_vocabulary,
    start_type,
    token_bits,
    token_type,
)
from draft_models.rehearsal import rehearsable
from draft_models.target.vocabulary import vocabulary_digest
from outrider.errors import UserError, require
from outrider.files import require_writable
from outrider.run_dirs import only_run
from outrider.settings import default_at

_GB = 10**9
_LEAST_MEMORY = 10**8  # what sorting a corpus may take in any case
_NARROW_BYTES, _WIDE_BYTES = 36, 96  # memory an n-gram of a block takes, see `_aggregate`
_MERGE_BYTES = 80  # memory an n-gram of a range takes: read, merged, grouped
_LARGEST_BLOCK, _LARGEST_RANGE = 2**24, 2**22  # larger is not faster
_PARTITIONS = 10  # runs can be cut at 2^10 keys
_CHUNK = 2**20  # values of a finished array held at once
_U4: np.dtype = np.dtype(np.uint32)
_U8: np.dtype = np.dtype(np.uint64)
_RUN_TYPES = {"keys": _U8, "tokens": _U4, "counts": _U4}  # the fields of Grams


@rehearsable
def build_table(config: TrigramConfig) -> None:
    """Read, tokenise and count a corpus. Leaves a `TrigramTable` in `config.out_dir` and prints one line of figures.

    Until the table is whole it lies in `<out_dir>.building`. `config.resume` goes on with the shards found there. Of
    several processes of a launcher the first builds it, with `config.workers` of its own. The others have nothing to
    do. Raises `UserError` for a bad corpus, tokenizer or place. Whatever happens, `out_dir` holds a whole table or
    none.
    """
    if int(os.environ.get("RANK", "0")):
        return
    began = time.perf_counter()
    out_dir, work = Path(config.out_dir), Path(f"{config.out_dir}.building")
    encoder = open_encoder(config.tokenizer, config.revision)
    require_vocabulary(encoder.vocabulary)
    others = [_open_other(path, encoder, config) for path in config.merge]
    if config.resume and (out_dir / TABLE_FILE).exists():
        _require_same(TrigramTable.open(out_dir), config, encoder, others)
        print(f"{out_dir}: finished already")
        return
    require_no_table(out_dir)
    require_writable(out_dir.parent)
    unfinished = (work / "shards").exists()
    with only_run(require_writable(work), f"the table of out_dir={out_dir}"):
        if unfinished and not config.resume:
            raise UserError(
                f"out_dir={out_dir}: {work} holds an unfinished build; resume=true continues it, another out_dir or "
                "removing it starts afresh"
            )
        require_writable(work / "shards")
        _tidily(work, lambda: _build(config, encoder, others, work, began))


def _tidily(work: Path, build: Callable[[], None]) -> None:
    """Build in `work` and remove it; of a build that fails, all but the shards that a resumed one goes on with."""
    try:
        build()
        shutil.rmtree(work)
    except BaseException as error:
        for part in ("table", "runs"):  # never resumed
            shutil.rmtree(work / part, ignore_errors=True)
        if not any((work / "shards").iterdir()):
            shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, OSError) and error.strerror:
            raise UserError(
                f"{work}: cannot be written ({error.strerror}); free space and continue with resume=true, or choose "
                "another out_dir"
            ) from error
        raise


def _build(config: TrigramConfig, encoder: Encoder, others: list[TrigramTable], work: Path, began: float) -> None:
    counts: Counter[str] = Counter()
    documents = passages(read_records(config.data, "train", counts), config.text)
    shards = tokenise(documents, config.tokenizer, config.revision, encoder, work / "shards", config.processes)
    where = f"data source={config.data.source} path={config.data.path}"
    if not shards.tokens:
        found = ", ".join(f"{name}={count}" for name, count in counts.items() if count) or "nothing"
        raise UserError(f"{where}: empty corpus: no text in it (found {found}); give more data")
    tokenised, table = time.perf_counter(), work / "table"
    for part in (table, work / "runs"):  # of a build that was killed
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
    memory = int(config.memory_gb * _GB)
    # What is rare here may be frequent in all tables together.
    limits = (memory, 1, None) if others else (memory, config.min_count, config.max_successors)
    described = {
        order: count_order(shards, order, encoder.vocabulary, work, *limits) for order in sorted(config.orders)
    }
    if not any(arrays["keys"][1] for arrays in described.values()):
        raise UserError(
            f"{where}: no n-gram of orders {list(config.orders)} occurs min_count={config.min_count} times in "
            f"{shards.tokens} tokens; lower min_count or give more data"
        )
    digest, facts = vocabulary_digest(encoder.pieces), _facts(config, shards)
    kept = _write_suffixes(shards, encoder.vocabulary, table, memory) if config.suffixes else {}
    if others or config.max_mb is not None:
        own = work / "runs" / "own"
        publish(table, own, encoder.vocabulary, digest, described, facts, kept)
        _shrunk(config, TrigramTable.open(own), others).save(config.out_dir)
    else:
        publish(table, Path(config.out_dir), encoder.vocabulary, digest, described, facts, kept)
    _report(config.out_dir, counts, tokenised - began, time.perf_counter() - tokenised)


def _shrunk(config: TrigramConfig, own: TrigramTable, others: list[TrigramTable]) -> TrigramTable:
    """The table of all counts, without what is rare in it."""
    table = prune(merge([own, *others]), config.min_count, config.max_successors) if others else own
    return table if config.max_mb is None else prune_to(table, config.max_mb)


def _report(out_dir: str, counts: Counter[str], tokenise_seconds: float, count_seconds: float) -> None:
    table = TrigramTable.open(out_dir)
    figures = {
        "tokens": table.facts["tokens"],
        "documents": table.facts["documents"],
        "ngrams": sum(len(level.tokens) for level in table.levels.values()),
        "contexts": sum(len(level.keys) for level in table.levels.values()),
        "seconds": f"{tokenise_seconds + count_seconds:.1f}",
        "tokenise_seconds": f"{tokenise_seconds:.1f}",
        "count_seconds": f"{count_seconds:.1f}",
        "mb": f"{table.nbytes / 1e6:.1f}",
        **{name: counts[name] for name in ("records", "empty", "malformed", "unreadable")},
    }
    print(f"trigrams {out_dir} " + " ".join(f"{key}={value}" for key, value in figures.items()), flush=True)


# ---------------------------------------------------------------------------------------------------- settings


def _facts(config: TrigramConfig, shards: Shards) -> dict[str, Any]:
    return {
        "tokens": shards.tokens,
        "documents": shards.documents,
        "min_count": config.min_count,
        "max_successors": config.max_successors,
        "corpus": {**config.corpus(), "digest": shards.digest},
    }


def _open_other(path: str, encoder: Encoder, config: TrigramConfig) -> TrigramTable:
    table = TrigramTable.open(path)
    table.require_tokenizer(vocabulary_digest(encoder.pieces), f"merge={path}")
    if sorted(table.levels) != sorted(config.orders):
        raise UserError(f"merge={path}: has orders {sorted(table.levels)}, expected {sorted(config.orders)}")
    require((table.suffixes is not None) == config.suffixes, "suffixes", config.suffixes, f"as in merge={path}")
    return table


def _require_same(table: TrigramTable, config: TrigramConfig, encoder: Encoder, others: list[TrigramTable]) -> None:
    """Raise `UserError` unless the finished table is what these settings would build, as far as can be told."""
    table.require_tokenizer(vocabulary_digest(encoder.pieces), f"out_dir={config.out_dir}")
    own, *merged = table.facts.get("merged") or [table.facts]
    found = dict(own["corpus"]) if isinstance(own.get("corpus"), dict) else {}
    found |= {key: own.get(key) for key in ("min_count", "max_successors")}
    found |= {
        "orders": sorted(table.levels),
        "merge": merged,
        "max_mb": table.facts.get("max_mb"),
        "suffixes": table.suffixes is not None,
    }
    wanted = {key: value for key, value in config.deciding().items() if key != "data"} | config.corpus()
    wanted |= {"orders": sorted(config.orders), "merge": [other.facts for other in others]}
    was = {key: found.get(key, default_at(config, key)) for key in wanted}
    differences = [f"{key}={was[key]!r}, not {wanted[key]!r}" for key in wanted if was[key] != wanted[key]]
    if differences:
        raise UserError(
            f"out_dir={config.out_dir}: holds a table built with {'; '.join(differences)}; choose another out_dir"
        )


# ---------------------------------------------------------------------------------------------------- suffixes


def _write_suffixes(shards: Shards, vocabulary: int, table: Path, memory: int) -> dict[str, Described]:
    """Write the suffix array of the corpus to `table`; what table.json says of it."""
    needed = SORT_BYTES * (shards.tokens + shards.documents)
    expected = f"at least {needed / _GB:.1f} for suffixes=true: the corpus is sorted in memory"
    require(needed <= max(memory, _LEAST_MEMORY), "memory_gb", memory / _GB, expected)
    return write_suffixes(sort_suffixes(separated(_documents(shards), vocabulary), vocabulary), table)


def _documents(shards: Shards) -> Iterator[np.ndarray]:
    """The token ids of every document, whole."""
    begun = np.empty(0, shards.dtype)
    for path, continues in zip(shards.paths, [*shards.continued[1:], False], strict=True):
        ids, lengths = read_shard(path, shards.dtype)
        parts = np.split(ids, np.cumsum(lengths[:-1], dtype=np.int64))
        parts[0] = np.concatenate([begun, parts[0]])
        begun = parts.pop() if continues else begun[:0]
        yield from parts


# ---------------------------------------------------------------------------------------------------- counting


class _Runs(NamedTuple):
    """Sorted runs, one after another in three files; bounds int64 [runs, partitions + 1]: where each one's
    partitions of the key space begin."""

    folder: Path
    bounds: np.ndarray


def count_order(
    shards: Shards, order: int, vocabulary: int, work: Path, memory: int, min_count: int, max_successors: int | None
) -> dict[str, Described]:
    """Write the array files of one order to work/table. Returns what table.json says of them, by name.

    memory: bytes for blocks and ranges. A shard's ids, and a 1024th of the n-grams, are taken at once in any case.
    Temporary files come and go in work/runs.
    """
    runs = _write_runs(shards, order, vocabulary, memory, work / "runs")
    table, lengths = work / "table", work / "runs" / "lengths"
    paths = {name: table / array_file(order, name) for name in ("keys", "totals", "tokens", "counts")}
    types = {"keys": _U8, "lengths": _U4, "totals": _U4, "tokens": token_type(vocabulary), "counts": _U4}
    with _Files({**paths, "lengths": lengths}, types, described=paths) as files:
        for grams in _merged(runs, memory, f"merging order {order}"):
            grouped = group(*grams, min_count, max_successors or vocabulary)
            for name, array in zip(("keys", "lengths", "totals", "tokens", "counts"), grouped, strict=True):
                files.append(name, array)
        found, contexts, successors = files.described(), files.sizes["keys"], files.sizes["tokens"]
    found |= _write_starts(lengths, table / array_file(order, "starts"), start_type(successors))
    buckets = count_buckets(_chunks(paths["keys"], _U8), contexts, order, vocabulary)
    with _Files.of_one("buckets", table / array_file(order, "buckets"), buckets.dtype) as files:
        files.append("buckets", buckets)
        found |= files.described()
    for file in (work / "runs").iterdir():
        file.unlink()
    return found


def _write_runs(shards: Shards, order: int, vocabulary: int, memory: int, folder: Path) -> _Runs:
    bits = token_bits(vocabulary)
    key_bits = (order - 1) * bits
    narrow = order * bits <= 64
    capacity = min(memory // (_NARROW_BYTES if narrow else _WIDE_BYTES), _LARGEST_BLOCK)
    cuts = min(_PARTITIONS, key_bits)
    edges = np.arange(1, 2**cuts, dtype=np.uint64) << np.uint64(key_bits - cuts)
    bounds, written = [], 0
    bar = tqdm(desc=f"counting order {order}", total=shards.tokens, unit=" tokens", unit_scale=True, disable=None)
    with bar, _Files({name: folder / name for name in Grams._fields}, _RUN_TYPES) as files:
        for keys, tokens in blocks(shards, order, bits, narrow, capacity, bar):
            grams = _aggregate(keys, tokens, bits, narrow)
            for name, array in grams._asdict().items():
                files.append(name, array)
            bounds.append(written + np.r_[0, np.searchsorted(grams.keys, edges), len(grams.keys)])
            written += len(grams.keys)
    return _Runs(folder, np.array(bounds, np.int64).reshape(len(bounds), 2**cuts + 1))


def _aggregate(keys: np.ndarray, tokens: np.ndarray, bits: int, narrow: bool) -> Grams:
    """Sort and count a block; reorders its arrays.

    Where key and token do not fit 64 bits together, the key's rank in the block stands for it while sorting.
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


@njit(cache=True, nogil=True)
def _run_lengths(values):  # type: ignore[no-untyped-def]
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
    bar = tqdm(desc=title, total=int(sizes.sum()), unit=" n-grams", unit_scale=True, disable=None)
    with bar:
        begin = 0
        while begin < len(sizes):
            end, rows = begin + 1, int(sizes[begin])
            while end < len(sizes) and rows + sizes[end] <= largest:
                rows += int(sizes[end])
                end += 1
            parts = [_read_run(runs.folder, int(row[begin]), int(row[end])) for row in runs.bounds]
            while len(parts) > 1:
                parts = [
                    Grams(*merge_grams(parts[i], parts[i + 1])) if i + 1 < len(parts) else parts[i]
                    for i in range(0, len(parts), 2)
                ]
            yield from parts
            bar.update(rows)
            begin = end


def _read_run(folder: Path, begin: int, end: int) -> Grams:
    return Grams(
        *(
            np.fromfile(folder / name, dtype, end - begin, offset=begin * dtype.itemsize)
            for name, dtype in _RUN_TYPES.items()
        )
    )


# -------------------------------------------------------------------------------------------------- array files


class _Files:
    """Array files that grow; `sizes`: values in each so far. described: those that become part of a table."""

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
        """What table.json says of them."""
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
    """Turn lengths into `Level.starts`; what table.json says of it."""
    with _Files.of_one("starts", path, dtype) as files:
        files.append("starts", np.zeros(1, dtype))
        last = 0
        for chunk in _chunks(lengths, _U4):
            starts = last + np.cumsum(chunk, dtype=np.int64)
            files.append("starts", starts)
            last = int(starts[-1])
        return files.described()
