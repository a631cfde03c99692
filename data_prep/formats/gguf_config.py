"""The transformers config of a model in a GGUF file, from its metadata. Unknown metadata are refused."""

import math
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from data_prep.formats.gguf_file import GgufFile, Value
from data_prep.formats.original import MOST_LAYERS
from outrider.errors import UserError, reason

FAMILIES = ("llama", "qwen2", "qwen3")  # ggml's names of architectures; Mistral's models are "llama" there
_CLASSES = {  # transformers' class names, which serving engines use
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"
IGNORED = {ROPE_FACTORS}  # tensors that belong to the config, not to the weights
# The architecture's keys that are read below. Any other key might change numbers in an unknown way.
_KNOWN = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.freq_base", "rope.dimension_count",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "rope.scale_linear", "tensor_data_layout",
}  # fmt: skip
_OFF = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}  # keys without effect at this value
# A file stores Llama 3's scaling as one factor per frequency; these bounds are the same in every model so far.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
Number = TypeVar("Number", int, float)


def gguf_config(file: GgufFile) -> PreTrainedConfig:
    """The config of the model in `file`. Raises `UserError` naming a key that is missing or not supported."""
    family = require_family(file)
    _require_known(file, family)
    layers = _count(file, "block_count")
    most = min(MOST_LAYERS, len(file.tensors))
    if layers > most:  # a config creates lists of this length before its other fields are checked
        raise UserError(f"{file.path}: {family}.block_count={layers}: expected 1 to {most}; fetch it again")
    heads, kv_heads = head_counts(file)
    hidden = _count(file, "embedding_length")
    head_dim = _count(file, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _count(file, key, head_dim) != head_dim:
            raise UserError(
                f"{file.path}: {family}.{key}={_count(file, key)} with heads of {head_dim} values; only whole heads of "
                "one size are supported"
            )
    values: dict[str, object] = {
        "vocab_size": _vocabulary_size(file),
        "hidden_size": hidden,
        "intermediate_size": _count(file, "feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": _count(file, "context_length"),
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int, None),
        "eos_token_id": _end_tokens(file),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id", int, None),
    }
    if family != "qwen2" or head_dim != hidden // heads:
        values["head_dim"] = head_dim
    kind = family
    if "attention.sliding_window" in _own_keys(file):
        if family != "llama":
            raise UserError(f"{file.path}: {family}.attention.sliding_window: supported with Mistral's models only")
        kind, values["sliding_window"] = "mistral", _count(file, "attention.sliding_window")
    elif family != "qwen2":
        values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    values["architectures"] = [_CLASSES[kind]]
    if kind == "llama":
        values["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    try:
        return AutoConfig.for_model(kind, **values)
    except Exception as error:  # any error of an architecture's config class for unexpected values
        raise UserError(f"{file.path}: no usable metadata ({reason(error)}); convert the model again") from error


def require_family(file: GgufFile) -> str:
    """The architecture of a file. Raises `UserError` if it is unsupported, or the file is one of several."""
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise UserError(
            f"{file.path}: one of {file.metadata['split.count']} files of a model (split.count); put them together "
            "with llama-gguf-split --merge"
        )
    family = file.get("general.architecture", str)
    if family not in FAMILIES:
        raise UserError(f"{file.path}: general.architecture={family!r}; supported in GGUF: {', '.join(FAMILIES)}")
    return family


def head_counts(file: GgufFile) -> tuple[int, int]:
    """The number of query heads, and of key/value heads."""
    heads = _count(file, "attention.head_count")
    return heads, _count(file, "attention.head_count_kv", heads)


def _own_keys(file: GgufFile) -> dict[str, Value]:
    """The metadata with the architecture's prefix, by keys without that prefix."""
    prefix = f"{file.metadata['general.architecture']}."
    return {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}


def _require_known(file: GgufFile, family: str) -> None:
    for key, value in _own_keys(file).items():
        if key not in _KNOWN and not (key in _OFF and value == _OFF[key]):
            raise UserError(
                f"{file.path}: {family}.{key}={value!r} is not supported; it may change what the model computes"
            )


def _count(file: GgufFile, key: str, default: int | None = None) -> int:
    """A positive integer of the architecture. Raises `UserError` if it is missing and there is no default."""
    key = f"{file.metadata['general.architecture']}.{key}"
    return _positive(file, key, file.get(key, int) if default is None else file.get(key, int, default))


def _number(file: GgufFile, key: str, default: float | None = None) -> float:
    """A positive number of the architecture, stored as float32, rounded to its shortest decimal: 1e-05."""
    key = f"{file.metadata['general.architecture']}.{key}"
    found = file.get(key, float) if default is None else file.get(key, float, default)
    return _decimal(_positive(file, key, found))


def _positive(file: GgufFile, key: str, value: Number) -> Number:
    if not 0 < value < math.inf:
        raise UserError(f"{file.path}: {key}={value}: expected a positive number; fetch it again")
    return value


def _vocabulary_size(file: GgufFile) -> int:
    """The number of rows of the embedding, which may be padded beyond the tokens."""
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{file.path}: holds no tensor 'token_embd.weight'; expected a whole model")
    return file.tensors["token_embd.weight"].shape[0]


def _end_tokens(file: GgufFile) -> int | list[int] | None:
    """The end-of-text id, and the end-of-turn id if it differs."""
    found = [file.get(f"tokenizer.ggml.{name}_token_id", int, None) for name in ("eos", "eot")]
    ends = list(dict.fromkeys(one for one in found if one is not None))
    return ends if len(ends) > 1 else ends[0] if ends else None


def _dtype(file: GgufFile) -> str:
    """The type of most of the weights; bfloat16 if they are quantised, since it loses no range."""
    names = {0: "float32", 1: "float16"}
    sizes: dict[str, int] = {}
    for place in file.tensors.values():
        name = names.get(place.kind, "bfloat16")
        sizes[name] = sizes.get(name, 0) + math.prod(place.shape)
    return max(sizes, key=lambda name: sizes[name])


def _decimal(value: float) -> float:
    """The shortest decimal of a number stored as float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope(file: GgufFile, head_dim: int) -> dict[str, object]:
    """`rope_parameters` of the config. Raises `UserError` for an unsupported scaling."""
    theta = _number(file, "rope.freq_base", 10000.0)
    own, family = _own_keys(file), file.metadata["general.architecture"]
    if ROPE_FACTORS in file.tensors:
        return {"rope_type": "llama3", "rope_theta": theta, **_llama3(file, theta, head_dim)}
    kind = own.get("rope.scaling.type", "linear" if "rope.scale_linear" in own else "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise UserError(f"{file.path}: {family}.rope.scaling.type={kind!r}; supported: none, linear, yarn")
    key = "rope.scaling.factor" if "rope.scaling.factor" in own else "rope.scale_linear"
    scaling: dict[str, object] = {"rope_type": kind, "rope_theta": theta, "factor": _number(file, key)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = _count(file, "rope.scaling.original_context_length")
    return scaling


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, float]:
    """The Llama 3 scaling whose factors, one per frequency, equal the tensor in the file."""
    place = file.tensors[ROPE_FACTORS]
    refused = f"{file.path}: tensor {ROPE_FACTORS!r} holds no rope scaling of Llama 3"
    if place.kind != 0 or place.shape != (head_dim // 2,):
        raise UserError(f"{refused} (expected {head_dim // 2} values in F32); not supported")
    stored = np.fromfile(file.path, np.float32, head_dim // 2, offset=place.begin)
    if len(stored) < head_dim // 2:
        raise UserError(f"{file.path}: ends within tensor {ROPE_FACTORS!r}; fetch it again")
    scaling = {"factor": round(float(stored.max()), 4), **LLAMA3}
    if not np.allclose(stored, llama3_factors({"rope_theta": theta, **scaling}, head_dim), rtol=1e-4):
        raise UserError(f"{refused} with {LLAMA3}; not supported")
    return scaling


def llama3_factors(rope: Mapping[str, float], head_dim: int) -> NDArray[np.float32]:
    """By what Llama 3's `rope` divides each frequency, [head_dim / 2]."""
    parameters = {"rope_type": "llama3", **rope}
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=parameters)
    plain = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    factors: NDArray[np.float32] = (plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()).astype(np.float32)
    return factors
