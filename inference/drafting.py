"""Ways of drafting a round: a structure with its settings and, for a chain, its stop rule."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from draft_models.calibration import CalibrationHead
from inference.settings import MethodConfig, StopConfig, StructureConfig
from inference.stop_rules import BetaThompson, CalibratedThompson, Confidence, FixedLength, StopRule
from inference.structures import (
    EAGLE_25,
    Extends,
    OptimalTree,
    ToProbs,
    binary_shape,
    chain,
    k_config,
    opt_tree,
    plain_probs,
    read_shape,
    static,
)
from inference.token_graph import GraphTree, token_graph
from inference.tree import ROOT, DraftTree

TRIED, CANDIDATE = "nodes_tried", "accepted_candidate_"  # names in `Structure.totals`


class RoundSource(Extends, Protocol):
    """A source during one round. `to_probs` makes draft distributions of its logits; None under greedy decoding."""

    @property
    def to_probs(self) -> ToProbs | None: ...


class Structure(Protocol):
    """Shapes one round's draft."""

    @property
    def max_rows(self) -> int:
        """Rows a round may add to the caches, besides the root."""
        ...

    def draft(self, source: RoundSource, root: Tensor, limit: int) -> DraftTree:
        """A draft under `root` [1] whose paths have at most `limit` nodes; empty at limit 0."""
        ...

    @property
    def totals(self) -> Mapping[str, float]:
        """Sums over the rounds observed: expected_tau (OPT-Tree's E(A)), drafted_by_source (a token graph's nodes
        before unmerging), graph_success (rounds in which a copy was accepted), and for a k-config tree `TRIED` nodes
        and `CANDIDATE`k of them at which the k-th draw was accepted."""
        ...

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """The round's draft and the nodes of it that were accepted."""
        ...


class Chain:
    """One token after the other until the stop rule says so. With a generator the tokens are drawn from q."""

    def __init__(self, rule: StopRule, generator: torch.Generator | None = None):
        self.rule = rule
        self.generator = generator
        self.max_rows = rule.max_draft
        self.totals: Mapping[str, float] = {}

    def draft(self, source: RoundSource, root: Tensor, limit: int) -> DraftTree:
        limit = min(limit, self.rule.max_draft)
        return chain(source, root, self.rule, limit=limit, to_probs=source.to_probs, generator=self.generator)

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        self.rule.observe(len(tree), len(accepted))


@dataclass
class Tree:
    """A tree structure with its settings bound. `totals` sums up what the papers report of theirs, over rounds."""

    build: Callable[..., DraftTree]  # (source, root, limit=…, to_probs=…)
    max_rows: int
    max_depth: int
    greedy_probs: ToProbs | None = None  # q under greedy decoding; None where logits do, to rank by
    count_candidates: bool = False
    totals: dict[str, float] = field(default_factory=dict)

    def draft(self, source: RoundSource, root: Tensor, limit: int) -> DraftTree:
        to_probs = source.to_probs or self.greedy_probs
        return self.build(source, root, limit=min(limit, self.max_depth), to_probs=to_probs)

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        if isinstance(tree, OptimalTree):
            self._add("expected_tau", tree.expected)
        if isinstance(tree, GraphTree):
            self._add("drafted_by_source", tree.drafted)
            self._add("graph_success", any(node >= tree.drafted for node in accepted))
        if self.count_candidates:
            self._count_candidates(tree, accepted)

    def _count_candidates(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """At every node the target went through: was one of the candidates accepted, and the how-manyeth draw?"""
        for node, child in zip([ROOT, *accepted], [*accepted, None], strict=True):
            candidates = tree.draws.get(node) or [i for i, parent in enumerate(tree.parents) if parent == node]
            if candidates:
                self._add(TRIED, 1)
                if child is not None:
                    self._add(f"{CANDIDATE}{list(candidates).index(child) + 1}", 1)

    def _add(self, name: str, value: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + value


def make_rule(stop: StopConfig, seed: int, head: CalibrationHead | None = None) -> StopRule:
    """The stop rule of `stop`, fresh: what it learns belongs to one generation. head: for rule=calibrated."""
    if stop.rule == "fixed":
        return FixedLength(stop.max_draft)
    if stop.rule == "confidence":
        return Confidence(stop.max_draft, stop.threshold)
    generator = torch.Generator().manual_seed(seed)
    if stop.rule == "beta":
        return BetaThompson(stop.max_draft, stop.alpha, stop.beta, stop.update, generator)
    if head is None:
        raise ValueError("rule=calibrated needs the drafter's calibration head")
    sigmas = (stop.model_sigma, stop.sample_sigma)
    return CalibratedThompson(head, stop.max_draft, *sigmas, stop.prior, stop.mean, generator, stop.evidence)


def make_structure(
    method: MethodConfig,
    seed: int,
    generator: torch.Generator | None = None,
    head: CalibrationHead | None = None,
) -> Structure:
    """The structure of `method`, fresh.

    generator: draw the draft from q (sampling); None: the likeliest tokens. head: for stop.rule=calibrated.
    """
    settings = method.structure
    if settings.kind == "chain":
        return Chain(make_rule(method.stop, seed, head), generator)
    return make_tree(settings, generator)


def make_tree(settings: StructureConfig, generator: torch.Generator | None = None) -> Tree:
    """A tree structure with `settings` bound."""

    def greedy_probs(logits: Tensor, rows: Sequence[int]) -> Tensor:
        return plain_probs(logits / settings.temperature, rows)

    build: Callable[..., DraftTree]
    if settings.kind == "opt_tree":
        if settings.delta is None:
            raise ValueError("opt_tree needs a delta: measure one (inference.evaluation.with_measured_delta)")
        build = partial(opt_tree, nodes=settings.nodes, delta=settings.delta)
        return Tree(build, settings.nodes * settings.max_depth, settings.max_depth, greedy_probs)
    if settings.kind == "token_graph":
        build = partial(
            token_graph,
            node_budget=settings.nodes,
            out_degree=settings.out_degree,
            theta_prob=settings.theta_prob,
            theta_sibling=settings.theta_sibling,
            tau=settings.tau,
        )
        return Tree(build, settings.nodes, settings.max_depth, greedy_probs)
    if settings.kind == "k_config":
        rows = sum(math.prod(settings.widths[: depth + 1]) for depth in range(len(settings.widths)))
        mode = "top_k" if generator is None else settings.draw
        build = partial(k_config, widths=settings.widths, mode=mode, generator=generator)
        return Tree(build, rows, len(settings.widths), count_candidates=True)
    shapes = {"eagle": EAGLE_25, "binary": binary_shape(settings.nodes)}
    shape = shapes[settings.shape] if settings.shape in shapes else read_shape(settings.shape)
    return Tree(partial(static, shape=shape), len(shape), len(shape))
