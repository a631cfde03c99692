"""Tiny targets of every family that runs layer by layer, with its quirks switched on.

A family is a model type of transformers. What stands here is what makes it itself; sizes are those of `SIZES` where its
config has such a field.
"""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.tiny import VOCABULARY, byte_tokenizer

LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_inner": 48, "n_positions": 128, "sliding_window": 8,
    "ffn_dim": 48, "word_embed_proj_dim": 32, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "n_routed_experts": 4, "moe_intermediate_size": 24, "bos_token_id": 256, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention"] * 2
GRANITE = {
    "embedding_multiplier": 1.7, "residual_multiplier": 0.8, "attention_multiplier": 0.3, "logits_scaling": 2.0,
    "attention_bias": True,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {"attention_bias": True},
    "arcee": {"attention_bias": True},
    "bitnet": {"attention_bias": True},
    "cohere": {"logit_scale": 0.4, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.4, "layer_types": MIXED},
    "diffllama": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {"layer_types": MIXED},
    "flex_olmo": {},
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 8.0, "query_pre_attn_scalar": 5,
               "layer_types": MIXED},
    "gemma3_text": {"query_pre_attn_scalar": 5, "layer_types": MIXED},
    "glm": {"attention_bias": True},
    "glm4": {"attention_bias": True},
    "glm4_moe": {"first_k_dense_replace": 1, "use_qk_norm": True},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {"use_parallel_residual": True},
    "gpt_oss": {"layer_types": MIXED},
    "granite": GRANITE,
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE,
    "helium": {"attention_bias": True},
    "hunyuan_v1_dense": {},
    "jetmoe": {},
    "llama": {"attention_bias": True},
    "mimo_v2_flash": {},
    "ministral": {"layer_types": MIXED},
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "nanochat": {"final_logit_softcapping": 8.0},
    "nemotron": {"attention_bias": True},
    "olmo": {"clip_qkv": 1.0},
    "olmo2": {},
    "olmo3": {"layer_types": MIXED},
    "olmoe": {"clip_qkv": 1.0},
    "opt": {},
    "persimmon": {"qk_layernorm": True},
    "phi": {"qk_layernorm": True},
    "phi3": {},
    "phimoe": {"attention_bias": True},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": {},
    "qwen3": {"attention_bias": True},
    "qwen3_moe": {},
    "seed_oss": {"attention_bias": True},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {"qk_layernorm": True, "use_parallel_residual": True},
    "starcoder2": {},
    "vaultgemma": {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 8.0, "layer_types": MIXED},
}  # fmt: skip
# One of each mechanism: norms, biases, windows, caps, positions, experts, matrices that are fused, parallel branches.
TYPICAL = {"cohere2", "gemma2", "gpt2", "gpt_neox", "granite", "llama", "olmo2", "opt", "phi3", "qwen2", "qwen3_moe"}


def family_config(name: str, **changes: Any) -> PreTrainedConfig:
    """The config of a tiny target of family `name`."""
    kind = CONFIG_MAPPING[name]
    known = {field.name for field in fields(kind)} if is_dataclass(kind) else set(SIZES)
    known |= set(getattr(kind, "attribute_map", {}))
    sizes = {key: value for key, value in SIZES.items() if key in known}
    return kind(**{**sizes, "tie_word_embeddings": False, **FAMILIES[name], **changes})


def save_family(path: Path, family: str, **changes: Any) -> Path:
    """Write a random target of `family` to `path`, whose next tokens depend on the text and are sure enough."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(family_config(family, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "norm" not in name:  # Cohere's norms of queries and keys are matrices
                parameter.mul_(6.0)
            elif parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path
