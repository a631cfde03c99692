"""Sampling by the inverse distribution function: exact at the size of real vocabularies, and never out of range."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from outrider.inference.core import sampling
from outrider.inference.core.sampling import invert

LARGE = 151_936
LAST = 1 - 2.0**-53  # the largest uniform number
STEPS = 2**53  # the number of uniform numbers


def large(temperature: float, seed: int = 0) -> Tensor:
    """A distribution over a large vocabulary [1, V], in float32 from a softmax."""
    logits = 3 * torch.randn(1, LARGE, generator=torch.Generator().manual_seed(seed))
    return (logits / temperature).softmax(-1)


def boundaries(weights: Tensor) -> list[int]:
    """The exact boundary between tokens i and i + 1 of one row [V], in units of 2^-53 of the total (rounded up)."""
    mantissas, exponents = weights.double().frexp()
    whole = [int(m) << (int(e) + 200) for m, e in zip((mantissas * STEPS).tolist(), exponents.tolist(), strict=True)]
    sums = list(itertools.accumulate(whole))
    return [-(-part * STEPS // sums[-1]) for part in sums]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_drawn_distribution_is_q(temperature: float) -> None:
    """The boundaries between tokens are exact to a few units in the last place of the uniform numbers.

    The error of a token's share is at most that of its two boundaries, so the total variation is at most their sum.
    """
    weights = large(temperature)
    exact = boundaries(weights[0])
    off = 2**11
    below = [max(0, at - off) / STEPS for at in exact[:-1]]
    above = [min(STEPS - 1, at + off) / STEPS for at in exact[:-1]]
    tokens = torch.arange(LARGE - 1)
    assert (invert(weights, torch.tensor([below], dtype=torch.float64))[0] <= tokens).all()
    assert (invert(weights, torch.tensor([above], dtype=torch.float64))[0] > tokens).all()
    assert LARGE * off / STEPS < 1e-6  # the total variation


def test_each_token_has_its_probability() -> None:
    weights = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.125, 0.125, 0.0])
    uniforms = torch.arange(1000, dtype=torch.float64)[:, None] / 1000
    tokens = invert(weights.expand(1000, -1), uniforms)[:, 0]
    assert torch.bincount(tokens, minlength=7).tolist() == [0, 250, 0, 500, 125, 125, 0]
    assert torch.equal(invert(weights[None], uniforms.T), tokens[None])
    assert (invert(weights[None], 0.0).item(), invert(weights[None], LAST).item()) == (1, 5)
    assert weights.tolist() == [0.0, 0.25, 0.0, 0.5, 0.125, 0.125, 0.0]  # unchanged
    assert invert(weights[None].double(), 0.3).item() == 3
    assert weights.sum() == 1


def test_a_row_without_weight_has_no_token() -> None:
    weights = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1e-30, 0.0], [0.0, 0.0, 0.0], [3e38, 0.0, 3e38]])
    for uniform in (0.0, 0.5, LAST):
        assert invert(weights, uniform)[:, 0].tolist() == [-1, 1, -1, 2 if uniform >= 0.5 else 0]


def plant_errors(patch: pytest.MonkeyPatch, size: float) -> None:
    """Running sums with errors of `size`, as from a parallel sum: not even monotone."""
    exact, errors = sampling._running_sums, torch.Generator().manual_seed(0)

    def rough(weights: Tensor) -> Tensor:
        sums = exact(weights)
        return sums + size * sums[:, -1:] * torch.randn(sums.shape, generator=errors, dtype=sums.dtype)

    patch.setattr(sampling, "_running_sums", rough)


@pytest.mark.parametrize("size", [1e-15, 1e-3, 0.1])
def test_no_token_without_weight_whatever_the_sums(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    plant_errors(monkeypatch, size)
    chance = random.Random(0)
    uniforms = torch.tensor([[0.0, LAST, *(chance.random() for _ in range(500))]] * 20, dtype=torch.float64)
    weights = torch.rand(20, 300, generator=torch.Generator().manual_seed(1))
    weights[weights < 0.9] = 0
    weights[3:5] = 0
    weights[4, 7] = 1e-30
    tokens = invert(weights, uniforms)
    assert (tokens[3] == -1).all()
    rest = [row for row in range(20) if row != 3]
    assert (tokens[rest] >= 0).all()
    assert (weights[rest].gather(-1, tokens[rest]) > 0).all()


def test_parallel_sums_keep_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """With errors of the size of rounding the distribution is the same, to much less than 1e-6."""
    weights = torch.rand(1, 500, generator=torch.Generator().manual_seed(1))
    weights[0, ::3] = 0
    exact = torch.tensor([boundaries(weights[0])[:-1]], dtype=torch.float64) / STEPS
    plant_errors(monkeypatch, 1e-13)
    after, before = invert(weights, (exact + 1e-11).clamp(max=LAST)), invert(weights, (exact - 1e-11).clamp(min=0))
    ends = exact[0, 1:] > exact[0, :-1]  # of tokens with a share above 0
    assert (after[0, 1:] > torch.arange(1, 499))[ends].all()
    assert (before[0, 1:] <= torch.arange(1, 499))[ends].all()


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CUDA's prefix sums: the same tokens as on a CPU except at boundaries, and in range."""
    weights = large(2.0).cuda()
    weights[0, ::2] = 0
    chance = random.Random(0)
    uniforms = torch.tensor([[0.0, LAST, *(chance.random() for _ in range(100_000))]], dtype=torch.float64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = invert(weights, uniforms.to("cuda", non_blocking=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (weights[0, tokens[0]] > 0).all()
    assert (tokens.cpu() != invert(weights.cpu(), uniforms)).sum() <= 2
