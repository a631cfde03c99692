"""Quantised checkpoints in transformers' own formats: fp8 is multiplied out as it is read, others are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from data_prep.formats.torch_files import unscaled
from data_prep.settings import ConvertConfig
from data_prep.targets import convert_target
from draft_models.targets.model_files import load_causal_lm
from draft_models.targets.open_target import open_target
from draft_models.targets.tensor_files import open_tensors
from outrider.errors import UserError
from tests.tiny import random_prompt, reference_generate, save_target

BLOCK = (48, 40)  # neither divides the tiny targets' matrices
FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}


def set_config(path: Path, **values: Any) -> Path:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))
    return path


def quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp8 values, the scale of each block, and their product: block by block."""
    rows, columns = ([range(at, min(at + step, size)) for at in range(0, size, step)]
                     for size, step in zip(weight.shape, BLOCK, strict=True))  # fmt: skip
    small, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(len(rows), len(columns))
    product = torch.empty_like(weight)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            place = (slice(row.start, row.stop), slice(column.start, column.stop))
            scales[i, j] = weight[place].abs().max() / 448
            small[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            product[place] = small[place].float() * scales[i, j]
    return small, scales, product


def save_fp8(folder: Path, architecture: str) -> tuple[Path, Path]:
    """A target with fp8 weights in its layers, and the same with their products in float32."""
    small, plain = (save_target(folder / name, architecture) for name in ("fp8", "plain"))
    stored, products = load_file(small / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name, tensor in stored.items() if ".layers." in name and tensor.ndim == 2]:
        stored[name], stored[f"{name}_scale_inv"], products[name] = quantised(stored[name])
    save_file(stored, small / "model.safetensors", metadata={"format": "pt"})
    save_file(products, plain / "model.safetensors", metadata={"format": "pt"})
    return set_config(small, quantization_config=FP8), plain


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_fp8_weights_are_multiplied_out(tmp_path: Path, architecture: str) -> None:
    small, plain = save_fp8(tmp_path, architecture)
    reference = AutoModelForCausalLM.from_pretrained(plain).eval()
    layers = open_target(str(small)).layers(dtype=torch.float32).state_dict()
    assert all(torch.equal(layers[name], tensor) for name, tensor in reference.state_dict().items())
    model = load_causal_lm(str(small), dtype=torch.float32).eval()
    texts = [reference_generate(one, random_prompt(9), 24) for one in (model, reference)]
    assert texts[0] == texts[1]


def test_a_scale_is_part_of_the_target(tmp_path: Path) -> None:
    small, _ = save_fp8(tmp_path, "llama")
    before = open_target(str(small)).fingerprint
    stored = load_file(small / "model.safetensors")
    stored["model.layers.2.mlp.up_proj.weight_scale_inv"][0, 0] *= 2
    save_file(stored, small / "model.safetensors", metadata={"format": "pt"})
    assert before.differences(open_target(str(small)).fingerprint) == ["the weights differ in model.layers.2"]


def test_a_copy_of_fp8_weights_is_plain(tmp_path: Path) -> None:
    small, plain = save_fp8(tmp_path, "llama")
    convert_target(ConvertConfig(target=str(small), out_dir=str(tmp_path / "out")))
    copied, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", plain))
    assert copied.keys() == expected.keys()
    assert all(torch.equal(copied[name], expected[name]) for name in expected)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_blocks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x: scales of shape \[2, 2\]: expected \[2, 3\]"):
        unscaled(torch.zeros(96, 96), torch.ones(2, 2), BLOCK, "x")
    small, _ = save_fp8(tmp_path, "llama")
    set_config(small, quantization_config={**FP8, "weight_block_size": "all"})
    with pytest.raises(UserError, match=r"quantization_config\.weight_block_size='all' in config\.json: expected rows"):
        open_tensors(str(small))
    set_config(small, quantization_config=None)
    with pytest.raises(UserError, match=r"has scales of fp8 weights, of which its config\.json does not speak"):
        open_tensors(str(small))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, r"bitsandbytes \(load_in_8bit\)"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8"),  # one scale a tensor, or none
        ({"bits": 4}, "unnamed"),
    ],
)
def test_other_methods_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], name: str) -> None:
    path = set_config(save_target(tmp_path / "target"), quantization_config=settings)
    with pytest.raises(UserError, match=rf"target=.*: quantised by '{name}' .*; supported: fp8 with scales by block"):
        open_target(str(path))


def test_without_settings_it_is_no_quantised_one(tmp_path: Path) -> None:
    path = set_config(save_target(tmp_path / "target"), quantization_config=None)
    assert open_target(str(path)).layers([0], dtype=torch.float32) is not None


@pytest.mark.parametrize("kind", ["U16", "F8_E8M0"])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_type_that_is_not_known_is_named(tmp_path: Path, kind: str, fp8: bool) -> None:
    """Whether it must be converted, or convert-target is asked to."""
    source = set_config(save_target(tmp_path / "target"), **({"quantization_config": FP8} if fp8 else {}))
    size = 2 if kind == "U16" else 1
    header = json.dumps({"odd": {"dtype": kind, "shape": [1], "data_offsets": [0, size]}}).encode()
    (source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    with pytest.raises(UserError, match=rf"tensor 'odd' has type {kind}: expected one of F64, .*; give the model in"):
        convert_target(ConvertConfig(target=str(source), out_dir=str(tmp_path / "out")))
