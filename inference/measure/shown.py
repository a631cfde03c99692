"""The rounds of some texts, kept to be looked at: what was drafted, what the target took of it, what it said itself.

They are decoded once more for it, after the timed runs, so that keeping them costs none of the time that is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from inference.core.acceptance import Chooser
from inference.core.stopwatch import Round
from inference.core.tree import DraftTree

NODES_KEPT = 1000  # of a text's trees together: a page of some texts by ten methods stays below a megabyte

_Verified = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # a tree's tokens and parents, the accepted nodes


@dataclass(frozen=True)
class ShownRound:
    """One round as it can be looked at; the first of a text is the prefill, which has no draft.

    tokens: committed; the first `accepted` of them were drafted, a token after those is the target's own.
    drafted, parents: the tree (see `DraftTree`). path: its accepted nodes, also those beyond the end of the text.
    All three are empty where a text's trees had more than `NODES_KEPT` nodes before.
    """

    tokens: tuple[int, ...]
    accepted: int = 0
    drafted: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    path: tuple[int, ...] = ()


class Noting(Chooser):
    """Chooses as `like` does, and notes every tree that is verified."""

    def __init__(self, like: Chooser):
        self.__dict__.update(like.__dict__)
        self.verified: list[_Verified] = []

    def verify(self, tree: DraftTree, logits: Tensor) -> tuple[list[int], list[int], Tensor, int]:
        tokens, nodes, following, bonus = super().verify(tree, logits)
        if 0 <= bonus < logits.shape[-1]:  # else the root is verified again, alone
            self.verified.append((tuple(tokens), tuple(tree.parents), tuple(nodes)))
        return tokens, nodes, following, bonus


def shown_rounds(first: int, rounds: Sequence[Round], verified: Sequence[_Verified]) -> tuple[ShownRound, ...]:
    """The rounds of one text, of which `first` is the prefill's token."""
    shown, nodes = [ShownRound((first,))], 0
    for r, (tokens, parents, path) in zip(rounds, verified, strict=True):
        nodes += len(tokens)
        tree = (tokens, parents, path) if nodes <= NODES_KEPT else ()
        shown.append(ShownRound(r.tokens, r.accepted, *tree))
    return tuple(shown)
