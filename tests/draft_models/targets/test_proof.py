"""A target of 16 bits proves itself in float32, a layer at a time: all of its layers, whatever its size."""

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.base.errors import UserError
from outrider.draft_models.targets import attention, proof
from outrider.draft_models.targets.model_files import decoder_layers, layer_stack, spec_of
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.stack import LayerStack, call_layer
from tests.families import FAMILIES, LAYERS, save_family
from tests.refusals import refusal
from tests.tiers import quick_where
from tests.tiny import unproven

prove_layers = partial(proof.prove_layers, largest=0)  # a long text runs through one layer of each kind


def load(path: Path, family: str) -> Any:
    """A tiny target of `family` in bfloat16, not proven yet."""
    with unproven():
        return open_target(str(save_family(path, family))).layers(dtype=torch.bfloat16)


@pytest.mark.parametrize("family", quick_where(lambda name: name in ("gemma2", "gpt2"), sorted(FAMILIES)))
def test_every_family_proves_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Nothing of the target is changed, whether it is proven or not."""
    model = load(tmp_path, family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    calls, config = spec_of(model).calls, model.config.to_dict()
    prove_layers(model, "target=large")
    monkeypatch.setattr(proof, "EXACT", -1)
    with pytest.raises(UserError):
        prove_layers(model, "target=large")
    assert len(decoder_layers(model)) == model.config.num_hidden_layers == LAYERS
    assert spec_of(model).calls == calls
    assert model.config.to_dict() == config
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in decoder_layers(model))
    for name, weight in model.state_dict().items():
        assert weight.dtype == before[name].dtype
        assert torch.equal(weight, before[name])


def test_one_layer_at_a_time_is_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the vocabulary a few tokens are."""
    model, seen = load(tmp_path, "llama"), []

    def watch(layer: Any, *args: Any, **options: Any) -> Any:
        seen.append([next(module.parameters()).dtype == torch.float32 for module in decoder_layers(model)])
        assert model.get_output_embeddings().weight.shape[0] == 50
        return type(layer).forward(layer, *args, **options)

    for layer in decoder_layers(model):
        monkeypatch.setattr(layer, "forward", partial(watch, layer))
    prove_layers(model, "target=large", vocabulary=50)
    assert {*map(tuple, seen)} == {tuple(i == j for j in range(LAYERS)) for i in range(LAYERS)}


KINDS = {"llama": [0], "gemma3_text": [0, 1], "qwen2": [0, 2], "ernie4_5_moe": [0, 1], "smollm3": [0, 1]}


@pytest.mark.parametrize("family", KINDS)
def test_the_first_layer_of_every_kind_is_taken(tmp_path: Path, family: str) -> None:
    """Sliding and full, dense and of experts, with and without rotary positions; with its own weights."""
    model = load(tmp_path, family)
    picked = proof._one_of_each_kind(model)
    assert set(spec_of(picked).calls) == set(spec_of(model).calls)
    for layer, index in zip(decoder_layers(picked), KINDS[family], strict=True):
        expected = decoder_layers(model)[index].state_dict()
        assert layer.state_dict().keys() == expected.keys()
        for name, weight in layer.state_dict().items():
            assert weight.data_ptr() == expected[name].data_ptr()


def with_another_base(patch: pytest.MonkeyPatch) -> None:
    """Rotary frequencies of base 10100 in the place of 10000."""

    def off(model: Any) -> LayerStack:
        stack = layer_stack(model)
        stack._rotary = [copy.deepcopy(module) for module in stack._rotary]
        for module in stack._rotary:
            module.inv_freq = module.inv_freq ** (math.log(10100) / math.log(10000))
        return stack

    patch.setattr(proof.model_files, "layer_stack", off)


def with_another_scale(patch: pytest.MonkeyPatch) -> None:
    """Scores of attention that are 2 % too large."""
    ours = attention.grouped_attention

    def off(*args: Any, scaling: float, **options: Any) -> Any:
        return ours(*args, scaling=1.02 * scaling, **options)

    patch.setattr(attention, "grouped_attention", off)


@pytest.mark.parametrize("plant", [with_another_base, with_another_scale])
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere2", "mixtral"])
def test_a_small_effect_is_refused_in_a_large_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """It is lost in the rounding of 16 bits."""
    model = load(tmp_path, family)
    plant(monkeypatch)
    with pytest.raises(UserError, match=r"differ from its own forward's by .* \(rounding: up to 1e-04\)"):
        prove_layers(model, "target=large", vocabulary=50)


@pytest.mark.parametrize("faulty", range(LAYERS))
def test_a_small_effect_in_any_one_layer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faulty: int
) -> None:
    model = load(tmp_path, "gemma3_text")

    def off(layer: Any, call: Any, hidden: Any, mask: Any, rotary: Any, cache: Any) -> Any:
        out = call_layer(layer, call, hidden, mask, rotary, cache)
        return hidden + 1.01 * (out - hidden) if layer is decoder_layers(model)[faulty] else out

    monkeypatch.setattr("outrider.draft_models.targets.stack.call_layer", off)
    refusal(r"differ from its own forward's by", prove_layers, model, "target=large")


def test_keys_with_large_biases_are_proven(tmp_path: Path) -> None:
    """Qwen2.5's are above 100, so in 16 bits transformers' own two attentions differ by a share of the logits."""
    model = load(tmp_path, "qwen2")
    for layer in decoder_layers(model):
        torch.nn.init.uniform_(layer.self_attn.k_proj.bias, -150, 150)
    prove_layers(model, "target=large")
