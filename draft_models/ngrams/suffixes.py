# mypy: allow-untyped-defs
"""The corpus by longest suffix: a suffix array over its tokens, in which contexts of up to 12 tokens are found.

n-gram levels know contexts of at most three tokens, and only what followed them often enough. A suffix array has every
place of the corpus, sorted by the tokens that begin there. So the places of a context lie side by side, whatever its
length, and two binary searches find them. It is sorted by the first `REACH` tokens only, which is as far as contexts
go. It takes 6 bytes a token where the vocabulary has fewer than 2^16 tokens, else 8.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from draft_models.ngrams.kernels import lean
from draft_models.ngrams.table_files import token_bits, token_type
from outrider.errors import require

LEAST, REACH = 4, 12  # tokens of a context; n-grams have the shorter ones
SAMPLE = 64  # places of a context that are looked at, evenly spread, where there are many
FEW = 2 * SAMPLE  # so many are looked at one by one
SORT_BYTES = 60  # memory that sorting takes, for each token
_REMEMBERED = 10  # contexts are remembered at 2^10 places


class Suffixes(NamedTuple):
    """tokens: uint16 or uint32 [T], documents one after another, a separator (the vocabulary's size) behind each.

    order: uint32 [T], places in `tokens`, by the `REACH` tokens from there on, equals by place. starts: uint32 [V + 1],
    the places that begin with token t are order[starts[t] : starts[t + 1]]; those of separators come last.
    """

    tokens: np.ndarray
    order: np.ndarray
    starts: np.ndarray


class Places(NamedTuple):
    """Room for the places of a text's last tokens.

    By the number of tokens, int64 [REACH + 1]: first, where they begin in `Suffixes.order`, and number, how many there
    are. near: int64 [2, FEW], of each place what follows it and how many tokens agree before that. followers, tokens,
    counts: int64 [FEW], see `successors_at`.

    begun: int64 [2^`_REMEMBERED`, 3], contexts of `LEAST` − 1 tokens, and where their places begin and end. It holds
    for one corpus. A draft asks for many contexts that differ in their last token alone.
    """

    first: np.ndarray
    number: np.ndarray
    near: np.ndarray
    followers: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray
    begun: np.ndarray


def new_places() -> Places:
    """Empty ones."""
    first, number = np.zeros((2, REACH + 1), np.int64)
    followers, tokens, counts = np.zeros((3, FEW), np.int64)
    begun = np.full((2**_REMEMBERED, 3), -1, np.int64)
    return Places(first, number, np.zeros((2, FEW), np.int64), followers, tokens, counts, begun)


def no_suffixes(vocabulary: int) -> Suffixes:
    """Those of no corpus: every look-up finds nothing."""
    return Suffixes(np.empty(0, token_type(vocabulary + 1)), np.empty(0, np.uint32), np.zeros(1, np.uint32))


def read_only(suffixes: Suffixes) -> Suffixes:
    """Views of its arrays, so that compiled code sees one type however they came about."""
    views = [np.asarray(array).view() for array in suffixes]
    for view in views:
        view.flags.writeable = False
    return Suffixes(*views)


def separated(documents: Iterable[Sequence[int] | np.ndarray], vocabulary: int) -> np.ndarray:
    """`Suffixes.tokens` of documents."""
    kind = token_type(vocabulary + 1)
    end = np.array([vocabulary], kind)
    parts = [part for document in documents for part in (np.asarray(document, kind), end)]
    return np.concatenate([np.empty(0, kind), *parts])


def sort_suffixes(tokens: np.ndarray, vocabulary: int) -> Suffixes:
    """The suffix array of separated `tokens`, in memory: `SORT_BYTES` a token."""
    size, bits = len(tokens), token_bits(vocabulary + 1)
    require(size < 2**32, "suffixes", size, "fewer than 2^32 tokens: places are numbers of 32 bits")
    together = 64 // bits
    padded = np.concatenate([tokens, np.full(REACH + together, vocabulary, tokens.dtype)])
    order, begins = np.arange(size, dtype=np.uint32), np.zeros(size, bool)
    begins[:1] = True
    for offset in range(0, REACH, together):
        groups = np.cumsum(begins)
        alike = np.bincount(groups)[groups] > 1  # what is sorted already stays
        places = order[alike].astype(np.int64) + offset
        keys = np.zeros(len(places), np.uint64)
        for ahead in range(min(together, REACH - offset)):
            keys = (keys << np.uint64(bits)) | padded[places + ahead].astype(np.uint64)
        ranked = np.lexsort((keys, groups[alike]))
        keys, order[alike] = keys[ranked], order[alike][ranked]
        differ = begins[alike]
        differ[1:] |= keys[1:] != keys[:-1]
        begins[alike] = differ
    starts = np.zeros(vocabulary + 1, np.uint32)
    np.cumsum(np.bincount(tokens, minlength=vocabulary + 1)[:vocabulary], out=starts[1:])
    return Suffixes(tokens, order, starts)


def fault_of_suffixes(suffixes: Suffixes) -> str:
    """Why look-up would reach outside of the arrays, or "". Arrays have the lengths that belong together."""
    tokens, order, starts = suffixes
    if starts[0] != 0 or (starts[1:] < starts[:-1]).any() or starts[-1] > len(order):
        return "starts do not ascend from 0 to the number of places"
    if len(order) and order.max() >= len(tokens):
        return "places are not all in the corpus"
    return ""


@lean
def _token_at(suffixes, place):
    """The corpus's token at `place`; beyond it, what separates documents."""
    return np.int64(suffixes.tokens[place]) if place < len(suffixes.tokens) else len(suffixes.starts) - 1


@lean
def _after(suffixes, place, recent, skip, size):
    """Whether the corpus from `place` on comes after the context (1), before it (−1), or begins so (0)."""
    for i in range(1, size):
        wanted = recent[skip + size - 1 - i]
        found = _token_at(suffixes, place + i)
        if found != wanted:
            return 1 if found > wanted else -1
    return 0


@lean
def places_of(suffixes, recent, skip, size):
    """First and end, in `order`, of the places where the last `size` tokens stand, once `skip` are taken away.

    recent[0] is the latest.
    """
    token = recent[skip + size - 1]
    if token + 1 >= len(suffixes.starts):
        return np.int64(0), np.int64(0)
    low, most = np.int64(suffixes.starts[token]), np.int64(suffixes.starts[token + 1])
    high = most
    while low < high:
        middle = (low + high) // 2
        if _after(suffixes, np.int64(suffixes.order[middle]), recent, skip, size) < 0:
            low = middle + 1
        else:
            high = middle
    first, step = low, 1
    while low + step < most and _after(suffixes, np.int64(suffixes.order[low + step]), recent, skip, size) <= 0:
        low, step = low + step, 2 * step  # most contexts have few places
    high = min(low + step, most)
    while low < high:
        middle = (low + high) // 2
        if _after(suffixes, np.int64(suffixes.order[middle]), recent, skip, size) <= 0:
            low = middle + 1
        else:
            high = middle
    return first, low


@lean
def _bound(suffixes, low, high, ahead, token):
    """The first place in order[low : high] that has `token` or a larger one `ahead` tokens on; they ascend by that."""
    while low < high:
        middle = (low + high) // 2
        if _token_at(suffixes, np.int64(suffixes.order[middle]) + ahead) < token:
            low = middle + 1
        else:
            high = middle
    return low


@lean
def _least_places(suffixes, recent, places):
    """`places_of` the last `LEAST` tokens, found among the places of all of them but the latest."""
    ahead, key = LEAST - 1, np.int64(0)
    for i in range(ahead, 0, -1):
        key = (key << 21) | recent[i]  # all ids are below 2^21
    slot = (np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - _REMEMBERED)
    if places.begun[slot, 0] != key:
        places.begun[slot, 1], places.begun[slot, 2] = places_of(suffixes, recent, 1, ahead)
        places.begun[slot, 0] = key
    most, number = places.begun[slot, 2], 0
    first = _bound(suffixes, places.begun[slot, 1], most, ahead, recent[0])
    last = first + FEW - 1
    if last < most and _token_at(suffixes, np.int64(suffixes.order[last]) + ahead) == recent[0]:
        return first, _bound(suffixes, last + 1, most, ahead, recent[0] + 1)
    while first + number < most and (
        _token_at(suffixes, np.int64(suffixes.order[first + number]) + ahead) == recent[0]
    ):
        number += 1  # few are read anyway, and here none of them waits for another
    return first, first + number


@lean
def known_suffixes(suffixes, recent, length, places):
    """(the most tokens that end the text and stand in the corpus, `LEAST` to `REACH`, or `LEAST` − 1 for no such;
    from how many tokens on `places.near` has all there is).

    Once a context has few places, longer ones are looked for among those, and not in all of the corpus.
    """
    vocabulary, reach, size = len(suffixes.starts) - 1, 0, LEAST - 1
    while reach < min(REACH, length) and recent[reach] < vocabulary:
        reach += 1
    while len(suffixes.order) > 0 and size < reach:
        if size < LEAST:
            first, end = _least_places(suffixes, recent, places)
        else:
            first, end = places_of(suffixes, recent, 0, size + 1)
        if first == end:
            break
        size += 1
        places.first[size], places.number[size] = first, end - first
        if end - first < FEW:
            return _look_closer(suffixes, recent, reach, first, end, size, places), size
    return size, size + 1


@lean
def _look_closer(suffixes, recent, reach, first, end, size, places):
    """Fill `places.near` with order[first : end], of a context of `size` tokens; the most tokens that agree there."""
    places.number[size + 1 :] = 0
    longest = size
    for i in range(end - first):  # a loop of its own: the corpus is far, and what does not wait is read at once
        places.near[0, i] = _token_at(suffixes, np.int64(suffixes.order[first + i]) + size)
    for i in range(end - first):
        before, agree = np.int64(suffixes.order[first + i]) - 1, size
        while agree < reach and before >= 0 and suffixes.tokens[before] == recent[agree]:
            agree, before = agree + 1, before - 1
            places.number[agree] += 1
        places.near[1, i] = agree
        longest = max(longest, agree)
    return longest


@lean
def successors_at(suffixes, size, narrow, places):
    """What follows a context of `size` tokens that `known_suffixes` has found, with its second answer as `narrow`.

    `places.followers` gets what follows each place that is looked at, `places.tokens` and `places.counts` the distinct
    successors and how often each came. Returns how many there are, the largest count, and the number of places looked
    at, ends of documents among them.
    """
    found, largest, seen, followers = 0, 0, 0, places.followers
    if size >= narrow:
        for i in range(places.number[narrow]):
            if places.near[1, i] >= size:
                followers[seen] = places.near[0, i]
                seen += 1
    else:
        for i in range(0, places.number[size], max(1, places.number[size] // SAMPLE)):
            followers[seen] = _token_at(suffixes, np.int64(suffixes.order[places.first[size] + i]) + size)
            seen += 1
    ascend = min(size, narrow) < REACH  # by what is beyond it, places are not sorted
    for i in range(seen):
        token = followers[i]
        if token >= len(suffixes.starts) - 1:
            continue
        at = max(0, found - 1) if ascend else 0
        while at < found and places.tokens[at] != token:
            at += 1
        if at == found:
            places.tokens[at], places.counts[at] = token, 0
            found += 1
        places.counts[at] += 1
        largest = max(largest, places.counts[at])
    return found, largest, seen
