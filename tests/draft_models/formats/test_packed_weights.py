"""Packed integers are the weights that their formats define, one by one; a model of them is a target like others."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.draft_models.formats import packed_weights
from outrider.draft_models.targets.coded import CodedLinear
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.tensor_files import open_tensors
from tests.pairwise import each_value
from tests.refusals import refusal
from tests.tiers import typical_where
from tests.tiny import random_prompt, reference_generate, save_target


def in_words(codes: np.ndarray, bits: int, order: list[int] | None = None) -> Tensor:
    """Codes [n, m] in words of 32 bits [n, m · bits / 32]. order: which code of a word's comes when, lowest first."""
    many = 32 // bits
    words = np.zeros((len(codes), codes.shape[1] // many), np.uint32)
    for place, code in enumerate(order or range(many)):
        words |= (codes[:, code::many] << (bits * place)).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32).copy())


def quantised(
    weight: Tensor, bits: int, method: str, symmetric: bool, acts: bool, size: int
) -> tuple[dict[str, Tensor], Tensor]:
    """What `method` stores for a weight [out, in], and the weight that this stands for."""
    outputs, inputs = weight.shape
    generator = np.random.default_rng(outputs * inputs)
    codes = generator.integers(2**bits, size=(outputs, inputs))
    scales = torch.from_numpy(generator.uniform(0.002, 0.01, (outputs, inputs // size))).half()
    zeros = generator.integers(1, 2**bits, size=(outputs, inputs // size))
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    group_of = np.arange(inputs) // size
    if acts:
        generator.shuffle(group_of)
    means = (codes - zeros[:, group_of]).astype(np.float32) * scales.float().numpy()[:, group_of]
    if method == "gptq":
        parts = {
            "qweight": in_words(codes, bits).T, "qzeros": in_words((zeros - 1).T, bits), "scales": scales.T,
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }  # fmt: skip
    elif method == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        parts = {"qweight": in_words(codes.T, 4, order), "qzeros": in_words(zeros.T, 4, order), "scales": scales.T}
    else:
        parts = {
            "weight_packed": in_words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            parts["weight_zero_point"] = in_words(zeros.T, bits).T
        if acts:
            parts["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    return {name: tensor.contiguous() for name, tensor in parts.items()}, torch.from_numpy(means)


def settings_of(method: str, bits: int, size: int) -> dict[str, Any]:
    if method != "compressed-tensors":
        return {"quant_method": method, "bits": bits, "group_size": size}
    weights = {"num_bits": bits, "type": "int", "group_size": size}
    return {"quant_method": method, "format": "pack-quantized", "config_groups": {"group_0": {"weights": weights}}}


def save_packed(
    folder: Path,
    method: str,
    bits: int,
    symmetric: bool = False,
    acts: bool = False,
    group: int = 16,
    **config: int,
) -> tuple[Path, Path]:
    """A target with packed projections, and the same one in float32. config: changes of its config."""
    packed, plain = save_target(folder / "packed", **config), save_target(folder / "plain", **config)
    stored, decoded = load_file(packed / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        parts, decoded[name] = quantised(stored.pop(name), bits, method, symmetric, acts, group)
        stored |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    for path, tensors in ((packed, stored), (plain, decoded)):
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(
        json.dumps(described | {"quantization_config": settings_of(method, bits, group)})
    )
    return packed, plain


CASES = [
    ("gptq", 4, False, False), ("gptq", 4, True, True), ("gptq", 8, False, True), ("awq", 4, False, False),
    ("compressed-tensors", 4, True, False), ("compressed-tensors", 4, False, True),
    ("compressed-tensors", 8, False, False),
]  # fmt: skip


GROUPED = [(*case, group) for group in (128, 32, 16) for case in CASES]


@pytest.mark.parametrize(
    ("method", "bits", "symmetric", "acts", "group"), typical_where(each_value(GROUPED).__contains__, GROUPED)
)
def test_a_packed_model_is_its_decoded_weights(
    tmp_path: Path, method: str, bits: int, symmetric: bool, acts: bool, group: int
) -> None:
    """Multiplied as it is stored where a group's inputs are not apart."""
    paths = save_packed(tmp_path, method, bits, symmetric, acts, group, hidden_size=256, intermediate_size=256)
    packed, plain = (open_target(str(path)) for path in paths)
    names = [name for name in plain.files.file_of if name.endswith("_proj.weight")]
    ours, theirs = packed.files.read(packed.files.file_of), plain.files.read(names)
    assert ours.keys() == plain.files.file_of.keys()
    assert all(tensor.is_contiguous() for tensor in ours.values())  # so that safetensors can write it
    for name in names:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=0)
        if (rows := packed.files.codes(name)) is not None:
            assert rows.kind_name == f"int{bits}" + (" by 128" if (group, bits) == (128, 4) else "")
            torch.testing.assert_close(rows.decode(), theirs[name], rtol=1e-6, atol=0)
        assert (rows is None) == (acts or group == 16)
    model, other = (target.layers(dtype=torch.float32, coded=True) for target in (packed, plain))
    assert isinstance(
        model.get_submodule("model.layers.1.mlp.up_proj"), nn.Linear if acts or group == 16 else CodedLinear
    )
    prompt = random_prompt(12)
    assert reference_generate(model, prompt, 8) == reference_generate(other, prompt, 8)
    assert packed.layers([0], dtype=torch.bfloat16).dtype == torch.bfloat16
    refusal("quantised as they are stored", packed.require_int8)


@pytest.mark.parametrize("fault", ["zeros", "order"])
def test_a_wrong_step_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    packing_of: Callable[..., Any] = packed_weights.packing_of
    method = "gptq" if fault == "zeros" else "awq"
    if fault == "zeros":
        changed = "outrider.draft_models.formats.folder_model.packing_of"
        monkeypatch.setattr(changed, lambda said: (one := packing_of(said)) and one._replace(zeros_less_one=False))
    else:
        monkeypatch.setattr(packed_weights, "AWQ_ORDER", tuple(range(8)))
    packed, plain = (open_tensors(str(path)) for path in save_packed(tmp_path, method, 4))
    name = "model.layers.1.mlp.up_proj.weight"
    assert not torch.allclose(packed.read([name])[name], plain.read([name])[name])


def test_damaged_ones_are_refused(tmp_path: Path) -> None:
    path, _ = save_packed(tmp_path, "gptq", 4)
    file, layer = path / "model.safetensors", "model.layers.0.mlp.up_proj"
    whole = load_file(file)
    save_file(
        whole | {f"{layer}.scales": whole[f"{layer}.scales"][:, 1:].contiguous()}, file, metadata={"format": "pt"}
    )
    files = open_tensors(str(path))
    refusal(r"up_proj: scales \[\d+, 4\] and zeros .*: expected one for each output", files.read, [f"{layer}.weight"])
    del whole[f"{layer}.qzeros"]
    save_file(whole, file, metadata={"format": "pt"})
    refusal(r"up_proj: expected packed rows, \.qzeros and \.scales", open_tensors, str(path))
