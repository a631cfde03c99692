"""A loss, and judging a drafter, take no more memory than the plan of a training says."""

import pytest
import torch

from outrider.draft_models import losses as losses_module
from outrider.draft_models.acceptance import BLOCK_BYTES, FLOAT32_BYTES, acceptance_by_target, argmax_and_acceptance
from outrider.draft_models.losses import (
    DIVERGENCES,
    linear_cross_entropy,
    linear_divergence,
    linear_topk_divergence,
    loss_bytes,
)
from tests.memory import Alive

ROWS, WIDTH, TOKENS = 1100, 4, 512


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 rows of logits."""
    monkeypatch.setitem(BLOCK_BYTES, "cpu", 16 * FLOAT32_BYTES * TOKENS + 1)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", ["cross_entropy", "cached", *DIVERGENCES])
def test_a_loss_takes_no_more_than_the_plan_says(kind: str) -> None:
    """Of a chunk one block of logits, and the copies of few rows at a time."""
    hidden, weight = torch.randn(ROWS, WIDTH).requires_grad_(), torch.randn(TOKENS, WIDTH).requires_grad_()
    known, labels = (torch.randn(ROWS, WIDTH), torch.randn(TOKENS, WIDTH)), torch.zeros(ROWS, dtype=torch.long)
    with Alive() as alive:
        if kind == "cross_entropy":
            loss = linear_cross_entropy(hidden, weight, labels)
        elif kind == "cached":
            top = torch.arange(8).expand(ROWS, 8), torch.full((ROWS, 8), -3.0), torch.full((ROWS,), 0.6)
            loss = linear_topk_divergence(hidden, weight, *top, labels, "forward_kl")
        else:
            loss = linear_divergence(hidden, weight, *known, labels, kind)
        loss.backward()
    given = 10 * (hidden.nbytes + weight.nbytes)
    assert alive.peak <= loss_bytes(TOKENS, TOKENS, hidden.device) + given
    assert alive.peak < 2 * 512 * TOKENS * FLOAT32_BYTES  # that is, no second tensor of a whole chunk


@pytest.mark.usefixtures("few")
def test_so_does_judging_a_drafter() -> None:
    hidden, head = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, TOKENS)
    with Alive() as alive, torch.no_grad():
        argmax_and_acceptance(
            lambda states: states @ head, hidden, acceptance_by_target(lambda states: states @ head, hidden)
        )
    assert alive.peak <= losses_module.COPIES * BLOCK_BYTES["cpu"] + 4 * hidden.nbytes
