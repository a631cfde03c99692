"""Targets in GGUF files: what is read is the model that was written, whatever the quantisation, or is refused."""

import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from data_prep.formats.gguf_file import open_gguf
from data_prep.formats.gguf_tokenizer import gguf_tokenizer
from draft_models.targets.fingerprint import tokenizer_digest
from draft_models.targets.model_files import load_causal_lm, load_generation_config
from draft_models.targets.open_target import open_target
from draft_models.targets.tensor_files import open_tensors
from outrider.errors import UserError
from tests.gguf_files import (
    TEMPLATE,
    UNQUANTISABLE,
    dequantised,
    rewritten,
    save_plain_target,
    write_gguf,
)
from tests.tiers import as_many, typical_where
from tests.tiny import random_prompt, reference_generate

KINDS = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1", *UNQUANTISABLE)

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tied": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "wide heads": ("llama", {"head_dim": 32}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 64}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}}),
    "yarn": ("llama", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 64}),
}  # fmt: skip


def random_biases(path: Path) -> None:
    """Give a model's biases and norms values that matter: they start as zeros and ones."""
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(path)


@torch.inference_mode()
def same_model(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    """Whether two models have the same logits, bit for bit, and the same greedy tokens."""
    ids = torch.tensor([random_prompt(40, seed=3)])
    logits = [model(ids).logits for model in (one, other)]
    texts = [reference_generate(model, random_prompt(9), 4) for model in (one, other)]
    return torch.equal(*logits) and texts[0] == texts[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_model_is_the_one_that_was_written(tmp_path: Path, variant: str) -> None:
    architecture, changes = VARIANTS[variant]
    source = save_plain_target(tmp_path / "model", architecture, **changes)
    random_biases(source)
    path = write_gguf(source, tmp_path / "model.gguf")
    reference = AutoModelForCausalLM.from_pretrained(source).eval()
    read = load_causal_lm(str(path), dtype=torch.float32).eval()
    assert same_model(read, reference)
    target = open_target(str(path))
    layers = target.layers(dtype=torch.float32)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(layers.state_dict()[name], tensor), name
    assert (target.config.model_type, target.config.architectures) == (architecture, [type(reference).__name__])
    # Transformers has a tokenizer of its own for some architectures: Qwen2's would be another than this file's.
    assert tokenizer_digest(target.tokenizer) == tokenizer_digest(gguf_tokenizer(open_gguf(path)))
    original = open_target(str(source))
    differing = target.fingerprint.differences(original.fingerprint)
    assert [words for words in differing if not words.startswith("tokenizer: ")] == []
    assert target.fingerprint.tensors == original.fingerprint.tensors


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_rows_left_as_llama_cpp_permutes_them_are_another_model(tmp_path: Path, architecture: str) -> None:
    """The fault that the tests above must find: without it in the file, undoing it is a fault too."""
    source = save_plain_target(tmp_path / "model", architecture)
    path = write_gguf(source, tmp_path / "model.gguf", permute=False)
    reference = AutoModelForCausalLM.from_pretrained(source).eval()
    assert not same_model(load_causal_lm(str(path), dtype=torch.float32).eval(), reference)
    assert open_target(str(path)).fingerprint.tensors != open_target(str(source)).fingerprint.tensors


QUANTISED = [*(("llama", kind) for kind in KINDS), ("qwen2", "BF16"), ("qwen2", "Q4_0")]
TYPICAL = {("llama", kind) for kind in ("F16", "Q8_0", "Q4_0", UNQUANTISABLE[0])} | {("qwen2", "BF16")}


@pytest.mark.parametrize(("architecture", "kind"), typical_where(TYPICAL.__contains__, QUANTISED))
def test_a_quantised_model_is_that_of_the_dequantised_weights(tmp_path: Path, architecture: str, kind: str) -> None:
    source = save_plain_target(tmp_path / "model", architecture)
    path = write_gguf(source, tmp_path / "model.gguf", kind)
    reference = AutoModelForCausalLM.from_pretrained(dequantised(source, tmp_path / "plain", kind)).eval()
    assert same_model(load_causal_lm(str(path), dtype=torch.float32).eval(), reference)
    assert not same_model(reference, AutoModelForCausalLM.from_pretrained(source).eval())
    halves = open_target(str(path)).layers([0], dtype=torch.bfloat16).state_dict()
    for name, tensor in halves.items():
        assert torch.equal(tensor, reference.state_dict()[name].bfloat16()), name


def test_a_directory_may_hold_one(tmp_path: Path, written: Path) -> None:
    shutil.copy(written, tmp_path / "one.gguf")
    there, itself = open_target(str(tmp_path)), open_target(str(written))
    assert there.fingerprint.differences(itself.fingerprint) == []
    shutil.copy(written, tmp_path / "two.gguf")
    with pytest.raises(UserError, match=r"holds several GGUF files \(one\.gguf, two\.gguf\)"):
        open_target(str(tmp_path))


def test_beside_a_model_directory_it_is_not_taken(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "both")
    write_gguf(llama, folder / "other.gguf", "Q4_0")
    files = open_tensors(str(folder))
    assert set(files.file_of.values()) == {"model.safetensors"}


def test_special_tokens_and_template(tmp_path: Path, llama: Path, written: Path) -> None:
    target, original = open_target(str(written)), open_target(str(llama))
    assert target.tokenizer.special_tokens_map == original.tokenizer.special_tokens_map
    assert target.tokenizer.chat_template == TEMPLATE
    said = target.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert said == "<user>hi"
    generation = load_generation_config(str(written))
    assert generation is not None
    assert generation.eos_token_id == original.tokenizer.eos_token_id
    pad = original.tokenizer.pad_token_id
    path = write_gguf(llama, tmp_path / "turns.gguf")
    path = rewritten(path, **{"tokenizer.ggml.eot_token_id": pad})
    assert load_generation_config(str(path)).eos_token_id == [original.tokenizer.eos_token_id, pad]


# ---------------------------------------------------------------------------------------------------- refusals


def test_a_file_that_ends_too_early_is_refused_wherever_it_ends(tmp_path: Path, written: Path) -> None:
    whole = written.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (4, 20, 40, 300, 5000, 12000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"cut\.gguf: (not a GGUF file|ends within)"):
            open_tensors(str(path))


@pytest.mark.parametrize("whose", ["name", "place"])
def test_one_tensor_in_the_place_of_another_is_refused(tmp_path: Path, written: Path, whose: str) -> None:
    """A tensor that is there twice, and one that begins within another; else the last one would win."""
    content, one, other = bytearray(written.read_bytes()), b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"
    at, place = content.index(one), content.index(other)
    if whose == "name":
        content[place : place + len(other)] = one
    else:  # after the name: the number of dimensions, two of them, the type, the offset
        skip = len(one) + 4 + 2 * 8 + 4
        content[place + skip : place + skip + 8] = content[at + skip : at + skip + 8]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"blk\.0\.ffn_up\.weight.*(twice|overlap)"):
        open_tensors(str(path))


@pytest.mark.slow
def test_a_damaged_byte_is_harmless_or_refused(tmp_path: Path, written: Path) -> None:
    """Anywhere before the weights: no traceback, no endless loop, no list that fills the memory."""
    whole = written.read_bytes()
    header = min(place.begin for place in open_gguf(written).tensors.values())
    path, random, refused, count = tmp_path / "model.gguf", np.random.default_rng(0), 0, as_many(200)
    for at, value in zip(random.integers(0, header, count), random.integers(0, 256, count), strict=True):
        content = bytearray(whole)
        content[at] = value
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        try:
            target = open_target(str(path))
            assert target.files.file_of
            assert target.tokenizer is not None
        except UserError:
            refused += 1
    assert refused > count // 4


def test_what_is_no_gguf_file_is_refused(tmp_path: Path, written: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"a text, not a model")
    with pytest.raises(UserError, match="a file, but not a GGUF file"):
        open_target(str(path))
    content = bytearray(written.read_bytes())
    content[4:8] = (3).to_bytes(4, "big")
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"GGUF version 50331648, supported: \(2, 3\) in little-endian"):
        open_target(str(path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"llama.embedding_length": None}, "says no llama.embedding_length"),
        ({"llama.block_count": None}, "says no llama.block_count"),
        ({"llama.block_count": 2**30}, r"llama.block_count=1073741824: expected 1 to \d\d;"),
        ({"llama.block_count": "four"}, "llama.block_count='four': expected int"),
        ({"llama.attention.head_count": [4, 4, 2, 4]}, "llama.attention.head_count=.*: expected int"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count=0: expected a positive number"),
        ({"llama.expert_count": 8}, "llama.expert_count=8 is not supported"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale=0.5 is not supported"),
        ({"llama.rope.dimension_count": 32}, "llama.rope.dimension_count=32 with heads of 64 values"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type='longrope'; supported: none, linear, yarn"),
        ({"llama.rope.scaling.type": "linear"}, "says no llama.rope.scale_linear"),
        ({"split.count": 3}, r"one of 3 files of a model \(split.count\)"),
        ({"llama.block_count": 5}, r"holds no tensor 'blk\.4\.attn_k\.weight'"),
        ({"llama.block_count": 3}, r"has a tensor that llama models have not: 'blk\.3\.attn_k\.weight'"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model='bert'; supported: gpt2"),
        ({"tokenizer.ggml.pre": "mine"}, "tokenizer.ggml.pre='mine': texts are cut in an unknown way"),
        ({"tokenizer.ggml.merges": None}, "says no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["nope never"]}, "no usable tokenizer"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 values of tokenizer.ggml.token_type for 320 tokens"),
        ({"tokenizer.ggml.eos_token_id": 999}, "tokenizer.ggml.eos_token_id=999 of 320 tokens"),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, "bos_token_id is missing"),
    ],
)
def test_metadata_that_are_missing_or_not_understood_are_named(
    tmp_path: Path, written: Path, values: dict[str, Any], message: str
) -> None:
    path = shutil.copy(written, tmp_path / "model.gguf")
    other = rewritten(path, **values)

    def read() -> None:
        target = open_target(str(other))
        _ = (target.files, target.tokenizer)

    with pytest.raises(UserError, match=message) as refused:
        read()
    assert "rewritten.gguf" in str(refused.value)


def test_a_scaling_that_is_not_llama3s_is_refused(tmp_path: Path) -> None:
    changed = {**LLAMA3, "high_freq_factor": 6.0}
    source = save_plain_target(tmp_path / "model", rope_parameters=changed, head_dim=64)
    with pytest.raises(UserError, match=r"'rope_freqs\.weight' holds no rope scaling of Llama 3 with"):
        open_target(str(write_gguf(source, tmp_path / "model.gguf")))


@pytest.mark.parametrize("shape", [(), (4, 2**31, 2**31, 256), (1, 259, 256), (2**31, 2**31), (0, 256), (2**32 - 1,)])
def test_shapes_that_no_matrix_has_are_refused(tmp_path: Path, written: Path, shape: tuple[int, ...]) -> None:
    """Their sizes are no 64-bit numbers: 4 · 2³¹ · 2³¹ would be 0, and a file of any length long enough for it."""
    content, name = written.read_bytes(), b"token_embd.weight"
    at = content.index(name) + len(name)
    stated = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    before, after = content[:at] + stated, content[at + 4 + 2 * 8 :]
    path = tmp_path / "model.gguf"
    path.write_bytes(before + after)
    with pytest.raises(UserError, match=r"model\.gguf: .*(damaged|token_embd\.weight)"):
        assert open_target(str(path)).fingerprint


def test_a_quantisation_that_cannot_be_undone_is_named(tmp_path: Path, written: Path) -> None:
    content = written.read_bytes()
    name = b"blk.1.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8
    for kind, said in ((15, "Q8_K"), (250, "250")):
        (tmp_path / "model.gguf").write_bytes(content[:at] + kind.to_bytes(4, "little") + content[at + 4 :])
        with pytest.raises(
            UserError, match=rf"'blk\.1\.ffn_up\.weight' is quantised as {said}, which the gguf package"
        ):
            open_tensors(str(tmp_path / "model.gguf"))


def test_without_the_package_the_error_names_the_remedy(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf", template="converted without the package by nobody")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"needs the gguf package: pip install 'outrider\[gguf\]'"):
        open_tensors(str(path))
