"""Targets in torch's pickles (.bin), whose code is not run, and in fp8: the same target as in safetensors.

Other quantisations are refused by name.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.base.errors import UserError
from outrider.data_prep.settings import ConvertConfig
from outrider.data_prep.targets import convert_target
from outrider.draft_models.formats.stored_tensors import open_pickled
from outrider.draft_models.targets.model_files import load_causal_lm
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.tensor_files import open_tensors
from tests.pairwise import all_pairs, each_value
from tests.refusals import refusal
from tests.tiers import typical_where
from tests.tiny import ARCHITECTURES, random_prompt, reference_generate, save_target

INDEX = "pytorch_model.bin.index.json"


def as_bin(source: Path, folder: Path, files: int = 1, *, bare: bool = False, **saving: Any) -> Path:
    """The model directory `source` with .bin files, as transformers wrote them: a tied head under both names.

    bare: of the base model alone, without its prefix and the head. saving: options of `torch.save`.
    """
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(source / "model.safetensors")
    if "lm_head.weight" not in weights and not bare:
        (embedding,) = (tensor for name, tensor in weights.items() if "embed_tokens" in name)
        weights["lm_head.weight"] = embedding
    if bare:
        weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    shared = [name for name in weights if "embed_tokens" in name or name == "lm_head.weight"]
    names = shared + [name for name in weights if name not in shared]  # one file holds both names of a tensor
    size = -(-len(names) // files)
    parts = [names[at : at + size] for at in range(0, len(names), size)]
    if files == 1:
        torch.save(weights, folder / "pytorch_model.bin", **saving)
        return folder
    file_of = {}
    for number, part in enumerate(parts, start=1):
        file = f"pytorch_model-{number:05d}-of-{len(parts):05d}.bin"
        torch.save({name: weights[name] for name in part}, folder / file, **saving)
        file_of |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return folder


FILES = all_pairs(ARCHITECTURES, (False, True), (1, 3))


@pytest.mark.parametrize(("architecture", "tied", "files"), typical_where(each_value(FILES).__contains__, FILES))
def test_it_is_the_target_that_it_is_in_safetensors(tmp_path: Path, architecture: str, tied: bool, files: int) -> None:
    source = save_target(tmp_path / "source", architecture, tied=tied)
    path = as_bin(source, tmp_path / "bin", files)
    one, other = open_target(str(source)), open_target(str(path))
    assert other.fingerprint.differences(one.fingerprint) == []
    assert other.fingerprint.tensors == one.fingerprint.tensors
    assert other.fingerprint.weights == one.fingerprint.weights
    assert other.files.digests(other.files.file_of, full=True) == one.files.digests(one.files.file_of, full=True)
    layers = [target.layers([0, 3], dtype=torch.float32).state_dict() for target in (one, other)]
    assert all(torch.equal(layers[0][name], layers[1][name]) for name in layers[0])
    texts = [
        reference_generate(load_causal_lm(str(folder), dtype=torch.float32).eval(), random_prompt(9), 4)
        for folder in (source, path)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_without_the_causal_lm_around_it(tmp_path: Path, architecture: str) -> None:
    source = save_target(tmp_path / "source", architecture, tied=True)
    path = as_bin(source, tmp_path / "bin", bare=True)
    assert open_target(str(path)).fingerprint.tensors == open_target(str(source)).fingerprint.tensors


@pytest.mark.parametrize("legacy", [False, True])
def test_only_what_is_looked_at_is_read(tmp_path: Path, legacy: bool) -> None:
    """Where torch wrote a file so that it can be mapped: what is changed after it was opened is seen, once."""
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.full((9,), 5.0)}, file, _use_new_zipfile_serialization=not legacy)
    before, after = (torch.full((9,), value).numpy().tobytes() for value in (5.0, 7.0))
    stored = open_pickled(str(file))["a"]
    at = file.read_bytes().index(before)
    with open(file, "r+b") as opened:
        opened.seek(at)
        opened.write(after)
    read = stored.read()
    assert read.tolist() == [5.0 if legacy else 7.0] * 9
    with open(file, "r+b") as opened:
        opened.seek(at)
        opened.write(before)
    assert read.tolist() == [5.0 if legacy else 7.0] * 9


@pytest.mark.parametrize(
    "tensor", [torch.arange(12.0).reshape(3, 4).T, torch.arange(12.0)[::2], torch.tensor(3.0), torch.zeros(0, 4)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_is_its_values_however_it_lies_in_memory(tmp_path: Path, tensor: Tensor, dtype: torch.dtype) -> None:
    plain, folders = {"model.x.weight": tensor.to(dtype)}, []
    for name in ("bin", "safetensors"):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
    torch.save(plain, folders[0] / "pytorch_model.bin")
    save_file({name: one.contiguous() for name, one in plain.items()}, folders[1] / "model.safetensors")
    pickled, safe = (open_tensors(str(folder)) for folder in folders)
    assert pickled.digests(pickled.file_of) == safe.digests(safe.file_of)
    read = [files.read(files.file_of)["model.x.weight"] for files in (pickled, safe)]
    assert read[0].shape == read[1].shape
    assert torch.equal(read[0].float(), read[1].float())


class Ran:
    """What a pickle may do as it is read."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path, legacy: bool) -> None:
    path = as_bin(save_target(tmp_path / "source"), tmp_path / "bin")
    weights = {"a": torch.zeros(2), "b": Ran(tmp_path / "ran")}
    torch.save(weights, path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(UserError, match=r"pytorch_model\.bin: torch's weights-only loader refuses it \(.*mkdir"):
        load_causal_lm(str(path), dtype=torch.float32)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_a_damaged_file_is_refused(tmp_path: Path, legacy: bool) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"model.a": torch.zeros(5000)}, file, _use_new_zipfile_serialization=not legacy)
    whole = file.read_bytes()
    for size in (0, 1, 50, len(whole) // 2, len(whole) - 9):
        file.write_bytes(whole[:size])
        refusal(r"pytorch_model\.bin: (not a readable|torch's weights-only loader)", open_tensors, str(tmp_path))


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


def quantised_whole(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with one scale, as ModelOpt has it."""
    scale = weight.abs().max() / 448
    small = (weight / scale).to(torch.float8_e4m3fn)
    return small, scale, small.float() * scale


def save_fp8(folder: Path, architecture: str, modelopt: bool = False) -> tuple[Path, Path]:
    """A target with fp8 weights in its layers, and the same with their products in float32."""
    small, plain = (save_target(folder / name, architecture) for name in ("fp8", "plain"))
    stored, products = load_file(small / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name, tensor in stored.items() if ".layers." in name and tensor.ndim == 2]:
        suffix, scaled = ("_scale", quantised_whole) if modelopt else ("_scale_inv", quantised)
        stored[name], stored[name + suffix], products[name] = scaled(stored[name])
        if modelopt:
            stored[name.replace("weight", "input_scale")] = torch.tensor(0.1)
    save_file(stored, small / "model.safetensors", metadata={"format": "pt"})
    save_file(products, plain / "model.safetensors", metadata={"format": "pt"})
    if modelopt:
        (small / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
        return small, plain
    return set_config(small, quantization_config=FP8), plain


@pytest.mark.parametrize(("architecture", "modelopt"), [("llama", False), ("qwen3", False), ("llama", True)])
def test_fp8_weights_are_multiplied_out(tmp_path: Path, capsys: Any, architecture: str, modelopt: bool) -> None:
    small, plain = save_fp8(tmp_path, architecture, modelopt)
    reference = AutoModelForCausalLM.from_pretrained(plain).eval()
    layers = open_target(str(small)).layers(dtype=torch.float32).state_dict()
    assert all(torch.equal(layers[name], tensor) for name, tensor in reference.state_dict().items())
    model = load_causal_lm(str(small), dtype=torch.float32).eval()
    texts = [reference_generate(one, random_prompt(9), 24) for one in (model, reference)]
    assert texts[0] == texts[1]
    assert "not read" not in capsys.readouterr().err


def test_a_scale_is_part_of_the_target(tmp_path: Path) -> None:
    small, _ = save_fp8(tmp_path, "llama")
    before = open_target(str(small)).fingerprint
    stored = load_file(small / "model.safetensors")
    stored["model.layers.2.mlp.up_proj.weight_scale_inv"][0, 0] *= 2
    save_file(stored, small / "model.safetensors", metadata={"format": "pt"})
    assert before.differences(open_target(str(small)).fingerprint) == ["the weights differ in model.layers.2"]


@pytest.mark.parametrize("modelopt", [False, True])
def test_a_copy_of_fp8_weights_is_plain(tmp_path: Path, modelopt: bool) -> None:
    small, plain = save_fp8(tmp_path, "llama", modelopt)
    convert_target(ConvertConfig(target=str(small), out_dir=str(tmp_path / "out")))
    copied, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", plain))
    torch.testing.assert_close(copied, expected, rtol=0, atol=0)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert open_target(str(tmp_path / "out")).layers([0], dtype=torch.float32) is not None


@pytest.mark.parametrize(("settings", "name"), [
    ({"quant_method": "gptq", "bits": 3}, "gptq"),
    ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "awq"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ({"load_in_8bit": True}, r"bitsandbytes \(load_in_8bit\)"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {1: 5}}, "compressed-tensors"),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8"),  # one scale a tensor, or none
    ({"bits": 4}, "unnamed"),
])  # fmt: skip
def test_other_methods_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], name: str) -> None:
    path = set_config(save_target(tmp_path / "target"), quantization_config=settings)
    refusal(rf"target=.*: quantised by '{name}' .*; supported: fp8 with scales by block", open_target, str(path))
    refusal(f"quantised by '{name}'", convert_target, ConvertConfig(target=str(path), out_dir=str(tmp_path / "out")))
    assert {file.name for file in (tmp_path / "out").iterdir()} <= {".lock"}


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A8_AWQ", "INT8_SQ", "FP8_PB_WO", "MIXED_PRECISION", 8, []])
def test_other_algorithms_of_modelopt_are_refused_by_name(tmp_path: Path, algorithm: object) -> None:
    path = save_target(tmp_path / "target")
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
    for by_layers in (True, False):
        with pytest.raises(UserError, match=rf"target=.*: quantised by {re.escape(repr(algorithm))} \(hf_quant_config"):
            open_target(str(path), by_layers=by_layers)
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": algorithm or 1}))
    refusal(r"hf_quant_config\.json: quantization=.*: expected a mapping", open_target, str(path))


def test_codes_are_left_to_a_method_that_transformers_knows(tmp_path: Path) -> None:
    """Another one it passes over, and would run the codes as weights."""
    path = save_target(tmp_path / "target")
    stored = load_file(path / "model.safetensors")
    stored["model.layers.1.mlp.up_proj.weight"] = torch.ones(96, 64, dtype=torch.int8)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    files = open_tensors(str(set_config(path, quantization_config={"quant_method": "gptq"})))
    assert len(dict(files.open_stored(files.file_of))) == len(stored)
    for other in ({"quant_method": "modelopt", "quant_algo": "INT8_SQ"}, {"bits": 8}, {"quant_method": []}):
        files = open_tensors(str(set_config(path, quantization_config=other)))
        refusal(r"up_proj\.weight: weights stored as codes \(I8\)", dict, files.open_stored(files.file_of))
