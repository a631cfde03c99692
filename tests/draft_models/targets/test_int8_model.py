"""The int8 model of a target: what its weights are, and what has none."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from outrider.draft_models.targets import int8
from outrider.draft_models.targets.int8 import LARGEST, Int8Linear, int8_bytes, quantise, quantise_rows
from outrider.draft_models.targets.open_target import open_target
from tests.refusals import refusal
from tests.tiny import save_target


def uneven(rows: int = 24, columns: int = 64) -> torch.Tensor:
    """Weights whose rows are of very different sizes; one is zero, and one has a single number."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    weight *= torch.logspace(-6, 3, rows)[:, None]
    weight[0], weight[1, 1:] = 0, 0
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_off_by_half_a_step_of_its_row_at_most(dtype: torch.dtype) -> None:
    weight = uneven()
    codes, scale = quantise_rows(weight, dtype)
    assert (codes.dtype, scale.dtype, scale.shape) == (torch.int8, dtype, (24,))
    step = scale.double()[:, None]
    off = (codes.double() * step - weight.double()).abs()
    assert (off <= 0.5 * step * (1 + 1e-6)).all()
    assert (step[1:, 0] <= weight[1:].abs().amax(1) / LARGEST * (1 + 2**-7)).all()  # and no step is wider than it must
    assert torch.equal(codes[1:].abs().amax(1), torch.full((23,), LARGEST, dtype=torch.int8))
    assert not codes[0].any()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("block", [int8.BLOCK, 1000])
def test_a_layer_is_that_of_its_codes(monkeypatch: pytest.MonkeyPatch, block: int, bias: bool) -> None:
    """In one piece and in several; given twice the precision, it computes in that."""
    monkeypatch.setattr(int8, "BLOCK", block)
    codes, scale = quantise_rows(uneven(), torch.float32)
    added = torch.randn(24, generator=torch.Generator().manual_seed(1)) if bias else None
    layer, x = Int8Linear(codes, scale, added), torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(2))
    rows = codes.double() * scale.double()[:, None]
    expected = x.double() @ rows.T + (0 if added is None else added.double())
    torch.testing.assert_close(layer(x.double()), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(x), expected.float(), rtol=1e-4, atol=1e-4)
    assert torch.equal(layer.weight, rows.float())


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_is_that_of_its_weights_as_they_are_stored(tmp_path: Path, tied: bool) -> None:
    """Also where it computes in fewer digits; all that is no linear layer keeps its floats. Its bytes are counted."""
    target = open_target(str(save_target(tmp_path, "qwen2", tied=tied)))
    stored = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = target.layers(dtype=torch.bfloat16, int8=True)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Int8Linear)}
    linears = {name: module for name, module in stored.named_modules() if isinstance(module, nn.Linear)}
    assert layers.keys() == linears.keys() >= {"lm_head"}
    for name, linear in linears.items():
        codes, scale = quantise_rows(linear.weight, torch.bfloat16)
        assert torch.equal(layers[name].codes, codes)
        assert torch.equal(layers[name].scale, scale)
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert torch.equal(model.get_input_embeddings().weight, stored.get_input_embeddings().weight.bfloat16())
    held = sum(parameter.nbytes for parameter in model.parameters())
    held += sum(buffer.nbytes for layer in layers.values() for buffer in layer.buffers())
    assert int8_bytes(stored, 2) == held


def test_what_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    model = open_target(str(save_target(tmp_path))).layers(dtype=torch.float32)
    model.get_submodule("model.layers.1.mlp.up_proj").weight[3, 4] = torch.nan
    refusal(r"model\.layers\.1\.mlp\.up_proj: dtype=int8 has no numbers", quantise, model, torch.float32, "target=t")
