"""Weights in another order: the same numbers; chosen where they are measured to be faster."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from transformers.models.phimoe.configuration_phimoe import PhimoeConfig
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

from outrider.inference.engines import packing
from outrider.inference.engines.cpu.at_once import PanelLinear
from outrider.inference.engines.cpu.recorded import can_pack, record_choices, settle
from outrider.inference.engines.cpu.vectors import PANEL
from outrider.inference.engines.packing import LAYOUTS, TIMED_ROWS, PackedLinear, find_fastest_layout, pack_linears

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
@torch.no_grad()
def test_a_kind_of_linear_layer_with_a_forward_of_its_own_is_left_alone() -> None:
    config = PhimoeConfig(hidden_size=16, num_local_experts=4, num_experts_per_tok=2)
    router, x = PhimoeTopKRouter(config).eval(), torch.randn(3, 16)
    model = nn.ModuleList([router, nn.Linear(16, 4)])
    pack_linears(model)
    assert [type(module) for module in model] == [PhimoeTopKRouter, PackedLinear]
    assert len(model[0](x)) == 3


# --- chosen ------------------------------------------------------------------------------------------------------

Cost = Callable[[str, int], float]


def machine(cost: Cost, monkeypatch: pytest.MonkeyPatch, ran: list[nn.Module] | None = None) -> Callable[[], float]:
    """A clock of a machine on which a layer takes cost(layout, rows) seconds. `ran`: which did, in order."""
    now = [0.0]
    ran = [] if ran is None else ran

    def running(layout: str, kind: type) -> None:
        forward = kind.__call__

        def timed(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
            ran.append(self)
            now[0] += cost(layout, x.shape[0])
            return forward(self, x)

        monkeypatch.setattr(kind, "__call__", timed)

    running("plain", nn.Linear)
    running("blocked", PackedLinear)
    running("panels", PanelLinear)
    return lambda: now[0]


def layers_of(count: int, outputs: int = PANEL) -> Sequence[nn.Linear]:
    return [nn.Linear(8, outputs).requires_grad_(False) for _ in range(count)]


@needs_onednn
@pytest.mark.parametrize(("cost", "fastest"), [
    (lambda layout, rows: 1 + rows / 16 if layout == "plain" else 1.2, "blocked"),  # a BLAS slower with every row
    (lambda layout, rows: 1 if layout == "plain" else 1.3, "plain"),  # where blocks are slower
    (lambda layout, rows: {1: 1.2, 4: 0.8, 16: 0.6}[rows] if layout == "blocked" else 1, "blocked"),  # by the mean
    (lambda layout, rows: {1: 1.5, 4: 1.0, 16: 0.9}[rows] if layout == "blocked" else 1, "plain"),
    (lambda layout, rows: {1: 0.5, 4: 0.8, 16: 1.2}[rows] if layout == "panels" else 1, "panels"),
    (lambda layout, rows: {1: 0.9, 4: 1.1, 16: 1.5}[rows] if layout == "panels" else 1, "plain"),
])  # fmt: skip
def test_the_fastest_layout_is_chosen(cost: Cost, fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_fastest_layout(layers_of(3), [*LAYOUTS], machine(cost, monkeypatch), small=0) == fastest
    assert set(TIMED_ROWS) == {1, 4, 16}


@needs_onednn
def test_panels_are_no_choice_for_layers_that_do_not_fit_or_run_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "find_fastest_layout", lambda _, able: able[-1])
    assert packing.choose_layout(layers_of(3), CPU) == "panels"
    assert packing.choose_layout(layers_of(3), CPU, panels=False) == "blocked"
    assert packing.choose_layout(layers_of(3, outputs=PANEL + 1), CPU) == "blocked"


@needs_onednn
def test_each_shape_is_chosen_for_itself() -> None:
    """What is not packed stays as it is, and shared ones stay shared."""
    wide, narrow = nn.Linear(4, 8), nn.Linear(4, 2)
    model = nn.ModuleDict({"a": wide, "b": nn.Sequential(wide, narrow, nn.Linear(4, 2)), "c": nn.Linear(4, 8)})
    asked = []

    def choose(alike: Sequence[nn.Linear]) -> str:
        asked.append([tuple(linear.weight.shape) for linear in alike])
        return "blocked" if asked[-1][0] == (8, 4) else "plain"

    pack_linears(model, choose)
    assert sorted(asked) == [[(2, 4)] * 2, [(8, 4)] * 2]
    assert model["b"][1] is narrow
    assert isinstance(model["a"], PackedLinear)
    assert model["a"] is model["b"][0]
    assert isinstance(model["c"], PackedLinear)


def asked(answer: str) -> str:
    return settle("8×8 in float32", ("plain", "blocked"), lambda: answer)


def test_a_question_has_one_answer() -> None:
    assert [asked("plain"), asked("blocked")] == ["plain", "blocked"]  # where nobody records
    with record_choices() as made:
        assert [asked("plain"), asked("blocked")] == ["plain", "plain"]
        with record_choices({"8×8 in float32": "blocked"}) as inner:
            assert asked("blocked") == "plain"
        assert inner is made
    assert made == {"8×8 in float32": "plain"}
    with record_choices(made):
        assert asked("blocked") == "plain"
    with record_choices():
        assert asked("blocked") == "blocked"
