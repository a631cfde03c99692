"""Every architecture that is read in GGUF: it is the model that was written, as transformers reads it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import outrider
from data_prep.formats.gguf_config import FAMILIES, gguf_config
from data_prep.formats.gguf_file import open_gguf
from data_prep.formats.gguf_model import GgufModel
from draft_models.targets.model_files import load_causal_lm
from draft_models.targets.open_target import load_tokenizer
from outrider.errors import UserError
from tests.gguf_files import TEMPLATE, GgufWriter, add_bpe, bpe_tokenizer, ggml_names, permuted
from tests.tiers import typical_where
from tests.tiny import random_prompt, reference_generate

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
    writer, written, config = GgufWriter(path, family), EXAMPLES[family], model.config
    values = {key: getattr(config, name) for key, name in (written.epsilon, *written.keys)}
    values |= {
        "block_count": LAYERS, "context_length": SIZES["max_position_embeddings"], "embedding_length": 64,
        "feed_forward_length": 96, "attention.head_count": 4,
        "attention.head_count_kv": {"falcon": 1, "gpt2": 4}.get(family, 2),
    }  # fmt: skip
    values |= rotary(config)
    for key, value in {**values, **{key.replace("__", "."): value for key, value in more.items()}}.items():
        writer.add(f"{family}.{key}", value)
    add_bpe(writer, bpe_tokenizer(), TEMPLATE)
    for name, array in {**laid_out(model, family), **(tensors or {})}.items():
        writer.tensor(name, array, kind if array.ndim > 1 else "F32")
    return writer.close()


def rotary(config: PreTrainedConfig) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    found: dict[str, Any] = {"rope.freq_base": rope["rope_theta"]} if rope else {}
    if "partial_rotary_factor" in rope:
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        found["rope.dimension_count"] = int(size * rope["partial_rotary_factor"])
    if rope.get("rope_type") == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    return found


def laid_out(model: PreTrainedModel, family: str) -> dict[str, NDArray[Any]]:
    """The tensors of `model` by ggml's names, as llama.cpp's converter lays them out."""
    found, state = {}, model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, known in ggml_names(family, LAYERS, state).items():
        array = state[name].numpy()
        if name.endswith("experts.gate_up_proj"):  # [experts, gates and values, hidden]
            block = name.split(".")[2]
            found[f"blk.{block}.ffn_gate_exps.weight"], found[f"blk.{block}.ffn_up_exps.weight"] = np.split(array, 2, 1)
        else:
            found[known] = as_stored(array, known, family)
    return found


def as_stored(array: NDArray[Any], name: str, family: str) -> NDArray[Any]:
    part = name.split(".")[-2]
    if family == "llama" and part in ("attn_q", "attn_k"):
        return permuted(array, 4 if part == "attn_q" else 2)
    if family in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        return array + 1
    if part == "ffn_gate_inp_shexp":  # one row, which ggml keeps as a vector
        return array[0]
    if family == "gpt2" and array.ndim == 2 and part in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
        return np.ascontiguousarray(array.T)
    return array


@torch.inference_mode()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.tensor([random_prompt(40, seed=3)])).logits


def test_every_architecture_has_an_example() -> None:
    assert EXAMPLES.keys() == FAMILIES.keys()


TYPICAL = ("gemma3", "qwen2moe", "gpt2", "phi3")


@pytest.mark.parametrize("family", typical_where(TYPICAL.__contains__, list(EXAMPLES)))
def test_the_model_is_the_one_that_was_written(tmp_path: Path, family: str) -> None:
    """By our conversion, and by transformers' own reading of the tensors."""
    model = example(family)
    path = write_family(model, family, tmp_path / "model.gguf")
    config = gguf_config(open_gguf(path))
    ours = load_causal_lm(str(path), dtype=torch.float32).eval()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", config=config, dtype=torch.float32)
    for read in (ours, theirs.eval()):
        assert read.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(read.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
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


@pytest.mark.parametrize(
    ("family", "keys", "named"),
    [
        ("gemma3", {"attention__scale": 0.5}, "gemma3.attention.scale=0.5"),
        ("qwen3moe", {"expert_gating_func": 2}, "qwen3moe.expert_gating_func=2"),
        ("qwen2", {"attention__sliding_window": 8}, "qwen2.attention.sliding_window=8"),
        ("falcon", {"attention__head_count_kv": 2}, "falcon.attention.head_count_kv=2"),
        ("phi3", {"rope__scaling__attn_factor": 1.2}, "phi3.rope.scaling.attn_factor=1.2"),
        ("stablelm", {"embedding_length": 32}, "token_embd.weight"),
        ("qwen2moe", {"expert_feed_forward_length": 48}, "exps.weight"),
    ],
)
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
