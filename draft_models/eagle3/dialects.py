"""Dialects: the config.json and the tensor names of different trainers of EAGLE-3 heads.

eagle        SafeAILab/EAGLE: `midlayer.`, a flat config, which does not name the aux hidden states
specforge    sgl-project/SpecForge: `midlayer.`, a flat config, aux hidden states as layer outputs in `eagle_config`;
             written here as boundaries too, which vLLM expects
speculators  vllm-project/speculators: `layers.0.`, the layer's config nested, aux hidden states as boundaries
modelopt     NVIDIA/Model-Optimizer: `layers.0.`, a flat config, `eagle_config` with layer outputs and switches

The output of layer i is boundary i + 1. Facts that the tensors show are taken from them, not from the config, such as
the number of layers: a config copied from the target's has that of the target (EAGLE3-Vicuna-13B).
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from draft_models.eagle3.reading import Reading
from draft_models.targets.settings import Dialect
from outrider.errors import UserError, reason

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
    "use_aux_hidden_state": (True, "a head without taps, as EAGLE-1's"),
    "use_mtp_layernorm": (False, "norms of multi-token prediction"),
    "next_layer_regular": (True, "later layers that are given the embedding too"),
    "parallel_draft_step": (1, "several tokens drafted at once"),
}
# The names in SGLang's first EAGLE-3.1 code for the norms of the aux hidden states, and for their switch.
_FORMER = {f"aux_norm_{place}.weight": f"fc_norm.{i}.weight" for i, place in enumerate(("low", "mid", "high"))}
_FORMER_SWITCH = {"fc_norm": "use_aux_norm"}


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
