"""Kernels for what lies between a layer's products: the numbers of PyTorch's operations, on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draft_models.targets.attention import triton_kernels

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
# Of the largest value; a token in 16 bits may be rounded to its neighbour where float32 sums were taken in other order.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SHAPES = [(4, 2, 16, 5, 40), (6, 2, 8, 3, 130), (9, 3, 64, 1, 256), (4, 4, 32, 20, 200), (8, 1, 128, 64, 1000)]


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def same(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
    assert error <= TOLERANCE[ours.dtype]


@pytest.fixture(params=list(TOLERANCE), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    return request.param


@pytest.mark.parametrize(("rows", "size"), [(1, 576), (5, 96), (64, 4096), (3, 11008)])
def test_norms_and_gates(dtype: torch.dtype, rows: int, size: int) -> None:
    kernels = triton_kernels(CUDA)
    x, added, weight = (drawn(*shape, dtype=dtype) for shape in ((1, rows, size), (1, rows, size), (size,)))
    summed, normed = kernels.add_and_norm(x, added, weight, 1e-5)
    assert torch.equal(summed, x + added)
    same(normed, F.rms_norm(summed, (size,), None, 1e-5) * weight)
    same(kernels.norm(x, weight, 1e-5), F.rms_norm(x, (size,), None, 1e-5) * weight)
    gate, up = (joined := drawn(1, rows, 2 * size, dtype=dtype)).chunk(2, -1)
    same(kernels.gate(joined), F.silu(gate) * up)


@pytest.mark.parametrize(("heads", "key_heads", "width", "queries", "capacity"), SHAPES)
@pytest.mark.parametrize(("norms", "rotates"), [(False, True), (True, True), (False, False)])
def test_heads_go_where_they_belong(
    dtype: torch.dtype, norms: bool, rotates: bool, heads: int, key_heads: int, width: int, queries: int, capacity: int
) -> None:
    """Rotated, normed, and into slots in any order; no other slot of the cache is touched."""
    given = drawn(1, queries, heads + 2 * key_heads, width, dtype=dtype)
    cos, sin = drawn(2, 1, queries, width, dtype=dtype)
    scales = drawn(heads + key_heads, width, dtype=dtype)
    keys, values = torch.zeros(2, 1, key_heads, capacity, width, dtype=dtype, device="cuda")
    slots = torch.randperm(capacity, device="cuda")[:queries]
    query = triton_kernels(CUDA).place(
        given, (cos, sin) if rotates else None, scales if norms else None, 1e-6, slots, keys, values
    )
    expected = given[:, :, : heads + key_heads]
    if norms:
        expected = F.rms_norm(expected, (width,), None, 1e-6) * scales
    if rotates:
        low, high = expected.chunk(2, -1)
        expected = expected * cos[:, :, None] + torch.cat([-high, low], -1) * sin[:, :, None]
    same(query, expected[:, :, :heads].transpose(1, 2))
    same(keys[:, :, slots], expected[:, :, heads:].transpose(1, 2))
    assert torch.equal(values[:, :, slots], given[:, :, heads + key_heads :].transpose(1, 2))
    for cache in (keys, values):
        cache[:, :, slots] = 0
        assert not cache.any()


@pytest.mark.parametrize(("heads", "key_heads", "width", "queries", "count"), SHAPES)
def test_attention_split_over_keys(
    dtype: torch.dtype, heads: int, key_heads: int, width: int, queries: int, count: int
) -> None:
    """Masked at will, in views of longer caches; a row that sees nothing is a number, for padding."""
    query = drawn(1, heads, queries, width, dtype=dtype)
    keys, values = drawn(2, 1, key_heads, count + 9, width, dtype=dtype)[..., :count, :]
    lowest = torch.finfo(dtype).min
    hidden = torch.rand(1, 1, queries, count, device="cuda") < 0.5
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape, dtype=dtype, device="cuda").masked_fill(hidden, lowest)
    expected = F.scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), attn_mask=mask.double(), scale=0.3, enable_gqa=True
    )
    same(triton_kernels(CUDA).attend(query, keys, values, mask, 0.3), expected.transpose(1, 2).to(dtype))
    mask[:, :, -1] = lowest
    assert triton_kernels(CUDA).attend(query, keys, values, mask, 0.3).isfinite().all()
