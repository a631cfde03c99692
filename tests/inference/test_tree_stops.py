"""Stop rules on trees: where they end a tree, what they see of it, and that tokens stay the target's own."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from outrider.base.streams import Streams
from outrider.inference.core.decode import speculative
from outrider.inference.core.target_session import Runtime
from outrider.inference.core.tree import DraftTree
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.settings.method import DRAWS, MethodConfig, StopConfig, StructureConfig
from outrider.inference.shapes.factory import make_structure, make_tree
from outrider.inference.stopping.interface import FixedLength, Step, StopRule
from outrider.inference.stopping.rules import make_rule
from tests.inference.known_source import KnownSource, Q, check, paths_of, random_q, root, sources, untied, weight
from tests.known_targets import Target, targets
from tests.pairwise import each_value
from tests.tiers import typical_where
from tests.tiny import STRUCTURES, random_prompt

LIMIT = 6
BUILT = {
    **{f"k_config, {draw}": StructureConfig("k_config", widths=(3, 2, 1, 2), draw=draw) for draw in DRAWS},
    "opt_tree": StructureConfig("opt_tree", nodes=9, delta=0.0),
    "token_graph": StructureConfig("token_graph", nodes=60, tau=1, theta_prob=0.0, theta_sibling=0.1),
    "static": StructureConfig("static"),
}
TREES = {
    **{name: STRUCTURES[name] for name in ("k_config", "opt_tree", "static")},
    "token_graph": StructureConfig(kind="token_graph", nodes=40, out_degree=2, theta_prob=0.0, theta_sibling=0.2),
}
RANKED = ("opt_tree", "token_graph")  # these know p̂
every_structure = pytest.mark.parametrize("name", BUILT)


def build(name: str, source: KnownSource, seed: int = 0, *, limit: int, rule: StopRule | None = None) -> DraftTree:
    structure = make_tree(BUILT[name], random.Random(seed) if name.startswith("k_config") else None)
    structure.rule = rule or structure.rule
    return structure.draft(source, root(), limit)


def content(tree: DraftTree) -> list:
    """All that verification and caches see of a draft."""
    probs = None if tree.path_probs is None else tree.path_probs.tolist()
    q = {node: row.tolist() for node, row in tree.q.items()}
    return [tree.tokens.tolist(), tree.parents, tree.rows, probs, q, tree.draws]


class At:
    """Stops at a depth; keeps what it was shown."""

    def __init__(self, depth: int):
        self.max_draft = 99
        self.depth = depth
        self.seen: list[tuple[int, int, Tensor, int]] = []  # depth, token, logits, row
        self.told: list[tuple[int, int]] = []

    def stop(self, step: Step) -> bool:
        self.seen.append((step.drafted, int(step.token), step.logits, int(step.hidden)))
        return step.drafted >= self.depth

    def observe(self, drafted: int, accepted: int) -> None:
        self.told.append((drafted, accepted))


@settings(deadline=None)
@every_structure
@given(q=sources, depth=st.integers(1, LIMIT), seed=st.integers(0, 99))
@pytest.mark.slow
def test_a_draft_stopped_at_a_depth_is_the_one_of_that_limit(name: str, q: Q, depth: int, seed: int) -> None:
    """Node for node: everything down to the level after which the rule spoke is submitted, nothing below is fed."""
    source, other, rule = KnownSource(q), KnownSource(q), At(depth)
    tree = build(name, source, seed, limit=LIMIT, rule=rule)
    assert [drafted for drafted, *_ in rule.seen] == list(range(1, len(source.calls) + 1))  # after every level, once
    stopped = len(rule.seen) == depth  # else there was nothing to go on with
    expected = build(name, other, seed, limit=depth if stopped else LIMIT)
    assert content(tree) == content(expected)
    assert source.calls == other.calls
    check(tree, source, depth if stopped else LIMIT)


@settings(deadline=None)
@every_structure
@given(q=untied, seed=st.integers(0, 99))
@pytest.mark.slow
def test_a_rule_sees_the_node_that_stands_for_the_level(name: str, q: Q, seed: int) -> None:
    """Its logits, and its hidden state by the number of the row; it has the level's largest p̂ where that is known."""
    source, rule = KnownSource(q), At(99)
    tree = build(name, source, seed, limit=LIMIT, rule=rule)
    first = {len(path): path for path in reversed(paths_of(tree))}  # of every level
    for depth, token, logits, row in rule.seen:
        above = source.paths[row]
        assert len(above) == depth - 1
        assert logits.exp()[0].tolist() == pytest.approx(list(q(above)), abs=1e-6)
        assert q(above)[token] > 0
        if name in RANKED:
            level = [(*path, other) for path in source.paths if len(path) == depth - 1 for other in range(len(q(())))]
            largest = max(weight(q, path) for path in level)
            assert weight(q, (*above, token)) == pytest.approx(largest, rel=1e-5)
        else:
            assert (*above, token) == first[depth]
            assert above == first.get(depth - 1, ())
            assert name.endswith("replacement") or q(above)[token] == max(q(above))


@pytest.mark.parametrize("structure", TREES)
@pytest.mark.parametrize("limit", [1, 2])
def test_max_draft_bounds_the_levels(structure: str, limit: int) -> None:
    own = make_structure(MethodConfig(structure=TREES[structure]), Streams(0))
    bound = make_structure(MethodConfig(structure=TREES[structure], stop=StopConfig(max_draft=limit)), Streams(0))
    longer = make_structure(MethodConfig(structure=TREES[structure], stop=StopConfig(max_draft=99)), Streams(0))
    for seed in range(10):
        trees = []
        for drafting in (own, bound, longer):
            source: Any = KnownSource(random_q(seed))

            trees.append(drafting.draft(source, root(), 99))
        assert (trees[1].depth, content(trees[0])) == (limit, content(trees[2]))
        assert trees[0].depth > 2


def test_max_draft_bounds_the_copies_of_a_token_graph() -> None:
    """They take no drafting: where a graph has ended by itself there is no level left after which a rule is asked."""

    def q(path: tuple[int, ...]) -> list[float]:
        """2 4 and something unlikely; or 3 5 and the same once more, which is merged."""
        after: dict[int, dict[int, float]] = {2: {4: 1.0}, 3: {5: 1.0}, 4: dict.fromkeys(range(10), 0.1), 5: {2: 1.0}}
        following = after.get(path[-1], {0: 1.0}) if path else {2: 0.5, 3: 0.5}
        return [following.get(token, 0.0) for token in range(10)]

    depths = {}
    for limit in (None, 4):
        stop, shape = StopConfig(max_draft=limit), StructureConfig(kind="token_graph", out_degree=2, tau=1)
        source: Any = KnownSource(q)

        tree = make_structure(MethodConfig(structure=shape, stop=stop), 0).draft(source, root(), 99)
        assert source.calls == [1, 2, 2]
        depths[limit] = tree.depth
    assert depths == {None: 5, 4: 4}


TO_HOST = {Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.cpu,
           Tensor.numpy, Tensor.nonzero}  # fmt: skip


class Transfers(TorchFunctionMode):
    """Counts what makes the host wait for the device."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in TO_HOST
        return func(*args, **(kwargs or {}))


@every_structure
def test_rules_that_look_at_nothing_transfer_nothing(name: str) -> None:
    def transfers(rule: StopRule | None) -> tuple[int, int]:
        source = KnownSource(random_q(3))
        with Transfers() as counted:
            build(name, source, limit=4, rule=rule)
        return counted.count, len(source.calls)

    bare, levels = transfers(None)
    assert levels == 4
    if name == "opt_tree":
        assert bare == 4 + 4  # one a level, and one of the source
    never = make_rule(StopConfig(rule="beta", max_draft=99, alpha=1e9, beta=1e-9), Streams(0))
    looks = make_rule(StopConfig(rule="confidence", max_draft=4, threshold=1e-9), Streams(0))
    assert transfers(FixedLength(4)) == transfers(never) == (bare, levels)
    assert transfers(looks)[0] > bare  # power: this one looks


make = pytest.fixture(scope="module")(targets)


REAL = list(itertools.product(TREES, ["early_exit", "small_lm", "eagle3"]))


@pytest.mark.parametrize(("structure", "kind"), typical_where(each_value(REAL).__contains__, REAL))
def test_real_hidden_states_are_those_behind_the_logits(
    make: Callable[..., Target], runtime: Runtime, structure: str, kind: str
) -> None:
    """What a rule sees of a source's hidden states gives, through the source's head, the logits it sees."""
    target = make("llama")
    source = target.source(kind)
    drafter = {"early_exit": target.exit, "small_lm": target.small}.get(kind, lambda _: target.head)(kind)
    by_place = kind == "eagle3" and structure != "token_graph"  # see `TimedModel`
    rows: list[int] = []

    def compare(step: Step) -> bool:
        logits_of = drafter.draft_logits if by_place else drafter.logits
        torch.testing.assert_close(logits_of(step.hidden), step.logits, rtol=1e-9, atol=1e-9)
        rows.append(step.row)
        return False

    flat = {"temperature": 15.0} if structure in RANKED else {}  # so that the likeliest is not always the first's child
    drafting = make_structure(MethodConfig(structure=replace(TREES[structure], **flat)), Streams(0))
    drafting.rule.stop = compare  # type: ignore[method-assign]
    options: Any = {"max_new_tokens": 16, "runtime": runtime}
    list(speculative(target.stack, ModelDrafter(source, drafting), random_prompt(9), **options))
    assert len(rows) > 4
    assert any(rows) == (structure in RANKED)
