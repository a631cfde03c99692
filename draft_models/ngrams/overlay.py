# mypy: allow-untyped-defs
"""Data that n-gram drafting learns while decoding, added to a read-only n-gram table: raised probabilities, a text
index, and the target's likeliest tokens after every token of a draft, accepted or not (`Recycled`).

The first two are a `ContextMap`: contexts with weighted successors, in flat arrays for compiled code. In an `Overlay`
a weight is a probability raised by Algorithm 2 of ADED (arXiv 2407.12021), which replaces the table's. In a
`TextIndex` a weight counts how often a token followed a context of 1 to K tokens in the text so far, with older
occurrences decayed. A `Level` is the table's n-grams of one order. Functions under `lean` are compiled by numba, and
create no arrays.
"""

from typing import NamedTuple

import numpy as np

from outrider.base.errors import UserError
from outrider.draft_models.ngrams.kernels import context_key, find_key, lean, read_only, successors_of
from outrider.draft_models.ngrams.table import Level, TrigramTable

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the factor of Fibonacci hashing
_LOAD = 2  # minimum slots per context; a map has slots / `_LOAD` entries
_SLOTS = 1 << 15  # of `Recycled`: 2.5 MB with eight tokens each
# Records of a `ContextMap`.
_SLOT = np.dtype([("key", np.uint64), ("sum", np.float64), ("head", np.int32), ("seen", np.int32)], align=True)
_ENTRY = np.dtype([("weight", np.float64), ("token", np.int32), ("following", np.int32)], align=True)


class ContextMap(NamedTuple):
    """Contexts in an open hash table of 2^b slots. A context's successors are a linked list by falling weight.

    slots: records [2^b] of a context's key, the sum of its weights, its head (first entry; −1: the slot is free) and
    how often it was seen. entries: records [E] of a successor's weight, its token, and the next entry (−1: none).
    used: int64 [2], the numbers of contexts and entries.
    """

    slots: np.ndarray
    entries: np.ndarray
    used: np.ndarray


def new_map(max_contexts: int = 1 << 10) -> ContextMap:
    """An empty map with capacity for `max_contexts` contexts and as many entries."""
    slot_count = 1 << max(4, (_LOAD * max_contexts - 1).bit_length())
    slots = np.zeros(slot_count, _SLOT)
    slots["head"] = -1
    return ContextMap(slots, np.zeros(slot_count // _LOAD, _ENTRY), np.zeros(2, np.int64))


def with_capacity(context_map: ContextMap, added_count: int) -> ContextMap:
    """`context_map`, or a larger copy of it, with capacity for `added_count` further contexts and entries."""
    needed_capacity = max(int(context_map.used[0]), int(context_map.used[1])) + added_count
    if needed_capacity <= len(context_map.entries):
        return context_map
    larger_map = new_map(2 * needed_capacity)
    _copy_contexts(context_map, larger_map)
    larger_map.entries[: context_map.used[1]] = context_map.entries[: context_map.used[1]]
    larger_map.used[:] = context_map.used
    return larger_map


@lean
def slot_of(contexts, key):
    """The slot of context `key`, or the free slot (head −1) where it would be inserted."""
    slot_count = len(contexts.slots)
    slot = np.int64((key * _GOLDEN) >> np.uint64(32)) & (slot_count - 1)
    while contexts.slots[slot].head >= 0 and contexts.slots[slot].key != key:
        slot = (slot + 1) & (slot_count - 1)
    return slot


@lean
def _copy_contexts(contexts: ContextMap, larger: ContextMap) -> None:
    for slot in range(len(contexts.slots)):
        if contexts.slots[slot].head >= 0:
            larger.slots[slot_of(larger, contexts.slots[slot].key)] = contexts.slots[slot]


@lean
def _unlink_entry(contexts: ContextMap, slot: int, token: int) -> int:
    """Unlink the entry of `token` at `slot`; returns its index, −1 if there is none."""
    previous_index, entry_index = -1, contexts.slots[slot].head
    while entry_index >= 0 and contexts.entries[entry_index].token != token:
        previous_index, entry_index = entry_index, contexts.entries[entry_index].following
    if entry_index >= 0:
        if previous_index < 0:
            contexts.slots[slot].head = contexts.entries[entry_index].following
        else:
            contexts.entries[previous_index].following = contexts.entries[entry_index].following
    return entry_index


@lean
def _insert_entry(contexts: ContextMap, slot: int, entry: int) -> None:
    """Insert `entry` by falling weight; of equal weights the newest comes first."""
    weight = contexts.entries[entry].weight
    previous_index, next_index = -1, contexts.slots[slot].head
    while next_index >= 0 and contexts.entries[next_index].weight > weight:
        previous_index, next_index = next_index, contexts.entries[next_index].following
    contexts.entries[entry].following = next_index
    if previous_index < 0:
        contexts.slots[slot].head = entry
    else:
        contexts.entries[previous_index].following = entry


@lean
def _new_entry(contexts: ContextMap, slot: int, key: np.uint64, token: int, weight: float) -> int:
    """The index of a new entry, not linked yet; a free slot becomes that of context `key`."""
    if contexts.slots[slot].head < 0 and contexts.slots[slot].seen == 0:
        contexts.slots[slot].key = key
        contexts.used[0] += 1
    entry_index = contexts.used[1]
    contexts.used[1] += 1
    contexts.entries[entry_index].token, contexts.entries[entry_index].weight = token, weight
    return entry_index


@lean
def table_probability(level: Level, key: np.uint64, token: int) -> float:
    """The table's P(token | context `key`); 0 if it has no such n-gram."""
    context_index = find_key(level.buckets, level.shift, level.keys, key)
    if context_index >= 0:
        begin, end = successors_of(level.starts, level.tokens, context_index)
        for i in range(begin, end):
            if level.tokens[i] == token:
                return level.counts[i] / max(level.totals[context_index], 1)
    return 0.0


@lean
def adapt(contexts, level, ids, start, stop, vocabulary, increment, highest):
    """ADED's Algorithm 2 over the n-grams that end at ids[start : stop], without those with ids ≥ `vocabulary`."""
    context_length = level.order - 1
    for position in range(max(start, context_length), stop):
        all_in_vocabulary = ids[position] < vocabulary
        for i in range(position - context_length, position):
            all_in_vocabulary = all_in_vocabulary and ids[i] < vocabulary
        if not all_in_vocabulary:
            continue
        key = context_key(ids, position, context_length, level.bits)
        slot = slot_of(contexts, key)
        entry_index = _unlink_entry(contexts, slot, ids[position])
        if entry_index < 0:
            entry_index = _new_entry(contexts, slot, key, ids[position], table_probability(level, key, ids[position]))
        else:
            contexts.slots[slot].sum -= contexts.entries[entry_index].weight
        contexts.entries[entry_index].weight = min(contexts.entries[entry_index].weight + increment, highest)
        contexts.slots[slot].sum += contexts.entries[entry_index].weight
        contexts.slots[slot].seen += 1
        _insert_entry(contexts, slot, entry_index)


class Overlay:
    """Probabilities of n-grams of one order, raised above the table's by occurrences in the text (Algorithm 2).

    P ← min(P + increment, highest); n-grams that the table lacks start at 0. Example: with increment 0.4 and highest
    0.7 an n-gram of P = 0.1 that occurs twice gets 0.5, then 0.7. Raises `UserError` if the table has no n-grams of
    that order.
    """

    def __init__(self, table: TrigramTable, order: int = 3, increment: float = 0.4, highest: float = 0.7):
        if order not in table.levels:
            raise UserError(f"order={order}: the n-gram table has orders {sorted(table.levels)} only")
        self.table, self.order, self.increment, self.highest = table, order, increment, highest
        self.level = read_only(table.levels[order])
        self.reset()

    def reset(self) -> None:
        self.contexts = new_map()

    def learn(self, ids: np.ndarray, start: int, stop: int) -> None:
        """Raise the n-grams whose last token is one of ids[start : stop] (int64); earlier ids are their contexts."""
        self.contexts = with_capacity(self.contexts, stop - start)
        adapt(self.contexts, self.level, ids, start, stop, self.table.vocabulary, self.increment, self.highest)


@lean
def longer_key(key: np.uint64, token: int) -> np.uint64:
    """Key of a context with `token` prepended; the empty context has key 0. A 64-bit hash (splitmix64's finaliser)."""
    x = (key + np.uint64(token) + np.uint64(1)) * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lean
def index_text(contexts: ContextMap, ids: np.ndarray, start: int, stop: int, longest: int, decay: float) -> None:
    """Count each of ids[start : stop] as successor of its contexts of 1 to `longest` tokens; older counts decay."""
    for position in range(max(start, 1), stop):
        key = np.uint64(0)
        for context_length in range(1, min(longest, position) + 1):
            key = longer_key(key, ids[position - context_length])
            slot = slot_of(contexts, key)
            entry_index = _unlink_entry(contexts, slot, ids[position])
            decayed_index = contexts.slots[slot].head
            while decayed_index >= 0:
                contexts.entries[decayed_index].weight *= decay
                decayed_index = contexts.entries[decayed_index].following
            if entry_index < 0:
                entry_index = _new_entry(contexts, slot, key, ids[position], 0.0)
            contexts.slots[slot].sum = contexts.slots[slot].sum * decay + 1.0
            contexts.entries[entry_index].weight = contexts.entries[entry_index].weight * decay + 1.0
            contexts.slots[slot].seen += 1
            _insert_entry(contexts, slot, entry_index)


class TextIndex:
    """Counts of the successors of contexts of 1 to `longest` tokens in a text. A context's counts are multiplied by
    `decay` at each of its later occurrences."""

    def __init__(self, longest: int = 6, decay: float = 0.7):
        self.longest, self.decay = longest, decay
        self.contexts = new_map(1 << 14)  # `learn` enlarges it

    def learn(self, ids: np.ndarray, start: int, stop: int) -> None:
        """Index ids[start : stop] (int64), which follow ids[:start]."""
        self.contexts = with_capacity(self.contexts, self.longest * (stop - start))
        index_text(self.contexts, ids, start, stop, self.longest, self.decay)


class Recycled(NamedTuple):
    """The target's top k by context, in a hash table of S = 2^b slots, or of one slot if nothing is recycled.

    A row is one token that the target read in a pass. The k most likely next tokens and their probabilities are stored
    under the row's last 1 to `longest` tokens. Token Recycling (arXiv:2408.08696) does so for one token. A new row
    replaces the row stored under its context, or under a context in the same slot: recent rows predict best.

    longest: maximum tokens of a context. keys: uint64 [S], the context's `longer_key`. seen: int32 [S], how many rows
    were stored for this context, 0 for a free slot. tokens: int32 [S, k], most likely first. probs: float32 [S, k].
    """

    longest: int
    keys: np.ndarray
    seen: np.ndarray
    tokens: np.ndarray
    probs: np.ndarray


def new_recycled(longest: int, top_k: int, slot_count: int = _SLOTS) -> Recycled:
    """An empty table for `top_k` tokens of a row; with top_k = 0 look-ups never find anything."""
    capacity = slot_count if top_k else 1
    tokens, probs = np.zeros((capacity, max(1, top_k)), np.int32), np.zeros((capacity, max(1, top_k)), np.float32)
    return Recycled(longest if top_k else 0, np.zeros(capacity, np.uint64), np.zeros(capacity, np.int32), tokens, probs)


@lean
def recycled_slot(recycled, key):
    """The slot of the context `key`."""
    return np.int64(key >> np.uint64(40)) & (len(recycled.keys) - 1)  # of its top 24 bits


@lean
def find_recycled(recycled: Recycled, recent: np.ndarray, text_length: int, slots: np.ndarray) -> int:
    """Write the slots of the last 1, 2, … tokens to `slots`, −1: unknown; returns their number. recent[0]: latest."""
    context_length, key = 0, np.uint64(0)
    while context_length < min(recycled.longest, text_length):
        key = longer_key(key, recent[context_length])
        slot = recycled_slot(recycled, key)
        slots[context_length] = slot if recycled.seen[slot] > 0 and recycled.keys[slot] == key else -1
        context_length += 1
    return context_length


@lean
def recycle(recycled, ids, stop, tokens, parents, rows, top_k):
    """Store the target's top-k after the root, ids[stop − 1], and after the nodes of its draft.

    tokens, parents: int64 [n], the draft; parent −1: the root. rows: int64 [m], the rows that ran: 0 is the root, 1 + i
    node i. top_k: float32 [m, 2k], k token ids and their probabilities. A row with non-finite numbers is skipped.
    """
    top_k_count = top_k.shape[1] // 2
    stored_count = min(top_k_count, recycled.tokens.shape[1])
    for i in range(len(rows)):
        if not top_k[i, top_k_count] > 0:
            continue
        node, text_position, key = rows[i] - 1, stop - 1, np.uint64(0)
        for _ in range(recycled.longest):
            if node < 0 and text_position < 0:
                break
            if node >= 0:
                key, node = longer_key(key, tokens[node]), parents[node]
            else:
                key, text_position = longer_key(key, ids[text_position]), text_position - 1
            slot = recycled_slot(recycled, key)
            recycled.seen[slot] = recycled.seen[slot] + 1 if recycled.keys[slot] == key else 1
            recycled.keys[slot] = key
            for j in range(stored_count):
                recycled.tokens[slot, j], recycled.probs[slot, j] = np.int32(top_k[i, j]), top_k[i, top_k_count + j]
            for j in range(stored_count, recycled.tokens.shape[1]):
                recycled.probs[slot, j] = 0.0
