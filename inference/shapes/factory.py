"""Draft structures built from their settings and stop rules."""

import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from draft_models.calibration_head import CalibrationHead
from inference.core.drafter import CANDIDATE, CHOSEN, TRIED
from inference.core.tree import DraftTree, OptimalTree
from inference.settings.limits import MOST_NODES
from inference.settings.method import AUTO, MethodConfig, StructureConfig, number
from inference.shapes.opt_tree import opt_tree
from inference.shapes.shapes import Extends, ToProbs, chain, find_shape, k_config, plain_probs, static
from inference.shapes.token_graph import GraphTree, token_graph
from inference.sizing.policy import BestWidths, TreeSizes, Tuning, level_sizes, outcomes_at_nodes
from inference.stopping.factory import make_rule, required
from inference.stopping.interface import StopRule
from inference.stopping.plain import BestLength, FixedLength
from outrider.streams import Streams


class RoundSource(Extends, Protocol):
    """A source during one round. `to_probs` turns its logits into draft distributions; None under greedy decoding."""

    @property
    def to_probs(self) -> ToProbs | None: ...


class WrappedSource:
    """A source that delegates to another one: the base of wrappers that observe it."""

    to_probs: ToProbs | None

    def __init__(self, source: Extends):
        self._source = source

    @property
    def hidden(self) -> Tensor:
        return self._source.hidden

    @property
    def target_hidden(self) -> Tensor:
        return self._source.target_hidden


class Structure(Protocol):
    """Shapes one round's draft.

    reads_root: whether it compares drafted tokens with the root; then both must be ids of the same vocabulary.
    """

    reads_root: bool

    @property
    def max_rows(self) -> int:
        """Upper bound of the rows that a round adds to the caches, not counting the root."""
        ...

    def draft(self, source: RoundSource, root: Tensor, limit: int) -> DraftTree:
        """A draft under `root` [1] whose paths have at most `limit` nodes; empty if `limit` is 0."""
        ...

    @property
    def totals(self) -> Mapping[str, float]:
        """Sums over the rounds observed.

        expected_tau: OPT-Tree's E(A). drafted_by_source: a token graph's nodes before unmerging. graph_success: rounds
        in which a copy was accepted. For a k-config tree, `TRIED` nodes and `CANDIDATE`k of them at which the k-th draw
        was accepted. For chosen sizes, the rounds with each choice: for example `CHOSEN`max_depth=3 rounds of 3 levels,
        or `CHOSEN`widths=[4,2] rounds of such trees.
        """
        ...

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Learn from a verified draft, given its `accepted` nodes."""
        ...


class Chain:
    """Drafts one token at a time until the stop rule stops. With a generator, tokens are sampled from q."""

    reads_root = False

    def __init__(self, rule: StopRule, generator: random.Random | None = None):
        self.rule = rule
        self.generator = generator
        self.max_rows = rule.max_draft
        self.totals: Counter[str] = Counter()

    def draft(self, source: RoundSource, root: Tensor, limit: int) -> DraftTree:
        limit = min(limit, self.rule.max_draft)
        return chain(source, root, self.rule, limit=limit, to_probs=source.to_probs, generator=self.generator)

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        if isinstance(self.rule, BestLength) and len(tree):
            self.totals[f"{CHOSEN}max_draft={self.rule.length}"] += 1
        self.rule.observe(len(tree), len(accepted))


@dataclass
class Tree:
    """A tree structure with its settings bound. `totals` are the statistics that the papers report, summed over rounds.

    rule: decides after every level whether drafting stops. It learns from the tree's depth and the accepted path, as
    from a chain and its accepted tokens.
    """

    build: Callable[..., DraftTree]  # (source, root, limit=…, rule=…, to_probs=…)
    max_rows: int
    max_depth: int
    greedy_probs: ToProbs | None = None  # q under greedy decoding; None if ranking the logits is enough
    rank: str = "sampler"  # drafter: `greedy_probs` when sampling too
    count_candidates: bool = False
    sizes: TreeSizes | BestWidths | None = None  # if `build` chooses sizes: learns from their outcomes
    rule: StopRule = field(default_factory=lambda: FixedLength(sys.maxsize))  # the default never stops
    reads_root: bool = False
    deep: bool = False  # copies of a token graph may have any depth
    totals: dict[str, float] = field(default_factory=dict)

    def draft(self, source: RoundSource, root: Tensor, limit: int) -> DraftTree:
        to_probs = (source.to_probs if self.rank == "sampler" else None) or self.greedy_probs
        steps = min(limit, self.max_depth, self.rule.max_draft)
        longest = {"longest": limit} if self.deep else {}
        return self.build(source, root, limit=steps, rule=self.rule, to_probs=to_probs, **longest)

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        self.rule.observe(tree.depth, len(accepted))
        if isinstance(tree, OptimalTree):
            self._add("expected_tau", tree.expected)
        if isinstance(tree, GraphTree):
            self._add("drafted_by_source", tree.drafted)
            self._add("graph_success", any(node >= tree.drafted for node in accepted))
        if self.count_candidates:
            for _, place in outcomes_at_nodes(tree, accepted):
                self._add(TRIED, 1)
                if place is not None:
                    self._add(f"{CANDIDATE}{place + 1}", 1)
        if self.sizes is not None and len(tree):
            self.sizes.observe(tree, accepted)
            for name in self.sizes.chosen(tree):
                self._add(CHOSEN + name, 1)

    def _add(self, name: str, value: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + value


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
        rule = make_rule(method.stop, streams, head, tuning, drawn=by_chance)
        return Chain(rule, generator)
    tree = make_tree(settings, generator, tuning)
    return replace(tree, rule=make_rule(method.stop, streams, head, tuning, levels=tree.max_depth))


def make_tree(settings: StructureConfig, generator: random.Random | None = None, tuning: Tuning | None = None) -> Tree:
    """A tree structure with `settings` bound, without a stop rule; tuning: for sizes that are "auto"."""

    def greedy_probs(logits: Tensor, rows: Sequence[int]) -> Tensor:
        return plain_probs(logits / settings.temperature, rows)

    build: Callable[..., DraftTree]
    if settings.kind == "opt_tree":
        return replace(_make_opt_tree(settings, tuning), rank=settings.rank)
    if settings.kind == "token_graph":
        build = partial(
            token_graph,
            node_budget=number(settings.nodes),
            out_degree=settings.out_degree,
            theta_prob=settings.theta_prob,
            theta_sibling=settings.theta_sibling,
            tau=settings.tau,
        )
        most, depth, deep = number(settings.nodes), number(settings.max_depth), settings.deep_copies
        return Tree(build, most, depth, greedy_probs, settings.rank, reads_root=True, deep=deep)
    if settings.kind == "k_config":
        mode = "top_k" if generator is None else settings.draw
        build = partial(k_config, mode=mode, generator=generator)
        if isinstance(settings.widths, str):
            sizes = BestWidths(required(tuning))
            chosen = _with_chosen_widths(build, sizes)
            return Tree(chosen, MOST_NODES, sizes.max_depth, count_candidates=True, sizes=sizes)
        rows = sum(level_sizes(settings.widths))
        return Tree(partial(build, widths=settings.widths), rows, len(settings.widths), count_candidates=True)
    shape = find_shape(settings.shape, number(settings.nodes))
    return Tree(partial(static, shape=shape), len(shape), shape.depth)


def _make_opt_tree(settings: StructureConfig, tuning: Tuning | None) -> Tree:
    nodes, depth = (None if size == AUTO else number(size) for size in (settings.nodes, settings.max_depth))
    if settings.delta is None and depth is not None:
        raise ValueError("opt_tree needs a delta: measure one (inference.measure.probe)")
    delta = settings.delta or 0.0
    if nodes is not None and depth is not None:
        build = partial(opt_tree, nodes=nodes, delta=delta, width=settings.width, temperature=settings.temperature)
        fed = min(nodes, settings.width or nodes)  # per level
        return Tree(build, max(nodes, fed * depth), depth)
    sizes = TreeSizes(required(tuning), nodes, depth)

    def grow(source: RoundSource, root: Tensor, **options: Any) -> DraftTree:
        options |= {"delta": delta, "width": settings.width, "temperature": settings.temperature}
        growth = sizes.begin()
        return opt_tree(source, root, nodes=growth.nodes, growth=growth, **options)

    return Tree(grow, sizes.max_nodes * sizes.max_depth, sizes.max_depth, sizes=sizes)


def _with_chosen_widths(build: Callable[..., DraftTree], sizes: BestWidths) -> Callable[..., DraftTree]:
    def choose(source: RoundSource, root: Tensor, *, limit: int, **options: Any) -> DraftTree:
        return build(source, root, limit=limit, widths=sizes.widths(limit), **options)

    return choose
