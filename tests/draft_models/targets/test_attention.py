"""Grouped attention against the textbook, and the masks it is given."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from draft_models.targets.attention import KERNELS, grouped_attention, packed_mask, use_kernel
from draft_models.targets.open_target import open_target
from outrider.files import PACKAGES
from tests.forked import Fork
from tests.tiny import save_target


def textbook(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 1, 9), (1, 4, 9), (1, 7, 7), (3, 5, 5)])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_equals_the_textbook(key_heads: int, batch: int, queries: int, keys: int, additive: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, 4, queries, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, batch, key_heads, keys, 8, generator=generator, dtype=torch.float64)
    visible = torch.rand(batch, 1, queries, keys, generator=generator) < 0.6
    visible[..., 0] = True
    mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf) if additive else visible
    out, _ = grouped_attention(nn.Module(), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(out, textbook(query, key, value, visible, 0.3))
    if queries == keys:
        causal = torch.ones(queries, keys, dtype=torch.bool).tril()
        out, _ = grouped_attention(nn.Module(), query, key, value, None, scaling=0.3)
        torch.testing.assert_close(out, textbook(query, key, value, causal, 0.3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("queries", "keys", "width", "masked"),
    [(1, 300, 64, False), (1, 300, 64, True), (7, 65, 16, True), (26, 128, 32, True)],
)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_no_kernel_rounds_more_than_another(
    key_heads: int, queries: int, keys: int, width: int, masked: bool, dtype: torch.dtype
) -> None:
    """Scores up to ±100, as in trained models: a score that went through 16 bits would be off by up to 0.25."""
    torch.manual_seed(queries)
    query = (12 * torch.randn(1, 4, queries, width)).to(dtype)
    key, value = torch.randn(2, 1, key_heads, keys, width).to(dtype)
    visible = torch.rand(1, 1, queries, keys) < 0.6
    visible[..., 0] = True
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min) if masked else None
    seen = visible if masked else torch.ones_like(visible)
    exact = textbook(query.double(), key.double(), value.double(), seen, width**-0.5)
    errors = {}
    for kernel in KERNELS:
        with use_kernel(kernel):
            out, _ = grouped_attention(nn.Module(), query, key, value, mask)
        assert out.dtype == dtype
        errors[kernel] = float((out.double() - exact).square().mean().sqrt())
    # A fused kernel rounds weights before it divides by their sum, and so the largest not at all.
    assert errors["products"] <= 2 * errors["fused"] + torch.finfo(dtype).eps ** 2


def test_no_mask_over_a_filled_cache_is_refused() -> None:
    query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match="3 queries, 5 keys"):
        grouped_attention(nn.Module(), query, key, key, None)


def test_packed_mask() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, -1, -1]])
    mask = packed_mask(documents)[0, 0]
    for i in range(7):
        for j in range(7):
            assert mask[i, j] == (j <= i and documents[0, i] == documents[0, j])


@pytest.mark.slow
def test_cudnn_is_left_out_where_a_target_is_opened_and_not_before(tmp_path: Path) -> None:
    """PyTorch would take it first on Hopper; an import changes nothing in the process."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    modules = "torch, inference.core.decode, draft_models.targets.open_target"
    run = Fork(["-c", f"import {modules}; print(torch.backends.cuda.cudnn_sdp_enabled())"], anew=PACKAGES)
    assert run.communicate() == ("True\n", "")
    save_target(tmp_path)
    open_target(str(tmp_path))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
