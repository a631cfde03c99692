"""What compiled passes do to each number between products, against PyTorch's, and numbers in three parts."""

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from outrider.inference.engines.cpu.elementwise import put_columns
from outrider.inference.engines.cpu.numbers import bits_of_bfloat16, put, rounded, wide
from outrider.inference.engines.cpu.vectors import LANES, LONG, arrays_of, exponential, load_floats, loop, store_floats

SIZE, ROWS = 5 * LANES, 3


@njit
def put_parts(values, line, begin, out, row, column, count, halves):  # type: ignore[no-untyped-def]
    put_columns(values, line, begin, out, row, column, count, halves)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def test_a_number_is_the_sum_of_its_three_parts() -> None:
    """To the last digit; as bfloat16s there is one of it."""
    values = normal(1, SIZE)
    for halves, parts in ((False, 3), (True, 1)):
        out = torch.zeros(parts * ROWS, SIZE, dtype=torch.bfloat16)
        put_parts(values.numpy(), 0, LANES, out.view(torch.uint16).numpy(), 1, 2 * LANES, 2 * LANES, halves)
        total = out.view(parts, ROWS, SIZE).float().sum(0)
        expected = torch.zeros(ROWS, SIZE)
        expected[1, 2 * LANES : 4 * LANES] = values[0, LANES : 3 * LANES]
        assert torch.equal(total, expected.bfloat16().float() if halves else expected)


@intrinsic
def _exponentials(context, x, out, vectors):  # type: ignore[no-untyped-def]
    def make(context, builder, signature, given):  # type: ignore[no-untyped-def]
        of_x, of_out = arrays_of(context, builder, (x, out), given[:2])

        def step(place, nothing):  # type: ignore[no-untyped-def]
            at = builder.mul(place, LONG(LANES))
            value = exponential(builder, load_floats(builder, of_x.data, at, types.float32))
            store_floats(builder, value, of_out.data, at, types.float32, ir.IntType(1)(0))
            return nothing

        loop(builder, given[2], [], step)
        return context.get_dummy_value()

    return types.void(x, out, types.int64), make


@njit
def exponentials(x, out):  # type: ignore[no-untyped-def]
    """Of as many numbers as fill vectors."""
    _exponentials(x, out, len(x) // LANES)


@njit
def there_and_back(x, stored, out):  # type: ignore[no-untyped-def]
    for i in range(len(x)):
        put(stored, i, x[i], False)
        out[i] = wide(stored[i])


@njit
def all_rounded(x, out):  # type: ignore[no-untyped-def]
    for i in range(len(x)):
        out[i] = rounded(x[i], True)


def test_exponentials() -> None:
    """To two units in the last place; beyond what silu and softmax tell from nothing it is nothing."""
    x = np.concatenate([np.linspace(-87, 88, 400_001), np.linspace(-1e-3, 1e-3, 10_001)]).astype(np.float32)
    x = x[: len(x) // LANES * LANES]
    out = np.empty_like(x)
    exponentials(x, out)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    edges = np.array([-87.5, -1e30, -np.inf, 1e30, np.nan] + [0.0] * (LANES - 5), np.float32)
    exponentials(edges, out)
    assert (out[:3] == 0).all()
    assert out[3] > 1e38
    assert np.isnan(out[4])


def test_bfloat16_is_rounded_as_pytorch_does() -> None:
    """Over bits of every kind: ties, subnormal numbers, infinities."""
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    x = np.concatenate([bits, ties, np.array([0, 0x80000000, 0x7F800000, 0xFF800000], np.uint32)]).view(np.float32)
    expected = torch.from_numpy(x).bfloat16()
    stored, out, within = np.empty(len(x), np.uint16), np.empty_like(x), np.empty_like(x)
    there_and_back(x, stored, out)
    all_rounded(x, within)
    for found in (out, within):
        torch.testing.assert_close(torch.from_numpy(found), expected.float(), rtol=0, atol=0, equal_nan=True)
    assert stored[~np.isnan(x)].tolist() == expected.view(torch.uint16).numpy()[~np.isnan(x)].tolist()
    assert bits_of_bfloat16(np.float32(1.0)) == 0x3F80
