"""Chains, trees of fixed shape, and MCSD's k-config trees."""

import itertools
import operator
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
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
from outrider.inference.settings.method import Draw, StructureConfig, number
from outrider.inference.shapes.structure import Structure, Tree, cat_levels, plain_probs
from outrider.inference.sizing.policy import Trials, Tuning, trials_in_chain
from outrider.inference.stopping.by_costs import BestLength
from outrider.inference.stopping.interface import Source, StopRule


class Chain(Structure):
    """Drafts one token at a time until the stop rule stops.

    Without a generator each token is the argmax, and the draft is deterministic. With one it is sampled from q, which
    the tree records. Without a sampler, unprocessed logits decide (greedy), or their softmax (sampled).
    """

    def __init__(self, rule: StopRule, generator: random.Random | None = None):
        super().__init__(rule.max_draft, rule.max_draft, rule)
        self.generator = generator

    def draft(self, source: Source, root: Tensor, limit: int) -> DraftTree:
        steps, to_probs, generator = self.steps(limit), source.to_probs, self.generator
        tokens = [root]
        q: dict[int, Tensor] = {}
        while len(tokens) <= steps:
            row = len(tokens) - 1
            logits = source.extend(tokens[-1], (row - 1,))
            if generator is None:
                scores = logits if to_probs is None else to_probs(logits, (row,))
                token = row_maxima(scores)[1]
            else:
                probs = (to_probs or plain_probs)(logits, (row,))
                q[row - 1] = probs[0]
                token = invert(probs, generator.random())[0]
            tokens.append(token)
            if self.stops(row + 1, token, logits, source):
                break
        n = len(tokens) - 1
        fed = (*range(1, n), -1)[:n]  # the last token is never fed
        return DraftTree(torch.cat(tokens)[1:], chain_parents(0, n), fed, q=q)

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        if isinstance(self.rule, BestLength) and len(tree):
            self.totals[f"{CHOSEN}max_draft={self.rule.length}"] += 1
        super().observe(tree, accepted)

    def trials(self, tree: DraftTree, accepted: Sequence[int]) -> Trials:
        return trials_in_chain(len(tree), len(accepted))


RankPath = Annotated[tuple[Annotated[int, Ge(0)], ...], Len(1)]
# A fixed tree as rank paths, in level order, with every path's parent (see `parse_shape`). (0, 2) is the third most
# probable child of the most probable first token.
Shape = tuple[tuple[int, ...], ...]


def parse_shape(paths: Collection[tuple[int, ...]], name: str = "shape") -> Shape:
    """Check rank paths and put them in level order; raises `UserError` naming `name` and the offending path."""
    if not paths:
        raise UserError(f"{name}: expected a non-empty list of rank paths such as [[0], [1], [0, 0]]")
    counts = Counter(paths)
    for path, count in counts.items():
        if count > 1:
            raise UserError(f"{name}: {list(path)} is listed twice; remove one of them")
        if len(path) > 1 and path[:-1] not in counts:
            raise UserError(f"{name}: {list(path)} has no parent; add {list(path[:-1])}")
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
    level: list[tuple[int, ...]] = [()]
    paths: list[tuple[int, ...]] = []
    for width in widths:
        level = [(*path, rank) for path in level for rank in range(width)]
        paths += level
    return parse_shape(paths)


def find_shape(name: str, nodes: int) -> Shape:
    """The shape "binary" with `nodes` nodes, "eagle", or the shape in the file `name`. Raises `UserError`."""
    if name == "binary":
        return binary_shape(nodes)
    return EAGLE_25 if name == "eagle" else read_shape(name)


class _Step(NamedTuple):
    """One level of a shape: which nodes of the previous level to feed, and which of their ranked tokens to take."""

    inner: Tensor | None  # indices in the previous level; None: all of it
    parent_rows: tuple[int, ...]  # their parents' rows
    ranks: int
    picks: Tensor | None  # indices in [inner nodes × ranks]; None: all


class _Plan(NamedTuple):
    steps: tuple[_Step, ...]
    parents: tuple[int, ...]
    rows: tuple[int, ...]


@lru_cache(maxsize=256)
def _plan(shape: Shape, limit: int, vocabulary: int, device: torch.device) -> _Plan:
    paths = [path for path in shape if len(path) <= limit and max(path) < vocabulary]
    index = {path: node for node, path in enumerate(paths)}
    parents = tuple(index.get(path[:-1], ROOT) for path in paths)
    inner_nodes = sorted({parent for parent in parents if parent >= 0})
    row_of = {ROOT: 0} | {node: row for row, node in enumerate(inner_nodes, start=1)}
    steps = []
    before: list[int] = []
    for depth in range(1, max(map(len, paths), default=0) + 1):
        level = [node for node, path in enumerate(paths) if len(path) == depth]
        inner = sorted({parents[node] for node in level})
        ranks = 1 + max(paths[node][-1] for node in level)
        offsets = [before.index(node) for node in inner] if depth > 1 else []
        picks = [inner.index(parents[node]) * ranks + paths[node][-1] for node in level]
        steps.append(
            _Step(
                None if len(offsets) == len(before) else torch.tensor(offsets, device=device),
                tuple(row_of[parents[node]] for node in inner if node >= 0),
                ranks,
                None if len(picks) == len(inner) * ranks else torch.tensor(picks, device=device),
            )
        )
        before = level
    return _Plan(tuple(steps), parents, tuple(row_of.get(node, -1) for node in range(len(paths))))


class Ranked(Tree):
    """Trees of fixed shape. A node of rank r, from 0, is the r-th most likely child of its parent."""

    def ranked(self, source: Source, root: Tensor, shape: Shape, limit: int) -> DraftTree:
        """The tree of this shape: deterministic, without a device transfer, of at most len(shape) rows.

        Without a sampler, unprocessed logits are ranked. Paths longer than `limit` and ranks beyond the vocabulary are
        left out.
        """
        steps, to_probs = self.steps(limit), self.ranking(source)
        if steps < 1:
            return DraftTree(root[:0], (), ())
        logits = source.extend(root, (ROOT,))
        vocabulary = logits.shape[-1]
        plan = _plan(shape, steps, vocabulary, root.device)
        levels: list[Tensor] = []
        fed = 0
        for step in plan.steps:
            if fed:
                logits = source.extend(levels[-1] if step.inner is None else levels[-1][step.inner], step.parent_rows)
            scores = logits if to_probs is None else to_probs(logits, range(fed, fed + len(logits)))
            fed += len(logits)
            ranked = scores.topk(step.ranks).indices.flatten()
            levels.append(ranked if step.picks is None else ranked[step.picks])
            if self.stops(len(levels), levels[-1], logits, source):
                break
        if len(levels) < len(plan.steps):
            plan = _plan(shape, len(levels), vocabulary, root.device)
        return DraftTree(cat_levels(levels, root), plan.parents, plan.rows)


class Static(Ranked):
    """A tree of fixed shape, named by the settings."""

    def __init__(self, settings: StructureConfig, generator: random.Random | None, tuning: Tuning | None):
        self.shape = find_shape(settings.shape, number(settings.nodes))
        super().__init__(settings, len(self.shape), len(self.shape[-1]))

    def draft(self, source: Source, root: Tensor, limit: int) -> DraftTree:
        return self.ranked(source, root, self.shape, limit)


class KConfig(Ranked):
    """MCSD's tree: every node of level i gets up to widths[i] children, fewer if q has fewer tokens left.

    How children are chosen, without a generator always as "top_k":
    - "with_replacement": i.i.d. samples; equal ones share a node (`DraftTree.draws`).
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
            return self.ranked(source, root, full_shape(widths), limit)
        widths = widths[: max(self.steps(limit), 0)]
        to_probs = self.ranking(source) or plain_probs
        replacement = self.mode == "with_replacement"
        levels: list[Tensor] = []
        parents: list[int] = []
        rows: list[int] = []
        q: dict[int, Tensor] = {}
        draws: dict[int, tuple[int, ...]] = {}
        inner, tokens, parent_rows, fed = [ROOT], root, [ROOT], 0  # inner: nodes that get children; fed: rows so far
        for depth, width in enumerate(widths):
            logits = source.extend(tokens, parent_rows)
            probs = to_probs(logits, range(fed, fed + len(inner)))
            fed += len(inner)
            drawn = _draw(probs, width, generator, replacement)
            fresh: list[int] = []
            start = len(parents)
            for slot, sequence in enumerate(drawn.tolist()):
                node_of: dict[int, int] = {}
                for token in sequence:
                    if token >= 0 and token not in node_of:
                        node_of[token] = len(parents)
                        parents.append(inner[slot])
                        fresh.append(token)
                q[inner[slot]] = probs[slot]
                if replacement:
                    draws[inner[slot]] = tuple(node_of[token] for token in sequence if token >= 0)
            inner = list(range(start, len(parents)))
            tokens = drawn.flatten() if len(fresh) == drawn.numel() else torch.tensor(fresh, device=root.device)
            levels.append(tokens)
            parent_rows = [rows[parents[node]] if depth else 0 for node in inner]
            last = self.stops(depth + 1, tokens, logits, source) or depth + 1 == len(widths)
            rows += [-1] * len(inner) if last else range(fed, fed + len(inner))
            if last:
                break
        return DraftTree(cat_levels(levels, root), tuple(parents), tuple(rows), q=q, draws=draws)

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        super().observe(tree, accepted)
        for _, index in outcomes_at_nodes(tree, accepted):
            self.totals[TRIED] += 1
            if index is not None:
                self.totals[f"{CANDIDATE}{index + 1}"] += 1


def level_sizes(widths: Sequence[int]) -> list[int]:
    """Nodes on every level of a k-config tree."""
    return list(itertools.accumulate(widths, operator.mul))


def outcomes_at_nodes(tree: DraftTree, accepted: Sequence[int]) -> Iterator[tuple[int, int | None]]:
    """For every node with candidates on the target's path: their number, and the index of the accepted one."""
    for node, child in zip([ROOT, *accepted], [*accepted, None], strict=True):
        candidates = tree.draws.get(node) or [i for i, parent in enumerate(tree.parents) if parent == node]
        if candidates:
            yield len(candidates), None if child is None else list(candidates).index(child)


def _draw(probs: Tensor, count: int, generator: random.Random, replacement: bool) -> Tensor:
    """Sample `count` tokens from each row of probs [m, V] -> [m, count], −1 if no token with q > 0 is left.

    Without replacement, each drawn token's q is set to 0 before the next draw. This has the distribution of Gumbel
    top-k, and needs one cumulative sum per draw instead of V random numbers per row.
    """
    rounds, per_round = (1, count) if replacement else (count, 1)
    q = probs if rounds == 1 else probs.clone()
    drawn = []
    for i in range(rounds):
        numbers = torch.tensor([generator.random() for _ in range(len(probs) * per_round)], dtype=torch.float64)
        tokens = invert(q, numbers.view(len(probs), per_round).to(probs.device, non_blocking=True))
        drawn.append(tokens)
        if i + 1 < rounds:
            q.scatter_(-1, tokens.clamp(min=0), 0.0)  # an exhausted row is 0 already
    return drawn[0] if rounds == 1 else torch.cat(drawn, dim=-1)
