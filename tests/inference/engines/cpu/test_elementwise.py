"""What compiled passes do to each number between products, against PyTorch's, and numbers in three parts."""

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from inference.engines.cpu.at_once import LARGE, in_large_pages
from inference.engines.cpu.elementwise import add_row, gate_row, norm_row, put_columns, softmax_row
from inference.engines.cpu.vectors import LANES

SIZE, ROWS = 5 * LANES, 3


@njit
def normed(x, weight, eps, halves, out):  # type: ignore[no-untyped-def]
    for row in range(x.shape[0]):
        norm_row(x, row, row, weight, eps, halves, out)


@njit
def gated(both, inner, begin, end, halves, out):  # type: ignore[no-untyped-def]
    for row in range(both.shape[0]):
        gate_row(both, row, inner, begin, end, halves, out)


@njit
def added(left, right, begin, end, halves):  # type: ignore[no-untyped-def]
    for row in range(left.shape[0]):
        add_row(left, right, row, begin, end, halves)


@njit
def softmaxed(scores, size):  # type: ignore[no-untyped-def]
    for row in range(scores.shape[0]):
        softmax_row(scores, row, size)


@njit
def put(values, line, begin, out, row, column, count, halves):  # type: ignore[no-untyped-def]
    put_columns(values, line, begin, out, row, column, count, halves)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("halves", [False, True])
def test_norms(halves: bool) -> None:
    x, weight = normal(ROWS, SIZE), normal(SIZE)
    x = x.bfloat16().float() if halves else x
    out = torch.full_like(x, torch.nan)
    normed(x.numpy(), weight.numpy(), np.float32(1e-5), halves, out.numpy())
    scaled = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = (scaled.bfloat16().float() * weight).bfloat16().float() if halves else scaled * weight
    torch.testing.assert_close(out, expected, rtol=0.01 if halves else 1e-5, atol=1e-6)
    assert not halves or torch.equal(out, out.bfloat16().float())


@pytest.mark.parametrize("halves", [False, True])
def test_gates_by_silu_within_its_columns(halves: bool) -> None:
    both = 5 * normal(ROWS, 2 * SIZE)
    out = torch.full((ROWS, SIZE), torch.nan)
    begin, end = LANES, 4 * LANES
    gated(both.numpy(), SIZE, begin, end, halves, out.numpy())
    gate, up = both.split(SIZE, dim=-1)
    active = torch.nn.functional.silu(gate)
    expected = (active.bfloat16().float() * up).bfloat16().float() if halves else active * up
    torch.testing.assert_close(out[:, begin:end], expected[:, begin:end], rtol=0.01 if halves else 1e-5, atol=1e-6)
    assert out[:, :begin].isnan().all()
    assert out[:, end:].isnan().all()


@pytest.mark.parametrize("halves", [False, True])
def test_adds_within_its_columns(halves: bool) -> None:
    left, right = normal(ROWS, SIZE), normal(ROWS, 2 * SIZE)
    found, begin, end = left.clone(), LANES, 4 * LANES
    added(found.numpy(), right.numpy(), begin, end, halves)
    total = left + right[:, :SIZE]
    total = total.bfloat16().float() if halves else total
    assert torch.equal(found[:, begin:end], total[:, begin:end])
    assert torch.equal(found[:, :begin], left[:, :begin])
    assert torch.equal(found[:, end:], left[:, end:])


def test_softmax_of_what_is_not_hidden() -> None:
    scores = 3 * normal(ROWS, SIZE)
    scores[:, 3 * LANES + 5 :] = -torch.inf
    found = scores.clone()
    softmaxed(found.numpy(), 4 * LANES)
    torch.testing.assert_close(found[:, : 4 * LANES], scores[:, : 4 * LANES].softmax(-1), rtol=1e-5, atol=1e-7)
    assert torch.equal(found[:, 4 * LANES :], scores[:, 4 * LANES :])


def test_a_number_is_the_sum_of_its_three_parts() -> None:
    """To the last digit; as bfloat16s there is one of it."""
    values = normal(1, SIZE)
    for halves, parts in ((False, 3), (True, 1)):
        out = torch.zeros(parts * ROWS, SIZE, dtype=torch.bfloat16)
        put(values.numpy(), 0, LANES, out.view(torch.uint16).numpy(), 1, 2 * LANES, 2 * LANES, halves)
        total = out.view(parts, ROWS, SIZE).float().sum(0)
        expected = torch.zeros(ROWS, SIZE)
        expected[1, 2 * LANES : 4 * LANES] = values[0, LANES : 3 * LANES]
        assert torch.equal(total, expected.bfloat16().float() if halves else expected)


def test_large_pages_change_no_number() -> None:
    """For what is smaller than one, and for what begins and ends within some."""
    for size in (7, LARGE // 4, 2 * LARGE + 3):
        numbers = torch.arange(size, dtype=torch.float32)
        assert in_large_pages(numbers) is numbers
        assert torch.equal(numbers, torch.arange(size, dtype=torch.float32))
