"""Weights in another order: the same numbers; chosen where they are measured to be faster."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from inference import packing
from inference.packing import TIMED_ROWS, PackedLinear, can_pack, faster_packed, pack_linears

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="needs oneDNN")
needs_bf16 = pytest.mark.skipif(not can_pack(CPU, torch.bfloat16), reason="needs oneDNN and AVX512-BF16")


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bf16)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 5, 24), (40, 24), (64, 24)])
def test_equals_linear(bias: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    linear = nn.Linear(24, 17, bias=bias).requires_grad_(False).to(dtype)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = PackedLinear(linear)
    out = packed(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, linear(x))
    torch.testing.assert_close(packed(x), out, rtol=0, atol=0)
    assert torch.equal(packed.weight, linear.weight)


def test_what_can_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_pack(torch.device("cuda"), torch.float32)
    for supported in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda supported=supported: supported)
        assert can_pack(CPU, torch.bfloat16) == (supported and can_pack(CPU, torch.float32))
    assert not can_pack(CPU, torch.float16)
    assert not can_pack(CPU, torch.float64)


@needs_onednn
def test_every_linear_is_replaced_and_shared_ones_stay_shared() -> None:
    one = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": one, "b": nn.Sequential(one, nn.Linear(4, 2), nn.ReLU())})
    pack_linears(model)
    assert not any(isinstance(m, nn.Linear) for m in model.modules())
    assert model["a"] is model["b"][0]


# --- chosen ------------------------------------------------------------------------------------------------------


def machine(cost: Callable[[bool, int], float], monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """A clock of a machine on which a layer takes cost(packed, rows) seconds."""
    now = [0.0]

    def running(packed: bool, kind: type) -> None:
        forward = kind.__call__

        def timed(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
            now[0] += cost(packed, x.shape[0])
            return forward(self, x)

        monkeypatch.setattr(kind, "__call__", timed)

    running(False, nn.Linear)
    running(True, PackedLinear)
    return lambda: now[0]


@needs_onednn
@pytest.mark.parametrize(
    ("cost", "faster"),
    [
        (lambda packed, rows: 1 if packed else 1 + rows / 16, True),  # a BLAS that slows down with every row
        (lambda packed, rows: 1.3 if packed else 1, False),  # a processor on which the blocked layout is slower
        (lambda packed, rows: {1: 1.2, 4: 0.8, 16: 0.6}[rows] if packed else 1, True),  # by the mean of the ratios
        (lambda packed, rows: {1: 1.5, 4: 1.0, 16: 0.9}[rows] if packed else 1, False),
    ],
)
def test_the_faster_layout_is_chosen(
    cost: Callable[[bool, int], float], faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "SMALL", 0)
    layers = [nn.Linear(8, 8).requires_grad_(False) for _ in range(3)]
    assert faster_packed(layers, machine(cost, monkeypatch)) == faster
    assert set(TIMED_ROWS) == {1, 4, 16}


@needs_onednn
def test_a_first_pass_and_a_single_slow_one_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SMALL", 0)
    calls: dict[tuple[bool, int], int] = {}

    def cost(packed: bool, rows: int) -> float:
        count = calls[packed, rows] = calls.get((packed, rows), 0) + 1
        slow = packed and count in (1, 3)
        return 50.0 if slow else 0.5 if packed else 1.0

    assert faster_packed([nn.Linear(8, 8).requires_grad_(False)], machine(cost, monkeypatch))


@needs_onednn
def test_each_shape_is_chosen_for_itself() -> None:
    """What is not packed stays as it is, and shared ones stay shared."""
    wide, narrow = nn.Linear(4, 8), nn.Linear(4, 2)
    model = nn.ModuleDict({"a": wide, "b": nn.Sequential(wide, narrow, nn.Linear(4, 2)), "c": nn.Linear(4, 8)})
    asked = []

    def choose(alike: object) -> bool:
        asked.append([tuple(linear.weight.shape) for linear in alike])  # type: ignore[attr-defined]
        return asked[-1][0] == (8, 4)

    pack_linears(model, choose)
    assert sorted(asked) == [[(2, 4)] * 2, [(8, 4)] * 2]
    assert model["b"][1] is narrow
    assert isinstance(model["a"], PackedLinear)
    assert model["a"] is model["b"][0]
    assert isinstance(model["c"], PackedLinear)


@needs_onednn
def test_small_layers_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert faster_packed([nn.Linear(8, 8).requires_grad_(False)], machine(lambda packed, _: packed, monkeypatch))
