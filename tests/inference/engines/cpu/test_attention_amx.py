"""Attention by AMX, against the formula, and to the bit against itself in other parts."""

from functools import partial

import numpy as np
import pytest
import torch
from numba import njit
from test_compiled_attention import HEADS, KEY_HEADS, POSITIONS, exactly, given, hidden
from test_compiled_attention import run as run_by
from torch import Tensor

from inference.engines.cpu.attention import NEAR, AttentionTask
from inference.engines.cpu.attention_amx import USED, attend_by_amx
from inference.engines.cpu.by_amx import BLOCK, STEP, has_amx

pytestmark = pytest.mark.skipif(not has_amx(), reason="this processor has no AMX, or it is not to be used")


@njit
def attended(queries, keys, values, seen, mask, scale, first, last, out):  # type: ignore[no-untyped-def]
    rows, width = queries.shape[0], keys.shape[2]
    scores = np.full((queries.shape[1] // width * rows, -(-seen // STEP) * STEP), np.float32(np.nan))
    sums, near = np.full(queries.shape, np.float32(np.nan)), np.full((NEAR, width), np.float32(np.nan))
    task = AttentionTask(queries, keys, values, seen, mask, scale, scores, sums, near, 0, rows)
    attend_by_amx(task, first, last, False, out)


def rows_of(count: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [count, H·D] that bfloat16 keeps, keys and values [G, positions, D] of bfloat16."""
    _, keys, values = given(width, torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(count, HEADS * width, generator=generator).bfloat16().float()
    return queries, keys, values


run = partial(run_by, by=attended)


def lower_triangle(rows: int) -> Tensor:
    """A mask [rows, POSITIONS] of a chain whose last row sees all."""
    seen = torch.arange(POSITIONS)[None] <= torch.arange(POSITIONS - rows, POSITIONS)[:, None]
    return torch.zeros(rows, POSITIONS, dtype=torch.bfloat16).masked_fill(~seen, torch.finfo(torch.bfloat16).min)


def test_its_room_is_there() -> None:
    assert USED <= NEAR


@pytest.mark.parametrize("width", [STEP, 2 * STEP, 3 * STEP, 4 * STEP])
def test_is_the_mean_of_values_by_the_softmax(width: int) -> None:
    """Where registers are full, and where keys, or the positions that there are, end before one does."""
    queries, keys, values = rows_of(3, width)
    for seen in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, STEP, STEP + 1, POSITIONS):
        for mask in (None, hidden(torch.bfloat16)):
            found, exact = (way(queries, keys, values, seen, mask).double() for way in (run, exactly))
            torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
            few = keys[:, :seen].contiguous(), values[:, :seen].contiguous()
            assert torch.equal(run(queries, *few, seen, mask).double(), found)


def test_any_parts_give_the_same() -> None:
    """To the bit, with more queries of a key head than a register has rows."""
    queries, keys, values = rows_of(2 * BLOCK // (HEADS // KEY_HEADS) + 1, 2 * STEP)
    mask = lower_triangle(len(queries))
    whole = run(queries, keys, values, POSITIONS, mask)
    for parts in (2, 3, 7, len(queries) * HEADS):
        assert torch.equal(run(queries, keys, values, POSITIONS, mask, parts), whole)


def test_a_row_of_a_chain_equals_the_row_alone() -> None:
    """To the bit, though others see more positions."""
    queries, keys, values = rows_of(BLOCK + 3, 2 * STEP)
    whole = run(queries, keys, values, POSITIONS, lower_triangle(len(queries)))
    for row in range(len(queries)):
        seen = POSITIONS - len(queries) + row + 1
        assert torch.equal(run(queries[row : row + 1], keys, values, seen)[0], whole[row])


def test_what_is_not_a_number_stays_that() -> None:
    queries, keys, values = rows_of(2, STEP)
    for place in (0, 20, POSITIONS - 1):
        broken = keys.clone()
        broken[:, place, 3] = torch.nan
        assert run(queries, broken, values, POSITIONS).isnan().all()
