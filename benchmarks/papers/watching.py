"""Counts of a round's tree that only the papers have: ranks of accepted children, repetitions, E(A) and A."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from outrider.inference.core.decode import cut
from outrider.inference.core.tree import ROOT, DraftTree, OptimalTree, depths
from outrider.inference.shapes.factory import Structure
from outrider.inference.shapes.shapes import outcomes_at_nodes
from outrider.inference.shapes.token_graph import GraphTree
from outrider.inference.stopping.interface import Source

LONGEST_GRAM, BANDS = 4, 5


class Watched:
    """A structure that drafts as `inner` does and counts besides. totals: its own and those counts.

    eos: the ids that end a text. Tokens that a round accepts after one are not counted.
    """

    def __init__(self, inner: Structure, eos: Collection[int] = ()):
        self.inner, self.eos = inner, eos
        self.max_rows, self.reads_root = inner.max_rows, inner.reads_root
        self.sums: Counter[str] = Counter()

    @property
    def totals(self) -> Mapping[str, float]:
        return {**self.inner.totals, **self.sums}

    def draft(self, source: Source, root: Tensor, limit: int) -> DraftTree:
        return self.inner.draft(source, root, limit)

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        tokens = tree.tokens[list(accepted)].tolist()
        accepted = accepted[: len(cut(tokens, self.eos, len(tokens)))]
        self.sums.update(of_tree(tree, accepted))
        self.inner.observe(tree, accepted)


def of_tree(tree: DraftTree, accepted: Sequence[int]) -> Counter[str]:
    """Counts of one round (see `papers.claims.quantity` for what is made of them)."""
    found: Counter[str] = Counter()
    reached = 1 + len(accepted)
    found["reached"] = reached
    for _, place in outcomes_at_nodes(tree, accepted):
        found["tried"] += 1
        if place is not None:
            found[f"rank_{place + 1}"] += 1
    deep = depths(tree.parents)
    inner = set(tree.parents)
    found["verified"] = 1 + len(tree)
    found["verified_apart"] = 1 + sum(deep[node + 1] for node in range(len(tree)) if node not in inner)
    if isinstance(tree, OptimalTree):
        found.update(expected_squared=tree.expected_tau**2, reached_squared=reached**2)
        found["expected_reached"] = tree.expected_tau * reached
        found.update(in_bands(tree, accepted))
    if isinstance(tree, GraphTree):
        found.update(repetitions(tree))
        found["shared_rounds"] = through_shared(tree, accepted)
    return found


def through_shared(tree: GraphTree, accepted: Sequence[int]) -> bool:
    """Whether the accepted path has a copied node, or a child of a node that others were merged into."""
    firsts = set(tree.merged.values())
    return any(node >= tree.drafted or tree.parents[node] in firsts for node in accepted)


def in_bands(tree: OptimalTree, accepted: Sequence[int]) -> Counter[str]:
    """The number of nodes with an accepted parent by band of q, and how many of them were accepted."""
    found: Counter[str] = Counter()
    parents, right = {ROOT, *accepted}, set(accepted)
    for node, parent in enumerate(tree.parents):
        if parent in parents:
            band = min(BANDS, 1 + int(BANDS * tree.branch_probs[node]))
            found[f"in_band_{band}"] += 1
            found[f"right_{band}"] += node in right
    return found


def repetitions(tree: GraphTree) -> Counter[str]:
    """How many of the drafted nodes belong to an n-gram, along a path, that stands in the tree more than once."""
    found: Counter[str] = Counter(nodes=tree.drafted)
    tokens = tree.tokens.tolist()
    for n in range(1, LONGEST_GRAM + 1):
        places: dict[tuple[int, ...], list[int]] = {}
        grams = {}
        for node in range(tree.drafted):
            line = [node]
            while len(line) < n and line[-1] != ROOT:
                line.append(tree.parents[line[-1]])
            if line[-1] != ROOT:
                gram = tuple(tokens[place] for place in line)
                places.setdefault(gram, []).append(node)
                grams[node] = line
        repeated = {place for ends in places.values() if len(ends) > 1 for end in ends for place in grams[end]}
        found[f"repeated_{n}"] = len(repeated)
    return found
