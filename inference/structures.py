"""Draft structures: functions from a source and the last committed token to a `DraftTree`.

Every structure feeds `root` [1] alone in its first `extend` (row 0), then one `extend` per level with the nodes
that get children. Nodes stand in level order (copies of a token graph behind all others), so parents come
before children and a caller may feed the nodes without a row in index order. `limit` bounds the nodes on a
path; at limit 0 nothing is drafted and nothing is fed.
"""

import heapq
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_models.errors import UserError, require_choice
from inference.stop_rules import Step, StopRule
from inference.tree import ROOT, DraftTree, chain_parents

# Logits [n, V] after the rows with these numbers -> draft distributions [n, V].
ToProbs = Callable[[Tensor, Sequence[int]], Tensor]
K_CONFIG_MODES = ("with_replacement", "without_replacement", "top_k")


class Extends(Protocol):
    """What a structure needs of a source (see `inference.sources.DraftModel`)."""

    @property
    def hidden(self) -> Tensor: ...
    @property
    def target_hidden(self) -> Tensor: ...
    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor: ...


@dataclass(frozen=True)
class OptimalTree(DraftTree):
    """An OPT-Tree. expected: E(A) = 1 + Σ p̂ over its nodes, known on the host."""

    expected: float = 1.0


@dataclass(frozen=True)
class GraphTree(DraftTree):
    """An unmerged token graph: nodes [0, drafted) came from the source, the others are copies.

    A round is a "graph success" if an accepted node is ≥ drafted. merged: redundant node -> first occurrence.
    """

    drafted: int = 0
    merged: dict[int, int] = field(default_factory=dict)


def plain_probs(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Softmax in float32 [n, V]: the draft distribution where nothing is processed."""
    return logits.float().softmax(-1)


# --- chain -----------------------------------------------------------------------------------------------------


def chain(
    source: Extends,
    root: Tensor,
    rule: StopRule,
    *,
    limit: int,
    to_probs: ToProbs | None = None,
    generator: torch.Generator | None = None,
) -> DraftTree:
    """One token after the other until `rule` stops or `limit` tokens are there.

    Without a generator each token is the most probable one and the draft is deterministic; with one it is drawn
    from q, which the tree records. `to_probs` None: logits as they are (greedy), plain softmax (sampled).
    """
    tokens = [root]
    q: dict[int, Tensor] = {}
    while len(tokens) <= limit:
        row = len(tokens) - 1
        logits = source.extend(tokens[-1], (row - 1,))
        if generator is None:
            token = (logits if to_probs is None else to_probs(logits, (row,))).argmax(-1)
        else:
            probs = (to_probs or plain_probs)(logits, (row,))
            q[row - 1] = probs[0]
            token = _draw(probs, 1, generator, replacement=True)[0]
        tokens.append(token)
        if rule.stop(Step(row + 1, token, logits, source)):
            break
    n = len(tokens) - 1
    fed = (*range(1, n), -1)[:n]  # the last token never is
    return DraftTree(torch.cat(tokens)[1:], chain_parents(0, n), fed, q=q)


# --- k-config trees ----------------------------------------------------------------------------------------------


def k_config(
    source: Extends,
    root: Tensor,
    *,
    limit: int,
    widths: Sequence[int] = (4, 2, 2),
    mode: str = "without_replacement",
    to_probs: ToProbs | None = None,
    generator: torch.Generator | None = None,
) -> DraftTree:
    """MCSD's tree: every node of level i gets up to widths[i] children; fewer where q has fewer tokens left.

    mode "with_replacement": i.i.d. draws, equal ones share a node (`DraftTree.draws`); "without_replacement":
    x_i ~ q_i, q_1 = q, q_{i+1} = norm(q_i without x_i); "top_k": the most probable tokens, deterministic.
    The sampled modes transfer once per level, top_k never. At most Σ_i Π_{j≤i} widths[j] rows.
    """
    require_choice("mode", mode, K_CONFIG_MODES)
    if mode == "top_k":
        return static(source, root, full_shape(tuple(widths)), limit=limit, to_probs=to_probs)
    to_probs = to_probs or plain_probs
    replacement = mode == "with_replacement"
    widths = widths[: max(limit, 0)]
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
        rows += range(fed, fed + len(inner)) if depth + 1 < len(widths) else [-1] * len(inner)
    return DraftTree(_cat(levels, root), tuple(parents), tuple(rows), q=q, draws=draws)


def _draw(probs: Tensor, count: int, generator: torch.Generator | None, replacement: bool) -> Tensor:
    """Draw `count` tokens from each row of probs [m, V] -> [m, count], −1 where no token with q > 0 is left.

    Inverse CDF: u uniform on [0, Σq), the first token whose running sum exceeds u; a token with q = 0 has an
    empty interval. Without replacement each drawn token's q is set to 0 and the rest is drawn from again. That
    is the law of Gumbel top-k, at one running sum per draw instead of V random numbers per row. The generator may
    live on another device than probs: its few numbers are moved.
    """
    rounds, each = (1, count) if replacement else (count, 1)
    home = probs.device if generator is None else generator.device
    left = probs if rounds == 1 else probs.clone()
    drawn = []
    for i in range(rounds):
        cumulative = left.cumsum(-1)
        u = torch.rand((len(probs), each), generator=generator, device=home, dtype=probs.dtype).to(probs.device)
        tokens = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).clamp_(max=probs.shape[-1] - 1)
        drawn.append(torch.where(left.gather(-1, tokens) > 0, tokens, -1))
        if i + 1 < rounds:
            left.scatter_(-1, tokens, 0.0)
    return drawn[0] if rounds == 1 else torch.cat(drawn, dim=-1)


# --- OPT-Tree ------------------------------------------------------------------------------------------------------


def opt_tree(
    source: Extends,
    root: Tensor,
    *,
    limit: int,
    nodes: int,
    delta: float,
    to_probs: ToProbs | None = None,
) -> OptimalTree:
    """The tree of at most `nodes` nodes with the largest E(A) = 1 + Σ p̂ (OPT-Tree, Algorithm 1).

    Level by level: the next level is the `nodes` largest p̂ among the children of the last one. Drafting ends
    when a level raised E of the best tree by `delta` or less. Of the last level only nodes that are in the best
    tree so far are fed: a child comes behind its parent in the order by (p̂, depth), so descendants of a node
    outside the best `nodes` can never enter. Nodes with p̂ = 0 are left out. The best tree holds a prefix of
    every level sorted by p̂, which makes parent closure hold under ties and leaves nothing to gather.
    One transfer per level; at most nodes · limit rows.
    """
    to_probs = to_probs or plain_probs
    levels: list[tuple[Tensor, Tensor]] = []  # per level: tokens, p̂, descending
    above: list[list[int]] = []  # per level: place of each node's parent in the level before
    first_rows: list[int] = []  # per level: row of its first node
    fed: list[int] = []  # per level: how many of its nodes were fed
    best: list[tuple[float, int]] = []  # (−p̂, level) of the best tree, ascending
    tokens, parent_rows, rows = root, [ROOT], 0
    weights: Tensor | None = None
    gain, expected = math.inf, 0.0
    while len(levels) < limit and gain > delta and parent_rows:
        logits = source.extend(tokens, parent_rows)
        probs = to_probs(logits, range(rows, rows + len(parent_rows)))
        start, rows = rows, rows + len(parent_rows)
        found, places, level_tokens = _largest(probs, weights, nodes)
        values, place_list = torch.stack([found, places.to(found.dtype)]).tolist()
        depth = len(levels)
        best = sorted([*best, *((-value, depth) for value in values if value > 0)])[:nodes]
        levels.append((level_tokens, found))
        above.append([int(place) for place in place_list])
        first_rows.append(rows)
        kept = sum(level == depth for _, level in best)
        total = -math.fsum(value for value, _ in best)
        gain, expected = total - expected, total
        tokens, weights = level_tokens[:kept], found[:kept]
        parent_rows = [start + place for place in above[-1][:kept]]
        fed.append(kept)
    if fed:
        fed[-1] = 0
    counts = [0] * len(levels)
    for _, level in best:
        counts[level] += 1
    parents: list[int] = []
    fed_rows: list[int] = []
    offset = 0
    for depth, count in enumerate(counts):
        previous = offset - counts[depth - 1] if depth else 0
        parents += [previous + place if depth else ROOT for place in above[depth][:count]]
        fed_rows += [first_rows[depth] + i if i < fed[depth] else -1 for i in range(count)]
        offset += count
    kept_levels = [(level[:count], values[:count]) for (level, values), count in zip(levels, counts, strict=True)]
    return OptimalTree(
        _cat([level for level, _ in kept_levels], root),
        tuple(parents),
        tuple(fed_rows),
        path_probs=_cat([values for _, values in kept_levels], torch.zeros(1, device=root.device)),
        expected=1.0 + expected,
    )


def _largest(probs: Tensor, weights: Tensor | None, count: int, chunk: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` largest of probs [m, V] · weights [m, 1], descending: values, rows, columns (each [count] or fewer).

    They lie in the `count` chunks with the largest maxima, so one pass over probs finds the chunks and the rest
    looks at count · chunk numbers. V is padded with zeros, which come last.
    """
    if probs.shape[-1] % chunk:
        probs = F.pad(probs, (0, -probs.shape[-1] % chunk))
    chunks = probs.unflatten(-1, (-1, chunk))  # [m, V / chunk, chunk]
    per_row = chunks.shape[1]
    maxima = chunks.amax(-1)
    if weights is not None:
        maxima = maxima * weights[:, None]
    best = maxima.flatten().topk(min(count, maxima.numel())).indices
    rows = best // per_row
    candidates = chunks.flatten(0, 1)[best]
    if weights is not None:
        candidates = candidates * weights[rows, None]
    top = candidates.flatten().topk(min(count, candidates.numel()))
    at = top.indices // chunk
    return top.values, rows[at], (best - rows * per_row)[at] * chunk + top.indices % chunk


# --- token graph -----------------------------------------------------------------------------------------------------


@dataclass
class TokenGraph:
    """Nodes on the host in level order. A merged node has no children of its own: its successors are those of
    `merged[node]`, the first extended node that ends the same τ-gram. Following children and merges never
    leads back: the graph is acyclic.
    """

    root_token: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)  # q of the node given its path
    paths: list[float] = field(default_factory=list)  # p̂
    depths: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    children: list[list[int]] = field(default_factory=list)
    merged: dict[int, int] = field(default_factory=dict)

    def add(self, token: int, parent: int, prob: float) -> int:
        """Append a node; returns its index."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.probs.append(prob)
        self.paths.append(prob * (self.paths[parent] if parent >= 0 else 1.0))
        self.depths.append(1 + (self.depths[parent] if parent >= 0 else 0))
        self.rows.append(-1)
        self.children.append([])
        if parent >= 0:
            self.children[parent].append(node)
        return node

    def suffix(self, node: int, tau: int) -> tuple[int, ...] | None:
        """The τ-gram that ends at `node`, last token first, the root's token included; None if the path is shorter."""
        if self.depths[node] + 1 < tau:
            return None
        gram: list[int] = []
        while len(gram) < tau:
            gram.append(self.tokens[node] if node >= 0 else self.root_token)
            node = self.parents[node] if node >= 0 else ROOT
        return tuple(gram)

    def leads_to(self, start: int, node: int) -> bool:
        """Whether `node` can be reached from `start` along children and merges."""
        seen, waiting = {node}, [node]
        while waiting:
            current = waiting.pop()
            if current == start:
                return True
            before = [redundant for redundant, first in self.merged.items() if first == current]
            for previous in (self.parents[current], *before):
                if previous >= 0 and previous not in seen:
                    seen.add(previous)
                    waiting.append(previous)
        return False


def token_graph(
    source: Extends,
    root: Tensor,
    *,
    limit: int,
    node_budget: int,
    out_degree: int = 4,
    theta_prob: float = 0.2,
    theta_sibling: float = 0.3,
    tau: int = 2,
    to_probs: ToProbs | None = None,
) -> GraphTree:
    """GSD's token graph, drafted and unmerged. At most `node_budget` nodes, and as many rows."""
    if limit < 1:
        return GraphTree(root[:0], (), ())
    graph = draft_graph(
        source,
        root,
        limit=limit,
        node_budget=node_budget,
        out_degree=out_degree,
        theta_prob=theta_prob,
        theta_sibling=theta_sibling,
        tau=tau,
        to_probs=to_probs,
    )
    drafted = len(graph.tokens)
    unmerge(graph, limit, node_budget)
    return GraphTree(
        torch.tensor(graph.tokens, dtype=torch.long, device=root.device),
        tuple(graph.parents),
        tuple(graph.rows),
        drafted=drafted,
        merged=graph.merged,
    )


def draft_graph(
    source: Extends,
    root: Tensor,
    *,
    limit: int,
    node_budget: int,
    out_degree: int,
    theta_prob: float,
    theta_sibling: float,
    tau: int,
    to_probs: ToProbs | None = None,
) -> TokenGraph:
    """Grow the graph level by level until no node is left to extend (GSD §4.2, §5.2, §5.3); one transfer a level.

    A node gets its `out_degree` most probable children (q > 0). It stays a leaf if q < theta_prob, or if
    q < theta_sibling · the largest q among its siblings, or if it is τ-redundant: its τ-gram ends at an earlier
    node that is extended. The redundant node is merged into the first such node, unless that would close a
    cycle; then it counts as new. A pruned earlier occurrence has no successors to share and is passed over; a
    pruned later one is merged like any other, sharing is free. tau=0 merges nothing. When a level exceeds
    `node_budget`, its nodes with the largest p̂ stay.
    """
    to_probs = to_probs or plain_probs
    graph = TokenGraph(0)
    first_with: dict[tuple[int, ...], int] = {}
    inner, tokens, parent_rows, fed = [ROOT], root, [ROOT], 0
    for depth in range(1, limit + 1):
        logits = source.extend(tokens, parent_rows)
        top = to_probs(logits, range(fed, fed + len(inner))).topk(min(out_degree, logits.shape[-1]))
        table = torch.cat([top.values.float(), top.indices.float()], dim=-1)  # token ids below 2^24 are exact
        if not fed:
            table = torch.cat([table, root[None].float()], dim=-1)
        lines = table.tolist()
        for place, node in enumerate(inner):
            if node >= 0:
                graph.rows[node] = fed + place
        if not fed:
            graph.root_token = int(lines[0].pop())
        fed += len(inner)
        level = _children(graph, inner, lines, node_budget)
        inner = []
        if depth == limit or len(graph.tokens) >= node_budget:
            break
        for node, largest in level:
            gram = graph.suffix(node, tau) if tau else None
            first = first_with.get(gram) if gram is not None else None
            if first is not None and not graph.leads_to(first, node):
                graph.merged[node] = first
            elif graph.probs[node] >= theta_prob and graph.probs[node] >= theta_sibling * largest:
                inner.append(node)
                if gram is not None:
                    first_with.setdefault(gram, node)
        if not inner:
            break
        tokens = torch.tensor([graph.tokens[node] for node in inner], device=root.device)
        parent_rows = [graph.rows[graph.parents[node]] if depth > 1 else 0 for node in inner]
    return graph


def _children(
    graph: TokenGraph, inner: Sequence[int], lines: Sequence[Sequence[float]], node_budget: int
) -> list[tuple[int, float]]:
    """Add a level to `graph`: per inner node a line of q's and tokens. Returns (node, largest q among siblings)."""
    found = []  # (p̂, parent, token, q, largest)
    for parent, line in zip(inner, lines, strict=True):
        k = len(line) // 2
        above = graph.paths[parent] if parent >= 0 else 1.0
        for prob, token in zip(line[:k], line[k:], strict=True):
            if prob > 0:
                found.append((above * prob, parent, int(token), prob, line[0]))
    room = node_budget - len(graph.tokens)
    if len(found) > room:
        order = sorted(range(len(found)), key=lambda i: -found[i][0])[:room]
        found = [found[i] for i in sorted(order)]
    return [(graph.add(token, parent, prob), largest) for _, parent, token, prob, largest in found]


def unmerge(graph: TokenGraph, limit: int, node_budget: int) -> None:
    """Turn the graph into a tree: below every merged node, copy the successors of its first occurrence (GSD §5.4).

    Copies carry the q of what they copy and are added by descending p̂ while there are fewer than `node_budget`
    nodes; no path gets longer than `limit`. Copies have no row: the source was never fed them.
    """
    originals = [graph.children[graph.merged.get(node, node)] for node in range(len(graph.tokens))]
    waiting: list[tuple[float, int, int, int]] = []  # (−p̂, tie-break, parent, node to copy)
    pushed = 0

    def push(parent: int, copied: int) -> None:
        nonlocal pushed
        if graph.depths[parent] < limit:
            for child in originals[copied]:
                heapq.heappush(waiting, (-graph.paths[parent] * graph.probs[child], pushed, parent, child))
                pushed += 1

    for node in graph.merged:
        push(node, node)
    while waiting and len(graph.tokens) < node_budget:
        _, _, parent, copied = heapq.heappop(waiting)
        push(graph.add(graph.tokens[copied], parent, graph.probs[copied]), copied)


# --- fixed shapes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A fixed tree as rank paths: (0, 2) is the third most probable child of the most probable first token.

    paths: in level order, every path's parent among them. Build it with `parse_shape`.
    """

    paths: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.paths)


def parse_shape(paths: object, name: str = "shape") -> Shape:
    """Check rank paths and put them in level order; raises `UserError` naming `name` and the offending path."""
    if not isinstance(paths, Sequence) or isinstance(paths, str) or not paths:
        raise UserError(f"{name}: expected a non-empty list of rank paths such as [[0], [1], [0, 0]]")
    known: set[tuple[int, ...]] = set()
    for path in paths:
        if not isinstance(path, Sequence) or isinstance(path, str) or not path:
            raise UserError(f"{name}: {path!r} is not a rank path; expected a non-empty list such as [0, 0]")
        for rank in path:
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
                raise UserError(f"{name}: rank {rank!r} in {list(path)}; ranks are integers from 0 (most probable) up")
        if tuple(path) in known:
            raise UserError(f"{name}: {list(path)} is listed twice; remove one of them")
        known.add(tuple(path))
    for path in known:
        if len(path) > 1 and path[:-1] not in known:
            raise UserError(f"{name}: {list(path)} has no parent; add {list(path[:-1])}")
    return Shape(tuple(sorted(known, key=lambda path: (len(path), path))))


def read_shape(path: str | Path) -> Shape:
    """A shape from a JSON file: a list of rank paths."""
    try:
        content = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected JSON such as [[0], [1], [0, 0]]") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); expected e.g. [[0], [1], [0, 0]]") from None
    return parse_shape(content, str(path))


# EAGLE's published tree: 4 first tokens, 25 nodes, depth 5.
EAGLE_25 = parse_shape(
    [
        [int(rank) for rank in path]
        for path in (
            *("0", "1", "2", "3"),
            *("00", "01", "02", "10", "11", "20", "21", "30"),
            *("000", "001", "002", "010", "011", "020", "021", "100"),
            *("0000", "0001", "0002", "00000", "00001"),
        )
    ]
)


@lru_cache
def binary_shape(nodes: int) -> Shape:
    """The first `nodes` nodes of the binary tree in level order."""
    if nodes < 1:
        raise UserError(f"binary tree of {nodes} nodes: expected at least 1")
    paths: list[tuple[int, ...]] = [()]
    for i in range(nodes):
        paths.append((*paths[i // 2], i % 2))
    return parse_shape(paths[1:])


@lru_cache
def full_shape(widths: tuple[int, ...]) -> Shape:
    """The tree in which every node of level i has widths[i] children."""
    if not widths or min(widths) < 1:
        raise UserError(f"widths={widths}: expected one number of children ≥ 1 per level, e.g. (4, 2, 2)")
    level: list[tuple[int, ...]] = [()]
    paths: list[tuple[int, ...]] = []
    for width in widths:
        level = [(*path, rank) for path in level for rank in range(width)]
        paths += level
    return parse_shape(paths)


def static(
    source: Extends,
    root: Tensor,
    shape: Shape,
    *,
    limit: int,
    to_probs: ToProbs | None = None,
) -> DraftTree:
    """A tree of fixed shape; a node's rank says the how-manieth most probable child of its parent it is.

    Deterministic and without any transfer. `to_probs` None ranks the logits as they are. Paths longer than
    `limit`, and ranks that the vocabulary does not have, are left out. At most len(shape) rows.
    """
    if limit < 1:
        return DraftTree(root[:0], (), ())
    scores = source.extend(root, (ROOT,))
    plan = _plan(shape, limit, scores.shape[-1], root.device)
    levels: list[Tensor] = []
    fed = 0
    for step in plan.steps:
        if fed:
            scores = source.extend(levels[-1] if step.inner is None else levels[-1][step.inner], step.parent_rows)
        if to_probs is not None:
            scores = to_probs(scores, range(fed, fed + len(scores)))
        fed += len(scores)
        ranked = scores.topk(step.ranks).indices.flatten()
        levels.append(ranked if step.picks is None else ranked[step.picks])
    return DraftTree(_cat(levels, root), plan.parents, plan.rows)


class _Step(NamedTuple):
    """One level of a shape: which nodes of the level before to feed, and which of their ranked tokens to take."""

    inner: Tensor | None  # places in the level before; None: all of it
    parent_rows: tuple[int, ...]  # their parents' rows
    ranks: int
    picks: Tensor | None  # places in [inner nodes × ranks]; None: all


class _Plan(NamedTuple):
    steps: tuple[_Step, ...]
    parents: tuple[int, ...]
    rows: tuple[int, ...]


@lru_cache(maxsize=256)
def _plan(shape: Shape, limit: int, vocabulary: int, device: torch.device) -> _Plan:
    paths = [path for path in shape.paths if len(path) <= limit and max(path) < vocabulary]
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
        places = [before.index(node) for node in inner] if depth > 1 else []
        picks = [inner.index(parents[node]) * ranks + paths[node][-1] for node in level]
        steps.append(
            _Step(
                None if len(places) == len(before) else torch.tensor(places, device=device),
                tuple(row_of[parents[node]] for node in inner if node >= 0),
                ranks,
                None if len(picks) == len(inner) * ranks else torch.tensor(picks, device=device),
            )
        )
        before = level
    return _Plan(tuple(steps), parents, tuple(row_of.get(node, -1) for node in range(len(paths))))


def _cat(levels: Sequence[Tensor], root: Tensor) -> Tensor:
    return torch.cat(list(levels)) if levels else root[:0]
