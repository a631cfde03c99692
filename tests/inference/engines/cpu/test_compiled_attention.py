"""Attention of the compiled passes, by vectors and by AMX: against the formula, and to the bit in other parts."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from outrider.inference.engines.cpu.attention import NEAR, AttentionTask, attend, softmax
from outrider.inference.engines.cpu.attention_amx import USED, attend_by_amx
from outrider.inference.engines.cpu.by_amx import BLOCK, STEP, has_amx
from outrider.inference.engines.cpu.passes import product
from outrider.inference.engines.cpu.vectors import LANES, Linear
from tests.kept_code import kernel_of_a_test

POSITIONS, ROWS, HEADS, KEY_HEADS, WIDTH = NEAR + 41, 3, 6, 2, 4 * LANES


@kernel_of_a_test
def attended(queries, keys, values, seen, mask, scale, first, last, out):  # type: ignore[no-untyped-def]
    rows, width = queries.shape[0], keys.shape[2]
    scores = np.empty((queries.shape[1] // width * rows, -(-seen // LANES) * LANES), np.float32)
    sums, near = np.full(queries.shape, np.float32(np.nan)), np.empty((NEAR, width), np.float32)
    task = AttentionTask(queries, keys, values, seen, mask, scale, scores, sums, near, 0, rows)
    attend(task, first, last, False, out)


@njit
def attended_by_amx(queries, keys, values, seen, mask, scale, first, last, out):  # type: ignore[no-untyped-def]
    rows, width = queries.shape[0], keys.shape[2]
    scores = np.full((queries.shape[1] // width * rows, -(-seen // STEP) * STEP), np.float32(np.nan))
    sums, near = np.full(queries.shape, np.float32(np.nan)), np.full((NEAR, width), np.float32(np.nan))
    task = AttentionTask(queries, keys, values, seen, mask, scale, scores, sums, near, 0, rows)
    attend_by_amx(task, first, last, False, out)


@kernel_of_a_test
def weighted(scores, count, size, mask):  # type: ignore[no-untyped-def]
    softmax(scores, 0, count, size, mask, np.float32(0.2))


@kernel_of_a_test
def multiplied(linear, x, rows, first, last, halves, out):  # type: ignore[no-untyped-def]
    product(linear, x, rows, first, last, halves, out)


def numbers(tensor: Tensor) -> np.ndarray:
    """What compiled code is given: float32, or a bfloat16's bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def given(width: int = WIDTH, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [R, H·D], keys and values [G, positions, D]."""
    generator = torch.Generator().manual_seed(0)
    queries = 2 * torch.randn(ROWS, HEADS * width, generator=generator)
    keys, values = torch.randn(2, KEY_HEADS, POSITIONS, width, generator=generator).to(dtype)
    return queries, keys, values


def run(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: int,
    mask: Tensor | None = None,
    parts: int = 1,
    by: Callable[..., None] = attended,
) -> Tensor:
    """What the queries attend to, in so many parts, as threads share them out."""
    out = torch.full(queries.shape, torch.nan)
    shown = torch.zeros(len(queries), 0, dtype=keys.dtype) if mask is None else mask[:, :seen].contiguous()
    given = (queries.numpy(), numbers(keys), numbers(values), seen, numbers(shown), np.float32(0.2))
    items = len(queries) * HEADS
    for part in range(parts):
        by(*given, items * part // parts, items * (part + 1) // parts, out.numpy())
    return out


def lower_triangle(rows: int, positions: int = POSITIONS) -> Tensor:
    """A mask [rows, positions] of a chain whose last row sees all."""
    seen = torch.arange(positions)[None] <= torch.arange(positions - rows, positions)[:, None]
    return torch.zeros(rows, positions, dtype=torch.bfloat16).masked_fill(~seen, torch.finfo(torch.bfloat16).min)


def exactly(queries: Tensor, keys: Tensor, values: Tensor, seen: int, mask: Tensor | None = None) -> Tensor:
    """The same in float64, by the formula. Without a mask the rows are a chain."""
    mask = lower_triangle(len(queries), seen) if mask is None else mask
    heads = queries.double().view(len(queries), KEY_HEADS, HEADS // KEY_HEADS, -1)
    scores = 0.2 * torch.einsum("rghd,gpd->rghp", heads, keys[:, :seen].double())
    scores += mask[:, None, None, :seen].double()
    return torch.einsum("rghp,gpd->rghd", scores.softmax(-1), values[:, :seen].double()).flatten(1)


def hidden(dtype: torch.dtype = torch.float32) -> Tensor:
    """A mask: of every row other positions are seen."""
    mask = torch.zeros(ROWS, POSITIONS, dtype=dtype)
    for row in range(ROWS):
        mask[row, row + 1 :: row + 2] = torch.finfo(dtype).min
    mask[:, 0] = -1.5
    return mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [LANES, 3 * LANES, WIDTH, 9 * LANES])
def test_is_the_mean_of_values_by_the_softmax(width: int, dtype: torch.dtype) -> None:
    """With few positions and with many, with and without a mask, of every width in vectors."""
    queries, keys, values = given(width, dtype)
    for seen in (1, 2, 7, 8, 9, 17, NEAR, NEAR + 1, POSITIONS):
        for mask in (None, hidden(dtype)) if seen >= ROWS else (hidden(dtype),):
            found, exact = (way(queries, keys, values, seen, mask).double() for way in (run, exactly))
            torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_parts_and_rows_give_the_same(dtype: torch.dtype) -> None:
    """To the bit: for a thread with two queries or less reads what is stored, one with more a copy in floats."""
    queries, keys, values = given(WIDTH, dtype)
    mask = hidden(dtype)
    whole = run(queries, keys, values, POSITIONS, mask)
    for parts in (2, 3, 5, ROWS * HEADS):
        assert torch.equal(run(queries, keys, values, POSITIONS, mask, parts), whole)
    for row in range(ROWS):
        rest = queries[row : row + 1], keys, values, POSITIONS, mask[row : row + 1]
        assert torch.equal(run(*rest)[0], whole[row])


def test_what_is_hidden_at_the_end_changes_no_bit() -> None:
    queries, keys, values = given()
    for seen in range(ROWS, POSITIONS):
        alone = run(queries, keys, values, seen)
        mask = torch.nn.functional.pad(lower_triangle(ROWS, seen), (0, POSITIONS - seen), value=-3e38)
        assert torch.equal(run(queries, keys, values, POSITIONS, mask.float()), alone)


def test_what_is_not_a_number_stays_that() -> None:
    for way, kind in ((run, torch.float32), *([(by_amx, torch.bfloat16)] if has_amx() else [])):
        queries, keys, values = given(2 * STEP, kind)
        for place in (0, 20, POSITIONS - 1):
            broken = keys.clone()
            broken[:, place, 3] = torch.nan
            assert way(queries[-1:], broken, values, POSITIONS).isnan().all()
    queries, keys, values = given()
    queries[:, 0] = torch.inf
    assert run(queries, keys, values, POSITIONS)[:, :WIDTH].isnan().all()


@pytest.mark.parametrize("kind", [np.uint16, np.float32])
def test_vectors_are_rounded_to_bfloat16_as_pytorch_does(kind: type) -> None:
    """Over bits of every kind: ties, subnormal numbers, infinities. They are stored as what is added to a product."""
    bits = np.random.default_rng(0).integers(0, 2**32, 2**17, dtype=np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    edges = np.full(LANES, 0x7F800000, np.uint32)
    x = np.concatenate([bits, ties, edges, edges | np.uint32(1 << 31)]).view(np.float32)
    out = np.empty((1, len(x)), kind)
    nothing = Linear(np.zeros(len(x), np.float32), 1, np.ones(len(x), np.float32), x)
    expected = torch.from_numpy(x).bfloat16().float()
    multiplied(nothing, np.zeros((1, 1), np.float32), 1, 0, len(x), True, out)
    found = torch.from_numpy(out).view(torch.bfloat16) if kind is np.uint16 else torch.from_numpy(out)
    torch.testing.assert_close(found[0].float(), expected, rtol=0, atol=0, equal_nan=True)
    if kind is np.float32:
        multiplied(nothing, np.zeros((1, 1), np.float32), 1, 0, len(x), False, out)
        np.testing.assert_array_equal(out[0], x)


@pytest.mark.parametrize("seen", [1, LANES - 1, LANES, LANES + 1, 2 * LANES + 1])
def test_weights_after_the_last_seen_position_are_zero(seen: int) -> None:
    """Up to any number of whole vectors: AMX reads two of them at a time."""
    size = 4 * LANES
    for hide in (False, True):
        scores, mask = torch.randn(1, size, generator=torch.Generator().manual_seed(seen)), torch.zeros(seen)
        mask[1 : seen - 1 : 2] = torch.finfo(mask.dtype).min if hide else 0.0
        exact = (0.2 * scores[0, :seen] + mask).softmax(-1)
        weighted(scores.numpy(), seen, size, mask.numpy())
        torch.testing.assert_close(scores[0, :seen], exact, rtol=1e-5, atol=1e-7)
        assert not scores[0, seen:].any()


# --- by AMX -------------------------------------------------------------------------------------------------------

needs_amx = pytest.mark.skipif(not has_amx(), reason="this processor has no AMX, or it is not to be used")
by_amx = partial(run, by=attended_by_amx)


def rows_of(count: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [count, H·D] that bfloat16 keeps, keys and values [G, positions, D] of bfloat16."""
    _, keys, values = given(width, torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(count, HEADS * width, generator=generator).bfloat16().float()
    return queries, keys, values


@needs_amx
@pytest.mark.parametrize("width", [STEP, 2 * STEP, 3 * STEP, 4 * STEP])
def test_amx_gives_the_mean_of_values_by_the_softmax(width: int) -> None:
    """Where registers are full, and where keys, or the positions that there are, end before one does."""
    assert USED <= NEAR
    queries, keys, values = rows_of(3, width)
    for seen in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, STEP, STEP + 1, POSITIONS):
        for mask in (None, hidden(torch.bfloat16)) if seen >= len(queries) else (hidden(torch.bfloat16),):
            found, exact = (way(queries, keys, values, seen, mask).double() for way in (by_amx, exactly))
            torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
            few = keys[:, :seen].contiguous(), values[:, :seen].contiguous()
            assert torch.equal(by_amx(queries, *few, seen, mask).double(), found)


@needs_amx
def test_amx_gives_the_same_in_any_parts_and_for_a_row_alone() -> None:
    """To the bit, with more queries of a key head than a register has rows; other rows see more positions."""
    queries, keys, values = rows_of(2 * BLOCK // (HEADS // KEY_HEADS) + 1, 2 * STEP)
    mask = lower_triangle(len(queries))
    whole = by_amx(queries, keys, values, POSITIONS, mask)
    for parts in (2, 3, 7, len(queries) * HEADS):
        assert torch.equal(by_amx(queries, keys, values, POSITIONS, mask, parts), whole)
    for row in range(len(queries)):
        seen = POSITIONS - len(queries) + row + 1
        assert torch.equal(by_amx(queries[row : row + 1], keys, values, seen)[0], whole[row])
