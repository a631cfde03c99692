"""OPT-Tree: the draft tree of a given or chosen size with the largest expected accepted length."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.inference.core.drafter import CHOSEN
from outrider.inference.core.ops import likeliest_children
from outrider.inference.core.sampling import top_k_chunked
from outrider.inference.core.tree import ROOT, DraftTree, OptimalTree
from outrider.inference.settings.method import AUTO, StructureConfig, known_size
from outrider.inference.shapes.structure import Tree, cat_levels, softmax_probs
from outrider.inference.sizing.policy import TreeSizes, Trials, Tuning, trials_by_band
from outrider.inference.stopping.interface import Source, ToProbs, require_value


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
        nodes, depth = (None if size == AUTO else known_size(size) for size in (settings.nodes, settings.max_depth))
        if settings.delta is None and depth is not None:
            raise ValueError("opt_tree needs a delta: measure one (inference.measure.probe)")
        if nodes is not None and depth is not None:
            self.sizes, fed = None, min(nodes, settings.width or nodes)  # per level
            super().__init__(settings, max(nodes, fed * depth), depth)
        else:
            self.sizes = sizes = TreeSizes(require_value(tuning), nodes, depth)
            super().__init__(settings, sizes.max_nodes * sizes.max_depth, sizes.max_depth)

    def draft(self, source: Source, root: Tensor, limit: int) -> OptimalTree:
        settings, steps, to_probs = self.settings, self.steps(limit), self.ranking(source)
        growth = None if self.sizes is None else self.sizes.begin()
        nodes = known_size(settings.nodes) if growth is None else growth.nodes
        delta, width, temperature = settings.delta or 0.0, settings.width, settings.temperature
        levels: list[_Level] = []
        best: list[tuple[float, int]] = []  # (−p̂, level) of the nodes of the best tree, ascending
        tokens, parent_rows, rows = root, [ROOT], range(0)  # what to feed next, and the rows that were fed last
        fed_probs, weights = [1.0], None  # p̂ of what to feed next: on the host, and on the device (None: 1)
        gain, expected, count = math.inf, 0.0, 0
        while len(levels) < steps and gain > delta and parent_rows:
            logits = source.extend(tokens, parent_rows)  # [m, V]
            if levels:
                levels[-1].fed = len(parent_rows)
            rows, depth = range(rows.stop, rows.stop + len(parent_rows)), len(levels)
            probs, level_tokens, values, parents = _children(
                logits, rows, fed_probs, weights, nodes, to_probs, temperature
            )
            branch_probs = [value / fed_probs[parent] for value, parent in zip(values, parents, strict=True)]
            levels.append(_Level(level_tokens, probs, parents, branch_probs, rows.stop))
            best = sorted([*best, *((-value, depth) for value in values if value > 0)])[:nodes]
            count, beam = len(best), sum(level == depth for _, level in best)
            if growth is not None:
                count, beam = growth.after_level(len(rows), branch_probs, parents, best)
            beam = beam if width is None else min(beam, width)
            total = -math.fsum(value for value, _ in best)
            gain, expected = total - expected, total
            tokens, weights, fed_probs = level_tokens[:beam], probs[:beam], values[:beam]
            parent_rows = [rows[parent] for parent in parents[:beam]]
            if self.stops(depth + 1, level_tokens, logits, source, parents[0]):
                break
        return _assemble(root, levels, best[:count])

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        assert isinstance(tree, OptimalTree)
        super().observe(tree, accepted)
        self.totals["expected_tau"] += tree.expected_tau
        if self.sizes is not None and len(tree):
            self.sizes.observe(tree, accepted)
            for name in self.sizes.describe(tree):
                self.totals[CHOSEN + name] += 1

    def trials(self, tree: DraftTree, accepted: Sequence[int]) -> Trials:
        assert isinstance(tree, OptimalTree)
        return trials_by_band(tree.parents, tree.branch_probs, accepted)


@dataclass
class _Level:
    """The drafted nodes of a level, most likely first."""

    tokens: Tensor  # [n]
    path_probs: Tensor  # [n]: p̂
    parents: list[int]  # [n]: indices in the level above
    branch_probs: list[float]  # [n]: q given the parent
    first_row: int  # of the first node, if it was fed
    fed: int = 0  # how many nodes were fed


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
    probs = softmax_probs(logits / temperature, rows) if to_probs is None else to_probs(logits, rows)
    if weights is not None:
        probs = probs * weights[:, None]
    top, indices = top_k_chunked(probs.flatten(), min(count, probs.numel()))
    values, parent_list = torch.stack([top, (indices // probs.shape[-1]).to(top.dtype)]).tolist()
    return top, indices % probs.shape[-1], values, [int(parent) for parent in parent_list]


def _assemble(root: Tensor, levels: Sequence[_Level], best: Sequence[tuple[float, int]]) -> OptimalTree:
    """The tree of the nodes `best`, as (−p̂, level); they are the first nodes of every level."""
    counts, masses = [0] * len(levels), [0.0] * len(levels)
    for value, depth in best:
        counts[depth] += 1
        masses[depth] -= value
    parents: list[int] = []
    rows: list[int] = []
    branch_probs: list[float] = []
    first_above = 0  # the number of the first node of the level above
    for depth, (level, count) in enumerate(zip(levels, counts, strict=True)):
        first = len(parents)
        parents += [first_above + index if depth else ROOT for index in level.parents[:count]]
        rows += [level.first_row + index if index < level.fed else -1 for index in range(count)]
        branch_probs += level.branch_probs[:count]
        first_above = first
    prefixes = list(zip(levels, counts, strict=True))
    no_probs = torch.zeros(1, device=root.device)
    return OptimalTree(
        cat_levels([level.tokens[:count] for level, count in prefixes], root),
        tuple(parents),
        tuple(rows),
        path_probs=cat_levels([level.path_probs[:count] for level, count in prefixes], no_probs),
        masses=tuple(masses),
        branch_probs=tuple(branch_probs),
    )
