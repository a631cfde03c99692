# mypy: allow-untyped-defs
"""Out-of-core counting of n-grams: shards of token ids → a table's level, in nearly constant memory; merging of tables.

`count_order` makes the level of one order in two passes. `count_runs` sorts and counts blocks of n-grams, and writes
each block as a run. `_merge_runs` adds the runs, one range of keys after another, and `write_level` writes the sums as
the level's arrays. Example, the document a b a b c, order 2, blocks of two n-grams, with counts after colons:

    blocks  ab ba | ab bc      runs  ab:1 ba:1 | ab:1 bc:1      level  a → b:2, b → a:1 c:1

A context is the n − 1 tokens before the last one of an n-gram. Its key is an integer: `kernels.mix` of its packed
tokens, a bijection that spreads keys evenly, so ranges of equal width have about equal sizes. `Grams` are sorted arrays
of n-grams: keys, last tokens, counts. `Grouped` and `Level` have each key once, with the total of its counts, and its
successors from the most frequent down. The arrays do not depend on the size of blocks and ranges.

`merge_tables` adds and prunes finished tables, which are memory-mapped, range by range too. Only the index of a level
(`Level.buckets`) is held in memory whole, 2 to 4 bytes a context.
"""

import shutil
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from outrider.base.compiled import compile_function
from outrider.base.errors import require
from outrider.base.files import reserve_space
from outrider.base.progress import Stage
from outrider.data_prep.ngrams.token_shards import Shards, read_token_shard
from outrider.draft_models.ngrams import kernels
from outrider.draft_models.ngrams.suffixes import sort_suffixes
from outrider.draft_models.ngrams.table import Level, TrigramTable, level_bytes, level_types, make_level

_NARROW_BYTES, _WIDE_BYTES = 36, 96  # memory per n-gram of a block; narrow: key and token fit into 64 bits
_MERGE_BYTES = 80  # memory per n-gram of a range: read, merged, grouped
_LARGEST_BLOCK, _LARGEST_RANGE = 2**24, 2**22  # larger is not faster
_PARTITION_BITS, _TABLE_PART_BITS = 10, 12  # runs can be cut at 2^10 keys, and tables at 2^12
_ROW_BYTES = 150  # memory per n-gram of a range of tables: sorted, merged, grouped
_MAX_COUNT = 2**32 - 1  # counts saturate here
_U4: np.dtype = np.dtype(np.uint32)
_U8: np.dtype = np.dtype(np.uint64)


class Runs(NamedTuple):
    """Sorted runs, one after another in one mapped array per field of `Grams`.

    bounds int64 [runs, partitions + 1]: where each run's partitions begin, which are parts of equal width of the key
    space. packed_bits: if key and token fit into 64 bits, the number of low bits of `keys` in which the tokens are, and
    the array of tokens is empty; else 0.
    """

    grams: kernels.Grams
    bounds: np.ndarray
    packed_bits: int


def count_order(
    shards: Shards, order: int, vocab_size: int, folder: Path, memory: int, min_count: int, max_successors: int | None
) -> Level:
    """The level of one order; its arrays are mapped from files in the new `folder`.

    memory: bytes for blocks and ranges; at least a shard's ids and a 1024th of the n-grams are held at once.
    """
    runs = count_runs(shards, order, vocab_size, memory, folder / "runs")
    merged_grams = _merge_runs(runs, memory, f"merging order {order}")
    grouped_parts = (kernels.group_contexts(*grams, min_count, max_successors or vocab_size) for grams in merged_grams)
    level = write_level(grouped_parts, order, vocab_size, folder)
    shutil.rmtree(folder / "runs")
    return level


def write_level(parts: Iterable[Sequence[np.ndarray]], order: int, vocab_size: int, folder: Path) -> Level:
    """The level of parts of `Grouped` by ascending keys; its arrays are mapped from files in `folder`.

    `make_level` fills one more array, `starts`: where the successors of each context begin.
    """
    types = {"keys": _U8, "lengths": _U4, "totals": _U4, "tokens": kernels.token_type(vocab_size), "counts": _U4}
    grouped = kernels.Grouped(**_write_arrays(folder, types, (kernels.Grouped(*part)._asdict() for part in parts)))
    n_contexts = len(grouped.keys)
    require(n_contexts < 2**32, "orders", n_contexts, f"fewer than 2^32 contexts of order {order}; raise min_count")
    dtype, start_count = level_types(order, vocab_size, n_contexts, len(grouped.tokens))["starts"]
    with open(folder / "starts", "wb") as file:  # writing to a mapped file on a full disk would kill the process
        reserve_space(file, start_count * dtype.itemsize)
    return make_level(order, vocab_size, grouped, np.memmap(folder / "starts", dtype, "r+", shape=(start_count,)))


def _write_arrays(
    folder: Path, types: dict[str, np.dtype], array_dicts: Iterable[dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The concatenated arrays of `array_dicts`, by name, mapped from files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / name, "wb")) for name in types}
        for arrays in array_dicts:
            for name, file in files.items():
                file.write(np.ascontiguousarray(arrays[name], types[name]).data)
    return {name: _map_array(folder / name, dtype) for name, dtype in types.items()}


def _map_array(file: Path, dtype: np.dtype) -> np.ndarray:
    return np.asarray(np.memmap(file, dtype, "r")) if file.stat().st_size else np.empty(0, dtype)


def count_runs(shards: Shards, order: int, vocab_size: int, memory_bytes: int, folder: Path) -> Runs:
    """The counted blocks of all n-grams, mapped from files in `folder`; memory_bytes: bytes for a block."""
    bits = kernels.token_bits(vocab_size)
    key_bits = (order - 1) * bits
    fits_64 = order * bits <= 64
    max_grams = min(memory_bytes // (_NARROW_BYTES if fits_64 else _WIDE_BYTES), _LARGEST_BLOCK)  # n-grams of a block
    partition_bits = min(_PARTITION_BITS, key_bits)
    key_edges = np.arange(1, 2**partition_bits, dtype=np.uint64) << np.uint64(key_bits - partition_bits)  # between them
    run_bounds, grams_written = [np.empty((0, 2**partition_bits + 1), np.int64)], 0

    def count_blocks(progress: Stage) -> Iterator[dict[str, np.ndarray]]:
        nonlocal grams_written
        for keys, tokens in _read_blocks(shards, order, bits, fits_64, max_grams, progress):
            grams = _aggregate(keys, tokens, bits, fits_64)
            run_bounds.append(grams_written + np.r_[0, np.searchsorted(grams.keys, key_edges), len(grams.keys)][None])
            grams_written += len(grams.keys)
            if fits_64:
                grams = grams._replace(keys=(grams.keys << np.uint64(bits)) | grams.tokens, tokens=grams.tokens[:0])
            yield grams._asdict()

    types = {"keys": _U8, "tokens": _U4, "counts": _U4}  # the fields of `Grams`
    with Stage(f"counting order {order}", shards.tokens, "tokens") as progress:
        run_grams = kernels.Grams(**_write_arrays(folder, types, count_blocks(progress)))
    return Runs(run_grams, np.concatenate(run_bounds), bits if fits_64 else 0)


def _read_blocks(
    shards: Shards, order: int, bits: int, fits_64: bool, capacity: int, progress: Stage
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All n-grams in blocks of at most `capacity`: keys uint64 [n] of their contexts, and their last tokens uint32 [n].

    They are not sorted. fits_64: the token is in the key's low bits, and the second array is empty.
    """
    keys = np.empty(capacity, np.uint64)
    tokens = np.empty(0 if fits_64 else capacity, np.uint32)
    n_grams, tail_ids = 0, np.empty(0, shards.dtype)
    for path, continued in zip(shards.paths, shards.continued, strict=True):
        ids, lengths = read_token_shard(path)
        progress.advance(len(ids))
        if continued:  # prepend the tokens that its first n-grams begin with
            ids = np.concatenate([tail_ids, ids])
            lengths = np.r_[lengths[:1] + len(tail_ids), lengths[1:]]
        tail_ids = ids[len(ids) - min(order - 1, int(lengths[-1])) :]  # at most order − 1, of the last document
        for part, sizes in _split_documents(ids, lengths, order, capacity):
            size = int(np.maximum(sizes - order + 1, 0).sum())  # n-grams of the part
            if n_grams + size > capacity:
                yield keys[:n_grams], tokens[:n_grams]
                n_grams = 0
            end = n_grams + size
            _fill_grams(part, sizes, order, bits, fits_64, keys[n_grams:end], tokens[n_grams:end])
            n_grams = end
    if n_grams:
        yield keys[:n_grams], tokens[:n_grams]


def _split_documents(
    ids: np.ndarray, lengths: np.ndarray, order: int, max_grams: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Documents, as ids [n] and lengths int64, in parts of at most `max_grams` n-grams; each n-gram is in one part.

    The later part of a split document starts with the order − 1 tokens before the split.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = ends - lengths
    for part_start in range(0, len(ids), max_grams):
        start, stop = max(0, part_start - order + 1), min(part_start + max_grams, len(ids))
        first_doc, end_doc = np.searchsorted(ends, start, "right"), np.searchsorted(begins, stop, "left")
        yield ids[start:stop], np.minimum(ends[first_doc:end_doc], stop) - np.maximum(begins[first_doc:end_doc], start)


@compile_function
def _fill_grams(ids, lengths, order, bits, narrow, keys, tokens):
    """Write the n-grams of documents, ids [n] and `lengths`, to a part of a block. narrow: `_read_blocks`' fits_64.

    Example, tokens of 2 bits: the context 1 3 of the n-gram 1 3 2 is packed as binary 01 11; `mix` makes the key of it.
    """
    key_bits = (order - 1) * bits
    context_mask = (np.uint64(1) << np.uint64(key_bits)) - np.uint64(1)
    doc_start, gram_index = 0, 0
    for length in lengths:
        packed_context = np.uint64(0)
        for i in range(doc_start, doc_start + np.int64(length)):
            token = np.uint64(ids[i])
            if i - doc_start >= order - 1:
                key = kernels.mix(packed_context, key_bits)
                if narrow:
                    keys[gram_index] = (key << np.uint64(bits)) | token
                else:
                    keys[gram_index], tokens[gram_index] = key, token
                gram_index += 1
            packed_context = ((packed_context << np.uint64(bits)) | token) & context_mask
        doc_start += np.int64(length)


def _aggregate(keys: np.ndarray, tokens: np.ndarray, token_bits: int, fits_64: bool) -> kernels.Grams:
    """Sort and count a block; reorders its arrays.

    If key and token do not fit into 64 bits, the key's rank in the block replaces it while sorting.
    """
    if fits_64:
        keys.sort()
        distinct_count, counts = _run_lengths(keys)
        distinct = keys[:distinct_count]
        return kernels.Grams(distinct >> np.uint64(token_bits), _low_tokens(distinct, token_bits), counts)
    context_keys, key_ranks = np.unique(keys, return_inverse=True)
    packed_grams = (key_ranks.astype(np.uint64) << np.uint64(token_bits)) | tokens
    del key_ranks
    packed_grams.sort()
    distinct_count, counts = _run_lengths(packed_grams)
    distinct = packed_grams[:distinct_count]
    return kernels.Grams(context_keys[distinct >> np.uint64(token_bits)], _low_tokens(distinct, token_bits), counts)


def _low_tokens(packed_grams: np.ndarray, token_bits: int) -> np.ndarray:
    """The tokens in the low bits, uint32."""
    return (packed_grams & np.uint64(2**token_bits - 1)).astype(np.uint32)


@compile_function
def _run_lengths(values: np.ndarray) -> tuple[int, np.ndarray]:
    """Move the distinct values of a sorted array to its front; (their number, uint32 counts)."""
    distinct_count = 0
    for i in range(len(values)):
        if i == 0 or values[i] != values[i - 1]:
            distinct_count += 1
    counts = np.zeros(distinct_count, np.uint32)
    run_index = -1
    for i in range(len(values)):
        if run_index < 0 or values[i] != values[run_index]:
            run_index += 1
            values[run_index] = values[i]
        counts[run_index] += np.uint32(1)
    return distinct_count, counts


def _merge_runs(runs: Runs, memory_bytes: int, title: str) -> Iterator[kernels.Grams]:
    """The sum of all runs, one range of keys after another."""
    partition_sizes = np.diff(runs.bounds, axis=1).sum(axis=0)
    with Stage(title, int(partition_sizes.sum()), "n-grams") as progress:
        for begin, end in group_partitions(partition_sizes, min(memory_bytes // _MERGE_BYTES, _LARGEST_RANGE)):
            run_slices = ([np.array(array[edges[begin] : edges[end]]) for array in runs.grams] for edges in runs.bounds)
            bits = runs.packed_bits
            grams_of_runs = [
                kernels.Grams(keys >> np.uint64(bits), _low_tokens(keys, bits) if bits else tokens, counts)
                for keys, tokens, counts in run_slices
            ]
            if grams_of_runs:  # else no document is long enough for an n-gram
                yield kernels.merge_all(grams_of_runs)
            progress.advance(int(partition_sizes[begin:end].sum()))


def group_partitions(sizes: np.ndarray, max_rows: int) -> Iterator[tuple[int, int]]:
    """Groups of adjacent partitions, of `sizes` rows each, with at most `max_rows` rows per group or one partition."""
    begin, row_ends = 0, np.cumsum(sizes)
    while begin < len(sizes):
        rows_before = row_ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(row_ends, rows_before + max_rows, "right")))
        yield begin, end
        begin = end


def merge_tables(
    tables: Sequence[TrigramTable], min_count: int, max_successors: int | None, folder: Path, memory_bytes: int
) -> TrigramTable:
    """The sum of the tables, pruned (see `merge_level`); the arrays of its levels are mapped from files in `folder`.

    A single table keeps its facts. With several, one suffix array is sorted over all corpora, in memory.
    """
    first_table, levels = tables[0], {}
    for order in sorted(first_table.levels):
        grouped_parts = merge_level(
            [table.levels[order] for table in tables], first_table.vocabulary, min_count, max_successors, memory_bytes
        )
        levels[order] = write_level(grouped_parts, order, first_table.vocabulary, folder / str(order))
    suffixes = first_table.suffixes
    if suffixes is not None and len(tables) > 1:
        token_arrays = [table.suffixes.tokens for table in tables if table.suffixes is not None]
        suffixes = sort_suffixes(np.concatenate(token_arrays), first_table.vocabulary)
    facts = first_table.facts
    if len(tables) > 1:
        facts = {key: sum(table.facts[key] for table in tables) for key in ("tokens", "documents")}
        facts["merged"] = [table.facts for table in tables]
    return replace(first_table, levels=levels, facts=facts, suffixes=suffixes)


def merge_level(
    levels: Sequence[Level], vocab_size: int, min_count: int, max_successors: int | None, memory_bytes: int
) -> Iterator[kernels.Grouped]:
    """The contexts of all `levels` of one order, by ascending keys, in parts; counts and totals are summed.

    N-grams with fewer than `min_count` occurrences over all levels are dropped. Of each context only the
    `max_successors` most frequent ones are kept. Dropped ones still count in its total. memory_bytes: bytes for a part;
    a part has at least a 4096th of the n-grams, and all n-grams of a context.
    """
    partition_bits = min(_TABLE_PART_BITS, levels[0].key_bits)
    key_edges = np.arange(2**partition_bits, dtype=np.uint64) << np.uint64(levels[0].key_bits - partition_bits)
    cuts = [np.r_[np.searchsorted(level.keys, key_edges), len(level.keys)] for level in levels]
    partition_sizes = sum(np.diff(level.starts[cut].astype(np.int64)) for level, cut in zip(levels, cuts, strict=True))
    for begin, end in group_partitions(partition_sizes, min(memory_bytes // _ROW_BYTES, _LARGEST_RANGE)):
        level_parts = [_slice_level(level, cut[begin], cut[end]) for level, cut in zip(levels, cuts, strict=True)]
        grams = kernels.merge_all([part.grams() for part in level_parts])
        grouped = kernels.Grouped(*kernels.group_contexts(*grams, min_count, max_successors or vocab_size))
        yield grouped._replace(totals=_sum_totals(level_parts, grouped.keys))


def _slice_level(level: Level, begin: int, end: int) -> Level:
    """Contexts `begin` to `end` of a level; its `buckets`, which nobody reads, stay those of the whole level."""
    starts = level.starts[begin : end + 1].astype(np.int64)
    successor_slice = slice(starts[0], starts[-1])
    arrays = {"keys": level.keys[begin:end], "totals": level.totals[begin:end], "starts": starts - starts[0]}
    return level._replace(**arrays, tokens=level.tokens[successor_slice], counts=level.counts[successor_slice])


def _sum_totals(parts: Sequence[Level], keys: np.ndarray) -> np.ndarray:
    """The totals of these contexts, summed over `parts`."""
    totals = np.zeros(len(keys), np.uint64)
    for part in parts:
        indices = np.minimum(np.searchsorted(keys, part.keys), max(0, len(keys) - 1))
        is_present = keys[indices] == part.keys if len(keys) else np.zeros(len(part.keys), bool)
        totals[indices[is_present]] += part.totals[is_present]
    return np.minimum(totals, _MAX_COUNT).astype(np.uint32)


def smallest_min_count(table: TrigramTable, max_mb: float) -> int:
    """The smallest minimum count with which the pruned levels of `table` fit into `max_mb`.

    Raises `UserError` if no n-gram would remain.
    """

    def fits(minimum: int) -> bool:
        sizes = {  # by order: the numbers of contexts and n-grams that remain
            order: kernels.count_frequent(level.starts, level.counts, minimum) for order, level in table.levels.items()
        }
        return sum(level_bytes(order, table.vocabulary, *size) for order, size in sizes.items()) <= max_mb * 10**6

    largest_count = max(int(level.counts.max(initial=0)) for level in table.levels.values())
    min_count = 1 + bisect_left(range(1, largest_count + 1), True, key=fits)  # the first count that fits
    require(min_count <= largest_count, "max_mb", max_mb, "room for the most frequent n-grams at least")
    return min_count
