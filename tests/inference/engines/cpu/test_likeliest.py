"""The likeliest tokens after several rows, against a softmax and a search; masks of lineages, against their bits."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inference.core.rows import RoundRows, unpack
from inference.engines.cpu.choices import MOST_COLUMNS, ancestor_mask, likeliest_children
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
def test_masks_of_lineages(dtype: torch.dtype) -> None:
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
