"""The draft of one decoding round: a tree of proposed tokens, the nodes, under the last token of the text, the root."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import Tensor

ROOT = -1  # the parent of a first draft token: the last committed token
DraftSource = Literal["", "model", "text", "table"]  # a model, a copy of the text so far, an n-gram table


@dataclass(frozen=True)
class DraftTree:
    """A draft of n nodes. Parents come before children, siblings have different tokens.

    tokens [n] int64.
    parents: index of each node's parent, `ROOT` for a child of the root. A chain has the parents (−1, 0, 1, …).
    rows: each node's index among the tokens that the draft model was fed in this round, −1 if it was not fed.
    path_probs [n]: p̂, the product of q along each node's path, if the drafter computed it.
    q: for sampled drafts, the distribution [V] that the children of a node (or `ROOT`) were drawn from, in order of
    their index. It is empty for a deterministic draft, whose candidates are point masses.
    draws: for draws with replacement, the child that each draw at a node hit, in order. Equal draws are one node, which
    is listed again. Example: a root that drew the tokens 7, 9, 7 has the children 0 and 1, and the draws (0, 1, 0).
    source: who drafted it; empty: not recorded.
    """

    tokens: Tensor
    parents: tuple[int, ...]
    rows: tuple[int, ...]
    path_probs: Tensor | None = None
    q: dict[int, Tensor] = field(default_factory=dict)
    draws: dict[int, tuple[int, ...]] = field(default_factory=dict)
    source: DraftSource = ""

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depth(self) -> int:
        """The nodes on the longest path; a chain's length."""
        return max(depths(self.parents))


@dataclass(frozen=True)
class OptimalTree(DraftTree):
    """An OPT-Tree (arXiv 2406.17276), the likeliest nodes by p̂.

    masses: Σ p̂ over the nodes of each drafted level; branch_probs: the q of each node given its parent.
    """

    masses: tuple[float, ...] = ()
    branch_probs: tuple[float, ...] = ()

    @property
    def expected_tau(self) -> float:
        """The expected number of tokens of the round, 1 + Σ p̂ over all nodes."""
        return 1.0 + math.fsum(self.masses)


def depths(parents: Sequence[int]) -> list[int]:
    """The n + 1 depths of the root, which is 0, and of every node. Parents come before children."""
    node_depths = [0]
    for parent in parents:
        node_depths.append(node_depths[parent + 1] + 1)
    return node_depths


def chain_parents(start: int, count: int) -> tuple[int, ...]:
    """Parents of `count` nodes in a line, the first one under node `start` − 1."""
    return tuple(range(start - 1, start - 1 + count))
