# mypy: allow-untyped-defs
"""Searches for the draft tree over tri-gram probabilities: ADED's PUCT search, and best-first by path probability.

A state is the last n − 1 tokens (two for tri-grams), packed into one number. Its successors are those of the table's
level (its n-grams of order n) and of the overlay (n-grams of the text), whose probabilities replace the table's, in
order of probability; ties go to the overlay. Everything is compiled (`lean`: by numba), in arrays allocated once.
"""

from typing import NamedTuple

import numpy as np

from outrider.base.compiled import compile_function
from outrider.draft_models.ngrams.kernels import find_key, lean, mix, successors_of
from outrider.draft_models.ngrams.overlay import ContextMap, slot_of
from outrider.draft_models.ngrams.table import Level

_ONE = np.uint64(1)


class Nodes(NamedTuple):
    """Draft nodes, at most B = budget.

    By rank: order int64 [B], node numbers by descending path probability, and ranked float64 [B], those probabilities.
    By node number, int64 [B]: tokens, parents (−1: the root), depths, and indices, their ranks in the result.
    tree int64 [2, B]: the result, tokens and parents by rank.
    """

    order: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    indices: np.ndarray
    ranked: np.ndarray
    tree: np.ndarray


def new_nodes(budget: int) -> Nodes:
    """A workspace for drafts of up to `budget` nodes."""
    order, tokens, parents, depths, indices = np.empty((5, budget), np.int64)
    return Nodes(order, tokens, parents, depths, indices, np.empty(budget), np.empty((2, budget), np.int64))


@lean
def offer_node(nodes, kept_count, final, node_count, token, parent, depth, prob):
    """Insert a candidate among the best nodes, of which the first `final` stay; a full ranking drops its last node.

    Returns (size, node_count, number): nodes kept, node numbers assigned, the candidate's number (−1: it was dropped).
    """
    order, ranked = nodes.order, nodes.ranked
    if kept_count == len(order):
        if prob <= ranked[kept_count - 1]:
            return kept_count, node_count, np.int64(-1)
        kept_count -= 1
        node_number = order[kept_count]
    else:
        node_number, node_count = np.int64(node_count), node_count + 1
    rank = kept_count
    while rank > final and ranked[rank - 1] < prob:
        order[rank], ranked[rank] = order[rank - 1], ranked[rank - 1]
        rank -= 1
    order[rank], ranked[rank] = node_number, prob
    nodes.tokens[node_number], nodes.parents[node_number], nodes.depths[node_number] = token, parent, depth
    return kept_count + 1, node_count, node_number


@lean
def write_tree(nodes: Nodes, node_count: int) -> int:
    """Write tokens and parents of the kept nodes to `nodes.tree`, likeliest first, parents as indices in that order.

    Returns their number. Their path probabilities are the first entries of `nodes.ranked`.
    """
    for rank in range(node_count):
        node_number = nodes.order[rank]
        nodes.indices[node_number] = rank
        nodes.tree[0, rank] = nodes.tokens[node_number]
        nodes.tree[1, rank] = nodes.indices[nodes.parents[node_number]] if nodes.parents[node_number] >= 0 else -1
    return node_count


@lean
def open_state(level, overlay, packed):
    """Successors of the state `packed`: (begin, end of those in the table, the table's total count, index of the first
    overlay entry or −1, the sum of the overlay's probabilities)."""
    state_key = mix(packed, (level.order - 1) * level.bits)
    context_index = find_key(level.buckets, level.shift, level.keys, state_key)
    begin, end, table_total = 0, 0, 0.0
    if context_index >= 0:
        begin, end = successors_of(level.starts, level.tokens, context_index)
        table_total = max(float(level.totals[context_index]), 1.0)
    slot = slot_of(overlay, state_key)
    first_entry = np.int64(overlay.slots[slot].head)
    return begin, end, table_total, first_entry, overlay.slots[slot].sum if first_entry >= 0 else 0.0


@lean
def _is_replaced(entries, head, token):
    """Whether the overlay's list of entries from `head` on has the token."""
    while head >= 0 and entries[head].token != token:
        head = np.int64(entries[head].following)
    return head >= 0


@lean
def next_successor(tokens, counts, entries, at, end, total, entry, head):
    """The next likeliest successor: (token or −1, probability, and where to continue: at, entry).

    at, end: of the table's successors; entry: of the overlay's, whose list begins at `head`.
    """
    while at < end and head >= 0 and _is_replaced(entries, head, tokens[at]):
        at += 1
    probability = counts[at] / total if at < end else -1.0
    if entry >= 0 and entries[entry].weight >= probability:
        overlay_entry = entries[entry]
        return np.int64(overlay_entry.token), overlay_entry.weight, at, np.int64(overlay_entry.following)
    if at < end:
        return np.int64(tokens[at]), probability, at + 1, entry
    return np.int64(-1), 0.0, at, entry


@lean
def append_token(level: Level, packed: np.uint64, token: int) -> np.uint64:
    """The state after `token` is appended to the state `packed`."""
    mask = (_ONE << np.uint64((level.order - 1) * level.bits)) - _ONE
    return ((packed << np.uint64(level.bits)) | np.uint64(token)) & mask


@lean
def state_of(level: Level, ids: np.ndarray, stop: int, vocabulary: int) -> tuple[np.uint64, bool]:
    """The state at the end of ids[:stop], and whether it is valid: long enough, with every id within the table."""
    packed = np.uint64(0)
    if stop < level.order - 1:
        return packed, False
    for i in range(stop - level.order + 1, stop):
        if ids[i] >= vocabulary:
            return packed, False
        packed = append_token(level, packed, ids[i])
    return packed, True


@lean
def search_best_first(level, overlay, ids, stop, vocabulary, depth, nodes, node_contexts):
    """Write the nodes with the largest path probabilities under ids[:stop], no deeper than `depth`; as `write_tree`.

    A child is never likelier than its parent, so the best become final in order. node_contexts: uint64 [B], scratch.
    """
    root_state, in_vocabulary = state_of(level, ids, stop, vocabulary)
    ranked_count, final_rank, node_count = 0, -1, 0
    tokens, counts, entries = level.tokens, level.counts, overlay.entries
    budget = len(nodes.order)
    while in_vocabulary and final_rank < ranked_count:
        parent, path_prob, child_depth, packed = np.int64(-1), 1.0, 1, root_state
        if final_rank >= 0:
            parent, path_prob = nodes.order[final_rank], nodes.ranked[final_rank]
            child_depth, packed = nodes.depths[parent] + 1, node_contexts[parent]
        final_rank += 1
        if child_depth > depth or (ranked_count == budget and path_prob <= nodes.ranked[ranked_count - 1]):
            continue
        begin, end, total, first_entry, _ = open_state(level, overlay, packed)
        at, entry = begin, first_entry
        while True:
            token, probability, at, entry = next_successor(tokens, counts, entries, at, end, total, entry, first_entry)
            if token < 0 or (ranked_count == budget and path_prob * probability <= nodes.ranked[ranked_count - 1]):
                break
            ranked_count, node_count, node_number = offer_node(
                nodes, ranked_count, final_rank, node_count, token, parent, child_depth, path_prob * probability
            )
            node_contexts[node_number] = append_token(level, packed, token)
    return write_tree(nodes, ranked_count)


_INTEGERS = "token parent depth first last sibling visits chosen at end head entry ahead"
_NUMBERS = "prob score value prospect total ahead_prob"
# A node of the search tree. Children are first visited in order of probability. So visited children are a linked list
# (first, sibling, last), and the others start at `at` and `entry` (see `next_successor`; at −1: not expanded). The next
# child is `ahead` (−1: none). visits: N; chosen: Σ N of its children; prob: P; score: the sum of its sentences' scores;
# value: Q = score / N; prospect: P / (1 + N).
_SEARCH_NODE = np.dtype(
    [("state", np.uint64)]
    + [(name, np.int64) for name in _INTEGERS.split()]
    + [(name, np.float64) for name in _NUMBERS.split()]
)


def new_search(iterations: int) -> np.ndarray:
    """A workspace for a search tree of `iterations` iterations, each of which adds at most two nodes."""
    return np.zeros(2 * iterations + 1, _SEARCH_NODE)


def exploration_factors(iterations: int, c1: float, c2: float) -> np.ndarray:
    """E · √ΣN for ΣN = 0 … iterations (ADED eqs. 2 and 3)."""
    visit_counts = np.arange(iterations + 1)
    return (c1 + np.log((visit_counts + c2 + 1) / c2)) * np.sqrt(visit_counts)


@lean
def next_random(seed: np.ndarray) -> float:
    """A number in [0, 1); advances `seed`, uint64 [1] (splitmix64)."""
    seed[0] += np.uint64(0x9E3779B97F4A7C15)
    x = seed[0]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@lean
def _add_node(search, node, token, parent, depth, packed, prob):
    search[node].token, search[node].parent, search[node].depth = token, parent, depth
    search[node].first, search[node].last, search[node].sibling = -1, -1, -1
    search[node].visits, search[node].chosen, search[node].score = 0, 0, 0.0
    search[node].at, search[node].ahead = -1, -1
    search[node].state, search[node].prob = packed, prob


@lean
def _look_ahead(search: np.ndarray, node: int, level: Level, overlay: ContextMap) -> None:
    table_index, end, total = search[node].at, search[node].end, search[node].total
    search[node].ahead, search[node].ahead_prob, search[node].at, search[node].entry = next_successor(
        level.tokens, level.counts, overlay.entries, table_index, end, total, search[node].entry, search[node].head
    )


@lean
def _expand(search: np.ndarray, node: int, level: Level, overlay: ContextMap, widest: int) -> None:
    begin, end, table_total, first_entry, _ = open_state(level, overlay, search[node].state)
    search[node].at, search[node].end, search[node].total = begin, min(end, begin + widest), table_total
    search[node].head, search[node].entry = first_entry, first_entry
    _look_ahead(search, node, level, overlay)


@lean
def _visit_next(search: np.ndarray, node: int, number: int, level: Level, overlay: ContextMap) -> None:
    """Add the likeliest unvisited child as node `number`."""
    packed = append_token(level, search[node].state, search[node].ahead)
    _add_node(search, number, search[node].ahead, node, search[node].depth + 1, packed, search[node].ahead_prob)
    if search[node].first < 0:
        search[node].first = number
    else:
        search[search[node].last].sibling = number
    search[node].last = number
    _look_ahead(search, node, level, overlay)


@lean
def _select(search: np.ndarray, node: int, explore: np.ndarray) -> int:
    """The child with the largest PUCT value, ties to the more likely; −1: the most likely unvisited child.

    Unvisited children have Q = N = 0, so the most likely one represents all of them.
    """
    exploration = explore[search[node].chosen]
    best_child, best_value = -1, -1.0
    child = search[node].first
    while child >= 0:
        value = search[child].value + exploration * search[child].prospect
        if value > best_value:
            best_child, best_value = child, value
        child = search[child].sibling
    if search[node].ahead >= 0 and exploration * search[node].ahead_prob > best_value:
        return -1
    return best_child


@lean
def _sample(level, overlay, begin, end, total, head, mass, seed):
    """A successor sampled by its probability: (token or −1, probability).

    mass: the overlay's total probability. A draw that hits a table entry replaced by the overlay is repeated.
    """
    table_count = np.int64(0)
    for table_index in range(begin, end):
        table_count += np.int64(level.counts[table_index])
    table_mass = table_count / total if end > begin else 0.0
    if mass + table_mass <= 0:
        return np.int64(-1), 0.0
    while True:
        threshold = next_random(seed) * (mass + table_mass)
        entry_index = head
        while entry_index >= 0:
            threshold -= overlay.entries[entry_index].weight
            if threshold < 0:
                return np.int64(overlay.entries[entry_index].token), overlay.entries[entry_index].weight
            entry_index = np.int64(overlay.entries[entry_index].following)
        remaining_count = np.int64(threshold * total)
        for table_index in range(begin, end):
            remaining_count -= np.int64(level.counts[table_index])
            if remaining_count < 0:
                if _is_replaced(overlay.entries, head, level.tokens[table_index]):
                    break
                return np.int64(level.tokens[table_index]), level.counts[table_index] / total


@compile_function
def search_by_puct(
    level, overlay, ids, stop, vocabulary, depth, widest, explore, sentences, seed, search, scratch, nodes
):
    """Write the tree of the `sentences` best sentences of up to `depth` tokens under ids[:stop]; as `write_tree`.

    Each iteration selects down to an unexpanded state and expands it. It goes to the likeliest child and completes the
    sentence with sampled successors. Then it adds the score 1 + Σ P to every node that it passed. Only the `widest`
    likeliest table successors of a state are used. This is Algorithm 1 of ADED (arXiv 2407.12021).

    explore: see `exploration_factors`; its length is the number of iterations + 1.
    scratch: int64 [iterations, depth] and float64 [iterations], for the sentences and their scores.
    """
    sentence_tokens, scores = scratch
    packed, is_valid = state_of(level, ids, stop, vocabulary)
    if not is_valid:
        return write_tree(nodes, 0)
    _add_node(search, 0, -1, -1, 0, packed, 0.0)
    node_count = 1
    for iteration in range(len(explore) - 1):
        node = 0
        while search[node].at >= 0 and search[node].first >= 0 and search[node].depth < depth:
            child = _select(search, node, explore)
            if child < 0:
                child, node_count = node_count, node_count + 1
                _visit_next(search, node, child, level, overlay)
            node = child
        sentence_ended = search[node].at >= 0  # expanded before, and nothing follows it
        if not sentence_ended and search[node].depth < depth:
            _expand(search, node, level, overlay, widest)
            sentence_ended = search[node].ahead < 0
            if not sentence_ended:
                _visit_next(search, node, node_count, level, overlay)
                node, node_count = node_count, node_count + 1
        sentence_length, score, ancestor = search[node].depth, 1.0, node
        while ancestor > 0:
            sentence_tokens[iteration, search[ancestor].depth - 1] = search[ancestor].token
            score += search[ancestor].prob
            ancestor = search[ancestor].parent
        packed = search[node].state
        while sentence_length < depth and not sentence_ended:
            begin, end, total, entry, overlay_mass = open_state(level, overlay, packed)
            token, prob = _sample(level, overlay, begin, min(end, begin + widest), total, entry, overlay_mass, seed)
            sentence_ended = token < 0
            if not sentence_ended:
                sentence_tokens[iteration, sentence_length] = token
                sentence_length, score, packed = sentence_length + 1, score + prob, append_token(level, packed, token)
        if sentence_length < depth:
            sentence_tokens[iteration, sentence_length] = -1
        scores[iteration] = score
        while node >= 0:
            search[node].visits += 1
            search[node].score += score
            search[node].value = search[node].score / search[node].visits
            search[node].prospect = search[node].prob / (1 + search[node].visits)
            parent = search[node].parent
            if parent >= 0:
                search[parent].chosen += 1
            node = parent
    return _join(sentence_tokens[: len(explore) - 1], scores[: len(explore) - 1], sentences, depth, nodes)


@compile_function
def _join(words: np.ndarray, scores: np.ndarray, sentences: int, depth: int, nodes: Nodes) -> int:
    """The tree of the best sentences, with shared prefixes merged, within the node budget; as `write_tree`."""
    budget, node_count, sentence_count = len(nodes.order), 0, 0
    for iteration in np.argsort(-scores, kind="mergesort"):
        if sentence_count == sentences or node_count == budget:
            break
        parent, is_new = -1, False
        for position in range(depth):
            token = words[iteration, position]
            if token < 0:
                break
            node = parent + 1
            while node < node_count and (nodes.parents[node] != parent or nodes.tokens[node] != token):
                node += 1
            if node == node_count:
                if node_count == budget:
                    break
                nodes.order[node_count], nodes.tokens[node_count], nodes.parents[node_count] = node_count, token, parent
                nodes.ranked[node_count] = scores[iteration]
                node_count, is_new = node_count + 1, True
            parent = node
        sentence_count += is_new
    return write_tree(nodes, node_count)
