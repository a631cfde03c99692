"""OPT-Tree: the draft tree of a given or chosen size with the largest expected accepted length.

A round drafts a tree under the root, the last committed token, and the target verifies the tree. A row is a token fed
to the draft model (`source.extend`, which returns the logits after each). The root is row 0.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

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

    p̂ of a node is the product of q along its path. The tree grows level by level. The next level holds the `nodes`
    children of the last level with the largest p̂. Drafting ends when a level raises the best tree's E by `delta` or
    less, or when the rule stops. Nodes with p̂ = 0 are left out. Example with nodes=3 and delta=0:

        level  fed           drafted, with p̂             the best tree so far                      E
        1      the root      a 0.6, b 0.3, c 0.1         a, b, c                                   2.0
        2      a, b, c       a a 0.5, b a 0.2, a b 0.05  a, a a, b: c is out                       2.4
        3      a a           a a a 0.2, …                the same, as b 0.3 is not below 0.2       2.4, so it ends

    Only nodes of the last level that are in the best tree so far are fed. In the order by (p̂, depth) a child follows
    its parent, so descendants of a node outside the best `nodes` can never enter. So the best tree contains a prefix of
    every level sorted by p̂; ties cannot remove a parent, and no gather is needed. Every prefix of that order is also a
    tree. `TreeGrowth` chooses the prefix with the best rate, and how many nodes of a level to feed.

    Nodes are ranked by q after the sampler, or by the softmax of logits / temperature (see `Tree.ranking`).
    generator: not read, as nodes are never drawn.
    sizes: chooses the sizes that are "auto", and learns from their outcomes; None: both sizes are given.
    width: the most nodes of a level that are fed, most likely first. With a width and δ = 0 the tree is EAGLE-2's
    (arXiv 2406.16858, section 4), which has the largest E(A) of all trees that such steps can find.
    One transfer from the device per level; at most nodes · limit rows.
    """

    sizes: TreeSizes | None

    def __init__(self, settings: StructureConfig, generator: random.Random | None, tuning: Tuning | None):
        max_nodes, depth = (None if size == AUTO else known_size(size) for size in (settings.nodes, settings.max_depth))
        if settings.delta is None and depth is not None:
            raise ValueError("opt_tree needs a delta: measure one (inference.measure.probe)")
        if max_nodes is not None and depth is not None:
            self.sizes, fed_count = None, min(max_nodes, settings.width or max_nodes)  # per level
            # A session of the target's layers holds what was fed while drafting, kept or not, and the rest of the tree.
            super().__init__(settings, max_nodes + fed_count * (depth - 1), depth)
        else:
            self.sizes = sizes = TreeSizes(require_value(tuning), max_nodes, depth)
            super().__init__(settings, sizes.max_nodes * sizes.max_depth, sizes.max_depth)

    def draft(self, source: Source, root: Tensor, limit: int) -> OptimalTree:
        settings, max_levels, to_probs = self.settings, self.steps(limit), self.ranking(source)
        tree_growth = None if self.sizes is None else self.sizes.begin()
        node_budget = known_size(settings.nodes) if tree_growth is None else tree_growth.nodes
        delta, width, temperature = settings.delta or 0.0, settings.width, settings.temperature
        levels: list[_Level] = []
        best: list[tuple[float, int]] = []  # (−p̂, level from 0) of the nodes of the best tree, ascending
        frontier, rows = _Frontier(root, [ROOT], [1.0], None), range(0)  # rows: of the nodes that were fed last
        prob_gain, last_prob_sum, node_count = math.inf, 0.0, 0
        while len(levels) < max_levels and prob_gain > delta and frontier.parent_rows:
            logits = source.extend(frontier.tokens, frontier.parent_rows)  # [m, V]
            if levels:
                levels[-1].fed = len(logits)
            rows, depth = range(rows.stop, rows.stop + len(logits)), len(levels)
            level = _draft_level(logits, rows, frontier, node_budget, to_probs, temperature)
            levels.append(level)
            best = sorted([*best, *((-prob, depth) for prob in level.host_path_probs if prob > 0)])[:node_budget]
            node_count, beam_width = len(best), sum(level_of_node == depth for _, level_of_node in best)
            if tree_growth is not None:  # it chooses how many nodes of `best` to keep and of this level to feed
                node_count, beam_width = tree_growth.after_level(len(rows), level.branch_probs, level.parents, best)
            prob_sum = -math.fsum(neg_prob for neg_prob, _ in best)
            prob_gain, last_prob_sum = prob_sum - last_prob_sum, prob_sum
            frontier = level.frontier(rows, beam_width if width is None else min(beam_width, width))
            if self.stops(depth + 1, level.tokens, logits, source, level.parents[0]):
                break
        return _assemble(root, levels, best[:node_count])

    def observe(self, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        assert isinstance(tree, OptimalTree)
        super().observe(tree, accepted_nodes)
        self.totals["expected_tau"] += tree.expected_tau
        if self.sizes is not None and len(tree):
            self.sizes.observe(tree, accepted_nodes)
            for size_label in self.sizes.describe(tree):
                self.totals[CHOSEN + size_label] += 1

    def trials(self, tree: DraftTree, accepted_nodes: Sequence[int]) -> Trials:
        assert isinstance(tree, OptimalTree)
        return trials_by_band(tree.parents, tree.branch_probs, accepted_nodes)


class _Frontier(NamedTuple):
    """The nodes to feed next, most likely first: the root, later nodes of the last level."""

    tokens: Tensor  # [m]
    parent_rows: list[int]  # [m]
    host_path_probs: list[float]  # [m]: p̂
    path_probs: Tensor | None  # [m]: p̂ on the device; None: 1


@dataclass
class _Level:
    """The drafted nodes of a level, most likely first."""

    tokens: Tensor  # [n]
    path_probs: Tensor  # [n]: p̂
    host_path_probs: list[float]  # [n]: p̂
    parents: list[int]  # [n]: indices in the level above
    branch_probs: list[float]  # [n]: q given the parent
    first_row: int  # of the first node, if the node is fed
    fed: int = 0  # how many nodes were fed

    def frontier(self, rows_above: Sequence[int], width: int) -> _Frontier:
        """The first `width` nodes. rows_above: of the level above."""
        parent_rows = [rows_above[parent] for parent in self.parents[:width]]
        return _Frontier(self.tokens[:width], parent_rows, self.host_path_probs[:width], self.path_probs[:width])


def _draft_level(
    logits: Tensor, rows: range, frontier: _Frontier, n_top: int, to_probs: ToProbs | None, temperature: float
) -> _Level:
    """The `n_top` most likely children of the frontier's nodes, from the logits [m, V] after them, which are `rows`."""
    top_children = None  # (p̂ [n], parents [n], tokens [n]) of a compiled kernel, where there is one
    if to_probs is None:
        top_children = likeliest_children(logits, frontier.host_path_probs, n_top, 1 / temperature)
    if top_children is not None:
        path_probs, parent_indices, tokens = top_children
        host_path_probs, parents = path_probs.tolist(), parent_indices.tolist()
    else:
        probs = softmax_probs(logits / temperature, rows) if to_probs is None else to_probs(logits, rows)
        if frontier.path_probs is not None:
            probs = probs * frontier.path_probs[:, None]
        path_probs, flat_indices = top_k_chunked(probs.flatten(), min(n_top, probs.numel()))  # [n]
        tokens, parent_indices = flat_indices % probs.shape[-1], flat_indices // probs.shape[-1]
        packed = torch.stack([path_probs, parent_indices.to(path_probs.dtype)])  # [2, n], for one transfer
        host_path_probs, parent_floats = packed.tolist()
        parents = [int(parent) for parent in parent_floats]
    parent_probs = (frontier.host_path_probs[parent] for parent in parents)
    branch_probs = [prob / parent_prob for prob, parent_prob in zip(host_path_probs, parent_probs, strict=True)]
    return _Level(tokens, path_probs, host_path_probs, parents, branch_probs, rows.stop)


def _assemble(root: Tensor, levels: Sequence[_Level], best_nodes: Sequence[tuple[float, int]]) -> OptimalTree:
    """The tree of the nodes `best_nodes`, as (−p̂, level); they are the first nodes of every level."""
    node_counts, prob_sums = [0] * len(levels), [0.0] * len(levels)
    for neg_prob, depth in best_nodes:
        node_counts[depth] += 1
        prob_sums[depth] -= neg_prob
    prefixes = list(zip(levels, node_counts, strict=True))
    first_nodes = [0, *accumulate(node_counts)]  # the number of the first node of every level
    parents = [
        first_nodes[depth - 1] + index if depth else ROOT
        for depth, (level, count) in enumerate(prefixes)
        for index in level.parents[:count]
    ]
    rows = (level.first_row + index if index < level.fed else -1 for level, count in prefixes for index in range(count))
    tokens = cat_levels([level.tokens[:count] for level, count in prefixes], root)
    no_probs = torch.zeros(1, device=root.device)  # has the dtype and the device of an empty tree's p̂
    path_probs = cat_levels([level.path_probs[:count] for level, count in prefixes], no_probs)
    branch_probs = tuple(prob for level, count in prefixes for prob in level.branch_probs[:count])
    return OptimalTree(
        tokens, tuple(parents), tuple(rows), path_probs=path_probs, masses=tuple(prob_sums), branch_probs=branch_probs
    )
