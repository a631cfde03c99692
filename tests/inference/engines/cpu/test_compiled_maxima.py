"""The largest of each row of logits, as PyTorch finds it."""

import pytest
import torch
from torch import Tensor

from inference.core.ops import largest, likeliest
from inference.engines.cpu import choices
from inference.engines.cpu.choices import MANY

ROWS = 3
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the calls of the compiled function."""
    calls: list[int] = []
    run = choices.call
    monkeypatch.setattr(choices, "call", lambda *given: calls.append(1) or run(*given))
    return calls


def logits(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(ROWS, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(scores: Tensor) -> None:
    values, places = largest(scores)
    expected = scores.max(-1)
    assert values.dtype == scores.dtype
    assert torch.equal(places, expected.indices)
    torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [MANY, MANY + 1, MANY + 15, 49152])
def test_is_that_of_pytorch(dtype: torch.dtype, size: int, compiled: list[int]) -> None:
    """bfloat16s are often equal: the first of them counts. Wherever the largest is, in a last part of a vector too."""
    for seed in range(5):
        check(logits(size, dtype, seed))
    for place in (0, 1, 15, 16, 17, size // 2, size - 2, size - 1):
        scores = logits(size, dtype)
        scores[1, place] = 50.0
        scores[2, [place, size - 1 - place]] = 50.0
        check(scores)
    check(torch.zeros(ROWS, size, dtype=dtype))
    assert compiled


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_what_is_no_number(dtype: torch.dtype) -> None:
    size = MANY + 3
    for value in (torch.inf, -torch.inf, torch.nan):
        for place in (0, 16, 100, size - 1):
            scores = logits(size, dtype)
            scores[0, place] = value
            check(scores)
            scores[0] = -torch.inf
            scores[0, place] = value
            check(scores)
            scores[2, place // 2] = torch.nan
            scores[2, place] = torch.nan
            check(scores)


def test_views_and_other_numbers(compiled: list[int]) -> None:
    check(logits(2 * MANY, torch.float32)[:, ::2])
    check(logits(2 * MANY, torch.bfloat16)[::2])
    assert len(compiled) == 2
    check(logits(MANY, torch.float64))
    check(logits(MANY - 1, torch.float32))
    assert len(compiled) == 2


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("size", [8, MANY, MANY + 3])
def test_no_place_where_the_largest_is_not_finite(dtype: torch.dtype, size: int) -> None:
    scores = logits(size, dtype)
    assert torch.equal(likeliest(scores), scores.argmax(-1))
    scores[0, size - 1] = torch.inf
    scores[1] = -torch.inf
    scores[2, 3] = torch.nan
    assert likeliest(scores).tolist() == [-1, -1, -1]
    scores[0, size - 1], scores[1, 2] = -torch.inf, 0.5
    assert likeliest(scores).tolist() == [int(scores[0].argmax()), 2, -1]
