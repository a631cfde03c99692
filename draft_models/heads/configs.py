"""The config of a draft head's layers, in transformers' keys: read (`layer_config`) and written (`layer_fields_of`).

A head's reading is the description of its tensors' sizes and roles, a `HeadSizes`.
"""

from collections.abc import Callable, Mapping

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from outrider.base.errors import UserError, reason
from outrider.draft_models.formats.gguf_file import MOST_LAYERS
from outrider.draft_models.heads.sizes import HeadSizes

_WIDEST = 2**16  # dimensions of an attention head
_LAYERS: dict[str, Callable[..., PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
# The fields of `HeadSizes` by transformers' keys of a layer's config, and the further keys that decide what a layer is.
LAYER_FIELDS = {
    "vocab_size": "vocabulary", "hidden_size": "hidden", "intermediate_size": "intermediate",
    "num_hidden_layers": "layers", "num_attention_heads": "heads", "num_key_value_heads": "key_heads",
    "head_dim": "head_dim", "rms_norm_eps": "epsilon", "hidden_act": "activation",
    "max_position_embeddings": "max_positions", "attention_bias": "attention_bias", "mlp_bias": "mlp_bias",
}  # fmt: skip
_FURTHER_KEYS = (
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types",
)  # fmt: skip


def section_of(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    """The config's `name`; empty without one. Raises `UserError` if it is no mapping."""
    section = config.get(name) or {}
    if not isinstance(section, dict):
        raise UserError(f"{name}={section!r}: expected a mapping")
    return section


def layer_config(layer_fields: object, layers: int) -> PreTrainedConfig:
    """transformers' config of a model of `layers` layers, from the fields that a head's config.json has for them.

    Missing fields get transformers' defaults: trainers omit values equal to defaults. Raises `UserError`.
    """
    if not isinstance(layer_fields, dict):
        raise UserError(f"transformer_layer_config={layer_fields!r}: expected a mapping")
    model_type, head_dim = layer_fields.get("model_type", "llama"), layer_fields.get("head_dim") or 1
    if layers > MOST_LAYERS or (isinstance(head_dim, int) and head_dim > _WIDEST):  # each decides how much is allocated
        raise UserError(f"{layers} layers with head_dim={head_dim}: expected at most {MOST_LAYERS}, and {_WIDEST}")
    if model_type not in _LAYERS:
        raise UserError(f"model_type={model_type!r}: a head has layers of one of {', '.join(_LAYERS)}")
    fields = {key: layer_fields[key] for key in (*LAYER_FIELDS, *_FURTHER_KEYS) if layer_fields.get(key) is not None}
    try:
        return _LAYERS[model_type](**fields | {"num_hidden_layers": layers})
    except Exception as error:  # any error of the class for unexpected values
        raise UserError(f"describes no layer ({reason(error)})") from None


def layer_fields_of(reading: HeadSizes, target: PreTrainedConfig) -> dict[str, object]:
    """The layer's config in transformers' keys; rope as in versions before 5, which later versions read as well.

    target: the config whose special ids are copied.
    """
    rope = {name: value for name, value in reading.rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    layer_fields = {
        "model_type": "qwen3" if reading.head_norms else "llama",
        **{key: getattr(reading, name) for key, name in LAYER_FIELDS.items()},
        "rope_theta": reading.rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "tie_word_embeddings": False,
        **{name: getattr(target, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    if "partial_rotary_factor" in reading.rope:
        layer_fields["partial_rotary_factor"] = reading.rope["partial_rotary_factor"]
    return layer_fields
