"""OPT-Tree: the draft tree of a given or chosen size with the largest expected accepted length."""

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.inference.core.drafter import CHOSEN
from outrider.inference.core.ops import likeliest_children
from outrider.inference.core.sampling import top_k_chunked
from outrider.inference.core.tree import ROOT, DraftTree, OptimalTree
from outrider.inference.settings.method import AUTO, StructureConfig, number
from outrider.inference.shapes.structure import Tree, cat_levels, plain_probs
from outrider.inference.sizing.policy import TreeSizes, Trials, Tuning, trials_by_band
from outrider.inference.stopping.interface import Source, ToProbs, required


class OptTree(Tree):
    """The tree of at most `nodes` nodes with the largest E(A) = 1 + Σ p̂ (OPT-Tree, Algorithm 1).

    Its sizes are given, or the fastest ones. It grows level by level. The next level holds the `nodes` children of the
    last level with the largest p̂. Drafting ends when a level raises the best tree's E by `delta` or less, or when the
    rule stops. Nodes with p̂ = 0 are left out.

    Only nodes of the last level that are in the best tree so far are fed. In the order by (p̂, depth) a child follows
    its parent, so descendants of a node outside the best `nodes` can never enter. So the best tree contains a prefix of
    every level sorted by p̂; ties cannot remove a parent, and no gather is needed. Any prefix of that order is also a
    tree. `TreeGrowth` chooses the prefix with the best rate, and how many nodes of a level to feed.

    Nodes are ranked by q after the sampler, or by the softmax of logits / temperature (see `Tree.ranking`).

    sizes: chooses the sizes that are "auto", and learns from their outcomes; None: none is.

    width: the most nodes of a level that are fed, most likely first. With it and δ = 0 the tree is EAGLE-2's (arXiv
    2406.16858, section 4), which has the largest E(A) of all trees that such steps can find.

    One transfer per level; at most nodes · limit rows.
    """

    sizes: TreeSizes | None

    def __init__(self, settings: StructureConfig, generator: random.Random | None, tuning: Tuning | None):
        nodes, depth = (None if size == AUTO else number(size) for size in (settings.nodes, settings.max_depth))
        if settings.delta is None and depth is not None:
            raise ValueError("opt_tree needs a delta: measure one (inference.measure.probe)")
        if nodes is not None and depth is not None:
            self.sizes, fed = None, min(nodes, settings.width or nodes)  # per level
            super().__init__(settings, max(nodes, fed * depth), depth)
        else:
            self.sizes = sizes = TreeSizes(required(tuning), nodes, depth)
            super().__init__(settings, sizes.max_nodes * sizes.max_depth, sizes.max_depth)

    def draft(self, source: Source, root: Tensor, limit: int) -> OptimalTree:
        settings, steps = self.settings, self.steps(limit)
        growth = None if self.sizes is None else self.sizes.begin()
        nodes = number(settings.nodes) if growth is None else growth.nodes
        delta, width, temperature = settings.delta or 0.0, settings.width, settings.temperature
        to_probs = self.ranking(source)
        levels: list[tuple[Tensor, Tensor]] = []  # per level: tokens, p̂, descending
        above: list[list[int]] = []  # per level: index of each node's parent in the previous level
        first_rows: list[int] = []  # per level: row of its first node
        fed: list[int] = []  # per level: how many of its nodes were fed
        shares: list[list[float]] = []  # per level: q of each node given its parent
        best: list[tuple[float, int]] = []  # (−p̂, level) of the best tree, ascending
        tokens, parent_rows, rows = root, [ROOT], 0
        parents_probs = [1.0]
        weights: Tensor | None = None
        gain, expected, count = math.inf, 0.0, 0
        while len(levels) < steps and gain > delta and parent_rows:
            logits = source.extend(tokens, parent_rows)
            start, rows = rows, rows + len(parent_rows)
            level_probs, level_tokens, values, parent_list = _children(
                logits, range(start, rows), parents_probs, weights, nodes, to_probs, temperature
            )
            depth = len(levels)
            best = sorted([*best, *((-value, depth) for value in values if value > 0)])[:nodes]
            levels.append((level_tokens, level_probs))
            above.append(parent_list)
            shares.append([value / parents_probs[parent] for value, parent in zip(values, above[-1], strict=True)])
            first_rows.append(rows)
            beam = sum(level == depth for _, level in best)
            count = len(best)
            if growth is not None:
                count, beam = growth.after_level(len(parent_rows), shares[-1], above[-1], best)
            beam = beam if width is None else min(beam, width)
            total = -math.fsum(value for value, _ in best)
            gain, expected = total - expected, total
            tokens, weights, parents_probs = level_tokens[:beam], level_probs[:beam], values[:beam]
            parent_rows = [start + parent for parent in above[-1][:beam]]
            fed.append(beam)
            if self.stops(len(levels), level_tokens, logits, source, above[-1][0]):
                break
        if fed:
            fed[-1] = 0
        return _assemble(root, levels, above, shares, first_rows, fed, best[:count])

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        assert isinstance(tree, OptimalTree)
        super().observe(tree, accepted)
        self.totals["expected_tau"] += tree.expected
        if self.sizes is not None and len(tree):
            self.sizes.observe(tree, accepted)
            for name in self.sizes.chosen(tree):
                self.totals[CHOSEN + name] += 1

    def trials(self, tree: DraftTree, accepted: Sequence[int]) -> Trials:
        assert isinstance(tree, OptimalTree)
        return trials_by_band(tree.parents, tree.steps, accepted)


def _children(
    logits: Tensor,
    rows: Sequence[int],
    parents: Sequence[float],
    weights: Tensor | None,
    count: int,
    to_probs: ToProbs | None,
    temperature: float,
) -> tuple[Tensor, Tensor, list[float], list[int]]:
    """The most likely children of a level: p̂, descending, and tokens; p̂ and the parents' indices on the host.

    parents, weights: p̂ of the level's nodes on the host, and on the logits' device (None if all are 1).
    """
    compiled = likeliest_children(logits, parents, count, 1 / temperature) if to_probs is None else None
    if compiled is not None:
        top, parent_indices, tokens = compiled
        return top, tokens, top.tolist(), parent_indices.tolist()
    probs = plain_probs(logits / temperature, rows) if to_probs is None else to_probs(logits, rows)
    if weights is not None:
        probs = probs * weights[:, None]
    top, indices = top_k_chunked(probs.flatten(), min(count, probs.numel()))
    values, parent_list = torch.stack([top, (indices // probs.shape[-1]).to(top.dtype)]).tolist()
    return top, indices % probs.shape[-1], values, [int(parent) for parent in parent_list]


def _assemble(
    root: Tensor,
    levels: Sequence[tuple[Tensor, Tensor]],
    above: Sequence[Sequence[int]],
    steps: Sequence[Sequence[float]],
    first_rows: Sequence[int],
    fed: Sequence[int],
    best: Sequence[tuple[float, int]],
) -> OptimalTree:
    """The tree of the `best` nodes of the drafted levels."""
    counts, masses = [0] * len(levels), [0.0] * len(levels)
    for value, level in best:
        counts[level] += 1
        masses[level] -= value
    parents: list[int] = []
    rows: list[int] = []
    offset = 0
    for depth, count in enumerate(counts):
        previous = offset - counts[depth - 1] if depth else 0
        parents += [previous + index if depth else ROOT for index in above[depth][:count]]
        rows += [first_rows[depth] + i if i < fed[depth] else -1 for i in range(count)]
        offset += count
    prefixes = [(tokens[:count], values[:count]) for (tokens, values), count in zip(levels, counts, strict=True)]
    return OptimalTree(
        cat_levels([tokens for tokens, _ in prefixes], root),
        tuple(parents),
        tuple(rows),
        path_probs=cat_levels([values for _, values in prefixes], torch.zeros(1, device=root.device)),
        masses=tuple(masses),
        steps=tuple(step for level, count in zip(steps, counts, strict=True) for step in level[:count]),
    )
