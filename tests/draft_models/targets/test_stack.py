"""Loading only named layers: what is read, what comes out, what is refused."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.base.errors import UserError
from outrider.draft_models.early_exit.model import exit_layers
from outrider.draft_models.targets.model_files import load_causal_lm, load_layers
from outrider.draft_models.targets.open_target import load_config, open_target, position_limit
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.tensor_files import TensorFiles, open_tensors
from outrider.train.toy_target import packed_mask
from tests.pairwise import each_value
from tests.refusals import refusal
from tests.tiers import typical_where
from tests.tiny import ARCHITECTURES, LAYERS, open_stack, random_prompt, save_target

VARIANTS = list(itertools.product(ARCHITECTURES, (False, True), (4, 2)))
TYPICAL = each_value(VARIANTS)
LAYER_NAMES = {"opt": ("model.decoder.layers.", "fc1.weight")}


def window_masks(stack: LayerStack, length: int) -> dict:
    positions = torch.arange(length)
    causal = packed_mask(torch.zeros(1, length, dtype=torch.long))
    distance = positions[:, None] - positions
    return {w: causal if w is None else causal & (distance < w) for w in {*stack.windows, None}}


def test_positions_beyond_a_models_context_differ_as_in_transformers(tmp_path: Path) -> None:
    """As of a small LM beside a target with a longer context. A rope that rescales has its own context only."""
    model, stack = open_stack(save_target(tmp_path / "a", max_position_embeddings=32))
    ids, positions = torch.tensor([random_prompt(80)]), torch.arange(80)[None]
    stack.reserve(80)
    with torch.inference_mode():
        hidden = stack.run(stack.embed(ids, positions), 0, LAYERS, stack.rotary(positions), window_masks(stack, 80))
        torch.testing.assert_close(stack.logits(hidden), model(ids).logits, rtol=1e-5, atol=1e-5)
    assert position_limit(stack.config) is None
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    rescaled = open_target(str(save_target(tmp_path / "b", max_position_embeddings=64, rope_parameters=rope)))
    assert position_limit(rescaled.config) == 64


@pytest.mark.parametrize(("architecture", "tied", "kv_heads"), typical_where(TYPICAL.__contains__, VARIANTS))
def test_layer_split_equals_the_full_forward(tmp_path: Path, architecture: str, tied: bool, kv_heads: int) -> None:
    model, stack = open_stack(save_target(tmp_path, architecture, tied=tied, kv_heads=kv_heads))
    ids = torch.tensor([random_prompt(30)])
    positions = torch.arange(30)[None]
    masks = window_masks(stack, 30)
    stack.reserve(30)
    with torch.inference_mode():
        model.set_attn_implementation("sdpa")
        expected = model(ids).logits
        model.set_attn_implementation("outrider")
        for split in range(LAYERS + 1):
            hidden = stack.run(stack.embed(ids, positions), 0, split, stack.rotary(positions), masks)
            hidden = stack.run(hidden, split, LAYERS, stack.rotary(positions), masks)
            torch.testing.assert_close(stack.logits(hidden), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("architecture", "tied", "kv_heads"), typical_where(TYPICAL.__contains__, VARIANTS))
@pytest.mark.parametrize("shard", ["5GB", "40KB"])
def test_bytes_read_are_those_of_the_named_tensors(
    tmp_path: Path, architecture: str, tied: bool, kv_heads: int, shard: str
) -> None:
    path = save_target(tmp_path, architecture, tied=tied, kv_heads=kv_heads, shard=shard)
    stored = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    config, files = load_config(str(path)), open_tensors(str(path))
    for exit_layer in range(1, LAYERS):
        files.bytes_read = 0
        layers = exit_layers(config, exit_layer)
        model = load_layers(files, config, layers, dtype=torch.float32)
        prefix, weight_name = LAYER_NAMES.get(architecture, ("model.layers.", "mlp.up_proj.weight"))
        prefixes = tuple(f"{prefix}{i}." for i in layers)
        needed = {n for n in stored if n.startswith(prefixes) or not n.startswith(prefix)}
        assert files.bytes_read == sum(stored[name].nbytes for name in needed)
        assert files.bytes_read < sum(t.nbytes for t in stored.values()) or exit_layer == LAYERS - 1
        for i, layer in enumerate(layers):
            weight = model.get_parameter(f"{prefix}{i}.{weight_name}")
            assert torch.equal(weight, stored[f"{prefix}{layer}.{weight_name}"])
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
        assert not any(p.requires_grad or p.is_meta for p in model.parameters())


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "a/../../elsewhere.safetensors", "absolute", 3, None])
def test_an_index_cannot_lead_out_of_the_directory(tmp_path: Path, file: object) -> None:
    """Not even to a file that is there and holds the tensor."""
    path = save_target(tmp_path / "target", shard="40KB")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    name, inside = next(iter(index["weight_map"].items()))
    outside = tmp_path / "elsewhere.safetensors"
    outside.write_bytes((path / inside).read_bytes())
    index["weight_map"][name] = str(outside) if file == "absolute" else file
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    for load in (open_tensors, lambda source: load_causal_lm(source, None)):
        refusal(rf"weight_map\.{re.escape(name)}=.*expected a \.safetensors file in its", load, str(path))


def test_code_that_comes_with_a_target_is_not_run(tmp_path: Path) -> None:
    settings = {"model_type": "odd", "auto_map": {"AutoConfig": "configuration_odd.OddConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import PreTrainedConfig as OddConfig\n"
    (tmp_path / "configuration_odd.py").write_text(code)
    refusal(r"no usable config\.json", load_config, str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_unusable_targets_are_refused(tmp_path: Path) -> None:
    refusal("no such directory", load_config, str(tmp_path / "nowhere"))
    path = save_target(tmp_path / "empty")
    (path / "model.safetensors").unlink()
    refusal("expected a safetensors checkpoint", open_tensors, str(path))
    path = save_target(tmp_path / "cut")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refusal("not a readable safetensors file", open_tensors, str(path))
    for change in ({"do_layer_norm_before": False}, {"word_embed_proj_dim": 32}):
        refusal("after its layers come", load_config, str(save_target(tmp_path / "opt", "opt", **change)))
    with pytest.raises(UserError, match=r"no tensor 'model\.embed_tokens\.weight'"):
        TensorFiles("x", None, {}, ("x", None)).read(["model.embed_tokens.weight"])


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_a_checkpoint_without_the_causal_lm_around_it(tmp_path: Path, architecture: str) -> None:
    """Saved from the base model, its tensors lack a prefix and the head, as those of OPT on the Hub do."""
    path = save_target(tmp_path / "whole", architecture, tied=True)
    model, _ = open_stack(path)
    model.model.save_pretrained(tmp_path / "base")
    names = set(load_file(tmp_path / "base" / "model.safetensors"))
    assert not any(name.startswith("model.") for name in names)
    files, whole = open_tensors(str(tmp_path / "base")), open_tensors(str(path))
    again = load_layers(files, load_config(str(path)), range(LAYERS), dtype=torch.float32)
    assert {n: p.sum() for n, p in again.named_parameters()} == {n: p.sum() for n, p in model.named_parameters()}
    assert again.lm_head.weight is again.get_input_embeddings().weight
    name = next(name for name in whole.file_of if "layers.2." in name)
    assert files.digest([name]) == whole.digest([name])
