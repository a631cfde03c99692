# mypy: allow-untyped-defs
"""Compiled parts of the n-gram table: packing, mixing and finding contexts; grouping and merging counts.

A context of n−1 tokens is packed into an integer of (n−1)·bits bits, the latest token lowest; its key is `mix` of the
integer. The successors of a context are the tokens that followed it. A level is the n-grams of one order n: arrays
sorted by key, and buckets, which say where the keys with the same top bits begin. In the signature of a compiled
function `int` is an int64, `float` a float64.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
from numba import typeof
from numba.core.dispatcher import Dispatcher

from outrider.base.compiled import compile_function
from outrider.base.errors import require

MAX_VOCABULARY = 2**21  # so that the context of a 4-gram fits 63 bits
_LARGEST = np.uint64(2**32 - 1)  # counts saturate here

Function = TypeVar("Function", bound=Callable[..., object])
Arrays = TypeVar("Arrays", bound=NamedTuple)
P = ParamSpec("P")
R = TypeVar("R")


def lean(function: Function) -> Function:
    """`function`, compiled without reference counting of arrays, so it cannot create arrays. Counting would take 40 %
    of the time of functions that run in every draft."""
    return compile_function(function, counts_references=False)


def compiled_for(function: Callable[P, R], arguments: Sequence[object]) -> Callable[P, R]:
    """The numba `function` compiled for the types of these arguments. It skips numba's type dispatch, which takes 15 µs
    per call with many arrays; it must not be called with other types."""
    assert isinstance(function, Dispatcher)
    return function.compile(tuple(map(typeof, arguments)))


def read_only(array_tuple: Arrays) -> Arrays:
    """A named tuple with read-only views of its arrays, so that compiled code sees one type whatever their origin."""
    fields = [np.asarray(field).view() if isinstance(field, np.ndarray) else field for field in array_tuple]
    for field in fields:
        if isinstance(field, np.ndarray):
            field.flags.writeable = False
    return array_tuple._make(fields)


def token_bits(vocabulary: int) -> int:
    """Bits per token in a packed context."""
    return max(1, (vocabulary - 1).bit_length())


def token_type(vocabulary: int) -> np.dtype:
    """The smallest type of token ids below `vocabulary`."""
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)


def require_vocabulary(vocabulary: int) -> None:
    """Raise `UserError` unless token ids below `vocabulary` fit the packing."""
    require(1 <= vocabulary <= MAX_VOCABULARY, "vocabulary", vocabulary, f"1 to {MAX_VOCABULARY} tokens")


class Grams(NamedTuple):
    """n-grams of one order: context keys uint64 [N], last tokens uint32 [N], counts uint32 [N].

    Sorted by (key, token), without duplicates, wherever this type is passed on.
    """

    keys: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray


class Grouped(NamedTuple):
    """C contexts with their successors: keys uint64 [C] ascending; lengths uint32 [C], the number of successors; totals
    uint32 [C], the sum of their counts, left-out successors included; tokens and counts uint32 [S], context by context,
    by falling count, then by id."""

    keys: np.ndarray
    lengths: np.ndarray
    totals: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray


@lean
def mix(packed: np.uint64, width: int) -> np.uint64:
    """A bijection on integers of `width` bits (1 to 63), uint64 → uint64, whose top bits depend on all of `packed`.

    x ^= x >> h; x = x·A mod 2^width; twice; x ^= x >> h, with h = ⌈width/2⌉ and odd A (splitmix64's two).
    """
    unit = np.uint64(1)
    bits = np.uint64(width)
    mask = (unit << bits) - unit
    half_width = (bits + unit) >> unit
    x = np.uint64(packed)
    x ^= x >> half_width
    x = (x * np.uint64(0xBF58476D1CE4E5B9)) & mask
    x ^= x >> half_width
    x = (x * np.uint64(0x94D049BB133111EB)) & mask
    x ^= x >> half_width
    return x


@lean
def context_key(ids: np.ndarray, end: int, size: int, bits: int) -> np.uint64:
    """Key of the context ids[end − size : end], all below the vocabulary; `bits` per token."""
    packed_context = np.uint64(0)
    for i in range(end - size, end):
        packed_context = (packed_context << np.uint64(bits)) | np.uint64(ids[i])
    return mix(packed_context, size * bits)


@lean
def find_key(buckets, shift, keys, key):
    """Index of `key` in `keys`, or −1. The keys of bucket b = key >> shift are keys[buckets[b] : buckets[b + 1]]."""
    bucket = np.int64(key >> np.uint64(shift))
    for i in range(np.int64(buckets[bucket]), min(np.int64(buckets[bucket + 1]), len(keys))):
        if keys[i] == key:
            return i
    return -1


@lean
def successors_of(starts, tokens, index):
    """Begin and end, in `tokens`, of the successors of context `index`; never beyond `tokens`, even if the mapped file
    changed after it was checked."""
    successor_end = min(np.int64(starts[index + 1]), len(tokens))
    return min(np.int64(starts[index]), successor_end), successor_end


FAULTS = (  # the faults that `find_level_fault` finds; index 0: no fault
    "",
    "buckets do not lead to their keys",
    "keys do not ascend within their width",
    "starts do not ascend from 0 to the number of successors",
    "tokens are not all in the vocabulary",
    "counts of a context do not descend to 1 or more",
    "totals are less than the counts they stand for",
)


@compile_function
def find_level_fault(buckets, shift, keys, key_bits, starts, totals, tokens, counts, vocabulary):
    """The index in `FAULTS` of the first way in which a level's arrays violate what `group_contexts` guarantees.

    Compiled look-up checks no index and relies on this. The arrays' lengths must already fit together.
    """
    context_count, successor_count = len(keys), len(tokens)
    if buckets[0] != 0 or buckets[len(buckets) - 1] != context_count:
        return 1
    for bucket in range(len(buckets) - 1):
        if buckets[bucket] > buckets[bucket + 1] or buckets[bucket + 1] > context_count:
            return 1
        for i in range(np.int64(buckets[bucket]), np.int64(buckets[bucket + 1])):
            if np.int64(keys[i] >> np.uint64(shift)) != bucket:
                return 1
            if (i > 0 and keys[i] <= keys[i - 1]) or (keys[i] >> np.uint64(key_bits)) != 0:
                return 2
    if starts[0] != 0 or starts[context_count] != successor_count:
        return 3
    for context_index in range(context_count):
        begin, end = np.int64(starts[context_index]), np.int64(starts[context_index + 1])
        if not 0 <= begin < end <= successor_count:
            return 3
        count_sum, previous_count = np.uint64(0), _LARGEST
        for i in range(begin, end):
            if tokens[i] >= vocabulary:
                return 4
            if not 1 <= counts[i] <= previous_count:
                return 5
            previous_count = np.uint64(counts[i])
            count_sum += previous_count
        if np.uint64(totals[context_index]) < min(count_sum, _LARGEST):
            return 6
    return 0


@compile_function
def context_grams(ids: np.ndarray, order: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(keys uint64, tokens uint32) of all n-grams of one document, in order of position."""
    gram_count = max(0, len(ids) - order + 1)
    context_keys, last_tokens = np.empty(gram_count, np.uint64), np.empty(gram_count, np.uint32)
    for i in range(gram_count):
        context_keys[i] = context_key(ids, i + order - 1, order - 1, bits)
        last_tokens[i] = ids[i + order - 1]
    return context_keys, last_tokens


@compile_function
def group_contexts(
    keys: np.ndarray, tokens: np.ndarray, counts: np.ndarray, min_count: int, max_successors: int
) -> tuple[np.ndarray, ...]:
    """`Grams` → the fields of `Grouped`, without successors of fewer than `min_count` and contexts of only such ones.

    Example: a context with the tokens 1, 2, 9 and counts 4, 7, 1 has, for min_count 2, the tokens 2, 1 and total 12.
    """
    n_keys = len(keys)
    out_keys, lengths, totals = np.empty(n_keys, np.uint64), np.empty(n_keys, np.uint32), np.empty(n_keys, np.uint32)
    sort_keys = np.empty(n_keys, np.uint64)  # (largest count − count, token): the most frequent first, then by id
    context_count, successor_count, group_begin = 0, 0, 0
    while group_begin < n_keys:
        end, count_sum, sort_end = group_begin, np.uint64(0), successor_count
        while end < n_keys and keys[end] == keys[group_begin]:
            count_sum += np.uint64(counts[end])
            if counts[end] >= min_count:
                sort_keys[sort_end] = ((_LARGEST - np.uint64(counts[end])) << np.uint64(32)) | np.uint64(tokens[end])
                sort_end += 1
            end += 1
        _sort(sort_keys, successor_count, sort_end)
        kept_count = min(sort_end - successor_count, max_successors)
        if kept_count:
            out_keys[context_count], lengths[context_count] = keys[group_begin], kept_count
            totals[context_count] = min(count_sum, _LARGEST)
            context_count, successor_count = context_count + 1, successor_count + kept_count
        group_begin = end
    out_tokens, out_counts = np.empty(successor_count, np.uint32), np.empty(successor_count, np.uint32)
    for i in range(successor_count):
        out_tokens[i] = sort_keys[i] & _LARGEST
        out_counts[i] = _LARGEST - (sort_keys[i] >> np.uint64(32))
    return out_keys[:context_count], lengths[:context_count], totals[:context_count], out_tokens, out_counts


@compile_function
def _sort(values: np.ndarray, begin: int, end: int) -> None:
    if end - begin > 24:
        values[begin:end].sort()
        return
    for i in range(begin + 1, end):  # insertion sort: most contexts have few successors
        value, j = values[i], i
        while j > begin and values[j - 1] > value:
            values[j] = values[j - 1]
            j -= 1
        values[j] = value


@compile_function
def merge_grams(first: Grams, second: Grams) -> tuple[np.ndarray, ...]:
    """The fields of the sum of two `Grams`; counts saturate at 2^32 − 1."""
    keys_a, tokens_a, counts_a = first
    keys_b, tokens_b, counts_b = second
    capacity = len(keys_a) + len(keys_b)
    keys, tokens, counts = np.empty(capacity, np.uint64), np.empty(capacity, np.uint32), np.empty(capacity, np.uint32)
    a, b, out_count = 0, 0, 0
    while a < len(keys_a) or b < len(keys_b):
        has_a, has_b = a < len(keys_a), b < len(keys_b)
        if has_a and has_b and keys_a[a] == keys_b[b] and tokens_a[a] == tokens_b[b]:
            keys[out_count], tokens[out_count] = keys_a[a], tokens_a[a]
            counts[out_count] = min(np.uint64(counts_a[a]) + np.uint64(counts_b[b]), _LARGEST)
            a, b = a + 1, b + 1
        elif has_a and (not has_b or keys_a[a] < keys_b[b] or (keys_a[a] == keys_b[b] and tokens_a[a] < tokens_b[b])):
            keys[out_count], tokens[out_count], counts[out_count] = keys_a[a], tokens_a[a], counts_a[a]
            a += 1
        else:
            keys[out_count], tokens[out_count], counts[out_count] = keys_b[b], tokens_b[b], counts_b[b]
            b += 1
        out_count += 1
    return keys[:out_count], tokens[:out_count], counts[:out_count]


@compile_function
def count_buckets(keys, shift, buckets):
    """Write `Level.buckets` of ascending keys to `buckets`, which are zeros."""
    for key in keys:
        buckets[np.int64(key >> np.uint64(shift)) + 1] += np.uint32(1)
    for bucket in range(1, len(buckets)):
        buckets[bucket] += buckets[bucket - 1]


@compile_function
def count_frequent(starts, counts, min_count):
    """The numbers of contexts and of successors with a count ≥ `min_count`; a context's first count is its largest."""
    context_count, successor_count = 0, 0
    for context_index in range(len(starts) - 1):
        context_count += counts[np.int64(starts[context_index])] >= min_count
    for count in counts:
        successor_count += count >= min_count
    return context_count, successor_count


def merge_all(grams_list: Sequence[Grams]) -> Grams:
    """The sum of one or more `Grams`, added in pairs."""
    while len(grams_list) > 1:
        pairs = [grams_list[i : i + 2] for i in range(0, len(grams_list), 2)]
        grams_list = [Grams(*merge_grams(*pair)) if len(pair) == 2 else pair[0] for pair in pairs]
    return grams_list[0]


def count_grams(document_grams: Sequence[tuple[np.ndarray, np.ndarray]]) -> Grams:
    """(keys, tokens) of each document's n-grams, by `context_grams` → `Grams`."""
    keys = np.concatenate([np.empty(0, np.uint64), *(keys for keys, _ in document_grams)])
    tokens = np.concatenate([np.empty(0, np.uint32), *(tokens for _, tokens in document_grams)])
    sort_order = np.lexsort((tokens, keys))
    keys, tokens = keys[sort_order], tokens[sort_order]
    is_first = np.ones(len(keys), bool)
    is_first[1:] = (keys[1:] != keys[:-1]) | (tokens[1:] != tokens[:-1])
    first_indices = np.flatnonzero(is_first)
    return Grams(keys[first_indices], tokens[first_indices], np.diff(first_indices, append=len(keys)).astype(np.uint32))
