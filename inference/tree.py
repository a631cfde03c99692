"""The draft of one round: a tree of proposed tokens under the last committed token."""

from dataclasses import dataclass

from torch import Tensor

ROOT = -1  # the parent of a first draft token: the last committed token


@dataclass(frozen=True)
class DraftTree:
    """tokens [n] int64; parents [n]: index of each node's parent, `ROOT` for a child of the root.

    Parents come before children. A chain is the tree with parents (−1, 0, 1, …).
    """

    tokens: Tensor
    parents: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parents)


def chain_parents(start: int, count: int) -> tuple[int, ...]:
    """Parents of `count` nodes in a line, the first one under node `start` − 1."""
    return tuple(range(start - 1, start - 1 + count))
