"""Packed weights: the same numbers to rounding, the same tokens."""

from pathlib import Path

import pytest
import torch
from torch import nn

from inference.decode import autoregressive, speculative
from inference.drafting import Chain
from inference.evaluation import Drafters, prepare
from inference.packing import PackedLinear, can_pack, pack_linears
from inference.sources import EarlyExitSource
from inference.stop_rules import FixedLength
from tests.tiny import ARCHITECTURES, LAYERS, make_drafter, open_stack, random_prompt, reference_generate, save_target

pytestmark = pytest.mark.skipif(not can_pack(torch.device("cpu"), torch.float32), reason="needs oneDNN")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 5, 24), (40, 24)])
def test_equals_linear(bias: bool, shape: tuple[int, ...]) -> None:
    linear = nn.Linear(24, 17, bias=bias).requires_grad_(False)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(PackedLinear(linear)(x), linear(x))


def test_every_linear_is_replaced_and_shared_ones_stay_shared() -> None:
    one = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": one, "b": nn.Sequential(one, nn.Linear(4, 2), nn.ReLU())})
    pack_linears(model)
    assert not any(isinstance(m, nn.Linear) for m in model.modules())
    assert model["a"] is model["b"][0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("own_head", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_decoding_equals_generate(tmp_path: Path, architecture: str, tied: bool, own_head: bool) -> None:
    path = save_target(tmp_path, architecture, tied=tied, kv_heads=2)
    model, _ = open_stack(path)
    _, stack = open_stack(path)
    drafter = make_drafter(path, LAYERS - 1, noise=0.1, own_head=own_head)
    prepare(stack, Drafters(early_exit=drafter))
    assert any(isinstance(m, PackedLinear) for m in stack.modules())
    prompt = random_prompt(20)
    expected = reference_generate(model, prompt, 40)
    rounds = list(speculative(stack, EarlyExitSource(drafter), Chain(FixedLength(4)), prompt, max_new_tokens=40))
    assert [t for r in rounds for t in r.tokens] == expected
    assert [t for r in autoregressive(stack, prompt, max_new_tokens=40) for t in r.tokens] == expected
