"""Verification rules: pure functions from a draft, a tree of nodes, and the target's distributions to accepted nodes.

Under sampling all rules are one recursion. Take a node whose target distribution is p, with candidates x_1, x_2, …
drawn from q_1, q_2, …. Start from r = p. Accept x_i with probability min(1, r(x_i) / q_i(x_i)), else set
r ← norm(max(r − q_i, 0)). If all are rejected, emit a sample from r. The emitted token is distributed exactly as p, for
any q_i. Example: p = (0.5, 0.5), q = (1, 0), one candidate. It is accepted with probability 0.5; else r = (0, 1), and
the other token is emitted.

The rules differ in their choice of q_i:

- with replacement: q_i = q, the candidates are independent draws (one candidate: Leviathan et al. 2023);
- without replacement: q_1 = q, q_{i+1} = norm(q_i with x_i removed);
- naive: q_i = the point mass on x_i, so r loses one token at a time. That is sampling from p and accepting the sample
  if it is among the candidates. It needs no q and is the rule for candidates that were chosen, not drawn.

(Multi-candidate speculative decoding, arXiv 2401.06706, §3.) `verify_block` decides about all tokens of a chain
together. The arrays are torch tensors in production. The sampled rules use only operations that torch tensors and numpy
arrays share. So tests run this code on arrays of fractions and sum over every random branch.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from types import ModuleType
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from outrider.inference.core.sampling import invert
from outrider.inference.core.tree import ROOT

Rows = TypeVar("Rows", Tensor, np.ndarray)  # of numbers
Weights = TypeVar("Weights", Tensor, np.ndarray, contravariant=True)


class Chance(Protocol[Weights]):
    """A source of randomness for decisions."""

    def accept(self, probability: float) -> bool:
        """True with the given probability; values above 1 mean 1."""

    def choose(self, weights: Weights) -> int:
        """An index of `weights` [V] (≥ 0, not all 0), each with probability proportional to its weight."""


class RandomChance:
    """Decisions by the numbers of `generator`; the same on every device up to rounding of the probabilities."""

    def __init__(self, generator: random.Random):
        self._random = generator  # Python's generator draws single numbers ten times faster than a tensor op

    def accept(self, probability: float) -> bool:
        return self._random.random() < probability

    def choose(self, weights: Tensor) -> int:
        """Draw by the inverse distribution function. One transfer."""
        return int(invert(weights[None], self._random.random()))


class NodeRule(Protocol):
    """The verification rule at one node. A family is (parent, its children's tokens in draw order)."""

    def acceptance(
        self, families: Sequence[tuple[int, Sequence[int]]], q: Mapping[int, Rows], p: Rows
    ) -> dict[int, list[float]]:
        """By parent, for each child: the probability that it is accepted if its earlier siblings were rejected.

        q: the distribution [V] that each parent's children were drawn from; p [n + 1, V]: the target's, row 0
        at the root and row i + 1 at node i. Probabilities above 1 mean 1. One transfer from the device.
        """

    def residual(self, family: tuple[int, Sequence[int]], q: Mapping[int, Rows], p: Rows) -> Rows:
        """The unnormalised distribution [V] of the token to emit at the parent if all its children were rejected."""


@dataclass(frozen=True)
class Rejection:
    """Candidates drawn from q, with or without replacement.

    A candidate with q_i(x_i) = 0 was not drawn from q_i (the support was exhausted, or it is repeated): it is never
    accepted and leaves r alone, so the tree is narrower and the distribution the same. Repeated draws with replacement
    do count (they are rejected and take their share of r), so a draft must keep them.
    """

    replace: bool  # whether they are drawn with replacement

    def acceptance(
        self, families: Sequence[tuple[int, Sequence[int]]], q: Mapping[int, Rows], p: Rows
    ) -> dict[int, list[float]]:
        families = sorted(families, key=lambda family: -len(family[1]))  # those with an i-th child come first
        # Step i decides about the i-th child of every family that has one. ratios: of each step, [families].
        r, q_i = self._start([parent for parent, _ in families], q, p)
        ratios: list[Rows] = []
        drawn_tokens: list[int] = []
        for i in range(len(families[0][1])):
            rejected_tokens, drawn_tokens = drawn_tokens, [tokens[i] for _, tokens in families if i < len(tokens)]
            family_count = len(drawn_tokens)
            if i:
                r, q_i = self._reject(r[:family_count], q_i[:family_count], rejected_tokens[:family_count])
            ratios.append(_ratio(r[range(family_count), drawn_tokens], q_i[range(family_count), drawn_tokens]))
        flat_ratios = iter(_module(p).concatenate(ratios).tolist())
        probs_by_parent: dict[int, list[float]] = {parent: [] for parent, _ in families}
        for level_ratios in ratios:
            for parent, _ in families[: len(level_ratios)]:
                probs_by_parent[parent].append(next(flat_ratios))
        return probs_by_parent

    def residual(self, family: tuple[int, Sequence[int]], q: Mapping[int, Rows], p: Rows) -> Rows:
        parent, tokens = family
        r, q_i = self._start([parent], q, p)
        for token in tokens:
            r, q_i = self._reject(r, q_i, [token])
        return r[0]

    def _start(self, parents: Sequence[int], q: Mapping[int, Rows], p: Rows) -> tuple[Rows, Rows]:
        """r and q_1 [m, V]; q_1 is a copy, to be modified in place."""
        if not all(parent in q for parent in parents):
            raise ValueError("this draft was not sampled: its candidates have no q; verify it with the naive rule")
        # One row is a view; indexing by a list copies.
        rows = p[parents[0] + 1][None] if len(parents) == 1 else p[[parent + 1 for parent in parents]]
        return rows, _module(p).stack([q[parent] for parent in parents])

    def _reject(self, r: Rows, q_i: Rows, rejected_tokens: Sequence[int]) -> tuple[Rows, Rows]:
        """r and q_i [m, V] after the tokens `rejected_tokens` [m] were rejected. Modifies q_i in place."""
        row_indices = range(len(rejected_tokens))
        has_mass = (q_i[row_indices, rejected_tokens] > 0)[:, None]
        r = _normalise((r - q_i * has_mass).clip(min=0))
        if not self.replace:
            q_i[row_indices, rejected_tokens] = 0
            q_i = _normalise(q_i)
        return r, q_i


@dataclass(frozen=True)
class Matching:
    """The naive rule, for candidates chosen in any way. At every node of a deterministic tree it is sample-and-match.

    It reads one gathered number per candidate. Only the last node's row is read as a whole.
    """

    def acceptance(
        self, families: Sequence[tuple[int, Sequence[int]]], q: Mapping[int, Rows], p: Rows
    ) -> dict[int, list[float]]:
        rows = [parent + 1 for parent, tokens in families for _ in tokens]  # of p, one for each child
        columns = [token for _, tokens in families for token in tokens]
        masses = iter(p[rows, columns].tolist())
        probs_by_parent: dict[int, list[float]] = {}
        for parent, tokens in families:
            probs_by_parent[parent] = []
            seen_tokens: set[int] = set()
            mass_left: float = 1  # the mass of r before renormalising
            for token in tokens:
                mass = next(masses) * (token not in seen_tokens)
                probs_by_parent[parent].append(mass / mass_left if mass_left > 0 else 0)
                mass_left -= mass
                seen_tokens.add(token)
        return probs_by_parent

    def residual(self, family: tuple[int, Sequence[int]], q: Mapping[int, Rows], p: Rows) -> Rows:
        parent, tokens = family
        r = p[[parent + 1]][0]  # a copy
        r[list(tokens)] = 0
        return r


def verify_sampled(
    tokens: Sequence[int],
    parents: Sequence[int],
    q: Mapping[int, Rows],
    p: Rows,
    rule: NodeRule,
    chance: Chance[Rows],
    *,
    draws: Mapping[int, Sequence[int]] | None = None,
    at_once: bool | None = None,
) -> tuple[list[int], int]:
    """Verification under sampling: apply `rule` at the root, then at each accepted node.

    tokens, parents [n]: the draft tree, siblings in draw order. q, p: as in `NodeRule.acceptance`, p being normalised.
    Returns (accepted nodes in order, the next token). The emitted tokens are distributed exactly as when sampled from p
    one by one.

    draws: for candidates drawn with replacement, the child that each draw of a parent hit (`DraftTree.draws`).
    at_once: find the acceptance probabilities of all nodes in one batch, so that a round takes two transfers from the
    device. False: of visited nodes only, which is less work, but a transfer per node. None: True unless p is on a CPU.
    """
    children = {parent: list(nodes) for parent, nodes in (draws or {}).items()}
    if not children:
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
    families = {parent: [tokens[node] for node in nodes] for parent, nodes in children.items()}
    if at_once is None:
        at_once = isinstance(p, Tensor) and p.device.type != "cpu"
    probs_by_parent = rule.acceptance(list(families.items()), q, p) if at_once and families else {}
    accepted_nodes: list[int] = []
    last = ROOT
    while last in families:
        probabilities = probs_by_parent[last] if at_once else rule.acceptance([(last, families[last])], q, p)[last]
        child_probs = zip(children[last], probabilities, strict=True)
        child = next((node for node, probability in child_probs if chance.accept(probability)), None)
        if child is None:
            break
        accepted_nodes.append(child)
        last = child
    weights = p[last + 1]
    if last in families:
        residual = rule.residual((last, families[last]), q, p)
        # If p ≤ q up to rounding, rejection has probability 1e-7 instead of 0 and may leave a residual of zero mass.
        weights = residual + (residual.sum() == 0) * weights
    return accepted_nodes, chance.choose(weights)


def verify_block(tokens: Sequence[int], q: Mapping[int, Rows], p: Rows, chance: Chance[Rows]) -> tuple[list[int], int]:
    """Block verification of a chain (arXiv 2403.10444, Algorithm 2).

    tokens [n]; q, p, the result: as in `verify_sampled`. No rule for chains accepts more tokens in expectation. At
    least i are accepted with probability c_i = min(1, c_{i−1} p(x_i) / q(x_i)), c_0 = 1; token by token it would be
    Π min(1, p / q). Let S_i be the mass of max(0, c_i p − q). A prefix passes with probability S_i / (S_i + 1 − c_i),
    the whole chain with c_n. The longest that passes is accepted. The next token is drawn from max(0, c_i p − q) or p.
    """
    q_drawn = _module(p).stack([q[node - 1][token] for node, token in enumerate(tokens)])  # node i − 1: the parent of i
    # x == x is false for NaN: the chain ends before a ratio that is not a number.
    ratios: Iterable[float] = takewhile(lambda x: x == x, _ratio(p[range(len(q_drawn)), tokens], q_drawn).tolist())
    c: list[float] = [*accumulate([1, *ratios], lambda previous, ratio: min(1, previous * ratio))]
    prefix_len: int = len(c) - 1
    if chance.accept(c[prefix_len]):
        return [*range(prefix_len)], chance.choose(p[prefix_len])
    while True:
        prefix_len -= 1
        residual = (c[prefix_len] * p[prefix_len] - q[prefix_len - 1]).clip(min=0)
        mass: float = residual[None].sum(-1).tolist()[0]
        if prefix_len == 0 or (mass > 0 and chance.accept(mass / (mass + 1 - c[prefix_len]))):
            return [*range(prefix_len)], chance.choose(residual + (mass == 0) * p[prefix_len])  # 0 by rounding alone


def verify_greedy(tokens: Sequence[int], parents: Sequence[int], argmax_ids: Sequence[int]) -> tuple[list[int], int]:
    """Greedy verification: walk down while the target's own choice is among the children.

    tokens, parents [n]: the draft tree; argmax_ids [n + 1]: the target's argmax after the root and after each node.
    Returns (accepted nodes in order, the target's choice after the last of them). The emitted text is exactly the
    target's greedy text.
    """
    accepted_nodes: list[int] = []
    last_accepted = ROOT
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == last_accepted and token == argmax_ids[last_accepted + 1]:
            accepted_nodes.append(node)
            last_accepted = node
    return accepted_nodes, argmax_ids[last_accepted + 1]


def _module(rows: object) -> ModuleType:
    return torch if isinstance(rows, Tensor) else np


def _ratio(r: Rows, q: Rows) -> Rows:
    """r / q [m], elementwise; 0 where q is 0."""
    is_positive = q > 0
    return r * is_positive / (q + ~is_positive)


def _normalise(rows: Rows) -> Rows:
    """Rows [m, V] divided by their sums; rows of zeros stay zero."""
    mass = rows.sum(-1)[..., None]
    return rows / (mass + (mass == 0))
