"""Export of EAGLE-3 heads in other dialects; a head that a dialect cannot express is refused."""

from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedConfig

from data_prep.formats.torch_files import CONFIG_FILE, SAFETENSORS
from draft_models.eagle3.checkpoint import D2T, DRAFT_TOKENS, MADE_WITH, T2D, their_name
from draft_models.eagle3.dialects import TAPS, Dialect, read_config
from draft_models.eagle3.model import Eagle3
from draft_models.eagle3.reading import Reading
from outrider.errors import UserError
from outrider.files import require_writable, write_atomically, write_json
from outrider.versions import package_version

# The dialects' names of switches, by fields of `Reading`.
_WORDS = {
    "tap_norms": "fc_norm", "joint_norm": "norm_before_fc", "norm_output": "norm_output",
    "norm_before_residual": "norm_before_residual", "final_norm": "use_last_layernorm",
    "embedding_norm": "use_input_layernorm_in_first_layer",
}  # fmt: skip
# The switches of each dialect, and further fields that its readers' own code supports.
_KNOWN: dict[Dialect, tuple[str, ...]] = {
    "eagle": ("fc_bias",),
    "specforge": ("tap_norms", "norm_output"),
    "speculators": (
        "tap_norms", "joint_norm", "norm_output", "norm_before_residual", "head_norms", "layers",
        "attention_bias", "mlp_bias",
    ),
    "modelopt": ("joint_norm", "final_norm", "embedding_norm", "layers", "attention_bias", "mlp_bias"),
}  # fmt: skip
_PLAIN: dict[str, object] = {  # the implied value of a field that a dialect does not know
    "tap_norms": False, "joint_norm": False, "norm_output": False, "norm_before_residual": False, "final_norm": True,
    "embedding_norm": True, "fc_bias": False, "head_norms": False, "attention_bias": False, "mlp_bias": False,
    "layers": 1,
}  # fmt: skip
_ARCHITECTURES: dict[Dialect, str] = {
    "eagle": "LlamaForCausalLM",
    "specforge": "LlamaForCausalLMEagle3",
    "speculators": "Eagle3DraftModel",
    "modelopt": "LlamaForCausalLMEagle3",
}


def save_head(
    path: Path,
    head: Eagle3,
    dialect: Dialect,
    target: PreTrainedConfig,
    target_name: str,
    drafted: int = 7,
    *,
    made_here: bool = True,
) -> None:
    """Write `head` to directory `path` in `dialect`, for reloading: config.json and model.safetensors.

    target, target_name: of the target it was trained for. drafted: suggested tokens per round for a server. made_here:
    False for another trainer's head, whose reading may be wrong. Raises `UserError` naming what `dialect` cannot say.
    """
    require_said(head, dialect, target)
    tensors = {their_name(name, dialect): tensor for name, tensor in _tensors(head, dialect).items()}
    config = _config(head.reading, dialect, target, target_name, drafted)
    config["dtype"] = config["torch_dtype"] = str(head.dtype).removeprefix("torch.")
    if made_here:
        config[MADE_WITH] = f"outrider {package_version()}"
    require_writable(path)
    write_atomically(path / SAFETENSORS.single, save(tensors, metadata={"format": "pt"}))
    write_json(path / CONFIG_FILE, config)


def _tensors(head: Eagle3, dialect: Dialect) -> dict[str, Tensor]:
    """The tensors by their names here; with d2t and t2d for a draft vocabulary, or if readers always expect them."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    ids = stored.pop(DRAFT_TOKENS, None)
    if ids is not None or dialect == "specforge":
        places = torch.arange(head.reading.draft_vocabulary)
        ids = places if ids is None else ids
        stored[D2T] = ids - places
        stored[T2D] = torch.zeros(head.reading.vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    return stored


def _config(
    reading: Reading, dialect: Dialect, target: PreTrainedConfig, target_name: str, drafted: int
) -> dict[str, object]:
    switches = {_WORDS[name]: getattr(reading, name) for name in _KNOWN[dialect] if name in _WORDS}
    outputs = [boundary - 1 for boundary in reading.taps]
    config: dict[str, object] = {
        "architectures": [_ARCHITECTURES[dialect]],
        "draft_vocab_size": reading.draft_vocabulary,
    }
    if len(reading.taps) != 3:
        config["num_aux_hidden_states"] = len(reading.taps)
    if reading.hidden != reading.target_hidden:  # with this key EAGLE's own loader takes no embedding from the target
        config["target_hidden_size"] = reading.target_hidden
    if dialect == "speculators":
        verifier = {"name_or_path": target_name, "architectures": list(target.architectures or ())}
        greedy = {"proposal_type": "greedy", "speculative_tokens": drafted}
        return config | switches | {
            "speculators_model_type": "eagle3",
            TAPS: list(reading.taps),
            "transformer_layer_config": _layer(reading, target) | _windows(reading),
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [greedy],
                "verifier": verifier,
            },
        }  # fmt: skip
    config |= _layer(reading, target)
    if dialect == "eagle":
        config["bias"] = reading.fc_bias
    else:  # vLLM reads boundaries at the top level, SGLang and TensorRT-LLM outputs in eagle_config
        config[TAPS] = list(reading.taps)
    if dialect == "specforge":
        config |= switches | {"eagle_config": {"use_aux_hidden_state": True, TAPS: outputs}}
    if dialect == "modelopt":
        config["eagle_config"] = {"use_aux_hidden_state": True, "use_mtp_layernorm": False, TAPS: outputs} | switches
    return config


def _layer(reading: Reading, target: PreTrainedConfig) -> dict[str, object]:
    """The layer's config in transformers' keys; rope as in versions before 5, which later versions read as well."""
    rope = {name: value for name, value in reading.rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    special = {name: getattr(target, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    layer = {
        "model_type": "qwen3" if reading.head_norms else "llama",
        "vocab_size": reading.vocabulary,
        "hidden_size": reading.hidden,
        "intermediate_size": reading.intermediate,
        "num_hidden_layers": reading.layers,
        "num_attention_heads": reading.heads,
        "num_key_value_heads": reading.key_heads,
        "head_dim": reading.head_dim,
        "rms_norm_eps": reading.epsilon,
        "hidden_act": reading.activation,
        "max_position_embeddings": reading.max_positions,
        "attention_bias": reading.attention_bias,
        "mlp_bias": reading.mlp_bias,
        "rope_theta": reading.rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "tie_word_embeddings": False,
        **special,
    }
    if "partial_rotary_factor" in reading.rope:
        layer["partial_rotary_factor"] = reading.rope["partial_rotary_factor"]
    return layer


def _windows(reading: Reading) -> dict[str, object]:
    sizes = {window for window in reading.windows if window is not None}
    if not sizes:
        return {}
    kinds = ["full_attention" if window is None else "sliding_attention" for window in reading.windows]
    return {"use_sliding_window": True, "sliding_window": max(sizes), "layer_types": kinds}


def require_said(head: Eagle3, dialect: Dialect, target: PreTrainedConfig) -> None:
    """Raise `UserError` unless the output of `save_head`, read again, gives the head's reading, also to its readers.

    Only names and shapes of the head's tensors are used, so it may be on the meta device.
    """
    if not head.reading.own_head:
        raise UserError("reading.own_head=false: expected null: what is written has the rows of its own logits")
    config = _config(head.reading, dialect, target, "", 1)
    # As they are written, whatever the source was.
    reading = replace(head.reading, draft_ids="offset", own_head=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    lost = [name for name, plain in _PLAIN.items()
            if name not in _KNOWN[dialect] and getattr(reading, name) != plain]  # fmt: skip
    # The embedding is not a layer's output, and SpecForge's code supports exactly three aux hidden states.
    embedding = dialect in ("specforge", "modelopt") and reading.taps[0] == 0
    if embedding or (dialect == "specforge" and len(reading.taps) != 3):
        lost.append("taps")
    if dialect == "eagle" and (reading.rope["rope_type"] != "default" or "partial_rotary_factor" in reading.rope):
        lost.append("rope")
    try:
        again = asdict(read_config(config, shapes, target.num_hidden_layers, "export"))
    except UserError:  # too few layers to choose taps from
        again, lost = asdict(reading), list(dict.fromkeys([*lost, "taps"]))
    lost += [name for name, value in asdict(reading).items() if again[name] != value and name not in lost]
    if lost:
        said = ", ".join(f"{name}={getattr(reading, name)!r}" for name in lost)
        raise UserError(
            f"dialect={dialect}: has no word for {said} of this head, and its readers would take it for another one; "
            "take another dialect"
        )
