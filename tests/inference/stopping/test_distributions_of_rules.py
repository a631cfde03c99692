"""The distribution of what is emitted under a stop rule, exactly: every random branch of chains and trees is run."""

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.base.streams import Streams
from outrider.draft_models.calibration_head import CalibrationHead
from outrider.inference.core.verify import Chance, Rejection
from outrider.inference.settings.method import StopConfig, StructureConfig
from outrider.inference.settings.stop_rules import THRESHOLDS
from outrider.inference.shapes.factory import Chain, make_tree
from outrider.inference.sizing.policy import Tuning
from outrider.inference.stopping.interface import Step
from outrider.inference.stopping.rules import make_rule
from tests.exact_distributions import Draft, Drafter, Model, emitted, plain, random_model, ships
from tests.inference.known_source import KnownSource, paths_of, root
from tests.inference.priced import costs


class Deciding:
    """Stops when `decide` says so, given its own `Chance` and the drafted step."""

    max_draft = 99

    def __init__(self, decide: Callable[[Chance, Step], bool], chance: Chance):
        self._decide, self._chance = decide, chance
        self.depth: int | None = None

    def stop(self, step: Step) -> bool:
        stopped = self._decide(self._chance, step)
        self.depth = step.drafted if stopped else None
        return stopped

    def observe(self, drafted: int, accepted: int) -> None:
        pass


DECISIONS: dict[str, Callable[[Chance, Step], bool]] = {
    "its token": lambda _, step: int(step.token) == 0,
    "its probability": lambda _, step: float(step.logits.exp()[0, step.token]) < 0.5,
    "chance": lambda chance, _: chance.accept(Fraction(2, 3)),
}


def shipped(rule: str) -> Callable[[Chance, Step], bool]:
    """The decision of the shipped rule; rules other than "chance" depend on the draft only."""
    head = CalibrationHead(1, 1).requires_grad_(False)
    head.draft += 0.7  # the hidden state of a row is its number
    stop = StopConfig(rule=rule, threshold=0.5 if rule in THRESHOLDS else None)
    made = make_rule(stop, Streams(0), head, Tuning(costs(0.4, node=0.1, rest=0.1, plain=1.1)))
    return lambda _, step: made.stop(step)


LOOKING = ("confidence", "adaedl", "svip", "rejection_risk", "posterior_mean", "survival")


def drafted_by(
    q: Model, widths: tuple[int, ...] | None, decide: Callable[[Chance, Step], bool], *, withdraw: bool = False
) -> Drafter:
    """The shipped chain, or tree of `widths`, its draws made branch by branch. withdraw: the fault of a rule that takes
    back the level it was asked about."""

    def draft(chance: Chance) -> Draft:
        source, rule = KnownSource(lambda path: [float(weight) for weight in q(path)]), Deciding(decide, chance)

        def draw(probs: Tensor, count: int, *_: Any, **__: Any) -> Tensor:
            rows = []
            for path in source.paths[-len(probs) :]:
                left, drawn = q(path), []
                for _ in range(count):
                    drawn.append(chance.choose(left) if left.sum() else -1)
                    left = left.copy()
                    left[drawn[-1]] = 0
                rows.append(drawn)
            return torch.tensor(rows)

        generator = random.Random(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("outrider.inference.shapes.shapes._draw", draw)
            patch.setattr("outrider.inference.shapes.shapes.invert", lambda probs, _: draw(probs, 1))
            if widths is None:
                tree = Chain(rule, generator).draft(source, root(), 2)
            else:
                structure = make_tree(StructureConfig("k_config", widths=widths), generator)
                structure.rule = rule
                tree = structure.draft(source, root(), 9)
        texts = paths_of(tree)
        kept = [node for node, text in enumerate(texts) if not (withdraw and len(text) == rule.depth)]
        tokens = tree.tokens.tolist()
        rows = {parent: q(texts[parent] if parent >= 0 else ()) for parent in (tree.parents[node] for node in kept)}
        return [tokens[node] for node in kept], [tree.parents[node] for node in kept], rows

    return draft


@pytest.mark.parametrize("decision", DECISIONS)
@pytest.mark.parametrize("widths", [None, (2, 1), (1, 2)])
@pytest.mark.slow
def test_the_distribution_is_the_targets_for_any_input_of_a_rule(widths: tuple[int, ...] | None, decision: str) -> None:
    for seed in range(2):
        p, q = random_model(seed, 2 + seed), random_model(seed + 10, 2 + seed)
        drafter = drafted_by(q, widths, DECISIONS[decision])
        assert emitted(p, drafter, ships(Rejection(replace=False)), 3) == plain(p, 3)


@pytest.mark.parametrize("rule", LOOKING)
def test_the_distribution_is_the_targets_under_shipped_rules(rule: str) -> None:
    p, q = random_model(0, 2), random_model(10, 2)
    drafter = drafted_by(q, None, shipped(rule))
    assert emitted(p, drafter, ships(Rejection(replace=False)), 3) == plain(p, 3)


@pytest.mark.parametrize("widths", [None, (2, 1), (1, 2)])
def test_a_rule_that_withdraws_what_it_saw_is_noticed(widths: tuple[int, ...] | None) -> None:
    p, q = random_model(1, 3), random_model(11, 3)
    faulty = drafted_by(q, widths, DECISIONS["its token"], withdraw=True)
    assert emitted(p, faulty, ships(Rejection(replace=False)), 3) != plain(p, 3)
    blind = drafted_by(q, widths, DECISIONS["chance"], withdraw=True)  # not because of its token: shorter, still exact
    assert emitted(p, blind, ships(Rejection(replace=False)), 3) == plain(p, 3)
