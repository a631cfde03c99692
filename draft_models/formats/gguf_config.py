"""The transformers config of a model in a GGUF file, made from the file's metadata: values by keys like
"llama.block_count", whose prefix is ggml's name of the architecture.

transformers' map (`KEYS`) and the additions in `Family` say which field a key fills. A key in neither is refused, since
it may change what the model computes.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig, PreTrainedConfig
from transformers.integrations import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.base.errors import UserError, reason
from outrider.draft_models.formats.gguf_file import MOST_LAYERS, GgufFile, MetadataValue


@dataclass(frozen=True)
class Family:
    """What transformers' map lacks for one of ggml's architectures.

    keys: GGUF key → config field, where the map lacks the key or has another field. "": the key is accepted, and fills
    no field. biases: config field → part of layer 0; the field is true if the file has a bias of this part.
    partial_rotary: whether a part of a head may be without rotary positions.
    """

    model_type: str  # transformers'
    keys: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    partial_rotary: bool = False


_EXPERTS = {"expert_feed_forward_length": "moe_intermediate_size"}
_SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_EPSILON, _RMS = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
_WINDOW, _CAP = "attention.sliding_window", "final_logit_softcapping"
FAMILIES = {  # by ggml's names of architectures; Mistral's models are "llama" there
    "llama": Family("llama", biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"}),
    "qwen2": Family("qwen2"),
    "qwen2moe": Family("qwen2_moe", _EXPERTS | _SHARED, {"qkv_bias": "attn_q"}),
    "qwen3": Family("qwen3", biases={"attention_bias": "attn_q"}),
    "qwen3moe": Family("qwen3_moe", _EXPERTS, {"attention_bias": "attn_q"}),
    "gemma2": Family("gemma2", {_CAP: _CAP, "attn_logit_softcapping": "attn_logit_softcapping"}),
    "gemma3": Family(
        "gemma3_text", {_CAP: _CAP, "rope.freq_base_swa": "", f"{_WINDOW}_pattern": "sliding_window_pattern"}
    ),
    "phi3": Family("phi3", {_WINDOW: "sliding_window"}, partial_rotary=True),
    "stablelm": Family("stablelm", {"use_parallel_residual": ""}, {"use_qkv_bias": "attn_q"}, partial_rotary=True),
    "starcoder2": Family("starcoder2", biases={"use_bias": "attn_q"}),
    "nemotron": Family(
        "nemotron", {_RMS: "", _EPSILON: "norm_eps"}, {"attention_bias": "attn_q", "mlp_bias": "ffn_up"},
        partial_rotary=True,
    ),
    "gpt2": Family("gpt2", {"context_length": "n_positions", "feed_forward_length": "n_inner"}),
    "falcon": Family(
        "falcon", {_RMS: "", _EPSILON: "layer_norm_epsilon", "feed_forward_length": "ffn_hidden_size"},
        {"bias": "attn_qkv"},
    ),
}  # fmt: skip
KEYS = cast(Mapping[str, Mapping[str, str | None]], GGUF_CONFIG_MAPPING)  # of a model type: fields by ggml's keys
ROPE_FACTORS = "rope_freqs.weight"
NO_WEIGHTS = {ROPE_FACTORS}  # tensors that belong to the config, not to the weights
# Keys that `_config_fields` accepts but does not read: other functions read them, or take their value from tensors.
_SPECIAL_KEYS = {
    "vocab_size", "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scale_linear", "tensor_data_layout",
}  # fmt: skip
_OFF = {  # keys without effect at this value
    "expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.attn_factor": 1.0, _WINDOW: 0,
    "expert_shared_feed_forward_length": 0, "expert_shared_count": 0,
}  # fmt: skip
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
_NOT_TEXT = (3, 4)  # ggml's types of control tokens and of user-defined tokens
_WAY_OUT = "give the model's Hugging Face directory or Hub name instead"
_REAL = ("_epsilon", "_softcapping")  # ends of keys whose values are real numbers; others are counts
_WIDE_SCALE = {("gemma2", 46), ("gemma3", 62)}  # the 27B models: their attention is scaled by hidden / heads
# A file stores Llama 3's scaling as one factor per frequency; these bounds are the same in every model so far.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def gguf_config(file: GgufFile) -> PreTrainedConfig:
    """The config of the model in `file`. Raises `UserError` naming a key that is missing or not supported."""
    name = require_family(file)
    family, layer_count, heads = FAMILIES[name], _read_layers(file), _read_heads(file)
    model_type = "mistral" if name == "llama" and _WINDOW in _family_metadata(file) else family.model_type
    field_of_key = {_WINDOW: "sliding_window"} if model_type == "mistral" else family.keys
    field_names = {field.name for field in fields(CONFIG_MAPPING[model_type])}
    field_values: dict[str, object] = {
        **GGUF_CONFIG_DEFAULTS_MAPPING.get(model_type, {}),
        **_config_fields(file, model_type, field_of_key),
        **{name: f"blk.0.{part}.bias" in file.tensors for name, part in family.biases.items() if name in field_names},
        "vocab_size": _vocabulary_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _main_dtype(file),
        **read_special_ids(file),
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],  # which serving engines use
    }
    if "num_key_value_heads" in field_names:
        field_values["num_key_value_heads"] = heads.key_value
    elif heads.key_value != (1 if model_type == "falcon" else heads.query):  # Falcon's class has 1 by default
        raise UserError(
            f"{file.path}: {name}.attention.head_count_kv={heads.key_value} of {heads.query} heads is not supported; "
            f"{_WAY_OUT}"
        )
    if "head_dim" in field_names or heads.width != heads.usual_width:
        field_values["head_dim"] = heads.width
    if "rope_parameters" in field_names:
        field_values["rope_parameters"] = _read_rope(file, heads.width, heads.rotary)
    if model_type == "stablelm":
        field_values["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in file.tensors
    if "query_pre_attn_scalar" in field_names:  # no key states the scale of Gemma's scores
        field_values["query_pre_attn_scalar"] = heads.usual_width if (name, layer_count) in _WIDE_SCALE else heads.width
    try:
        return AutoConfig.for_model(model_type, **field_values)
    except Exception as error:  # any error of an architecture's config class for unexpected values
        raise UserError(f"{file.path}: no usable metadata ({reason(error)}); convert the model again") from error


def require_family(file: GgufFile) -> str:
    """The architecture of a file. Raises `UserError` if it is unsupported, or the file is one of several."""
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise UserError(
            f"{file.path}: one of {file.metadata['split.count']} files of a model (split.count); put them together "
            "with llama-gguf-split --merge"
        )
    name = file.get("general.architecture", str)
    if name not in FAMILIES:
        raise UserError(f"{file.path}: general.architecture={name!r}; read in GGUF: {', '.join(FAMILIES)}; {_WAY_OUT}")
    return name


def _read_layers(file: GgufFile) -> int:
    """The number of layers. Raises `UserError` for more than the file can hold."""
    layer_count, max_layers = _family_count(file, "block_count"), min(MOST_LAYERS, len(file.tensors))
    if layer_count > max_layers:  # a config creates lists of this length before its other fields are checked
        name = file.metadata["general.architecture"]
        raise UserError(f"{file.path}: {name}.block_count={layer_count}: expected 1 to {max_layers}; fetch it again")
    return layer_count


class _HeadSizes(NamedTuple):
    """The attention heads of a layer."""

    query: int  # the number of query heads
    key_value: int  # the number of key-value heads
    width: int  # values of a head
    rotary: int  # how many of these have rotary positions
    usual_width: int  # the hidden size by the number of query heads


def _read_heads(file: GgufFile) -> _HeadSizes:
    """The attention heads. Raises `UserError` for values of another width than keys, and for unsupported rotations."""
    name = str(file.metadata["general.architecture"])
    query_heads = _family_count(file, "attention.head_count")
    usual_width = _family_count(file, "embedding_length") // query_heads
    kv_heads = _family_count(file, "attention.head_count_kv", query_heads)
    head_dim = _family_count(file, "attention.key_length", usual_width)
    rotary = _family_count(file, "rope.dimension_count", head_dim)
    # transformers stores the share rotary / head_dim, from which it must compute the same `rotary`
    is_partial = FAMILIES[name].partial_rotary and int(head_dim * (rotary / head_dim)) == rotary
    if _family_count(file, "attention.value_length", head_dim) != head_dim or (rotary != head_dim and not is_partial):
        raise UserError(
            f"{file.path}: {name}.attention.value_length or {name}.rope.dimension_count={rotary} with heads of "
            f"{head_dim} values; only whole heads of one size are supported"
        )
    return _HeadSizes(query=query_heads, key_value=kv_heads, width=head_dim, rotary=rotary, usual_width=usual_width)


def read_special_ids(file: GgufFile) -> dict[str, object]:
    """The config's special ids. There are two end tokens if a turn ends by another token ("eot") than a text ("eos").

    For a file without a key of "eot" this token is looked up in the chat template, as llama.cpp does.
    """
    ids = {key: file.get(f"tokenizer.ggml.{key}_token_id", int, None) for key in ("bos", "eos", "eot", "padding")}
    if ids["eot"] is None and (template := file.get("tokenizer.chat_template", str, None)):
        tokens, types = file.texts("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type", list, [])
        id_of = {token: index for index, token in enumerate(tokens[: len(types)]) if types[index] in _NOT_TEXT}
        ids["eot"] = next((id_of[token] for token in _TURN_ENDS if token in template and token in id_of), None)
    end_ids = [*dict.fromkeys(ids[name] for name in ("eos", "eot") if ids[name] is not None)]
    eos_value = end_ids if len(end_ids) > 1 else next(iter(end_ids), None)
    return {"bos_token_id": ids["bos"], "eos_token_id": eos_value, "pad_token_id": ids["padding"]}


def _family_metadata(file: GgufFile) -> dict[str, MetadataValue]:
    """The metadata with the architecture's prefix that have an effect, by keys without that prefix."""
    prefix = f"{file.metadata['general.architecture']}."
    metadata = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    return {key: value for key, value in metadata.items() if key not in _OFF or value != _OFF[key]}


def _config_fields(file: GgufFile, model_type: str, keys: Mapping[str, str]) -> dict[str, int | float]:
    """The config's fields that have a key. Raises `UserError` for an unknown key, and for a missing one.

    keys: `Family.keys`. The file must have the keys of transformers' map, and of `keys` those of epsilons and lengths,
    whose defaults fit one model only. Example: without Gemma 2's "final_logit_softcapping" the config's default stays.
    """
    metadata, key_map = _family_metadata(file), KEYS["gemma3" if model_type == "gemma3_text" else model_type]
    for key, value in metadata.items():
        if key not in {*key_map, *keys, *_SPECIAL_KEYS}:
            raise UserError(
                f"{file.path}: {file.metadata['general.architecture']}.{key}={value!r} is not supported; it may change "
                f"what the model computes; {_WAY_OUT}"
            )
    required_keys = {key for key in keys if key.endswith(("_epsilon", "_length"))} | key_map.keys()
    read_keys = (required_keys | metadata.keys()) - _SPECIAL_KEYS
    field_of = {key: name for key, name in {**key_map, **keys}.items() if name and key in read_keys}
    return {
        name: (_family_number if key.endswith(_REAL) else _family_count)(file, key) for key, name in field_of.items()
    }


def _family_count(file: GgufFile, key: str, default: int | None = None) -> int:
    """A positive integer of the architecture. Raises `UserError` if it is missing and there is no default."""
    return int(_family_number(file, key, default, int))


def _family_number(
    file: GgufFile, key: str, default: float | None = None, number_type: type[int] | type[float] = float
) -> float:
    """A positive number of the architecture, stored as float32, as its shortest decimal: 1e-05, not 9.9999997e-06."""
    key = f"{file.metadata['general.architecture']}.{key}"
    value = file.get(key, number_type) if default is None else file.get(key, number_type, default)
    if not 0 < value < math.inf:
        raise UserError(f"{file.path}: {key}={value}: expected a positive number; fetch it again")
    return value if number_type is int else float(str(np.float32(value)))


def _vocabulary_size(file: GgufFile) -> int:
    """The number of rows of the embedding, which may be padded beyond the tokens."""
    embed_location = file.tensors.get("token_embd.weight")
    if embed_location is None or len(embed_location.shape) != 2 or 0 in embed_location.shape:
        raise UserError(f"{file.path}: holds no matrix 'token_embd.weight'; expected a whole model; fetch it again")
    return embed_location.shape[0]


def _main_dtype(file: GgufFile) -> str:
    """The type of most of the weights; bfloat16 if they are quantised, since it loses no range."""
    name_of_type = {0: "float32", 1: "float16"}  # by ggml's numbers
    weight_counts: Counter[str] = Counter()
    for location in file.tensors.values():
        weight_counts[name_of_type.get(location.ggml_type, "bfloat16")] += math.prod(location.shape)
    return max(weight_counts, key=lambda dtype_name: weight_counts[dtype_name])


def _read_rope(file: GgufFile, head_dim: int, rotary_dims: int) -> dict[str, object]:
    """`rope_parameters` of the config; transformers' map has only their base. head_dim, rotary_dims: see `_HeadSizes`.

    Raises `UserError` for an unsupported scaling.
    """
    rope = _read_scaling(file, _family_number(file, "rope.freq_base", 10000.0), head_dim)
    family = str(file.metadata["general.architecture"])
    if FAMILIES[family].partial_rotary:
        return {**rope, "partial_rotary_factor": rotary_dims / head_dim}
    if family == "gemma3":  # its layers with a window have another base, and no scaling
        local_base = _family_number(file, "rope.freq_base_swa", 10000.0)
        return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local_base}}
    return rope


def _read_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, object]:
    """`rope_parameters` of base `theta` with the scaling that the file states."""
    metadata, family = _family_metadata(file), file.metadata["general.architecture"]
    if ROPE_FACTORS in file.tensors:
        return {"rope_type": "llama3", "rope_theta": theta, **_read_llama3(file, theta, head_dim)}
    scaling_type = metadata.get("rope.scaling.type", "linear" if "rope.scale_linear" in metadata else "none")
    if scaling_type == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if scaling_type not in ("linear", "yarn"):
        raise UserError(f"{file.path}: {family}.rope.scaling.type={scaling_type!r}; supported: none, linear, yarn")
    key = "rope.scaling.factor" if "rope.scaling.factor" in metadata else "rope.scale_linear"
    scaling: dict[str, object] = {"rope_type": scaling_type, "rope_theta": theta, "factor": _family_number(file, key)}
    if scaling_type == "yarn":
        scaling["original_max_position_embeddings"] = _family_count(file, "rope.scaling.original_context_length")
    return scaling


def _read_llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, float]:
    """The Llama 3 scaling whose factors, one per frequency, equal the tensor in the file."""
    location = file.tensors[ROPE_FACTORS]
    error_prefix = f"{file.path}: tensor {ROPE_FACTORS!r} holds no rope scaling of Llama 3"
    if location.ggml_type != 0 or location.shape != (head_dim // 2,):
        raise UserError(f"{error_prefix} (expected {head_dim // 2} values in F32); not supported")
    factors = np.fromfile(file.path, np.float32, head_dim // 2, offset=location.begin)
    if len(factors) < head_dim // 2:
        raise UserError(f"{file.path}: ends within tensor {ROPE_FACTORS!r}; fetch it again")
    scaling = {"factor": round(float(factors.max()), 4), **LLAMA3}  # the factor divides the lowest frequencies fully
    if not np.allclose(factors, llama3_factors({"rope_theta": theta, **scaling}, head_dim), rtol=1e-4):
        raise UserError(f"{error_prefix} with {LLAMA3}; not supported")
    return scaling


def llama3_factors(rope: Mapping[str, float], head_dim: int) -> NDArray[np.float32]:
    """The divisor of each frequency under Llama 3's scaling `rope`, float32 [head_dim / 2]."""
    parameters = {"rope_type": "llama3", **rope}
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=parameters)
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)  # [head_dim / 2]
    return (frequencies / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()).astype(np.float32)
