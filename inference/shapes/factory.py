"""Draft structures, which shape one round's draft, built from their settings and stop rules."""

import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor

from outrider.base.streams import Streams
from outrider.draft_models.calibration_head import CalibrationHead
from outrider.inference.core.drafter import CANDIDATE, CHOSEN, TRIED
from outrider.inference.core.tree import DraftTree, OptimalTree
from outrider.inference.settings.limits import MOST_NODES
from outrider.inference.settings.method import AUTO, Draw, MethodConfig, StructureConfig, StructureKind, number
from outrider.inference.shapes.opt_tree import opt_tree
from outrider.inference.shapes.shapes import chain, find_shape, k_config, plain_probs, static
from outrider.inference.shapes.token_graph import GraphTree, token_graph
from outrider.inference.sizing.policy import (
    BestWidths,
    TreeSizes,
    Trials,
    Tuning,
    level_sizes,
    outcomes_at_nodes,
    trials_at_nodes,
    trials_by_band,
    trials_in_chain,
)
from outrider.inference.stopping.interface import Source, StopRule, ToProbs
from outrider.inference.stopping.rules import BestLength, FixedLength, make_rule, required


class Structure(ABC):
    """Shapes one round's draft. Its stop rule decides after every token or level, and learns from the accepted depth.

    max_rows: upper bound of the rows that a round adds to the caches, not counting the root. max_depth: the most
    drafting steps. reads_root: whether it compares drafted tokens with the root; then both must be ids of the same
    vocabulary.

    totals: sums over the rounds observed, most of which the papers report. expected_tau: OPT-Tree's E(A).
    drafted_by_source: a token graph's nodes before unmerging. graph_success: rounds in which a copy was accepted. For a
    k-config tree, `TRIED` nodes and `CANDIDATE`k of them at which the k-th draw was accepted. For chosen sizes, the
    rounds with each choice: for example `CHOSEN`max_depth=3 rounds of 3 levels, or `CHOSEN`widths=[4,2] rounds of such
    trees.
    """

    reads_root = False

    def __init__(self, max_rows: int, max_depth: int, rule: StopRule | None = None):
        self.max_rows, self.max_depth = max_rows, max_depth
        self.rule = rule or FixedLength(max_depth)
        self.totals: dict[str, float] = defaultdict(float)

    @abstractmethod
    def draft(self, source: Source, root: Tensor, limit: int) -> DraftTree:
        """A draft under `root` [1] whose paths have at most `limit` nodes; empty if `limit` is 0."""

    def steps(self, limit: int) -> int:
        """The most drafting steps of a round whose paths may have `limit` nodes."""
        return min(limit, self.max_depth, self.rule.max_draft)

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Learn from a verified draft, given its `accepted` nodes."""
        self.rule.observe(tree.depth, len(accepted))

    def trials(self, tree: DraftTree, accepted: Sequence[int]) -> Trials:
        """The outcomes of a round from which "auto" learns; none if no size can be "auto"."""
        return iter(())


class Chain(Structure):
    """Drafts one token at a time until the stop rule stops. With a generator, tokens are sampled from q."""

    def __init__(self, rule: StopRule, generator: random.Random | None = None):
        super().__init__(rule.max_draft, rule.max_draft, rule)
        self.generator = generator

    def draft(self, source: Source, root: Tensor, limit: int) -> DraftTree:
        steps, to_probs = self.steps(limit), source.to_probs
        return chain(source, root, self.rule, limit=steps, to_probs=to_probs, generator=self.generator)

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        if isinstance(self.rule, BestLength) and len(tree):
            self.totals[f"{CHOSEN}max_draft={self.rule.length}"] += 1
        super().observe(tree, accepted)

    def trials(self, tree: DraftTree, accepted: Sequence[int]) -> Trials:
        return trials_in_chain(len(tree), len(accepted))


class Tree(Structure):
    """A structure with `settings`. sizes: if some of them are "auto", chooses these and learns from their outcomes."""

    sizes: TreeSizes | BestWidths | None = None

    def __init__(self, settings: StructureConfig, max_rows: int, max_depth: int):
        super().__init__(max_rows, max_depth)
        self.settings = settings

    def ranking(self, source: Source) -> ToProbs | None:
        """What turns logits into the q that a tree grows by, if this is not the softmax of the logits."""
        return source.to_probs if self.settings.rank == "sampler" else None

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        super().observe(tree, accepted)
        if self.sizes is not None and len(tree):
            self.sizes.observe(tree, accepted)
            for name in self.sizes.chosen(tree):
                self.totals[CHOSEN + name] += 1


class Static(Tree):
    """A tree of fixed shape."""

    def __init__(self, settings: StructureConfig, generator: random.Random | None, tuning: Tuning | None):
        self.shape = find_shape(settings.shape, number(settings.nodes))
        super().__init__(settings, len(self.shape), self.shape.depth)

    def draft(self, source: Source, root: Tensor, limit: int) -> DraftTree:
        steps, to_probs = self.steps(limit), self.ranking(source)
        return static(source, root, self.shape, limit=steps, rule=self.rule, to_probs=to_probs)


class KConfig(Tree):
    """MCSD's tree: so many children of every node, drawn with the generator, or the most likely ones without it."""

    def __init__(self, settings: StructureConfig, generator: random.Random | None, tuning: Tuning | None):
        self.generator = generator
        self.mode: Draw = "top_k" if generator is None else settings.draw
        self.widths: tuple[int, ...] = () if isinstance(settings.widths, str) else settings.widths
        if not self.widths:
            self.sizes = BestWidths(required(tuning))
            super().__init__(settings, MOST_NODES, self.sizes.max_depth)
        else:
            super().__init__(settings, sum(level_sizes(self.widths)), len(self.widths))

    def draft(self, source: Source, root: Tensor, limit: int) -> DraftTree:
        steps, sizes = self.steps(limit), self.sizes
        return k_config(
            source,
            root,
            limit=steps,
            widths=sizes.widths(steps) if isinstance(sizes, BestWidths) else self.widths,
            mode=self.mode,
            rule=self.rule,
            to_probs=self.ranking(source),
            generator=self.generator,
        )

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        super().observe(tree, accepted)
        for _, place in outcomes_at_nodes(tree, accepted):
            self.totals[TRIED] += 1
            if place is not None:
                self.totals[f"{CANDIDATE}{place + 1}"] += 1

    def trials(self, tree: DraftTree, accepted: Sequence[int]) -> Trials:
        return trials_at_nodes(tree, accepted)


class OptTree(Tree):
    """OPT-Tree's: the tree with the largest expected accepted length, of given sizes or of the fastest ones."""

    def __init__(self, settings: StructureConfig, generator: random.Random | None, tuning: Tuning | None):
        nodes, depth = (None if size == AUTO else number(size) for size in (settings.nodes, settings.max_depth))
        if settings.delta is None and depth is not None:
            raise ValueError("opt_tree needs a delta: measure one (inference.measure.probe)")
        if nodes is not None and depth is not None:
            fed = min(nodes, settings.width or nodes)  # per level
            super().__init__(settings, max(nodes, fed * depth), depth)
        else:
            self.sizes = sizes = TreeSizes(required(tuning), nodes, depth)
            super().__init__(settings, sizes.max_nodes * sizes.max_depth, sizes.max_depth)

    def draft(self, source: Source, root: Tensor, limit: int) -> OptimalTree:
        settings = self.settings
        growth = self.sizes.begin() if isinstance(self.sizes, TreeSizes) else None
        return opt_tree(
            source,
            root,
            limit=self.steps(limit),
            nodes=number(settings.nodes) if growth is None else growth.nodes,
            delta=settings.delta or 0.0,
            width=settings.width,
            growth=growth,
            rule=self.rule,
            to_probs=self.ranking(source),
            temperature=settings.temperature,
        )

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        assert isinstance(tree, OptimalTree)
        super().observe(tree, accepted)
        self.totals["expected_tau"] += tree.expected

    def trials(self, tree: DraftTree, accepted: Sequence[int]) -> Trials:
        return trials_by_band(tree, accepted)


class Graph(Tree):
    """GSD's token graph, unmerged."""

    reads_root = True

    def __init__(self, settings: StructureConfig, generator: random.Random | None, tuning: Tuning | None):
        super().__init__(settings, number(settings.nodes), number(settings.max_depth))

    def ranking(self, source: Source) -> ToProbs:
        return super().ranking(source) or self._softened

    def _softened(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        return plain_probs(logits / self.settings.temperature, rows)

    def draft(self, source: Source, root: Tensor, limit: int) -> GraphTree:
        return token_graph(
            source,
            root,
            self.settings,
            limit=self.steps(limit),
            longest=limit if self.settings.deep_copies else 0,
            rule=self.rule,
            to_probs=self.ranking(source),
        )

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        assert isinstance(tree, GraphTree)
        super().observe(tree, accepted)
        self.totals["drafted_by_source"] += tree.drafted
        self.totals["graph_success"] += any(node >= tree.drafted for node in accepted)


TREES: Mapping[StructureKind, type[Static] | type[KConfig] | type[OptTree] | type[Graph]] = {
    "static": Static,
    "k_config": KConfig,
    "opt_tree": OptTree,
    "token_graph": Graph,
}


def make_structure(
    method: MethodConfig,
    streams: Streams,
    drawn: bool = False,
    head: CalibrationHead | None = None,
    tuning: Tuning | None = None,
) -> Structure:
    """A new structure of `method`.

    streams: the generation's; the draft and the stop rule use one each. drawn: sample the draft from q, else take the
    most likely tokens. head: for stop.rule=calibrated. tuning: for sizes that are "auto" (see
    `inference.measure.probe`).
    """
    settings = method.structure
    generator = streams.of("draft") if drawn else None
    if settings.kind == "chain":
        by_chance = drawn and method.verify == "exact"  # naive verification accepts a token with probability p
        return Chain(make_rule(method.stop, streams, head, tuning, drawn=by_chance), generator)
    tree = make_tree(settings, generator, tuning)
    tree.rule = make_rule(method.stop, streams, head, tuning, levels=tree.max_depth)
    return tree


def make_tree(settings: StructureConfig, generator: random.Random | None = None, tuning: Tuning | None = None) -> Tree:
    """A tree structure with `settings`, which drafts all its levels; tuning: for sizes that are "auto"."""
    return TREES[settings.kind](settings, generator, tuning)
