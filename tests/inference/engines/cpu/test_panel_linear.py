"""Compiled products: those of a linear layer, in the fewest bytes, and no row's depends on the others."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from outrider.draft_models.targets.int8 import Int8Linear, quantise_rows
from outrider.inference.engines.cpu import by_amx, layout
from outrider.inference.engines.cpu.at_once import MAX_ROWS, PanelLinear
from outrider.inference.engines.cpu.by_amx import BLOCK, STEP, has_amx
from outrider.inference.engines.cpu.by_vectors import TILE
from outrider.inference.engines.cpu.vectors import PANEL

IN, OUT = 37, 5 * PANEL
EVEN, WHOLE = IN + 1, 3 * STEP  # inputs in pairs, and in AMX's registers
ROWS = (1, 2, TILE, TILE + 1, BLOCK, BLOCK + 1, 4 * TILE - 1, 3 * BLOCK - 1)
KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def make_linear(kind: str, dtype: torch.dtype = torch.float32, *, bias: bool = True, inputs: int = IN) -> nn.Linear:
    """A layer in `dtype` whose weights have the digits of `kind`."""
    torch.manual_seed(0)
    linear = nn.Linear(inputs, OUT, bias=bias).requires_grad_(False)
    linear.weight.copy_(linear.weight.to(KINDS[kind]))
    return linear.to(dtype)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_linear(kind: str, bias: bool) -> None:
    """As near to the product in float64 as PyTorch's own is, for rows that fill tiles and rows that do not."""
    linear = make_linear(kind, bias=bias)
    panels = PanelLinear(linear)
    for rows in ROWS:
        x = normal(1, rows, IN)
        exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
        assert panels(x).shape == (1, rows, OUT)
        assert (panels(x) - exact).abs().max() < 4 * (linear(x) - exact).abs().max() + 1e-7
    assert panels.layout.weight_dtype == KINDS[kind]
    assert torch.equal(panels.weight, linear.weight)


@pytest.mark.parametrize("inputs", [IN, EVEN, WHOLE])
def test_bfloat16_is_rounded_once(way: str, inputs: int) -> None:
    linear = make_linear("bfloat16", torch.bfloat16, inputs=inputs)
    panels = PanelLinear(linear)
    for rows in ROWS:
        x = normal(rows, inputs, dtype=torch.bfloat16)
        exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
        out = panels(x)
        assert out.dtype == torch.bfloat16
        assert (out == exact.bfloat16()).float().mean() > 0.97
        torch.testing.assert_close(out, exact.bfloat16())
    assert torch.equal(panels.weight, linear.weight)
    assert panels.layout.together == (1 if inputs == IN else 2)
    able = inputs == WHOLE if way == "amx" else inputs != IN
    assert panels.layout.way == (way if able else "floats")


def test_float32_by_amx_is_as_exact_as_by_floats(way: str) -> None:
    """As the sum of three bfloat16s, so also numbers whose last digits count."""
    if way != "amx":
        pytest.skip("pairs are for bfloat16 alone, floats are tested above")
    linear = make_linear("bfloat16", inputs=WHOLE)
    panels = PanelLinear(linear)
    assert (panels.layout.way, panels.layout.parts) == ("amx", 3)
    for rows in ROWS:
        x = normal(1, rows, WHOLE)
        exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
        assert (panels(x) - exact).abs().max() < 2 * (linear(x) - exact).abs().max() + 1e-7


def test_only_bfloat16s_are_multiplied_as_they_are(choosing: Callable[..., None]) -> None:
    """In pairs the rest of a float32's digits would be lost."""
    choosing(("floats", "pairs"), "pairs")
    for kind, dtype in (("bfloat16", torch.float32), ("float32", torch.float32)):
        assert PanelLinear(make_linear(kind, dtype, inputs=EVEN)).layout.way == "floats"
    codes, scale = quantise_rows(normal(OUT, EVEN), torch.bfloat16)
    assert PanelLinear(Int8Linear(codes, scale, None)).layout.way == "floats"


def test_the_fastest_way_is_taken(choosing: Callable[..., None]) -> None:
    """AMX wherever it is, without a clock."""
    linear = make_linear("bfloat16", torch.bfloat16, inputs=WHOLE)
    for ways, taken in ((("floats", "pairs"), None), (("floats", "pairs", "amx"), "amx")):
        for fastest in ways:
            choosing(ways, fastest)
            assert layout.WeightLayout.of([linear], torch.bfloat16).way == (taken or fastest)


def test_amx_is_not_used_where_linux_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first instruction would end the process."""
    monkeypatch.setattr(by_amx.ctypes, "CDLL", lambda _: SimpleNamespace(syscall=lambda *_: -1))
    has_amx.cache_clear()
    try:
        assert not has_amx()
    finally:
        monkeypatch.undo()
        has_amx.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_multiplied_as_they_are(dtype: torch.dtype) -> None:
    codes, scale = quantise_rows(normal(OUT, IN), dtype)
    bias = normal(OUT).to(dtype)
    linear, x = Int8Linear(codes, scale, bias), normal(3, IN, dtype=dtype)
    panels = PanelLinear(linear)
    assert panels.layout.weight_dtype == torch.int8
    exact = (x.double() @ codes.double().T) * scale.double() + bias.double()
    torch.testing.assert_close(panels(x), exact.to(dtype))
    assert torch.equal(panels.weight, linear.weight)


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.float32) for kind in KINDS), ("bfloat16", torch.bfloat16)])
def test_a_row_is_the_same_whatever_is_beside_it(kind: str, dtype: torch.dtype, way: str) -> None:
    if kind != "bfloat16" and way != "floats":
        pytest.skip("those are for bfloat16s")
    if (way, dtype) == ("pairs", torch.float32):
        pytest.skip("these are for x of bfloat16s")
    inputs = WHOLE if way == "amx" else EVEN
    panels, x = PanelLinear(make_linear(kind, dtype, inputs=inputs)), normal(2 * BLOCK + 1, inputs, dtype=dtype)
    assert panels.layout.way == way
    together = panels(x)
    for rows in range(1, len(x)):
        assert torch.equal(panels(x[:rows]), together[:rows])


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.float32) for kind in KINDS), ("bfloat16", torch.bfloat16)])
def test_after_a_norm(kind: str, dtype: torch.dtype, way: str) -> None:
    """As the norm and then the product, for few rows of it, each by itself."""
    if (way, dtype) == ("pairs", torch.float32):
        pytest.skip("these are for x of bfloat16s")
    panels = PanelLinear(make_linear(kind, dtype, inputs=WHOLE))
    if panels.layout.way != way:
        pytest.skip("those are for bfloat16s")
    torch.manual_seed(2)
    x, weight = 7 * normal(1, 2 * BLOCK, WHOLE, dtype=dtype), torch.rand(WHOLE).to(dtype)
    scaled = (x.double() * (x.double().square().mean(-1, keepdim=True) + 0.1).rsqrt()).to(dtype)
    together = panels.after(weight, 0.1, x)
    assert together is not None
    near = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 2e-6}
    torch.testing.assert_close(together, panels(scaled * weight), **near)
    assert together.shape == (1, 2 * BLOCK, OUT)
    for rows in range(1, 2 * BLOCK):
        assert torch.equal(panels.after(weight, 0.1, x[:, :rows]), together[:, :rows])
    many = normal(1, 2 * MAX_ROWS + 1, WHOLE, dtype=dtype)
    apart = torch.cat([panels.after(weight, 0.1, many[:, row : row + 1]) for row in range(many.shape[1])], dim=1)
    assert torch.equal(panels.after(weight, 0.1, many), apart)
    assert panels.after(weight.double(), 0.1, x) is None


def test_any_number_of_threads_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than panels, too."""
    panels, x = PanelLinear(make_linear("float32")), normal(4, IN)
    head, weight, y = PanelLinear(make_linear("float32", inputs=WHOLE)), torch.ones(WHOLE), normal(4, WHOLE)
    alone, normed = panels(x), head.after(weight, 1e-5, y)
    assert normed is not None
    monkeypatch.setattr(layout, "SHARE", 0)
    for threads in (2, 3, OUT // PANEL + 2):
        torch.set_num_threads(threads)
        assert torch.equal(panels(x), alone)
        assert torch.equal(head.after(weight, 1e-5, y), normed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_a_number_stays_that(dtype: torch.dtype) -> None:
    panels, x = PanelLinear(make_linear("bfloat16", dtype, inputs=EVEN)), normal(2, EVEN, dtype=dtype)
    x[1, 3] = torch.nan
    assert panels(x)[0].isfinite().all()
    assert panels(x)[1].isnan().all()


def test_another_dtype_and_layouts_of_x() -> None:
    linear, x = make_linear("bfloat16"), normal(4, 2 * IN)
    panels = PanelLinear(linear)
    torch.testing.assert_close(panels(x[:, ::2]), linear(x[:, ::2]))
    torch.testing.assert_close(panels(x[:, :IN].double()), linear.double()(x[:, :IN].double()))
