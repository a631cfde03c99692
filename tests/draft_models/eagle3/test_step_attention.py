"""The joined attention of training's steps is one softmax over all that a place sees."""

import pytest
import torch
from torch import Tensor, nn

from draft_models.eagle3.model import Steps, join
from draft_models.targets.attention import packed_mask
from draft_models.targets.target import Band

HEADS, KEY_HEADS, LENGTH, WIDTH, STEPS = 4, 2, 13, 8, 4
DOCUMENTS = torch.tensor([[0] * 6 + [1] * 5 + [-1] * 2, [0] * 13])
SCALING = 0.3


def made(dtype: torch.dtype) -> list[list[Tensor]]:
    """Queries, keys and values of each step, large enough that weights are far from equal."""
    generator = torch.Generator().manual_seed(0)

    def some(heads: int) -> Tensor:
        values = 3 * torch.randn(2, heads, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    return [[some(HEADS), some(KEY_HEADS), some(KEY_HEADS)] for _ in range(STEPS)]


def plain(parts: list[list[Tensor]], seen: Tensor) -> Tensor:
    """Over the keys of all steps side by side, under a mask of all of them; seen [B, 1, T, T]: of step 0's."""
    found = []
    for step, (query, _, _) in enumerate(parts):
        keys, values = (torch.cat([part[i].double() for part in parts[: step + 1]], 2) for i in (1, 2))
        own = torch.eye(LENGTH, dtype=torch.bool).expand(*seen.shape[:2], -1, -1)
        mask = torch.cat([seen, *[own] * step], -1)
        keys, values = (part.repeat_interleave(HEADS // KEY_HEADS, 1) for part in (keys, values))
        scores = (query.double() @ keys.mT * SCALING).masked_fill(~mask, -torch.inf)
        found.append((scores.softmax(-1) @ values).transpose(1, 2))
    return torch.stack(found)


def joined(parts: list[list[Tensor]], mask: Tensor | Band | None) -> Tensor:
    steps, found = Steps(), []
    for step, (query, key, value) in enumerate(parts):
        steps.now = step
        found.append(steps.attend(nn.Identity(), query, (key, value), mask, 0, SCALING))
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["whole", "blocks", "causal"])
def test_values_and_gradients_are_those_of_one_softmax(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Band, "BLOCK", 5)
    documents = torch.zeros_like(DOCUMENTS) if kind == "causal" else DOCUMENTS
    seen = packed_mask(documents)
    mask = {"whole": seen, "blocks": Band.packed(documents), "causal": None}[kind]
    found = []
    for given in (lambda parts: plain(parts, seen), lambda parts: joined(parts, mask)):
        parts = made(torch.float64)
        out = given(parts)
        out.sin().sum().backward()
        found.append([out, *(tensor.grad for step in parts for tensor in step)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9)


def test_sixteen_bits_do_not_round_the_joint_score() -> None:
    """Two entries of one key share the weight evenly, also where their score is too large for its fractions."""
    key = 4 * torch.randn(1, 1, LENGTH, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    mask = torch.eye(LENGTH, dtype=torch.bool)[None, None]
    one = torch.ones_like(key)
    found = join(nn.Identity(), key, (key, 0 * one), [(key, one)], mask, scaling=0.3)
    torch.testing.assert_close(found, 0.5 * one.transpose(1, 2), rtol=0, atol=0.01)
