"""A target too large for a float32 copy proves itself in 16 bits: the whole coarsely, its kinds of layers exactly."""

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
from outrider.draft_models.targets.proof import ROUNDED
from outrider.draft_models.targets.stack import LayerStack, call_layer
from tests.families import FAMILIES, LAYERS, save_family
from tests.tiers import quick_where
from tests.tiny import unproven

prove_layers = partial(proof.prove_layers, largest=0)  # no copy of the whole is made


def load(path: Path, family: str) -> Any:
    """A tiny target of `family` in bfloat16, not proven yet."""
    with unproven():
        return open_target(str(save_family(path, family))).layers(dtype=torch.bfloat16)


@pytest.mark.parametrize("family", quick_where(lambda name: name in ("gemma2", "gpt2"), sorted(FAMILIES)))
def test_every_family_proves_itself(tmp_path: Path, family: str) -> None:
    """By one layer of each kind; nothing of the target is changed."""
    model = load(tmp_path, family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    few, calls = proof._one_of_each_kind(model), spec_of(model).calls
    assert set(spec_of(few).calls) == set(calls)
    assert len(decoder_layers(few)) < LAYERS
    assert {weight.dtype for weight in few.parameters()} == {torch.float32}
    prove_layers(model, "target=large")
    assert len(decoder_layers(model)) == model.config.num_hidden_layers == LAYERS
    assert spec_of(model).calls == calls
    for name, weight in model.state_dict().items():
        assert weight.dtype == before[name].dtype
        assert torch.equal(weight, before[name])


KINDS = {"llama": [0], "gemma3_text": [0, 1], "qwen2": [0, 2], "ernie4_5_moe": [0, 1], "smollm3": [0, 1]}


@pytest.mark.parametrize("family", KINDS)
def test_the_first_layer_of_every_kind_is_taken(tmp_path: Path, family: str) -> None:
    """Sliding and full, dense and of experts, with and without rotary positions; with its own weights."""
    model = load(tmp_path, family)
    few = decoder_layers(proof._one_of_each_kind(model))
    assert len(few) == len(KINDS[family])
    for layer, index in zip(few, KINDS[family], strict=True):
        expected = decoder_layers(model)[index].state_dict()
        assert layer.state_dict().keys() == expected.keys()
        for name, weight in layer.state_dict().items():
            assert torch.equal(weight, expected[name].float())


def with_another_base(patch: pytest.MonkeyPatch) -> None:
    """Rotary frequencies of base 10100 in the place of 10000."""

    def off(model: Any) -> LayerStack:
        stack = layer_stack(model)
        stack._rotary = [copy.deepcopy(module) for module in stack._rotary]
        for module in stack._rotary:
            module.inv_freq = module.inv_freq ** (math.log(10100) / math.log(10000))
        return stack

    patch.setattr(proof, "layer_stack", off)


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
    proof._prove_layers(model, "target=whole", ROUNDED)
    with pytest.raises(UserError, match="differ from its own forward's by"):
        prove_layers(model, "target=large")


def test_a_small_effect_in_one_kind_of_layers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large vocabulary a few tokens are enough to see it."""
    model = load(tmp_path, "gemma3_text")

    def off(layer: Any, call: Any, hidden: Any, mask: Any, rotary: Any, cache: Any) -> Any:
        out = call_layer(layer, call, hidden, mask, rotary, cache)
        return out if call.slides else hidden + 1.01 * (out - hidden)

    prove_layers(model, "target=large", few=50)
    monkeypatch.setattr("outrider.draft_models.targets.stack.call_layer", off)
    with pytest.raises(UserError, match=r"differ .* \(rounding: up to 1e-04\)"):
        prove_layers(model, "target=large", few=50)
