"""Layers and weights laid out for decoding: the same numbers to rounding, the same tokens."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.draft_models.draft_vocabulary import narrow
from outrider.draft_models.targets.model_files import layer_stack, load_layers
from outrider.draft_models.targets.narrowed import DraftVocabulary
from outrider.draft_models.targets.open_target import load_config
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.drafters.early_exit.drafter import EarlyExitDraftModel
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.model_plugin import Calibrated
from outrider.inference.engines.cpu.recorded import can_pack
from outrider.inference.engines.fused_layers import FusedLayer, RMSNorm, fuse_layers, join_linears
from outrider.inference.engines.packing import PackedLinear
from outrider.inference.loading.models import prepare_models
from outrider.inference.shapes.factory import Chain
from outrider.inference.stopping.interface import FixedLength
from tests import tiny
from tests.families import save_family
from tests.known_targets import tokens_of
from tests.pairwise import all_pairs
from tests.tiers import quick_where

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="needs oneDNN")


# --- joined and fused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_fused_layers_equal_transformers(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    """A batch of rows through all layers, head included, with biases and scales that are none of the initial ones."""
    path = tiny.save_target(
        tmp_path, architecture, kv_heads=2, **({"attention_bias": True} if architecture == "llama" else {})
    )
    model = load_layers(open_tensors(str(path)), load_config(str(path)), range(tiny.LAYERS), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    stack, tokens = layer_stack(model), torch.randint(256, (2, 18), generator=generator)
    stack.reserve(18)
    positions = torch.arange(18).expand(2, 18)
    hidden, rotary = stack.embed(tokens, positions), stack.rotary(positions)
    masks = stack.packed_masks(torch.zeros_like(tokens))
    expected = stack.logits(stack.run(hidden, 0, tiny.LAYERS, rotary, masks))
    whole = model(tokens).logits
    fuse_layers(stack)
    assert all(isinstance(layer, FusedLayer) for layer in stack.layers)
    torch.testing.assert_close(stack.logits(stack.run(hidden, 0, tiny.LAYERS, rotary, masks)), expected)
    torch.testing.assert_close(model(tokens).logits, whole, rtol=0, atol=0)  # the model goes on as it was


def test_joined_weights_are_held_once() -> None:
    linears = [nn.Linear(4, size, bias=size != 2) for size in (3, 2, 5)]
    x = torch.randn(6, 4)
    expected = torch.cat([linear(x) for linear in linears], dim=-1)
    joined = join_linears(linears)
    torch.testing.assert_close(joined(x), expected)
    assert {linear.weight.untyped_storage().data_ptr() for linear in linears} == {
        joined.weight.untyped_storage().data_ptr()
    }
    assert not joined.weight.requires_grad


@pytest.mark.parametrize("architecture", ["llama", "phi"])  # the latter's head has a bias
def test_the_head_of_some_tokens_has_no_row_for_the_others(tmp_path: Path, architecture: str) -> None:
    """It is never proposed. Twice laid out it is the same; tied to the embedding, that goes on having the row."""
    save = save_family if architecture == "phi" else tiny.save_target
    path = save(tmp_path, architecture)
    tokens = torch.arange(3, 35)
    model = load_layers(open_tensors(str(path)), load_config(str(path)), range(tiny.LAYERS), dtype=torch.float32)
    narrow(model, DraftVocabulary(tokens, tiny.VOCABULARY))
    stack, hidden = layer_stack(model), torch.randn(1, 5, model.config.hidden_size)
    expected, whole = stack.draft_logits(hidden), stack.logits(hidden)
    prepare_models(stack, {})
    prepare_models(stack, {})
    assert stack.head.weight.shape[0] == len(tokens)
    assert stack.embed_tokens.weight.shape[0] == len(tokens) + 1
    torch.testing.assert_close(stack.draft_logits(hidden), expected)
    torch.testing.assert_close(stack.logits(hidden), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(96).to(dtype)
    norm.weight.data = torch.rand(96).to(dtype)
    x = torch.randn(50, 96).to(dtype)
    found, expected = RMSNorm(norm)(x), norm(x)
    torch.testing.assert_close(found, expected)
    if dtype != torch.float32:
        assert (found == expected).float().mean() > 0.99  # rounding in other places changes a quarter of them


@needs_onednn
@pytest.mark.parametrize(
    ("architecture", "tied", "own_head"),
    quick_where(lambda row: row[0] == "llama", all_pairs(tiny.ARCHITECTURES, (True, False), (True, False))),
)
def test_packed_decoding_equals_generate(tmp_path: Path, architecture: str, tied: bool, own_head: bool) -> None:
    """Both arms, prepared."""
    path = tiny.save_target(tmp_path, architecture, tied=tied, kv_heads=2)
    (model, _), (_, stack), prompt = tiny.open_stack(path), tiny.open_stack(path), tiny.random_prompt(20)
    expected = tiny.reference_generate(model, prompt, 40)
    drafter = tiny.make_drafter(path, tiny.LAYERS - 1, noise=0.1, own_head=own_head)
    prepare_models(stack, {"early_exit": Calibrated(drafter)})
    assert all(isinstance(layer, FusedLayer) for layer in (*stack.layers, drafter.layer))
    shaped = ModelDrafter(EarlyExitDraftModel(drafter), Chain(FixedLength(4)))
    rounds = list(speculative(stack, shaped, prompt, max_new_tokens=40))
    assert tokens_of(rounds) == tokens_of(autoregressive(stack, prompt, max_new_tokens=40)) == expected
    assert sum(r.accepted for r in rounds) > 10
    assert any(isinstance(m, PackedLinear) for m in stack.modules())
    assert not any(isinstance(m, nn.Linear) for m in stack.modules())
