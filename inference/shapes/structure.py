"""Draft structures: a structure shapes one round's draft, a chain or tree, under the root, the last committed token.

A draft model is a `Source`: `extend` feeds tokens to it and returns the logits after each. A fed token is a row. Every
structure feeds only `root` [1] in its first `extend` (row 0), then calls `extend` once per level with the nodes that
get children. Nodes are in level order; the copies of a token graph follow all others. So parents precede children, and
a caller may feed the nodes without a row in index order. The stop rule of a structure is evaluated after every level. A
draft that the rule stops at depth d equals the draft with limit d.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.inference.core.drafter import OBSERVED
from outrider.inference.core.tree import DraftTree
from outrider.inference.settings.method import StructureConfig
from outrider.inference.sizing.policy import Trials
from outrider.inference.stopping.interface import FixedLength, Source, Step, StopRule, ToProbs


class Structure(ABC):
    """Shapes one round's draft. Its stop rule decides after every token or level, and learns from the accepted depth.

    max_rows: upper bound of the rows that a round adds to the caches, not counting the root. max_depth: the most
    drafting steps. reads_root: whether it compares drafted tokens with the root; then both must be ids of the same
    vocabulary.
    totals: sums over the rounds observed, by name; `OBSERVED` is their number. expected_tau: OPT-Tree's E(A).
    drafted_by_source: a token graph's nodes before unmerging. graph_success: rounds in which a copy was accepted. For a
    k-config tree, `TRIED` nodes and `CANDIDATE`k of them at which the k-th draw was accepted. For chosen sizes, the
    rounds with each choice: for example `CHOSEN`max_depth=3 rounds of 3 levels.
    """

    reads_root = False

    def __init__(self, max_rows: int, max_depth: int, rule: StopRule | None = None):
        self.max_rows, self.max_depth = max_rows, max_depth
        self.rule = rule or FixedLength(max_depth)
        self.totals: dict[str, float] = defaultdict(float)

    @abstractmethod
    def draft(self, source: Source, root: Tensor, limit: int) -> DraftTree:
        """A draft under `root` [1] whose paths have at most `limit` nodes; with limit 0 nothing is drafted or fed."""

    def steps(self, limit: int) -> int:
        """The most drafting steps of a round whose paths may have `limit` nodes."""
        return min(limit, self.max_depth, self.rule.max_draft)

    def stops(self, depth: int, tokens: Tensor, logits: Tensor, source: Source, logits_row: int = 0) -> bool:
        """Whether the rule ends the draft after a level of depth `depth`, which the level's first node represents.

        tokens: of the level. logits [n, V]: after the n rows just fed. logits_row: of them, the row that predicted the
        first node.
        """
        return self.rule.stop(Step(depth, tokens[:1], logits[logits_row : logits_row + 1], source, logits_row))

    def observe(self, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        """Learn from a verified draft and its accepted nodes, from the root down."""
        self.rule.observe(tree.depth, len(accepted_nodes))
        self.totals[OBSERVED] += 1

    def trials(self, tree: DraftTree, accepted_nodes: Sequence[int]) -> Trials:
        """The outcomes of a round from which sizes that are "auto" learn; none if no size can be "auto"."""
        return iter(())


class Tree(Structure):
    """A structure with `settings`, of any shape but a chain. `make_structure` replaces its rule, a `FixedLength`."""

    def __init__(self, settings: StructureConfig, max_rows: int, max_depth: int):
        super().__init__(max_rows, max_depth)
        self.settings = settings

    def ranking(self, source: Source) -> ToProbs | None:
        """The function from logits to the q by which a tree grows; None: the softmax of the logits."""
        return source.to_probs if self.settings.rank == "sampler" else None


def softmax_probs(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Softmax in float32 [n, V]: the draft distribution without logits processors. rows: as in `ToProbs`, not read."""
    return logits.float().softmax(-1)


def cat_levels(levels: Sequence[Tensor], root: Tensor) -> Tensor:
    """The nodes of all levels; an empty tensor like `root` if there are none."""
    return torch.cat(list(levels)) if levels else root[:0]
