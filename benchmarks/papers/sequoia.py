"""Sequoia's tree (Chen et al., arXiv 2402.12374): the fixed tree of n nodes that is best on average."""

import heapq
from collections import Counter
from collections.abc import Sequence

from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import MethodConfig, StructureConfig
from outrider.inference.shapes.shapes import Shape, parse_shape
from papers.claims import Row
from papers.measuring import Asked, Bench, continued

RANKS = 32  # of a node's children that are looked at


def acceptance_by_rank(bench: Bench, drafter: str, prompts: Sequence[Asked]) -> list[float]:
    """How often the target's greedy token is the draft's likeliest, second likeliest, and so on, over `prompts`."""
    assert KINDS[drafter].shaped
    widest = StructureConfig(kind="k_config", widths=(RANKS,), draw="top_k")
    row = Row("ranks", MethodConfig(source=drafter, structure=widest))
    totals: Counter[str] = Counter()
    for asked in prompts:
        totals.update(continued(bench, row, asked).totals)
    return [totals[f"rank_{rank}"] / max(1, totals["tried"]) for rank in range(1, RANKS + 1)]


def best_shape(acceptance: Sequence[float], nodes: int, depth: int) -> Shape:
    """The tree of `nodes` nodes, at most `depth` deep, whose expected accepted length is largest.

    acceptance: by rank, the same at every node. A node is reached with the product along its path, which no descendant
    exceeds. So the `nodes` largest products are a tree, and no other has a larger sum: what Sequoia's dynamic programme
    finds.
    """
    descending = sorted(acceptance, reverse=True)
    waiting = [(-descending[0], (0,))]
    found: list[tuple[int, ...]] = []
    while waiting and len(found) < nodes:
        reached, path = heapq.heappop(waiting)
        found.append(path)
        rank = path[-1]
        if rank + 1 < len(descending):
            heapq.heappush(
                waiting, (reached / max(descending[rank], 1e-12) * descending[rank + 1], (*path[:-1], rank + 1))
            )
        if len(path) < depth:
            heapq.heappush(waiting, (reached * descending[0], (*path, 0)))
    return parse_shape(found, "Sequoia's tree")
