"""Dialects: the config.json and the tensor names of different trainers of EAGLE-3 heads. Two of the four are written.

eagle        SafeAILab/EAGLE: `midlayer.`, a flat config, which does not name the aux hidden states
specforge    sgl-project/SpecForge: `midlayer.`, a flat config, aux hidden states as layer outputs in `eagle_config`;
             written here as boundaries too, which vLLM expects
speculators  vllm-project/speculators: `layers.0.`, the layer's config nested, aux hidden states as boundaries
modelopt     NVIDIA/Model-Optimizer: `layers.0.`, a flat config, `eagle_config` with layer outputs and switches

The output of layer i is boundary i + 1. Facts that the tensors show are taken from them, not from the config, such as
the number of layers: a config copied from the target's has that of the target (EAGLE3-Vicuna-13B).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from outrider.base.errors import UserError, reason
from outrider.draft_models.eagle3.reading import Reading
from outrider.draft_models.targets.settings import Dialect, Written

Shapes = Mapping[str, tuple[int, ...]]
MIDLAYER, FIRST_LAYER, BASE = "midlayer.", "layers.0.", "model."
TAPS = "eagle_aux_hidden_state_layer_ids"
_LAYERS: dict[str, Callable[..., PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "hidden_act", "vocab_size", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "max_position_embeddings", "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types",
)  # fmt: skip
# Switches of which this toolkit supports only the given value, and the meaning of other values.
_FIXED = {
    "use_aux_hidden_state": (True, "a head without aux hidden states, as EAGLE-1's"),
    "use_mtp_layernorm": (False, "norms of multi-token prediction"),
    "next_layer_regular": (True, "later layers that are given the embedding too"),
    "parallel_draft_step": (1, "several tokens drafted at once"),
}
# The names in SGLang's first EAGLE-3.1 code for the norms of the aux hidden states, and for their switch.
_FORMER = {f"aux_norm_{place}.weight": f"fc_norm.{i}.weight" for i, place in enumerate(("low", "mid", "high"))}
_FORMER_SWITCH = {"fc_norm": "use_aux_norm"}
# The names of switches in config.json, by fields of `Reading`.
_WORDS = {
    "tap_norms": "fc_norm", "joint_norm": "norm_before_fc", "norm_output": "norm_output",
    "norm_before_residual": "norm_before_residual",
}  # fmt: skip
# The switches of each dialect that is written, and further fields that its readers' own code supports.
_KNOWN: dict[Written, tuple[str, ...]] = {
    "specforge": ("tap_norms", "norm_output"),
    "speculators": (*_WORDS, "head_norms", "layers", "attention_bias", "mlp_bias"),
}
_PLAIN: dict[str, object] = {  # the implied value of a field that a dialect does not know
    "tap_norms": False, "joint_norm": False, "norm_output": False, "norm_before_residual": False, "final_norm": True,
    "embedding_norm": True, "fc_bias": False, "head_norms": False, "attention_bias": False, "mlp_bias": False,
    "layers": 1,
}  # fmt: skip


def own_name(stored: str) -> str:
    """The name here of a tensor with the name `stored` in the file."""
    name = stored.removeprefix(BASE)
    name = _FORMER.get(name, name)
    return FIRST_LAYER + name.removeprefix(MIDLAYER) if name.startswith(MIDLAYER) else name


def is_head(stored: Collection[str]) -> bool:
    """Whether tensors of these names are an EAGLE-3 head's: they have a norm that no other model has."""
    return FIRST_LAYER + "hidden_norm.weight" in set(map(own_name, stored))


def dialect_of(config: Mapping[str, Any], stored: Collection[str], source: str) -> Dialect:
    """The dialect of the head in `source`, by its config and its tensors' names. Raises `UserError`."""
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise UserError(f"eagle3={source}: speculators_model_type={kind!r}: expected 'eagle3'; it is another drafter")
    if not is_head(stored):
        raise UserError(
            f"eagle3={source}: no tensor {MIDLAYER}hidden_norm.weight or {FIRST_LAYER}hidden_norm.weight there, which "
            "every EAGLE-3 head has; give the directory of such a head"
        )
    if kind is not None:
        return "speculators"
    if any(name.removeprefix(BASE).startswith(MIDLAYER) for name in stored):
        new = "eagle_config" in config or "Eagle3" in str(config.get("architectures"))
        return "specforge" if new else "eagle"
    return "modelopt"


def read_config(
    config: Mapping[str, Any], shapes: Shapes, target_layers: int, source: str, taps: tuple[int, ...] | None = None
) -> Reading:
    """The reading that `config`, the contents of config.json, declares for tensors of `shapes`, by their names here.

    target_layers: the target's number of layers, from which taps are chosen if the config does not name them. taps:
    replace those of the config. Raises `UserError`.
    """
    try:
        return _read(config, shapes, taps or _taps(config, target_layers))
    except (UserError, TypeError, ValueError, OverflowError) as error:  # also of values that are no numbers
        why = f"{reason(error)} (in its config.json)"
        raise UserError(f"eagle3={source}: {why}; fetch the head again, or correct it") from None


def _read(config: Mapping[str, Any], shapes: Shapes, taps: tuple[int, ...]) -> Reading:
    switches = _Switches(config)
    for name, (known, what) in _FIXED.items():
        if switches.get(name, known) != known:
            raise UserError(f"{name}={switches.get(name, known)!r}: {what}; expected {known!r}")
    found = {int(name.split(".")[1]) for name in shapes if name.startswith("layers.") and name.split(".")[1].isdigit()}
    layers = max(found, default=0) + 1
    described = config if "speculators_model_type" not in config else config.get("transformer_layer_config")
    layer = _layer_config(described, layers)
    rows = shapes.get("lm_head.weight", (layer.vocab_size,))[0]
    return Reading(
        taps=taps,
        target_hidden=config.get("target_hidden_size") or layer.hidden_size,
        hidden=layer.hidden_size,
        intermediate=layer.intermediate_size,
        layers=layers,
        heads=layer.num_attention_heads,
        key_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim,
        epsilon=layer.rms_norm_eps,
        activation=layer.hidden_act,
        vocabulary=layer.vocab_size,
        draft_vocabulary=config.get("draft_vocab_size") or config.get("truncated_vocab_size") or rows,
        rope=dict(layer.rope_parameters),
        max_positions=layer.max_position_embeddings,
        windows=_windows(layer, layers),
        attention_bias=layer.attention_bias,
        mlp_bias=getattr(layer, "mlp_bias", False),
        fc_bias="fc.bias" in shapes,
        head_norms=layer.model_type == "qwen3",
        tap_norms=switches.get("fc_norm", "fc_norm.0.weight" in shapes),
        joint_norm=switches.get("norm_before_fc", "input_norm.weight" in shapes),
        embedding_norm=switches.get("use_input_layernorm_in_first_layer", True),
        norm_before_residual=switches.get("norm_before_residual", False),
        final_norm=switches.get("use_last_layernorm", True),
        norm_output=switches.get("norm_output", False),
        own_embedding="embed_tokens.weight" in shapes,
    )


class _Switches:
    """The config's switches, which trainers write at its top level or in its `eagle_config`."""

    def __init__(self, config: Mapping[str, Any]):
        self._places = [config, _inner(config)]

    def get(self, name: str, default: object) -> Any:
        """The value of a switch; `default` if it is not set. Raises `UserError` if two values differ."""
        names = (name, _FORMER_SWITCH.get(name, name))
        found = [place[key] for place in self._places for key in dict.fromkeys(names) if place.get(key) is not None]
        other = next((value for value in found if value != found[0]), None)
        if other is not None:
            raise UserError(f"{name}={found[0]!r} at the top, {other!r} in eagle_config: expected one of them")
        return found[0] if found else default


def _inner(config: Mapping[str, object]) -> Mapping[str, object]:
    """The config's `eagle_config`; empty without one. Raises `UserError` if it is no mapping."""
    inner = config.get("eagle_config") or {}
    if not isinstance(inner, dict):
        raise UserError(f"eagle_config={inner!r}: expected a mapping")
    return inner


def _layer_config(described: object, layers: int) -> PreTrainedConfig:
    """transformers' config of a model of such layers, with its defaults: trainers omit values equal to defaults."""
    if not isinstance(described, dict):
        raise UserError(f"transformer_layer_config={described!r}: expected a mapping")
    kind = described.get("model_type", "llama")
    if kind not in _LAYERS:
        raise UserError(f"model_type={kind!r}: expected one of {', '.join(_LAYERS)}, whose layers heads are made of")
    given = {key: described[key] for key in _LAYER_KEYS if described.get(key) is not None}
    try:
        return _LAYERS[kind](**given, num_hidden_layers=layers)
    except Exception as error:  # any error of the class for unexpected values
        raise UserError(f"describes no layer ({reason(error)})") from None


def _windows(layer: PreTrainedConfig, layers: int) -> tuple[int | None, ...]:
    kinds = getattr(layer, "layer_types", None) or ["full_attention"] * layers
    return tuple(layer.sliding_window if kind == "sliding_attention" else None for kind in kinds)


def _taps(config: Mapping[str, Any], target_layers: int) -> tuple[int, ...]:
    """The boundaries; if none are named, 2, n // 2 and n − 3 of n layers (as in EAGLE, SpecForge and vLLM)."""
    inner = _inner(config)
    given = {TAPS: config.get(TAPS), f"eagle_config.{TAPS}": inner.get(TAPS)}
    for name, place in (("layer_ids", config), ("eagle_config.layer_ids", inner)):
        given[name] = place.get("layer_ids")  # boundaries, as vLLM reads them
    named = {}
    for name, layers in given.items():
        if not layers:
            continue
        if not (isinstance(layers, list) and all(type(one) is int for one in layers)):
            raise UserError(f"{name}={layers!r}: expected a list of layers")
        outputs = name == f"eagle_config.{TAPS}"
        named[name] = tuple(layer + 1 for layer in layers) if outputs else tuple(layers)
    if len(set(named.values())) > 1:
        said = "; ".join(f"{name}={given[name]} means boundaries {list(taps)}" for name, taps in named.items())
        raise UserError(f"{said}: expected the same, or give reading.taps")
    if named:
        return next(iter(named.values()))
    if target_layers < 7:
        few = f"the target's {target_layers} layers are too few to choose"
        raise UserError(f"names no {TAPS}: expected them, as {few}; or give reading.taps")
    return (2, target_layers // 2, target_layers - 3)


def require_said(reading: Reading, shapes: Shapes, dialect: Written, target: PreTrainedConfig) -> None:
    """Raise `UserError` unless what is written in `dialect`, read again, gives `reading`, also to its readers.

    shapes: of the head's tensors, by their names here.
    """
    if not reading.own_head:
        raise UserError("reading.own_head=false: expected null: what is written has the rows of its own logits")
    # As they are written, whatever the source was.
    wanted = asdict(replace(reading, draft_ids="offset", own_head=True))
    lost = [name for name, plain in _PLAIN.items() if name not in _KNOWN[dialect] and wanted[name] != plain]
    # The embedding is not a layer's output, and SpecForge's code supports exactly three aux hidden states.
    if dialect == "specforge" and (reading.taps[0] == 0 or len(reading.taps) != 3):
        lost.append("taps")
    again = asdict(read_config(written_config(reading, dialect, target, "", 1), shapes, 0, "export"))
    lost += [name for name, value in wanted.items() if again[name] != value and name not in lost]
    if lost:
        said = ", ".join(f"{name}={wanted[name]!r}" for name in lost)
        raise UserError(
            f"dialect={dialect}: has no word for {said}, so its readers would run another head; take another dialect"
        )


def written_config(
    reading: Reading, dialect: Written, target: PreTrainedConfig, target_name: str, drafted: int
) -> dict[str, object]:
    """config.json of a head in `dialect`. target, target_name, drafted: as in `save_head`."""
    switches = {_WORDS[name]: getattr(reading, name) for name in _KNOWN[dialect] if name in _WORDS}
    config: dict[str, object] = {
        "draft_vocab_size": reading.draft_vocabulary,
        TAPS: list(reading.taps),  # vLLM reads boundaries here, SGLang outputs of layers in eagle_config
        **switches,
    }
    if len(reading.taps) != 3:
        config["num_aux_hidden_states"] = len(reading.taps)
    if reading.hidden != reading.target_hidden:  # with this key EAGLE's own loader takes no embedding from the target
        config["target_hidden_size"] = reading.target_hidden
    layer = _layer(reading, target)
    if dialect == "specforge":
        inner = {"use_aux_hidden_state": True, TAPS: [boundary - 1 for boundary in reading.taps]}
        return {"architectures": ["LlamaForCausalLMEagle3"], **config, **layer, "eagle_config": inner}
    verifier = {"name_or_path": target_name, "architectures": list(target.architectures or ())}
    return config | {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer | _written_windows(reading),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafted}],
            "verifier": verifier,
        },
    }


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


def _written_windows(reading: Reading) -> dict[str, object]:
    sizes = {window for window in reading.windows if window is not None}
    if not sizes:
        return {}
    kinds = ["full_attention" if window is None else "sliding_attention" for window in reading.windows]
    return {"use_sliding_window": True, "sliding_window": max(sizes), "layer_types": kinds}
