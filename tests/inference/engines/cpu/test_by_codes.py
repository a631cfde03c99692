"""Products with quantised weights as they are stored: those of the weights that their format defines."""

import copy
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.draft_models.formats.gguf_codes import CODE_KINDS, CodedRows, decode_rows
from outrider.draft_models.targets import coded
from outrider.draft_models.targets.coded import ROUNDED, CodedEmbedding, CodedLinear, as_multiplied, round_to_bytes
from outrider.inference.engines.cpu.at_once import PanelLinear
from outrider.inference.engines.cpu.code_panels import code_panels
from outrider.inference.engines.cpu.panel_block import PanelBlock
from outrider.inference.engines.cpu.vectors import PANEL
from outrider.inference.engines.packing import compare_panels
from tests.gguf_files import random_blocks
from tests.refusals import refusal

INPUTS, ROWS = 768, (1, 2, 3, 4, 5, 8, 9, 17, 70)  # whole blocks of every kind; tiles, and what they leave
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.5e-2}  # of a spread of outputs: rounding of sums, and of results


def coded_rows(kind: str, rows: int, seed: int = 0) -> CodedRows:
    if CODE_KINDS[kind].has_zero_point:
        generator, count, form = np.random.default_rng(seed), INPUTS // CODE_KINDS[kind].inputs, CODE_KINDS[kind]
        blocks = generator.integers(256, size=(rows, count, form.block_bytes), dtype=np.uint8)
        numbers = np.stack(
            [generator.uniform(0.002, 0.01, (rows, count)), generator.integers(16, size=(rows, count))], -1
        )
        blocks[..., :4] = numbers.astype(np.float16).view(np.uint8)
        return CodedRows(kind, blocks.reshape(rows, -1))
    blocks = random_blocks(np.zeros((rows + seed, INPUTS)), gguf.GGMLQuantizationType[kind])
    return CodedRows(kind, blocks[seed:].copy())


def defined(kind: str, raw: Any) -> Any:
    """The weights float32 of stored rows: the gguf package's; of packed integers scale · (code − zero)."""
    if not CODE_KINDS[kind].has_zero_point:
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    blocks = raw.reshape(len(raw), -1, CODE_KINDS[kind].block_bytes)
    codes, numbers = blocks[..., 4:], blocks[..., :4].copy().view(np.float16).astype(np.float32)
    if CODE_KINDS[kind].bits == 4:
        codes = np.concatenate([codes & 15, codes >> 4], -1)
    return ((codes - numbers[..., 1:]) * numbers[..., :1]).reshape(len(raw), -1)


def mixed_linear(dtype: torch.dtype = torch.float32, bias: bool = True) -> CodedLinear:
    """A layer of every kind, in parts that end within a tile's panels."""
    parts = [coded_rows(kind, PANEL * (1 + 4 * (place % 2)), place) for place, kind in enumerate(CODE_KINDS)]
    outputs = sum(map(len, parts))
    return CodedLinear(parts, torch.linspace(-1, 1, outputs).to(dtype) if bias else None, dtype)


def inputs(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(rows)).to(dtype)


def true_product(linear: CodedLinear, x: Tensor) -> Tensor:
    """In float64, of the `defined` weights."""
    weights = [defined(part.kind_name, part.raw.numpy()) for part in linear.parts]
    out = x.double() @ torch.from_numpy(np.concatenate(weights)).double().mT
    return out if linear.bias is None else out + linear.bias.double()


def error_of(product: Callable[[Tensor], Tensor], linear: CodedLinear, x: Tensor) -> float:
    """The largest difference from the true product, as a share of a kind's spread of outputs."""
    expected, ours = true_product(linear, as_multiplied(x)), product(x).double()
    sizes = [len(part) for part in linear.parts]
    pairs = zip(expected.split(sizes, -1), ours.split(sizes, -1), strict=True)
    return max(float((left - right).abs().max() / left.std()) for left, right in pairs)


@pytest.mark.parametrize("kind", CODE_KINDS)
def test_rows_are_decoded_as_their_format_defines(kind: str) -> None:
    """Bit for bit; ggml's also with subnormal, negative and infinite factors, and those that are no number."""
    raw = coded_rows(kind, 64).raw
    random = torch.randint(256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for stored in (raw,) if CODE_KINDS[kind].has_zero_point else (raw, random):
        with np.errstate(all="ignore"):
            expected = defined(kind, stored.numpy())
        np.testing.assert_array_equal(decode_rows(kind, stored).numpy(), expected)
    tokens = torch.tensor([[5, 0], [63, 5]])
    assert torch.equal(
        CodedEmbedding(CodedRows(kind, raw.numpy()), torch.float32)(tokens), decode_rows(kind, raw)[tokens]
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_product_of_the_decoded_weights(dtype: torch.dtype, bias: bool) -> None:
    linear = mixed_linear(dtype, bias)
    for rows in ROWS:
        x = inputs(rows, dtype)
        assert error_of(linear, linear, x) < TOLERANCE[dtype]
        assert error_of(PanelLinear(linear), linear, x) < TOLERANCE[dtype]
    assert error_of(PanelLinear(linear), linear, inputs(3).double()) < 1e-12  # in another dtype: of the judgement


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    product = PanelLinear(mixed_linear(dtype))
    for rows in ROWS:
        x = inputs(rows, dtype)
        alone = torch.cat([product(x[row : row + 1]) for row in range(rows)])
        assert torch.equal(product(x), alone), rows


@pytest.mark.parametrize("kind", CODE_KINDS)
def test_products_of_bytes_are_exact(kind: str) -> None:
    """If rounding loses nothing, outputs are the decoded weights' but for the last of bfloat16's 8 digits."""
    linear = CodedLinear([coded_rows(kind, 3 * PANEL)], None, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    for rows in ROWS:
        whole = torch.randint(-127, 128, (rows, INPUTS // ROUNDED, ROUNDED), generator=generator)
        whole[..., 5] = 127
        wide = (whole * 2.0 ** torch.randint(-9, 3, (rows, INPUTS // ROUNDED, 1), generator=generator)).flatten(1)
        assert torch.equal(as_multiplied(wide.bfloat16()), wide)
        for x in (wide.bfloat16(), inputs(rows, torch.bfloat16)):  # the other rows are rounded to the same integers
            expected = true_product(linear, as_multiplied(x))
            assert ((PanelLinear(linear)(x) - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * expected.std()).all()


def test_products_of_bytes_are_compared_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = mixed_linear(torch.bfloat16)
    compare_panels(linear)
    monkeypatch.setattr(coded, "LARGEST_BYTE", 63.0)
    if torch.cpu._is_vnni_supported():
        refusal("other weights than those that its file stores", compare_panels, linear)


def test_rows_are_rounded_to_255_steps_of_each_32_inputs() -> None:
    x = inputs(7) * torch.logspace(-6, 3, INPUTS)
    x[2, 64:96] = 0
    x[3, :32] = 1e-33
    rounded, step = round_to_bytes(x), x.unflatten(1, (-1, ROUNDED)).abs().amax(-1).repeat_interleave(ROUNDED, 1) / 127
    assert ((rounded - x).abs() <= step / 2 * (1 + 1e-5) + 1e-30).all()
    assert torch.equal(rounded[3, :32], torch.zeros(32))
    assert len((rounded / step)[1, :32].round().unique()) > 20


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_is_not_finite_is_not_lost(value: float, dtype: torch.dtype) -> None:
    x, product = inputs(3, dtype), PanelLinear(mixed_linear(dtype))
    x[1, 40] = value
    finite = product(x).isfinite()
    assert finite[[0, 2]].all()
    assert not finite[1].any()


def test_copies_share_the_panels() -> None:
    linear = mixed_linear()
    first, second = PanelLinear(linear), PanelLinear(copy.deepcopy(linear))
    assert torch.equal(first._panels, second._panels)
    assert torch.equal(copy.deepcopy(first)(inputs(2)), first(inputs(2)))


def scaled(panels: Tensor, kind: str) -> None:
    """The factor of one block of one output is 2 % too large."""
    factor = panels[0, 0, : 2 * PANEL].view(torch.float16)
    factor[3] *= 1.02


def swapped(panels: Tensor, kind: str) -> None:
    """Two codes of one output change places."""
    codes = panels[0, 0, PanelBlock(CODE_KINDS[kind]).header :]
    byte = int((codes[::4] >> 4 != codes[::4] & 15).nonzero()[0]) * 4
    codes[byte] = (codes[byte] >> 4) | (codes[byte] << 4)


def without_minimum(panels: Tensor, kind: str) -> None:
    """The minima of one block are forgotten."""
    panels[0, 0, 2 * PANEL : 4 * PANEL] = 0


FAULTS: list[tuple[Any, str]] = [(fault, kind) for kind in CODE_KINDS for fault in (scaled, swapped)]
FAULTS += [(without_minimum, kind) for kind in CODE_KINDS if CODE_KINDS[kind].has_minimum]


@pytest.mark.parametrize(("plant", "kind"), FAULTS)
def test_a_small_fault_of_one_block_is_seen(plant: Callable[[Tensor, str], None], kind: str) -> None:
    rows = coded_rows(kind, 2 * PANEL)
    linear = CodedLinear([rows], None, torch.float32)
    rows.packed = code_panels(kind, rows.raw)
    assert error_of(PanelLinear(linear), linear, inputs(4)) < TOLERANCE[torch.float32]
    plant(rows.packed, kind)
    assert error_of(PanelLinear(linear), linear, inputs(4)) > 10 * TOLERANCE[torch.float32]
