"""GSD's token graph: repeated τ-grams of a draft tree are drafted once, and unmerged for verification.

The root is the last token of the text, under which a round drafts. A row is a token that is fed to the drafter
(`source.extend`, which returns the logits after each token). p̂ of a node is the product of q along its path.

A τ-gram is a sequence of τ tokens. Two nodes whose paths end in the same τ-gram most likely have the same
continuations. So `Graph.grow` drafts these under the first node only, and merges the second node into it. `unmerge`
copies them below the second node, because verification needs a tree. Example with τ = 2, where node 5 is merged into
node 2, as both paths end in "cat sat":

    the                              the
    ├─ cat 0 ─── sat 2 ─── on 4      ├─ cat 0 ─── sat 2 ─── on 4
    └─ old 1 ─── cat 3 ─── sat 5     └─ old 1 ─── cat 3 ─── sat 5 ─── on 6, a copy of 4
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.inference.core.tree import ROOT, DraftTree
from outrider.inference.settings.method import StructureConfig, known_size
from outrider.inference.shapes.structure import Tree, softmax_probs
from outrider.inference.sizing.policy import Tuning
from outrider.inference.stopping.interface import Source, ToProbs


@dataclass(frozen=True)
class GraphTree(DraftTree):
    """An unmerged token graph: nodes [0, drafted) came from the source, the others are copies.

    A round is a "graph success" if an accepted node is ≥ drafted. merged: redundant node -> first occurrence.
    """

    drafted: int = 0
    merged: dict[int, int] = field(default_factory=dict)


@dataclass
class TokenGraph:
    """Nodes on the host in level order. A merged node has no children: it shares those of `merged[node]`, the first
    extended node that ends the same τ-gram. The graph of children and merges is acyclic."""

    root_token: int
    limit: int  # the most nodes on a path
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)  # q of the node given its path
    paths: list[float] = field(default_factory=list)  # p̂
    depths: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # −1: not fed
    children: list[list[int]] = field(default_factory=list)
    merged: dict[int, int] = field(default_factory=dict)

    def add(self, token: int, parent: int, prob: float) -> int:
        """Append a node; returns its index."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.probs.append(prob)
        self.paths.append(prob * self.path_prob(parent))
        self.depths.append(1 + (self.depths[parent] if parent >= 0 else 0))
        self.rows.append(-1)
        self.children.append([])
        if parent >= 0:
            self.children[parent].append(node)
        return node

    def path_prob(self, node: int) -> float:
        """p̂ of a node, or of the root."""
        return self.paths[node] if node >= 0 else 1.0

    def suffix(self, node: int, gram_length: int) -> tuple[int, ...] | None:
        """The τ-gram that ends at `node`, last token first, including the root's token; None if the path is shorter."""
        if self.depths[node] + 1 < gram_length:  # with the root's token
            return None
        gram: list[int] = []
        while len(gram) < gram_length:
            gram.append(self.tokens[node] if node >= 0 else self.root_token)
            node = self.parents[node] if node >= 0 else ROOT
        return tuple(gram)

    def leads_to(self, start: int, node: int) -> bool:
        """Whether `node` can be reached from `start` along children and merges."""
        visited, stack = {node}, [node]
        while stack:
            current = stack.pop()
            if current == start:
                return True
            merged_nodes = [redundant for redundant, first_node in self.merged.items() if first_node == current]
            for predecessor in (self.parents[current], *merged_nodes):
                if predecessor >= 0 and predecessor not in visited:
                    visited.add(predecessor)
                    stack.append(predecessor)
        return False


class Graph(Tree):
    """GSD's token graph, drafted and unmerged. At most `settings.nodes` nodes and rows.

    Copies cost no drafting and may reach the depth of the drafting steps, unless the rule stopped the graph earlier;
    with deep_copies, the limit always. Nodes are never drawn (generator), and no size is "auto" (tuning).
    """

    reads_root = True

    def __init__(self, settings: StructureConfig, generator: random.Random | None, tuning: Tuning | None):
        super().__init__(settings, known_size(settings.nodes), known_size(settings.max_depth))

    def ranking(self, source: Source) -> ToProbs:
        temperature = self.settings.temperature
        return super().ranking(source) or (lambda logits, rows: softmax_probs(logits / temperature, rows))

    def draft(self, source: Source, root: Tensor, limit: int) -> GraphTree:
        if self.steps(limit) < 1:
            return GraphTree(root[:0], (), ())
        graph = self.grow(source, root, limit)
        drafted_count = len(graph.tokens)
        unmerge(graph, known_size(self.settings.nodes), limit if self.settings.deep_copies else 0)
        tokens = torch.tensor(graph.tokens, dtype=torch.long, device=root.device)
        return GraphTree(tokens, tuple(graph.parents), tuple(graph.rows), drafted=drafted_count, merged=graph.merged)

    def grow(self, source: Source, root: Tensor, depth_limit: int) -> TokenGraph:
        """Grow the graph level by level until no node is left to extend (GSD §4.2, §5.2, §5.3), or the rule stops it.

        A stop lowers the graph's limit. There is one transfer from the device per level.

        A node gets its `out_degree` most probable children (q > 0). It stays a leaf in three cases: q < theta_prob;
        q < theta_sibling · the largest q among its siblings; or it is τ-redundant: an extended earlier node ends the
        same τ-gram. Example with τ = 2: if two paths end in "of the", only the first such node is extended.

        A redundant node is merged into that first node, unless that would close a cycle; then it counts as new. A
        pruned earlier occurrence has no children to share and is ignored. A pruned later one is merged like any other,
        as sharing is free. tau=0 merges nothing. A level that exceeds the node budget keeps its nodes with the largest
        p̂.
        """
        to_probs, node_budget = self.ranking(source), known_size(self.settings.nodes)
        graph = TokenGraph(root_token=0, limit=self.steps(depth_limit))  # the root's token is set below
        first_nodes: dict[tuple[int, ...], int] = {}  # the first extended node that ends each τ-gram
        fed_nodes, tokens, parent_rows, rows = [ROOT], root, [ROOT], range(0)
        for depth in range(1, graph.limit + 1):
            logits = source.extend(tokens, parent_rows)  # [m, V]
            rows = range(rows.stop, rows.stop + len(fed_nodes))
            top = to_probs(logits, rows).topk(min(self.settings.out_degree, logits.shape[-1]))  # [m, k]
            top_packed = torch.cat([top.values.float(), top.indices.float()], dim=-1)  # token ids below 2^24 are exact
            if depth == 1:  # the id of the root comes with the first transfer
                top_packed = torch.cat([top_packed, root[None].float()], dim=-1)
            top_rows: list[list[float]] = top_packed.tolist()  # of each fed node: k values of q, k tokens
            if depth == 1:
                graph.root_token = int(top_rows[0].pop())
            else:
                for node, row in zip(fed_nodes, rows, strict=True):
                    graph.rows[node] = row
            nodes_with_max = _add_children(graph, fed_nodes, top_rows, node_budget)
            best_probs = [graph.path_prob(node) * top_row[0] for node, top_row in zip(fed_nodes, top_rows, strict=True)]
            best_index = best_probs.index(max(best_probs))
            if self.stops(depth, top.indices[best_index], logits, source, best_index):
                graph.limit = depth
            if depth == graph.limit or len(graph.tokens) >= node_budget:
                break
            fed_nodes = self._select_extended(graph, nodes_with_max, first_nodes)
            if not fed_nodes:
                break
            tokens = torch.tensor([graph.tokens[node] for node in fed_nodes], device=root.device)
            parents = [graph.parents[node] for node in fed_nodes]
            parent_rows = [graph.rows[parent] if parent >= 0 else 0 for parent in parents]
        return graph

    def _select_extended(
        self, graph: TokenGraph, nodes_with_max: Sequence[tuple[int, float]], node_by_gram: dict[tuple[int, ...], int]
    ) -> list[int]:
        """The nodes of a level that get children; τ-redundant nodes are merged instead (see `grow`).

        nodes_with_max: each node, and the largest q among its siblings. node_by_gram: the first extended node by
        τ-gram, to which those of this level are added.
        """
        settings, extended_nodes = self.settings, list[int]()
        for node, sibling_max in nodes_with_max:
            gram = graph.suffix(node, settings.tau) if settings.tau else None
            first_node = node_by_gram.get(gram) if gram is not None else None
            if first_node is not None and not graph.leads_to(first_node, node):
                graph.merged[node] = first_node
            elif graph.probs[node] >= max(settings.theta_prob, settings.theta_sibling * sibling_max):
                extended_nodes.append(node)
                if gram is not None:
                    node_by_gram.setdefault(gram, node)
        return extended_nodes

    def observe(self, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        assert isinstance(tree, GraphTree)
        super().observe(tree, accepted_nodes)
        self.totals["drafted_by_source"] += tree.drafted
        self.totals["graph_success"] += any(node >= tree.drafted for node in accepted_nodes)


def _add_children(
    graph: TokenGraph, fed_nodes: Sequence[int], top_rows: Sequence[Sequence[float]], node_budget: int
) -> list[tuple[int, float]]:
    """Add the children of `fed_nodes`, a level; returns each child, and the largest q among its siblings.

    top_rows: for each node, k values of q, descending, and their k tokens. A level that exceeds the budget keeps its
    nodes with the largest p̂.
    """
    candidates = []  # (p̂, parent, token, q, sibling_max)
    for parent, top_row in zip(fed_nodes, top_rows, strict=True):
        k, parent_prob = len(top_row) // 2, graph.path_prob(parent)
        for prob, token in zip(top_row[:k], top_row[k:], strict=True):
            if prob > 0:
                candidates.append((parent_prob * prob, parent, int(token), prob, top_row[0]))
    free_slots = node_budget - len(graph.tokens)
    if len(candidates) > free_slots:
        best_indices = sorted(range(len(candidates)), key=lambda i: -candidates[i][0])[:free_slots]
        candidates = [candidates[i] for i in sorted(best_indices)]
    return [(graph.add(token, parent, prob), sibling_max) for _, parent, token, prob, sibling_max in candidates]


def unmerge(graph: TokenGraph, node_budget: int, max_depth: int = 0) -> None:
    """Turn the graph into a tree: below every merged node, copy the subtree of its first occurrence (GSD §5.4).

    A copy keeps the q of its original. Copies are added by descending p̂ up to `node_budget` nodes in total, and no path
    exceeds `max_depth`, or else the graph's limit. Copies have no row, since they were never fed to the source.
    """
    children_by_node = [graph.children[graph.merged.get(node, node)] for node in range(len(graph.tokens))]
    heap: list[tuple[float, int, int, int]] = []  # (−p̂, tie-break, parent, node to copy)
    pushed = 0

    def push(parent: int, copied_node: int) -> None:
        nonlocal pushed
        if graph.depths[parent] < (max_depth or graph.limit):
            for child in children_by_node[copied_node]:
                heapq.heappush(heap, (-graph.paths[parent] * graph.probs[child], pushed, parent, child))
                pushed += 1

    for node in graph.merged:
        push(node, node)
    while heap and len(graph.tokens) < node_budget:
        _, _, parent, original_node = heapq.heappop(heap)
        push(graph.add(graph.tokens[original_node], parent, graph.probs[original_node]), original_node)
