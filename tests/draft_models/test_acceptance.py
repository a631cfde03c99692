"""Acceptance and the expected tokens of a round, against sums and enumerations written out."""

from itertools import product

import pytest
import torch
from torch import Tensor

from outrider.draft_models.acceptance import (
    BLOCK_BYTES,
    FLOAT32_BYTES,
    acceptance,
    acceptance_by_target,
    acceptance_by_top_k,
    analytic_tau,
    argmax_and_acceptance,
    scatter_positions,
)

TOKENS, VOCABULARY, WIDTH = 11, 9, 4


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_acceptance_is_the_probability_that_a_drawn_token_is_kept() -> None:
    """Of all tokens x: drawn with q(x), kept with min(1, p(x) / q(x))."""
    p, q = random(5, VOCABULARY).softmax(-1), random(5, VOCABULARY, seed=1).softmax(-1)
    kept = sum(q[:, x] * (p[:, x] / q[:, x]).clamp_max(1) for x in range(VOCABULARY))
    torch.testing.assert_close(acceptance(p.log(), q.log()), kept)


def test_acceptance_is_a_probability_whatever_rounding_does() -> None:
    for seed in range(20):
        logs = random(30, 5000, seed=seed).float().log_softmax(-1)
        assert acceptance(logs, logs).max() <= 1
    sure = (1000.0 * torch.eye(3)).log_softmax(-1)
    assert acceptance(sure, sure.roll(1, 0)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("at_once", [3, 1024])
def test_judging_is_the_argmax_and_the_acceptance(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """By a whole target, of which the vocabulary may be padded, or the drafter's, and by all there is of its top-k."""
    monkeypatch.setitem(BLOCK_BYTES, "cpu", at_once * FLOAT32_BYTES * VOCABULARY + 1)
    hidden, head = random(TOKENS, WIDTH), random(WIDTH, VOCABULARY, seed=1)
    known, teacher = random(TOKENS, WIDTH, seed=2), random(WIDTH, VOCABULARY, seed=3)
    q, p = (hidden @ head).log_softmax(-1), (known @ teacher).log_softmax(-1)
    top = p.topk(4)
    tail = 1 - top.values.exp().sum(-1)
    for accept, expected in (
        (acceptance_by_target(lambda states: states @ teacher, known), acceptance(p, q)),
        (acceptance_by_target(lambda states: states @ torch.cat([teacher, teacher], 1), known), acceptance(p, q)),
        (
            acceptance_by_target(lambda states: states @ teacher[:, :6], known),
            acceptance(*(of[:, :6].log_softmax(-1) for of in (p, q))),
        ),
        (acceptance_by_top_k(top.indices, top.values, tail), acceptance(top.values, q.gather(1, top.indices))),
    ):
        choices, accepted = argmax_and_acceptance(lambda states: states @ head, hidden, accept)
        assert torch.equal(choices, q.argmax(-1))
        assert accepted is not None
        torch.testing.assert_close(accepted, expected)
    assert argmax_and_acceptance(lambda states: states @ head, hidden, None)[1] is None


def test_of_the_top_k_it_is_a_lower_bound_that_more_of_them_raise() -> None:
    logits, p = random(TOKENS, VOCABULARY), random(TOKENS, VOCABULARY, seed=1).log_softmax(-1)
    before = torch.zeros(TOKENS, dtype=torch.float64)
    for k in range(1, VOCABULARY):
        top = p.topk(k)
        tail = 1 - top.values.exp().sum(-1)
        found = acceptance_by_top_k(top.indices, top.values, tail)(logits, slice(None))
        assert (found > before).all()
        rounded = acceptance_by_top_k(top.indices, top.values + 0.1, tail * torch.tensor(0.1).exp())(
            logits, slice(None)
        )
        torch.testing.assert_close(rounded, found)
        before = found
    exact = acceptance(p, logits.log_softmax(-1))
    assert (before < exact).all()
    torch.testing.assert_close(acceptance_by_top_k(*p.topk(VOCABULARY)[::-1], 0 * exact)(logits, slice(None)), exact)


def expected_tokens(accepted: list[float]) -> float:
    """Over all outcomes of a round whose i-th drafted token is accepted with probability accepted[i]."""
    total = 0.0
    for outcome in product((True, False), repeat=len(accepted)):
        probability = 1.0
        for kept, alpha in zip(outcome, accepted, strict=True):
            probability *= alpha if kept else 1 - alpha
        total += probability * ([*outcome, False].index(False) + 1)
    return total


def test_analytic_tau_is_what_all_outcomes_come_to() -> None:
    """Windows that lie in one document and have every acceptance, in their order."""
    length, accepted = 3, random(2, 12).sigmoid()
    accepted[0, 4] = accepted[1, 0] = torch.nan
    documents = torch.tensor([[0] * 7 + [1] * 5, [0] * 2 + [1] * 6 + [-1] * 4])
    expected = [
        expected_tokens(accepted[row, start : start + length].tolist())
        for row, starts in ((0, (0, 1, 7, 8, 9)), (1, (2, 3, 4, 5, 8, 9)))
        for start in starts
    ]
    found = analytic_tau(accepted, documents, length)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert not len(analytic_tau(accepted, documents, 13))
    same = analytic_tau(torch.full((1, 4), 0.7, dtype=torch.float64), torch.zeros(1, 4), 4)
    assert same.tolist() == pytest.approx([(1 - 0.7**5) / (1 - 0.7)])


def test_values_are_put_where_they_are_of() -> None:
    keep = torch.tensor([[True, False, True], [False, True, False]])
    assert scatter_positions(torch.tensor([5, 6, 7]), keep, -100).tolist() == [[5, -100, 6], [-100, 7, -100]]
