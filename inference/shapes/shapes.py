"""Chains, trees of fixed shape, and MCSD's k-config trees.

The root is the last token of the text, under which a round drafts. A row is a token that is fed to the drafter
(`source.extend`, which returns the logits after each token). A fixed shape is a list of rank paths. The path (0, 2) is
the third most probable child of the most probable first token. Nodes are numbered in level order, and a node with
children is fed. Example: the paths (0), (1), (0, 0), (0, 1), (1, 0).

    the root, row 0
    ├─ (0)      node 0, row 1
    │  ├─ (0, 0)   node 2
    │  └─ (0, 1)   node 3
    └─ (1)      node 1, row 2
       └─ (1, 0)   node 4

`Ranked.draft_shape` feeds the root and takes the tokens of rank 0 and 1 from its logits: nodes 0 and 1. It feeds both
nodes in one pass and ranks two tokens after each. The four tokens have the paths (0, 0), (0, 1), (1, 0) and (1, 1), and
the first three are in the shape. `_plan` works this out once for each shape: the nodes to feed, and the tokens to pick.

A k-config tree has a number of children for each level instead of a shape. Its children may be drawn from q, so equal
draws make its nodes fewer from round to round.
"""

import operator
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, pairwise, product
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from annotated_types import Ge, Len
from torch import Tensor

from outrider.base.errors import UserError
from outrider.base.settings import read_as
from outrider.inference.core.drafter import CANDIDATE, CHOSEN, TRIED
from outrider.inference.core.ops import row_maxima
from outrider.inference.core.sampling import invert
from outrider.inference.core.tree import ROOT, DraftTree, chain_parents
from outrider.inference.settings.method import Draw, StructureConfig, known_size
from outrider.inference.shapes.structure import Structure, Tree, cat_levels, softmax_probs
from outrider.inference.sizing.policy import Trials, Tuning, trials_in_chain
from outrider.inference.stopping.by_costs import BestLength
from outrider.inference.stopping.interface import Source, StopRule


class Chain(Structure):
    """Drafts one token at a time until the stop rule stops.

    Without a generator of random numbers each token is the argmax, and the draft is deterministic. With a generator it
    is sampled from q, which the tree records. q is the softmax of the logits if the source has no `to_probs`.
    """

    def __init__(self, rule: StopRule, generator: random.Random | None = None):
        super().__init__(rule.max_draft, rule.max_draft, rule)
        self.generator = generator

    def draft(self, source: Source, root: Tensor, limit: int) -> DraftTree:
        max_steps, to_probs, generator = self.steps(limit), source.to_probs, self.generator
        tokens, q_by_node = [root], dict[int, Tensor]()
        while len(tokens) <= max_steps:
            row = len(tokens) - 1  # of the token to feed: the root, or node row − 1
            logits = source.extend(tokens[-1], (row - 1,))
            if generator is None:
                scores = logits if to_probs is None else to_probs(logits, (row,))
                token = row_maxima(scores)[1]
            else:
                probs = (to_probs or softmax_probs)(logits, (row,))
                q_by_node[row - 1] = probs[0]
                token = invert(probs, generator.random())[0]
            tokens.append(token)
            if self.stops(row + 1, token, logits, source):
                break
        draft_len = len(tokens) - 1
        rows = (*range(1, draft_len), -1)[:draft_len]  # the last token is never fed
        return DraftTree(torch.cat(tokens)[1:], chain_parents(0, draft_len), rows, q=q_by_node)

    def observe(self, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        if isinstance(self.rule, BestLength) and len(tree):
            self.totals[f"{CHOSEN}max_draft={self.rule.length}"] += 1
        super().observe(tree, accepted_nodes)

    def trials(self, tree: DraftTree, accepted_nodes: Sequence[int]) -> Trials:
        return trials_in_chain(len(tree), len(accepted_nodes))


RankPath = Annotated[tuple[Annotated[int, Ge(0)], ...], Len(1)]
Shape = tuple[tuple[int, ...], ...]  # rank paths in level order, with the parent of every path (see `parse_shape`)


def parse_shape(paths: Collection[tuple[int, ...]], label: str = "shape") -> Shape:
    """Check rank paths and put them in level order; raises `UserError` naming `label` and the offending path."""
    if not paths:
        raise UserError(f"{label}: expected a non-empty list of rank paths such as [[0], [1], [0, 0]]")
    counts = Counter(paths)
    for path, count in counts.items():
        if count > 1:
            raise UserError(f"{label}: {list(path)} is listed twice; remove one of them")
        if len(path) > 1 and path[:-1] not in counts:
            raise UserError(f"{label}: {list(path)} has no parent; add {list(path[:-1])}")
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def read_shape(path: str | Path) -> Shape:
    """A shape from a JSON file: a list of rank paths. Raises `UserError`."""
    remedy = "expected ranks from 0 (most probable) up, e.g. [[0], [1], [0, 0]]"
    return parse_shape(read_as(list[RankPath], path, "list of rank paths", remedy), str(path))


# EAGLE's published tree: 4 first tokens, 25 nodes, depth 5.
_EAGLE = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
EAGLE_25 = parse_shape([tuple(map(int, path)) for path in _EAGLE.split()])


@lru_cache
def binary_shape(nodes: int) -> Shape:
    """The first `nodes` nodes of the binary tree in level order."""
    paths: list[tuple[int, ...]] = [()]
    for i in range(nodes):
        paths.append((*paths[i // 2], i % 2))
    return parse_shape(paths[1:])


@lru_cache
def full_shape(widths: tuple[int, ...]) -> Shape:
    """The tree in which every node of level i has widths[i] children."""
    width_prefixes = [widths[:depth] for depth in range(1, len(widths) + 1)]
    return parse_shape([path for prefix in width_prefixes for path in product(*map(range, prefix))])


def find_shape(name_or_path: str, n_nodes: int) -> Shape:
    """The shape "binary" with `n_nodes` nodes, "eagle", or the shape in the file `name_or_path`. Raises `UserError`."""
    if name_or_path == "binary":
        return binary_shape(n_nodes)
    return EAGLE_25 if name_or_path == "eagle" else read_shape(name_or_path)


class _LevelPlan(NamedTuple):
    """How one level of a shape is drafted: which nodes of the level above to feed, and which ranked tokens to take."""

    fed: Tensor | None  # [m] indices in the level above of its nodes with children; None: all of that level
    parent_rows: tuple[int, ...]  # [m] rows of these nodes' parents
    rank_count: int  # the number of most likely tokens to find after each of them
    flat_picks: Tensor | None  # [level] indices of the level's tokens in the flattened [m, ranks]; None: all


class _ShapePlan(NamedTuple):
    """How a shape is drafted, level by level, and the parents and rows of the tree."""

    levels: tuple[_LevelPlan, ...]
    parents: tuple[int, ...]  # of every node
    rows: tuple[int, ...]  # of every node; −1 without children


@lru_cache(maxsize=256)
def _plan(shape: Shape, limit: int, vocabulary: int, device: torch.device) -> _ShapePlan:
    """The plan of the paths of `shape` that have at most `limit` ranks, all below `vocabulary`."""
    paths = [path for path in shape if len(path) <= limit and max(path) < vocabulary]
    node_by_path: dict[tuple[int, ...], int] = {(): ROOT} | {path: node for node, path in enumerate(paths)}
    parents = tuple(node_by_path[path[:-1]] for path in paths)
    nodes_with_children = set(parents)
    fed_paths = [path for path, node in node_by_path.items() if node in nodes_with_children]
    row_by_path = {path: row for row, path in enumerate(fed_paths)}
    levels: list[Shape] = [((),), *(tuple(level) for _, level in groupby(paths, key=len))]
    level_plans = tuple(_plan_level(level_above, level, row_by_path, device) for level_above, level in pairwise(levels))
    return _ShapePlan(level_plans, parents, tuple(row_by_path.get(path, -1) for path in paths))


def _plan_level(above: Shape, level: Shape, row_of: Mapping[tuple[int, ...], int], device: torch.device) -> _LevelPlan:
    """The plan of the paths `level`, whose parents are among the paths `above`. row_of: the rows of the fed paths."""
    fed_indices = [index for index, path in enumerate(above) if path in row_of]
    fed_paths = [above[index] for index in fed_indices]
    rank_count = 1 + max(path[-1] for path in level)
    flat_picks = [fed_paths.index(path[:-1]) * rank_count + path[-1] for path in level]
    return _LevelPlan(
        None if len(fed_indices) == len(above) else torch.tensor(fed_indices, device=device),
        tuple(row_of[path[:-1]] for path in fed_paths),
        rank_count,
        None if len(flat_picks) == len(fed_paths) * rank_count else torch.tensor(flat_picks, device=device),
    )


class Ranked(Tree):
    """Trees of fixed shape. A node of rank r, from 0, is the r-th most likely child of its parent."""

    def draft_shape(self, source: Source, root: Tensor, shape: Shape, limit: int) -> DraftTree:
        """The tree of this shape: deterministic, without a device transfer, of at most len(shape) rows.

        Ranks are by q, or by the logits if the source has no `to_probs`. Paths longer than `limit` and ranks beyond the
        vocabulary are left out.
        """
        max_levels, to_probs = self.steps(limit), self.ranking(source)
        if max_levels < 1:
            return DraftTree(root[:0], (), ())
        logits = source.extend(root, (ROOT,))  # [1, V]
        vocab_size = logits.shape[-1]
        plan = _plan(shape, max_levels, vocab_size, root.device)
        levels, row_count = list[Tensor](), 0  # levels: the tokens of every level
        for level_plan in plan.levels:
            if levels:
                tokens = levels[-1] if level_plan.fed is None else levels[-1][level_plan.fed]
                logits = source.extend(tokens, level_plan.parent_rows)  # [m, V]
            rows = range(row_count, row_count + len(logits))
            scores = logits
            if to_probs is not None:  # tokens that sampling leaves out come after all others, by their logits
                q = to_probs(logits, rows)
                scores = torch.where(q > 0, q, logits.float() - logits.amax(-1, keepdim=True) - 1)
            row_count = rows.stop
            ranked_tokens = scores.topk(level_plan.rank_count).indices.flatten()  # [m · ranks]
            levels.append(ranked_tokens if level_plan.flat_picks is None else ranked_tokens[level_plan.flat_picks])
            if self.stops(len(levels), levels[-1], logits, source):
                break
        if len(levels) < len(plan.levels):  # the rule stopped: the plan of the levels that there are
            plan = _plan(shape, len(levels), vocab_size, root.device)
        return DraftTree(cat_levels(levels, root), plan.parents, plan.rows)


class Static(Ranked):
    """A tree of fixed shape, named by the settings."""

    def __init__(self, settings: StructureConfig, generator: random.Random | None, tuning: Tuning | None):
        self.shape = find_shape(settings.shape, known_size(settings.nodes))
        super().__init__(settings, len(self.shape), len(self.shape[-1]))

    def draft(self, source: Source, root: Tensor, limit: int) -> DraftTree:
        return self.draft_shape(source, root, self.shape, limit)


class KConfig(Ranked):
    """MCSD's tree: every node of level i gets up to widths[i] children, fewer if q has fewer tokens left.

    How children are chosen, without a generator of random numbers always as "top_k":
    - "with_replacement": i.i.d. samples; equal samples share a node (`DraftTree.draws`).
    - "without_replacement": x_i ~ q_i, q_1 = q, q_{i+1} = norm(q_i without x_i).
    - "top_k": the most probable tokens, deterministic.
    The sampled modes transfer once per level, top_k never. At most Σ_i Π_{j≤i} widths[j] rows.
    """

    def __init__(self, settings: StructureConfig, generator: random.Random | None, tuning: Tuning | None):
        self.generator = generator
        self.mode: Draw = "top_k" if generator is None else settings.draw
        super().__init__(settings, sum(level_sizes(settings.widths)), len(settings.widths))

    def draft(self, source: Source, root: Tensor, limit: int) -> DraftTree:
        generator, widths = self.generator, self.settings.widths
        if generator is None or self.mode == "top_k":
            return self.draft_shape(source, root, full_shape(widths), limit)
        to_probs = self.ranking(source) or softmax_probs
        with_replacement = self.mode == "with_replacement"
        levels, parents = list[Tensor](), list[int]()  # the tokens of every level; the parent of every node
        draws_by_node: dict[int, tuple[int, ...]] = {}
        q_by_node, row_by_node = dict[int, Tensor](), dict[int, int]()  # of the root and the nodes with children
        fed_nodes, tokens, parent_rows = [ROOT], root, [ROOT]
        for depth, width in enumerate(widths[: max(self.steps(limit), 0)], start=1):
            logits = source.extend(tokens, parent_rows)  # [m, V]
            rows = range(len(row_by_node), len(row_by_node) + len(fed_nodes))
            row_by_node |= zip(fed_nodes, rows, strict=True)
            probs = to_probs(logits, rows)  # [m, V]
            q_by_node |= zip(fed_nodes, probs, strict=True)
            drawn = _draw(probs, width, generator, with_replacement)  # [m, width]
            first_new_node = len(parents)
            token_ids = _add_children(fed_nodes, drawn.tolist(), parents, draws_by_node)
            tokens = drawn.flatten() if len(token_ids) == drawn.numel() else torch.tensor(token_ids, device=root.device)
            levels.append(tokens)
            if self.stops(depth, tokens, logits, source):
                break
            fed_nodes = list(range(first_new_node, len(parents)))
            parent_rows = [row_by_node[parents[node]] for node in fed_nodes]
        node_rows = tuple(row_by_node.get(node, -1) for node in range(len(parents)))
        draws_by_node = draws_by_node if with_replacement else {}
        return DraftTree(cat_levels(levels, root), tuple(parents), node_rows, q=q_by_node, draws=draws_by_node)

    def observe(self, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        super().observe(tree, accepted_nodes)
        for _, accepted_rank in outcomes_at_nodes(tree, accepted_nodes):
            self.totals[TRIED] += 1
            if accepted_rank is not None:
                self.totals[f"{CANDIDATE}{accepted_rank + 1}"] += 1


def _add_children(
    nodes: Sequence[int], drawn: Sequence[Sequence[int]], parents: list[int], draws_by_node: dict[int, tuple[int, ...]]
) -> list[int]:
    """Add a child for every different token that was drawn at a node; returns the tokens of the new nodes.

    drawn: the draws at each of `nodes`, −1 for none. parents: of the tree's nodes so far, to which those of the new
    nodes are appended. draws_by_node: receives the child that each draw hit (see `DraftTree`).
    """
    tokens: list[int] = []
    for parent, node_draws in zip(nodes, drawn, strict=True):
        child_by_token: dict[int, int] = {}
        for token in node_draws:
            if token >= 0 and token not in child_by_token:
                child_by_token[token] = len(parents)
                parents.append(parent)
                tokens.append(token)
        draws_by_node[parent] = tuple(child_by_token[token] for token in node_draws if token >= 0)
    return tokens


def level_sizes(widths: Sequence[int]) -> list[int]:
    """Nodes on every level of a k-config tree."""
    return list(accumulate(widths, operator.mul))


def outcomes_at_nodes(tree: DraftTree, accepted_nodes: Sequence[int]) -> Iterator[tuple[int, int | None]]:
    """For every node with candidates on the target's path: their number, and the index of the accepted one."""
    for node, child in zip([ROOT, *accepted_nodes], [*accepted_nodes, None], strict=True):
        candidates = tree.draws.get(node) or [i for i, parent in enumerate(tree.parents) if parent == node]
        if candidates:
            yield len(candidates), None if child is None else list(candidates).index(child)


def _draw(probs: Tensor, sample_count: int, generator: random.Random, replacement: bool) -> Tensor:
    """Sample `sample_count` tokens from each row of probs [m, V] -> [m, samples], −1 if no token with q > 0 is left.

    Without replacement, each drawn token's q is set to 0 before the next draw. This has the distribution of Gumbel
    top-k, and needs one cumulative sum per draw instead of V random numbers per row.
    """
    draw_count, tokens_per_draw = (1, sample_count) if replacement else (sample_count, 1)
    q = probs if draw_count == 1 else probs.clone()
    sampled_tokens = []
    for i in range(draw_count):
        uniforms = [generator.random() for _ in range(len(probs) * tokens_per_draw)]
        uniform_rows = torch.tensor(uniforms, dtype=torch.float64).view(len(probs), tokens_per_draw)
        sampled_tokens.append(invert(q, uniform_rows.to(probs.device, non_blocking=True)))  # [m, tokens_per_draw]
        if i + 1 < draw_count:
            q.scatter_(-1, sampled_tokens[-1].clamp(min=0), 0.0)  # an exhausted row is 0 already
    return torch.cat(sampled_tokens, dim=-1)
