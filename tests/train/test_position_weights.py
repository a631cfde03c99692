"""Weights of a draft's slots. test_parallel.py and test_eagle3_student.py compare losses with those of drafts alone."""

from collections.abc import Sequence
from math import prod

import torch

from outrider.draft_models.losses import IGNORE
from outrider.train.parts.position_weights import Slots, cached_probabilities, cat_weights, dpace_weights


def slot_weight(kind: str, slot: int, p: Sequence[float], q: Sequence[float]) -> float:
    """The weight of a slot of a draft, slowly. p, q: the probabilities of its labels by teacher and drafter, in order,
    until the first slot without a label or a prediction."""
    if kind == "cat":
        return prod(p[:slot]) if slot <= len(p) else 0.0
    chances = [prod((1 + value) / 2 for value in q[: last + 1]) for last in range(slot, len(q))]
    return sum(chances) if kind == "dpace" else 1.0


def test_certain_teachers_weigh_all_slots_alike() -> None:
    """And certain drafters the earlier slots most, by the tokens that follow."""
    anchors, numbers = torch.arange(5)[:, None].expand(5, 3).flatten(), torch.arange(3).repeat(5)
    within = anchors + numbers < 5
    slots = Slots("cat", anchors[within], numbers[within], 3, torch.Size((1, 5)))
    certain = torch.ones(len(slots.anchors))
    assert torch.equal(cat_weights(slots, torch.ones(1, 5)), certain)
    weights = dpace_weights(slots, certain, certain.bool())
    assert weights.tolist() == [3, 2, 1, 3, 2, 1, 3, 2, 1, 2, 1, 1]


def test_a_cached_probability_is_the_teachers_or_bounds_it() -> None:
    """By the least likely cached token or the tail, whichever is smaller; 0 without a label."""
    probabilities = (2 * torch.randn(64, 8, generator=torch.Generator().manual_seed(0))).softmax(-1)
    for count in (1, 3, 7, 8):
        top = probabilities.topk(count)
        for label in range(8):
            labels = torch.full((64,), label)
            cached = cached_probabilities(labels, top.indices, top.values.log(), 1 - top.values.sum(-1))
            is_cached = (top.indices == label).any(-1)
            torch.testing.assert_close(cached[is_cached], probabilities[is_cached, label])
            bound = torch.minimum(top.values[:, -1], 1 - top.values.sum(-1))
            torch.testing.assert_close(cached[~is_cached], bound[~is_cached])
            assert (cached >= probabilities[:, label] - 1e-6).all()
    assert not cached_probabilities(torch.full((64,), IGNORE), top.indices, top.values.log(), top.values[:, 0]).any()
