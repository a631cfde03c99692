# mypy: allow-untyped-defs
"""A suffix array over the corpus, for longest-suffix matches with contexts of up to 12 tokens.

The n-gram table has contexts of at most three tokens, and only frequent successors. A suffix array lists every position
of the corpus, sorted by the tokens from there on. The occurrences of a context of any length are therefore adjacent,
and two binary searches find them. Example: the documents "a b c" and "a b d" with the ids 0 to 3 are

    tokens  0 1 2 4 0 1 3 4     4 ends a document
    order   0 4 1 5 2 6 3 7     the positions of a, a, b, b, c, d, and of both ends
    starts  0 2 4 5 6           order[0 : 2] are the positions of a, order[2 : 4] those of b

The context "a b" occurs at order[0 : 2], that is at positions 0 and 4. The tokens two later, c and d, are its
successors.

Positions are sorted by the first `REACH` tokens only, the longest context. The array takes 6 bytes a token if the
vocabulary has fewer than 2^16 tokens, else 8. A draft calls `find_suffixes` once, and `count_successors` for each
context length. `recent` are the text's last tokens, the latest first. A position's suffix is the corpus from there on.
Functions under `lean` are compiled by numba, and create no arrays.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from outrider.base.errors import require
from outrider.draft_models.ngrams.kernels import lean, token_bits, token_type

LEAST, REACH = 4, 12  # minimum and maximum tokens of a context; the n-gram table has the shorter contexts
SAMPLE = 64  # occurrences of a frequent context that are sampled, evenly spread
FEW = 2 * SAMPLE  # with fewer occurrences than this, all are read
SORT_BYTES = 60  # memory of sorting, per token
_REMEMBERED = 10  # contexts are cached in 2^10 slots


class Suffixes(NamedTuple):
    """tokens: uint16 or uint32 [T], documents one after another, a separator (the vocabulary's size) after each.

    order: uint32 [T], positions in `tokens`, sorted by the `REACH` tokens from there on, then by position. starts:
    uint32 [V + 1]: the positions of token t are order[starts[t] : starts[t + 1]]; those of separators come last.
    """

    tokens: np.ndarray
    order: np.ndarray
    starts: np.ndarray


class SuffixWorkspace(NamedTuple):
    """Arrays that look-ups fill, made once.

    first, number: int64 [REACH + 1]: for each context length, where its occurrences begin in `Suffixes.order`, and how
    many they are. near: int64 [2, FEW]: for each occurrence of a context with few occurrences, the next token, and how
    many tokens before that token match the text. followers, tokens, counts: int64 [FEW], see `count_successors`.

    cache: int64 [2^`_REMEMBERED`, 3], for one corpus: contexts of `LEAST` − 1 tokens with begin and end of their
    occurrences. The contexts of a draft often differ only in their last token.
    """

    first: np.ndarray
    number: np.ndarray
    near: np.ndarray
    followers: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray
    cache: np.ndarray


def new_suffix_workspace() -> SuffixWorkspace:
    begins, occurrence_counts = np.zeros((2, REACH + 1), np.int64)
    followers, tokens, counts = np.zeros((3, FEW), np.int64)
    cache = np.full((2**_REMEMBERED, 3), -1, np.int64)
    return SuffixWorkspace(begins, occurrence_counts, np.zeros((2, FEW), np.int64), followers, tokens, counts, cache)


def no_suffixes(vocabulary: int) -> Suffixes:
    """The suffix array of an empty corpus: look-ups find nothing."""
    return Suffixes(np.empty(0, token_type(vocabulary + 1)), np.empty(0, np.uint32), np.zeros(1, np.uint32))


def join_documents(documents: Iterable[Sequence[int] | np.ndarray], vocabulary: int) -> np.ndarray:
    """`Suffixes.tokens` of documents, sequences of token ids."""
    dtype = token_type(vocabulary + 1)
    separator = np.array([vocabulary], dtype)
    token_arrays = [array for document in documents for array in (np.asarray(document, dtype), separator)]
    return np.concatenate([np.empty(0, dtype), *token_arrays])


def sort_suffixes(tokens: np.ndarray, vocabulary: int) -> Suffixes:
    """The suffix array of separated `tokens`, sorted in memory: `SORT_BYTES` per token.

    A step of the loop sorts positions whose first `sorted_depth` tokens are equal (a group) by the next few tokens, as
    many as fit a key of 64 bits. starts_group [T]: whether the suffix at order[i] begins a group.
    """
    token_count, bits = len(tokens), token_bits(vocabulary + 1)
    require(token_count < 2**32, "suffixes", token_count, "fewer than 2^32 tokens: places are numbers of 32 bits")
    tokens_per_key = 64 // bits
    padded_tokens = np.concatenate([tokens, np.full(REACH + tokens_per_key, vocabulary, tokens.dtype)])
    order, starts_group = np.arange(token_count, dtype=np.uint32), np.zeros(token_count, bool)
    starts_group[:1] = True
    for sorted_depth in range(0, REACH, tokens_per_key):
        group_numbers = np.cumsum(starts_group)
        is_tied = np.bincount(group_numbers)[group_numbers] > 1  # others are already in their order
        key_positions = order[is_tied].astype(np.int64) + sorted_depth
        sort_keys = np.zeros(len(key_positions), np.uint64)
        for offset in range(min(tokens_per_key, REACH - sorted_depth)):
            sort_keys = (sort_keys << np.uint64(bits)) | padded_tokens[key_positions + offset].astype(np.uint64)
        sort_order = np.lexsort((sort_keys, group_numbers[is_tied]))
        sort_keys, order[is_tied] = sort_keys[sort_order], order[is_tied][sort_order]
        tied_starts_group = starts_group[is_tied]
        tied_starts_group[1:] |= sort_keys[1:] != sort_keys[:-1]
        starts_group[is_tied] = tied_starts_group
    token_starts = np.zeros(vocabulary + 1, np.uint32)
    np.cumsum(np.bincount(tokens, minlength=vocabulary + 1)[:vocabulary], out=token_starts[1:])
    return Suffixes(tokens, order, token_starts)


def find_suffix_fault(suffixes: Suffixes, vocabulary: int) -> str:
    """The reason why compiled look-up, which checks no index, would read outside the arrays; "": there is none."""
    tokens, order, starts = suffixes
    expected = [(token_type(vocabulary + 1), len(tokens)), (np.uint32, len(tokens)), (np.uint32, vocabulary + 1)]
    if [(array.dtype, len(array)) for array in suffixes] != expected:
        return f"arrays are {[f'{len(array)} of {array.dtype}' for array in suffixes]}"
    if starts[0] != 0 or (starts[1:] < starts[:-1]).any() or starts[-1] > len(order):
        return "starts do not ascend from 0 to the number of places"
    if len(order) and order.max() >= len(tokens):
        return "places are not all in the corpus"
    return ""


@lean
def _token_at(suffixes, position):
    """The corpus's token at `position`; the separator beyond its end."""
    return np.int64(suffixes.tokens[position]) if position < len(suffixes.tokens) else len(suffixes.starts) - 1


@lean
def _compare_suffix(suffixes, position, recent, skip, size):
    """1 if the corpus from `position` on sorts after a context, −1 if before, 0 if it begins with the context.

    The context is the last `size` tokens before the latest `skip` tokens. Example: of the text "a b c" with skip 1 and
    size 2 it is "a b". Its first token is not compared.
    """
    for i in range(1, size):
        context_token = recent[skip + size - 1 - i]
        token = _token_at(suffixes, position + i)
        if token != context_token:
            return 1 if token > context_token else -1
    return 0


@lean
def find_occurrences(suffixes, recent, skip, size):
    """Begin and end, in `order`, of the occurrences of the last `size` tokens before the latest `skip` tokens."""
    first_token = recent[skip + size - 1]
    if first_token + 1 >= len(suffixes.starts):
        return np.int64(0), np.int64(0)
    low, stop = np.int64(suffixes.starts[first_token]), np.int64(suffixes.starts[first_token + 1])
    high = stop
    while low < high:  # binary search of the begin
        middle = (low + high) // 2
        if _compare_suffix(suffixes, np.int64(suffixes.order[middle]), recent, skip, size) < 0:
            low = middle + 1
        else:
            high = middle
    begin, step = low, 1
    while (
        low + step < stop and _compare_suffix(suffixes, np.int64(suffixes.order[low + step]), recent, skip, size) <= 0
    ):
        low, step = low + step, 2 * step  # bound the end by growing steps: most contexts have few occurrences
    high = min(low + step, stop)
    while low < high:  # binary search of the end
        middle = (low + high) // 2
        if _compare_suffix(suffixes, np.int64(suffixes.order[middle]), recent, skip, size) <= 0:
            low = middle + 1
        else:
            high = middle
    return begin, low


@lean
def _find_bound(suffixes, low, high, distance, token):
    """The first index in order[low : high] whose token `distance` positions later is ≥ `token`; these tokens ascend."""
    while low < high:
        middle = (low + high) // 2
        if _token_at(suffixes, np.int64(suffixes.order[middle]) + distance) < token:
            low = middle + 1
        else:
            high = middle
    return low


@lean
def _find_shortest_occurrences(suffixes, recent, workspace):
    """`find_occurrences` of the last `LEAST` tokens, searched among the cached occurrences of all but the latest."""
    prefix_length, packed_prefix = LEAST - 1, np.int64(0)
    for recent_index in range(prefix_length, 0, -1):
        packed_prefix = (packed_prefix << 21) | recent[recent_index]  # all ids are below 2^21
    slot = (np.uint64(packed_prefix) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - _REMEMBERED)
    if workspace.cache[slot, 0] != packed_prefix:
        workspace.cache[slot, 1], workspace.cache[slot, 2] = find_occurrences(suffixes, recent, 1, prefix_length)
        workspace.cache[slot, 0] = packed_prefix
    range_end, occurrence_count = workspace.cache[slot, 2], 0
    first_index = _find_bound(suffixes, workspace.cache[slot, 1], range_end, prefix_length, recent[0])
    probe = first_index + FEW - 1  # if it is an occurrence too, there are at least `FEW`
    if probe < range_end and _token_at(suffixes, np.int64(suffixes.order[probe]) + prefix_length) == recent[0]:
        return first_index, _find_bound(suffixes, probe + 1, range_end, prefix_length, recent[0] + 1)
    while first_index + occurrence_count < range_end and (
        _token_at(suffixes, np.int64(suffixes.order[first_index + occurrence_count]) + prefix_length) == recent[0]
    ):
        occurrence_count += 1  # few occurrences are read in any case, and these reads do not depend on one another
    return first_index, first_index + occurrence_count


@lean
def find_suffixes(suffixes, recent, text_length, workspace):
    """Look up the text's last tokens as contexts of each length. Returns (the length of the longest context in the
    corpus, the context length from which on `workspace.near` is used).

    The first result is `LEAST` to `REACH`, or `LEAST` − 1: no such context. Once a context has fewer than `FEW`
    occurrences, all of them are read to `workspace.near`, and longer contexts are searched among them.
    """
    vocab_size, max_length, context_length = len(suffixes.starts) - 1, 0, LEAST - 1
    while max_length < min(REACH, text_length) and recent[max_length] < vocab_size:
        max_length += 1
    while len(suffixes.order) > 0 and context_length < max_length:
        if context_length < LEAST:
            first, end = _find_shortest_occurrences(suffixes, recent, workspace)
        else:
            first, end = find_occurrences(suffixes, recent, 0, context_length + 1)
        if first == end:
            break
        context_length += 1
        workspace.first[context_length], workspace.number[context_length] = first, end - first
        if end - first < FEW:
            return _match_each(suffixes, recent, max_length, first, end, context_length, workspace), context_length
    return context_length, context_length + 1


@lean
def _match_each(suffixes, recent, max_length, first, end, size, workspace):
    """Fill `workspace.near` from order[first : end], of a context of `size` tokens; return the longest match.

    `workspace.number` gets the number of occurrences of each longer context, up to `max_length` tokens.
    """
    workspace.number[size + 1 :] = 0
    longest_match = size
    for i in range(end - first):  # a separate loop: independent reads overlap their cache misses
        workspace.near[0, i] = _token_at(suffixes, np.int64(suffixes.order[first + i]) + size)
    for i in range(end - first):
        position, match_length = np.int64(suffixes.order[first + i]) - 1, size
        while match_length < max_length and position >= 0 and suffixes.tokens[position] == recent[match_length]:
            match_length, position = match_length + 1, position - 1
            workspace.number[match_length] += 1
        workspace.near[1, i] = match_length
        longest_match = max(longest_match, match_length)
    return longest_match


@lean
def count_successors(suffixes, size, near_from, workspace):
    """Count the successors of a context of `size` tokens. near_from: the second result of `find_suffixes`.

    `workspace.followers` gets the token after each sampled occurrence, `workspace.tokens` and `workspace.counts` the
    distinct successors and their counts. Returns the number of distinct successors, the largest count, and the number
    of occurrences sampled, ends of documents included.
    """
    successor_count, largest_count, sample_count, followers = 0, 0, 0, workspace.followers
    if size >= near_from:
        for i in range(workspace.number[near_from]):
            if workspace.near[1, i] >= size:
                followers[sample_count] = workspace.near[0, i]
                sample_count += 1
    else:
        for i in range(0, workspace.number[size], max(1, workspace.number[size] // SAMPLE)):
            followers[sample_count] = _token_at(suffixes, np.int64(suffixes.order[workspace.first[size] + i]) + size)
            sample_count += 1
    is_sorted = min(size, near_from) < REACH  # then equal followers are adjacent; tokens beyond `REACH` are not sorted
    for i in range(sample_count):
        token = followers[i]
        if token >= len(suffixes.starts) - 1:
            continue
        successor_index = max(0, successor_count - 1) if is_sorted else 0
        while successor_index < successor_count and workspace.tokens[successor_index] != token:
            successor_index += 1
        if successor_index == successor_count:
            workspace.tokens[successor_index], workspace.counts[successor_index] = token, 0
            successor_count += 1
        workspace.counts[successor_index] += 1
        largest_count = max(largest_count, workspace.counts[successor_index])
    return successor_count, largest_count, sample_count
