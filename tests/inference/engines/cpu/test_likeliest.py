"""The likeliest tokens after rows and the largest logits, against PyTorch's; ancestor masks, against their bits."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.inference.core.ops import likeliest, row_maxima
from outrider.inference.core.rows import RoundRows, unpack
from outrider.inference.engines.cpu import choices
from outrider.inference.engines.cpu.choices import MANY, MOST_COLUMNS, ancestor_mask, likeliest_children
from tests.tiers import as_many

DTYPES = [torch.float32, torch.bfloat16]


def expected(logits: Tensor, weights: list[float], sharpness: float) -> Tensor:
    """weights · softmax(sharpness · logits) [n, V]."""
    return (logits.float() * sharpness).softmax(-1) * torch.tensor(weights)[:, None]


@settings(deadline=None, max_examples=as_many(60))
@given(
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([16, 17, 31, 64, 1000, 8192]),
    rows=st.integers(1, 5),
    count=st.integers(1, 70),
    sharpness=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_are_those_of_a_softmax(
    seed: int, dtype: torch.dtype, size: int, rows: int, count: int, sharpness: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(rows, size, generator=generator)).to(dtype)
    weights = torch.rand(rows, generator=generator).tolist()
    found: Any = likeliest_children(logits, weights, count, sharpness)
    values, of_rows, columns = found
    probs = expected(logits, weights, sharpness)
    assert len(values) == min(count, rows * size)
    torch.testing.assert_close(values, probs.flatten().topk(len(values)).values, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(probs[of_rows, columns], values, rtol=1e-5, atol=1e-9)
    assert len({*zip(of_rows.tolist(), columns.tolist(), strict=True)}) == len(values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_ones_come_in_order(dtype: torch.dtype) -> None:
    found: Any = likeliest_children(torch.zeros(2, 40, dtype=dtype), [0.5, 0.5], 42)
    assert found[0].tolist() == pytest.approx([0.5 / 40] * 42)
    assert list(zip(found[1].tolist(), found[2].tolist(), strict=True)) == [
        (place // 40, place % 40) for place in range(42)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 15, 16, 40, 49])
def test_a_row_with_what_is_no_number_has_no_tokens(dtype: torch.dtype, place: int) -> None:
    for value in (torch.nan, torch.inf):
        logits = torch.randn(2, 50).to(dtype)
        logits[0, place] = value
        found: Any = likeliest_children(logits, [1.0, 0.5], 60)
        probs = expected(logits, [1.0, 0.5], 1.0)[1]
        torch.testing.assert_close(found[0][:50], probs.sort(descending=True).values, rtol=1e-5, atol=1e-9)
        assert found[1][:50].tolist() == [1] * 50
        assert found[0][50:].tolist() == [0.0] * 10
    assert likeliest_children(torch.randn(1, 8), [1.0], 2) is None
    assert likeliest_children(torch.randn(1, 80, dtype=torch.float64), [1.0], 2) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_ancestor_masks(dtype: torch.dtype) -> None:
    rows = RoundRows([-1, 0, 0, 1, 2, 3])
    for start, stop in ((0, 6), (3, 6), (1, 3)):
        for past in (0, 5, 200):
            seen = rows.ancestors[start:stop]
            found = ancestor_mask(seen, past, stop, dtype)
            assert found is not None
            visible = torch.from_numpy(unpack(seen, stop).copy())
            assert found.shape == (1, 1, stop - start, past + stop)
            assert bool((found[0, 0, :, :past] == 0).all())
            assert torch.equal(found[0, 0, :, past:] == 0, visible)
            assert torch.equal(found[0, 0, :, past:] == torch.finfo(dtype).min, ~visible)
    assert ancestor_mask([1], 3, MOST_COLUMNS + 1, dtype) is None
    assert ancestor_mask([1], 3, 1, torch.float64) is None


ROWS = 3


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
    values, places = row_maxima(scores)
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
