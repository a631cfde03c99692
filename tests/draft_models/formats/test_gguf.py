"""Targets in GGUF files: what is read is the model that was written, of any family and quantisation, or is refused."""

import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import outrider
from outrider.base.errors import UserError
from outrider.draft_models.formats.gguf_config import FAMILIES, gguf_config, read_special_ids
from outrider.draft_models.formats.gguf_file import GgufFile, open_gguf
from outrider.draft_models.formats.gguf_model import GgufModel
from outrider.draft_models.formats.gguf_tokenizer import gguf_tokenizer
from outrider.draft_models.small_lm.model import load_small_lm
from outrider.draft_models.targets.coded import CodedLinear
from outrider.draft_models.targets.model_files import load_causal_lm, load_generation_config
from outrider.draft_models.targets.open_target import load_tokenizer, open_target
from outrider.draft_models.targets.vocabulary import tokenizer_digest
from tests import gguf_files
from tests.refusals import refusal
from tests.tiers import as_many, typical_where
from tests.tiny import random_prompt, reference_generate, shake_norms_and_biases

KINDS = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1", *gguf_files.UNQUANTISABLE)

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
    source = gguf_files.save_plain_target(tmp_path / "model", architecture, **changes)
    shake_norms_and_biases(source)
    path = gguf_files.write_gguf(source, tmp_path / "model.gguf")
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
    source = gguf_files.save_plain_target(tmp_path / "model", architecture)
    path = gguf_files.write_gguf(source, tmp_path / "model.gguf", permute=False)
    reference = AutoModelForCausalLM.from_pretrained(source).eval()
    assert not same_model(load_causal_lm(str(path), dtype=torch.float32).eval(), reference)
    assert open_target(str(path)).fingerprint.tensors != open_target(str(source)).fingerprint.tensors


QUANTISED = [*(("llama", kind) for kind in KINDS), ("qwen2", "BF16"), ("qwen2", "Q4_0")]
TYPICAL = {("llama", kind) for kind in ("F16", "Q8_0", "Q4_0", gguf_files.UNQUANTISABLE[0])} | {("qwen2", "BF16")}


@pytest.mark.parametrize(("architecture", "kind"), typical_where(TYPICAL.__contains__, QUANTISED))
def test_a_quantised_model_is_that_of_the_dequantised_weights(tmp_path: Path, architecture: str, kind: str) -> None:
    source = gguf_files.save_plain_target(tmp_path / "model", architecture)
    path = gguf_files.write_gguf(source, tmp_path / "model.gguf", kind)
    reference = AutoModelForCausalLM.from_pretrained(gguf_files.dequantised(source, tmp_path / "plain", kind)).eval()
    assert same_model(load_causal_lm(str(path), dtype=torch.float32).eval(), reference)
    assert not same_model(reference, AutoModelForCausalLM.from_pretrained(source).eval())
    halves = open_target(str(path)).layers([0], dtype=torch.bfloat16).state_dict()
    for name, tensor in halves.items():
        assert torch.equal(tensor, reference.state_dict()[name].bfloat16()), name


def test_a_small_lm_runs_as_its_file_stores_it(tmp_path: Path, llama: Path) -> None:
    path = str(gguf_files.write_gguf(llama, tmp_path / "small.gguf", "Q8_0"))
    lm = load_small_lm(path, load_tokenizer(path), dtype=torch.float32)
    assert {type(module) for module in lm.modules() if hasattr(module, "in_features")} == {CodedLinear}
    model = outrider.load(llama, small_lm=path, method="small_lm/fixed", device="cpu", dtype="float32")
    prompt = random_prompt(9)
    model.generate(prompt, max_new_tokens=24)
    assert model.last is not None
    assert model.last.tau > 1.5
    reference = AutoModelForCausalLM.from_pretrained(llama).eval()
    assert [*model.last.ids] == reference_generate(reference, prompt, 24, [reference.config.eos_token_id])


def test_a_directory_may_hold_one(tmp_path: Path, written: Path) -> None:
    shutil.copy(written, tmp_path / "one.gguf")
    there, itself = open_target(str(tmp_path)), open_target(str(written))
    assert there.fingerprint.differences(itself.fingerprint) == []
    shutil.copy(written, tmp_path / "two.gguf")
    refusal(r"holds several GGUF files \(one\.gguf, two\.gguf\)", open_target, str(tmp_path))


def test_special_tokens_and_template(tmp_path: Path, llama: Path, written: Path) -> None:
    target, original = open_target(str(written)), open_target(str(llama))
    assert target.tokenizer.special_tokens_map == original.tokenizer.special_tokens_map
    assert target.tokenizer.chat_template == gguf_files.TEMPLATE
    said = target.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert said == "<user>hi"
    generation = load_generation_config(str(written))
    assert generation is not None
    assert generation.eos_token_id == original.tokenizer.eos_token_id
    pad = original.tokenizer.pad_token_id
    path = gguf_files.write_gguf(llama, tmp_path / "turns.gguf")
    path = gguf_files.rewritten(path, **{"tokenizer.ggml.eot_token_id": pad})
    assert load_generation_config(str(path)).eos_token_id == [original.tokenizer.eos_token_id, pad]


def test_the_end_of_a_turn_is_found_in_the_template() -> None:
    """As llama.cpp does, where no key names it."""
    tokens, template = ["a", "END", "<|im_end|>", "<end_of_turn>"], "<|im_end|><end_of_turn>"
    found = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 3, 1, 4]}
    found |= {"tokenizer.ggml.eos_token_id": 1, "tokenizer.chat_template": template}
    assert read_special_ids(GgufFile(Path("m.gguf"), found, {}))["eos_token_id"] == [1, 3]
    named = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.chat_template": "<end_of_turn>"}
    assert read_special_ids(GgufFile(Path("m.gguf"), found | named, {}))["eos_token_id"] == [1, 0]
    other = {"tokenizer.chat_template": "another"}
    assert read_special_ids(GgufFile(Path("m.gguf"), found | other, {}))["eos_token_id"] == 1


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


UP, SHAPE = b"blk.0.ffn_up.weight", 4 + 2 * 8  # behind a tensor's name are a matrix's shape, its kind and its offset
ENDS = (4, 20, 40, 300, 5000, 12000, 200000, -1)
SHAPES = ((), (4, 2**31, 2**31, 256), (1, 259, 256), (2**31, 2**31), (0, 256), (2**32 - 1,))


def with_bytes(data: bytes, after: bytes, skip: int = 0, replaced: int = 4) -> Callable[[bytes], bytes]:
    """A file with `data` in place of so many bytes, `skip` bytes behind the word `after`."""

    def change(content: bytes) -> bytes:
        begin = content.index(after) + len(after) + skip
        return content[:begin] + data + content[begin + replaced :]

    return change


def with_shape(*sizes: int) -> Callable[[bytes], bytes]:
    return with_bytes(struct.pack(f"<I{len(sizes)}Q", len(sizes), *reversed(sizes)), b"token_embd.weight", 0, SHAPE)


def with_offset_of_another(content: bytes) -> bytes:
    begin = content.index(UP) + len(UP) + SHAPE + 4
    return with_bytes(content[begin : begin + 8], b"blk.1.ffn_up.weight", SHAPE + 4, 8)(content)


DAMAGES: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("a file, but not a GGUF file", lambda _: b"a text, not a model"),
    (r"GGUF version 50331648, supported: \(2, 3\) in little-endian", with_bytes((3).to_bytes(4, "big"), b"GGUF")),
    *(("(not a GGUF file|ends within)", itemgetter(slice(end))) for end in ENDS),
    (r"blk\.0\.ffn_up\.weight.*twice", lambda content: content.replace(b"blk.1.ffn_up.weight", UP)),
    (r"blk\.0\.ffn_up\.weight.*overlap", with_offset_of_another),
    *((r"(damaged|token_embd\.weight)", with_shape(*sizes)) for sizes in SHAPES),
    ("is quantised as Q8_K, which the gguf package", with_bytes((15).to_bytes(4, "little"), UP, SHAPE)),
    ("is quantised as 250, which the gguf package", with_bytes((250).to_bytes(4, "little"), UP, SHAPE)),
]


@pytest.mark.parametrize(("words", "damage"), DAMAGES)
def test_a_damaged_file_is_refused(tmp_path: Path, written: Path, words: str, damage: Callable[[bytes], bytes]) -> None:
    """Wherever it ends. Of two tensors in one place the last would win. Shapes: 4 · 2³¹ · 2³¹ would be 0 in 64 bits,
    and a file of any length long enough for it."""
    (tmp_path / "model.gguf").write_bytes(damage(written.read_bytes()))
    refusal(rf"model\.gguf.*{words}", lambda: open_target(str(tmp_path / "model.gguf")).fingerprint)


@pytest.mark.parametrize(("values", "message"), [
    ({"llama.block_count": 2**30}, r"llama.block_count=1073741824: expected 1 to \d\d;"),
    ({"llama.expert_count": 8}, "llama.expert_count=8 is not supported"),
    ({"llama.rope.dimension_count": 32}, "llama.rope.dimension_count=32 with heads of 64 values"),
    ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type='longrope'; supported: none, linear, yarn"),
    ({"split.count": 3}, r"one of 3 files of a model \(split.count\)"),
    ({"llama.block_count": 5}, r"holds no tensor 'blk\.4\.attn_k\.weight'"),
    ({"llama.block_count": 3}, r"has a tensor that llama models have not: 'blk\.3\.attn_k\.weight'"),
    ({"tokenizer.ggml.pre": "mine"}, "tokenizer.ggml.pre='mine': texts are cut in an unknown way"),
    ({"tokenizer.ggml.token_type": [1, 1]}, "2 values of tokenizer.ggml.token_type for 320 tokens"),
    ({"tokenizer.ggml.eos_token_id": 999}, "tokenizer.ggml.eos_token_id=999 of 320 tokens"),
    ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, "bos_token_id is missing"),
])  # fmt: skip
def test_metadata_that_are_missing_or_not_understood_are_named(
    tmp_path: Path, written: Path, values: dict[str, Any], message: str
) -> None:
    path = shutil.copy(written, tmp_path / "model.gguf")
    other = gguf_files.rewritten(path, **values)
    refusal(rf"rewritten\.gguf.*{message}", lambda: (open_target(str(other)).files, open_target(str(other)).tokenizer))


LAYERS = 6  # the last of which, of a Gemma 3, has no window
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 200, "vocab_size": 320, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
RMS, EPSILON = ("attention.layer_norm_rms_epsilon", "rms_norm_eps"), "attention.layer_norm_epsilon"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
          "expert_feed_forward_length": "moe_intermediate_size"}  # fmt: skip


def partial(part: float, theta: float = 10000.0) -> dict[str, Any]:
    """Rotary positions of a part of each head."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part}}


@dataclass(frozen=True)
class Written:
    """How llama.cpp's converter writes an architecture: its config, and the keys with the fields that they say."""

    kind: str
    config: dict[str, Any]
    epsilon: tuple[str, str] = RMS
    keys: tuple[tuple[str, str], ...] = ()


HEAD_DIM = (("attention.key_length", "head_dim"), ("attention.value_length", "head_dim"))
WINDOW = ("attention.sliding_window", "sliding_window")
CAPS = (("final_logit_softcapping", "final_logit_softcapping"), ("attn_logit_softcapping", "attn_logit_softcapping"))
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
EXAMPLES = {
    "llama": Written("llama", {"rms_norm_eps": 1e-5, "head_dim": 32}, keys=HEAD_DIM),
    "qwen2": Written("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "qwen2moe": Written(
        "qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40, "rms_norm_eps": 1e-5},
        keys=(*ROUTED.items(), ("expert_shared_feed_forward_length", "shared_expert_intermediate_size")),
    ),
    "qwen3": Written("qwen3", {"head_dim": 32}, keys=HEAD_DIM),
    "qwen3moe": Written("qwen3_moe", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True},
                        keys=(*ROUTED.items(), *HEAD_DIM)),
    "gemma2": Written(
        "gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "tie_word_embeddings": True,
                   "attn_logit_softcapping": 0.5, "final_logit_softcapping": 8.0}, keys=(*HEAD_DIM, WINDOW, *CAPS),
    ),
    "gemma3": Written(
        "gemma3_text", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "tie_word_embeddings": True,
                        "rope_parameters": GEMMA3_ROPE}, keys=(*HEAD_DIM, WINDOW),
    ),
    "phi3": Written("phi3", {"sliding_window": 12, "original_max_position_embeddings": 200, **partial(0.5)},
                    keys=(WINDOW,)),
    "stablelm": Written("stablelm", {"use_qkv_bias": True, "layer_norm_eps": 1e-6, **partial(0.25)},
                        (EPSILON, "layer_norm_eps")),
    "starcoder2": Written(
        "starcoder2", {"norm_epsilon": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        (EPSILON, "norm_epsilon"),
    ),
    "nemotron": Written("nemotron", {"head_dim": 32, "norm_eps": 1e-6, **partial(0.5)},
                        (EPSILON, "norm_eps"), HEAD_DIM),
    "gpt2": Written("gpt2", {"n_inner": 96, "layer_norm_epsilon": 1e-6, "tie_word_embeddings": True},
                    (EPSILON, "layer_norm_epsilon")),
    "falcon": Written("falcon", {"bias": True, "tie_word_embeddings": True, "ffn_hidden_size": 96},
                      (EPSILON, "layer_norm_epsilon")),
}  # fmt: skip


def example(family: str) -> PreTrainedModel:
    """A random model of a family. What a converter adds 1 to has few digits, so that nothing is rounded."""
    torch.manual_seed(0)
    written = EXAMPLES[family]
    config = AutoConfig.for_model(written.kind, **{**SIZES, **written.config})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randint(8, 48, parameter.shape) / 64)
            else:
                parameter.mul_(6.0)
    return model


def write_family(
    model: PreTrainedModel,
    family: str,
    path: Path,
    kind: str = "F32",
    tensors: dict[str, NDArray[Any]] | None = None,
    **more: Any,
) -> Path:
    """The file that llama.cpp's converter makes of `model`, matrices as `kind`.

    tensors, more: other tensors and values of keys, the latter with "__" for a point.
    """
    written, config = EXAMPLES[family], model.config
    keys = gguf_files.keys_of(config) | {key: getattr(config, name) for key, name in (written.epsilon, *written.keys)}
    keys |= {key.replace("__", "."): value for key, value in more.items()}
    laid = gguf_files.laid_out(model.state_dict(), config, family) | (tensors or {})
    return gguf_files.write_file(path, family, keys, laid, kind, gguf_files.bpe_tokenizer(), gguf_files.TEMPLATE)


@torch.inference_mode()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.tensor([random_prompt(40, seed=3)])).logits


def test_every_architecture_has_an_example() -> None:
    assert EXAMPLES.keys() == FAMILIES.keys()


TYPICAL_FAMILIES = ("gemma3", "qwen2moe", "gpt2", "phi3")


@pytest.mark.parametrize("family", typical_where(TYPICAL_FAMILIES.__contains__, list(EXAMPLES)))
def test_every_architecture_is_the_one_that_was_written(tmp_path: Path, family: str) -> None:
    """By our conversion, and by transformers' own reading of the tensors."""
    model = example(family)
    path = write_family(model, family, tmp_path / "model.gguf")
    config = gguf_config(open_gguf(path))
    ours = load_causal_lm(str(path), dtype=torch.float32).eval()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", config=config, dtype=torch.float32)
    for read in (ours, theirs.eval()):
        torch.testing.assert_close(read.state_dict(), model.state_dict(), rtol=0, atol=0)
        assert torch.allclose(logits_of(read), logits_of(model), atol=1e-5)  # sums of experts go by addresses


@pytest.mark.parametrize("family", typical_where(("gemma3", "falcon").__contains__, list(EXAMPLES)))
@pytest.mark.slow
def test_decoding_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    """Layer by layer, or as a whole where its layers cannot be run one by one; drafts are taken from the prompt."""
    path = write_family(example(family), family, tmp_path / "model.gguf")
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", config=gguf_config(open_gguf(path)), dtype=torch.float32
    ).eval()
    model = outrider.load(str(path), device="cpu", dtype="float32")
    prompt = "the same words, and then the same words, and then"
    tokenizer = load_tokenizer(str(path))
    expected = reference_generate(reference, tokenizer(prompt)["input_ids"], 24, [1])
    assert model.generate(prompt, max_new_tokens=24) == tokenizer.decode(expected, skip_special_tokens=True)


def refused(file: Path) -> str:
    with pytest.raises(UserError) as raised:
        load_causal_lm(str(file), dtype=torch.float32)
    return str(raised.value)


@pytest.mark.parametrize(("family", "keys", "named"), [
    ("gemma3", {"attention__scale": 0.5}, "gemma3.attention.scale=0.5"),
    ("qwen3moe", {"expert_gating_func": 2}, "qwen3moe.expert_gating_func=2"),
    ("qwen2", {"attention__sliding_window": 8}, "qwen2.attention.sliding_window=8"),
    ("falcon", {"attention__head_count_kv": 2}, "falcon.attention.head_count_kv=2"),
    ("phi3", {"rope__scaling__attn_factor": 1.2}, "phi3.rope.scaling.attn_factor=1.2"),
    ("stablelm", {"embedding_length": 32}, "token_embd.weight"),
    ("qwen2moe", {"expert_feed_forward_length": 48}, "exps.weight"),
])  # fmt: skip
def test_what_would_be_another_model_is_refused_by_its_name(
    tmp_path: Path, family: str, keys: dict[str, Any], named: str
) -> None:
    assert named in refused(write_family(example(family), family, tmp_path / "model.gguf", **keys))


def test_factors_of_long_texts_are_not_left_out(tmp_path: Path) -> None:
    """transformers reads a Phi 3 with them as one without."""
    path = tmp_path / "model.gguf"
    write_family(example("phi3"), "phi3", path, tensors={"rope_factors_long.weight": np.ones(4, np.float32)})
    assert "rope_factors_long.weight" in refused(path)


@pytest.mark.parametrize(("family", "layers", "scale"), [("gemma2", 46, 16), ("gemma2", 6, 32), ("gemma3", 62, 16)])
def test_attention_of_the_largest_gemmas_has_another_scale(
    tmp_path: Path, family: str, layers: int, scale: int
) -> None:
    """No key says it: llama.cpp knows those models by the number of their layers."""
    file = open_gguf(write_family(example(family), family, tmp_path / "model.gguf", block_count=layers))
    assert gguf_config(file).query_pre_attn_scalar == scale


def test_the_layers_of_a_gemma_3_without_a_window_are_those_that_the_file_says(tmp_path: Path) -> None:
    keys = {"attention__sliding_window_pattern": 2, "rope__freq_base_swa": 5000.0}
    config = gguf_config(open_gguf(write_family(example("gemma3"), "gemma3", tmp_path / "model.gguf", **keys)))
    assert config.layer_types == ["sliding_attention", "full_attention"] * 3
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 5000.0


def test_one_row_may_be_a_matrix(tmp_path: Path) -> None:
    """The gate of shared experts is a vector only after llama.cpp has copied the file."""
    model, name = example("qwen2moe"), "blk.0.ffn_gate_inp_shexp.weight"
    path = write_family(model, "qwen2moe", tmp_path / "model.gguf", tensors={name: np.ones((1, 64), np.float32)})
    read = load_causal_lm(str(path), dtype=torch.float32)
    assert read.state_dict()["model.layers.0.mlp.shared_expert_gate.weight"].tolist() == [[1.0] * 64]


def test_halves_and_joined_experts_keep_their_type(tmp_path: Path) -> None:
    path = write_family(example("qwen3moe"), "qwen3moe", tmp_path / "model.gguf", "BF16")
    kinds = {name: stored.dtype for name, stored in GgufModel("", path).tensors().items()}
    assert kinds["model.layers.0.mlp.experts.gate_up_proj"] == kinds["model.embed_tokens.weight"] == torch.bfloat16
    assert kinds["model.norm.weight"] == torch.float32
