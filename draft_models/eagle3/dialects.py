"""Dialects: the config.json and the tensor names of different trainers of EAGLE-3 heads. Four are read, three written.

eagle        SafeAILab/EAGLE, read only: `midlayer.`, a flat config, which does not name the aux hidden states
specforge    sgl-project/SpecForge: `midlayer.`, a flat config, aux hidden states as layer outputs in `eagle_config`;
             written here as boundaries too, which vLLM expects
speculators  vllm-project/speculators: `layers.0.`, the layer's config nested, aux hidden states as boundaries
modelopt     NVIDIA/Model-Optimizer, read only: `layers.0.`, flat, `eagle_config` with layer outputs and switches
gguf         llama.cpp, written only: ggml's names, and the config as metadata

The head reads aux hidden states of the target at `taps`, boundaries of its layers: 0 is the embedding, i + 1 the output
of layer i. A reading (`Reading`) is what a config says of the tensors. Facts that the tensors show, such as the number
of layers, are taken from the tensors: some configs have the target's number, as EAGLE3-Vicuna-13B's.

To read a head: `dialect_of` and `read_config`. To write one: `require_expressible`, then `config_in_dialect`.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from transformers import PreTrainedConfig

from outrider.base.errors import UserError, reason
from outrider.draft_models.eagle3.reading import Reading
from outrider.draft_models.heads.configs import LAYER_FIELDS, layer_config, layer_fields_of, section_of
from outrider.draft_models.heads.sizes import Shapes, default_aux_layers
from outrider.draft_models.targets.settings import Dialect, ExportDialect

MIDLAYER, FIRST_LAYER, BASE = "midlayer.", "layers.0.", "model."  # prefixes of tensors' names
AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
# Switches of which this toolkit supports only the given value, and the meaning of other values.
_FIXED_SWITCHES = {
    "use_aux_hidden_state": (True, "a head without aux hidden states, as EAGLE-1's"),
    "use_mtp_layernorm": (False, "norms of multi-token prediction"),
    "next_layer_regular": (True, "later layers that are given the embedding too"),
    "parallel_draft_step": (1, "several tokens drafted at once"),
}
# By fields of `Reading`: the switch's name in config.json, and its value without an entry there: a default, or the name
# of a tensor, with which the switch is true.
_SWITCHES: dict[str, tuple[str, bool | str]] = {
    "tap_norms": ("fc_norm", "fc_norm.0.weight"),
    "joint_norm": ("norm_before_fc", "input_norm.weight"),
    "embedding_norm": ("use_input_layernorm_in_first_layer", True),
    "norm_before_residual": ("norm_before_residual", False),
    "final_norm": ("use_last_layernorm", True),
    "norm_output": ("norm_output", False),
}
# The names in SGLang's first EAGLE-3.1 code for the norms of the aux hidden states, and for their switch.
_FORMER_NAMES = {f"aux_norm_{level}.weight": f"fc_norm.{i}.weight" for i, level in enumerate(("low", "mid", "high"))}
_FORMER_SWITCH = {"fc_norm": "use_aux_norm"}
# For each dialect that is written: the fields of `_READER_DEFAULTS` that the code of its readers supports.
_SUPPORTED: dict[ExportDialect, tuple[str, ...]] = {
    "specforge": ("tap_norms", "norm_output"),
    "speculators": (
        "tap_norms", "joint_norm", "norm_output", "norm_before_residual", "head_norms", "layers", "attention_bias",
        "mlp_bias",
    ),
    "gguf": ("joint_norm", "norm_before_residual"),
}  # fmt: skip
_READER_DEFAULTS: dict[str, object] = {  # the value that a reader assumes for a field that it does not support
    **{name: default is True for name, (_, default) in _SWITCHES.items()},  # False where a tensor shows it
    **dict.fromkeys(("fc_bias", "head_norms", "attention_bias", "mlp_bias"), False),
    "layers": 1,
}


def local_name(stored_name: str) -> str:
    """The name here of a tensor with the name `stored_name` in the file."""
    name = stored_name.removeprefix(BASE)
    name = _FORMER_NAMES.get(name, name)
    return FIRST_LAYER + name.removeprefix(MIDLAYER) if name.startswith(MIDLAYER) else name


def is_head(stored_names: Collection[str]) -> bool:
    """Whether tensors of these names are an EAGLE-3 head's: they have a norm that no other model has."""
    return FIRST_LAYER + "hidden_norm.weight" in set(map(local_name, stored_names))


def dialect_of(config: Mapping[str, Any], stored_names: Collection[str], source: str) -> Dialect:
    """The dialect of the head in `source`, by its config and its tensors' names. Raises `UserError`."""
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise UserError(f"eagle3={source}: speculators_model_type={kind!r}: expected 'eagle3'; it is another drafter")
    if not is_head(stored_names):
        raise UserError(
            f"eagle3={source}: no tensor {MIDLAYER}hidden_norm.weight or {FIRST_LAYER}hidden_norm.weight there, which "
            "every EAGLE-3 head has; give the directory of such a head"
        )
    if kind is not None:
        return "speculators"
    if any(name.removeprefix(BASE).startswith(MIDLAYER) for name in stored_names):
        return "specforge" if "eagle_config" in config or "Eagle3" in str(config.get("architectures")) else "eagle"
    return "modelopt"


def read_config(
    config: Mapping[str, Any], shapes: Shapes, target_layers: int, source: str, taps: tuple[int, ...] | None = None
) -> Reading:
    """The reading that `config`, the contents of config.json, declares for tensors of `shapes`, by their names here.

    target_layers: the target's number of layers, from which taps are chosen if the config does not name them. taps:
    replace those of the config. Raises `UserError`.
    """
    try:
        return _read_declared(config, shapes, taps or _read_aux_layers(config, target_layers))
    except (UserError, TypeError, ValueError, LookupError, OverflowError) as error:  # also of odd values
        problem = f"{reason(error)} (in its config.json)"
        raise UserError(f"eagle3={source}: {problem}; fetch the head again, or correct it") from None


def _read_declared(config: Mapping[str, Any], shapes: Shapes, taps: tuple[int, ...]) -> Reading:
    """The reading that `config` and `shapes` declare, with these aux layers. Raises `UserError`."""
    for name, (expected, meaning) in _FIXED_SWITCHES.items():
        if (setting := _read_switch(config, name, expected)) != expected:
            raise UserError(f"{name}={setting!r}: {meaning}; expected {expected!r}")
    layer_numbers = [name.split(".")[1] for name in shapes if name.startswith("layers.")]
    layer_count = max((int(number) for number in layer_numbers if number.isdigit()), default=0) + 1
    layer_fields = config if "speculators_model_type" not in config else config.get("transformer_layer_config")
    layer = layer_config(layer_fields, layer_count)
    head_row_count = shapes.get("lm_head.weight", (layer.vocab_size,))[0]
    layer_types = getattr(layer, "layer_types", None) or ["full_attention"] * layer_count
    switches: dict[str, Any] = {
        name: _read_switch(config, config_key, default in shapes if isinstance(default, str) else default)
        for name, (config_key, default) in _SWITCHES.items()
    }
    # Sizes of the layer, by their names here; key: transformers' name.
    size_fields: dict[str, Any] = {name: getattr(layer, key, False) for key, name in LAYER_FIELDS.items()}
    return Reading(
        **size_fields,
        **switches,
        taps=taps,
        target_hidden=config.get("target_hidden_size") or layer.hidden_size,
        draft_vocabulary=config.get("draft_vocab_size") or config.get("truncated_vocab_size") or head_row_count,
        rope=dict(layer.rope_parameters),
        windows=tuple(layer.sliding_window if kind == "sliding_attention" else None for kind in layer_types),
        fc_bias="fc.bias" in shapes,
        head_norms=layer.model_type == "qwen3",
        own_embedding="embed_tokens.weight" in shapes,
    )


def _read_switch(config: Mapping[str, Any], name: str, default: object) -> Any:
    """The value of a switch, at the config's top level or in its `eagle_config`; `default` if it is not set.

    Raises `UserError` if two values differ.
    """
    config_keys = (name, _FORMER_SWITCH.get(name, name))
    sections = (config, section_of(config, "eagle_config"))
    values = [section.get(key) for section, key in product(sections, config_keys)]
    switch_values = [value for value in values if value is not None]
    conflict = next((value for value in switch_values if value != switch_values[0]), None)
    if conflict is not None:
        raise UserError(f"{name}={switch_values[0]!r} at the top, {conflict!r} in eagle_config: expected one of them")
    return switch_values[0] if switch_values else default


def _read_aux_layers(config: Mapping[str, Any], target_layer_count: int) -> tuple[int, ...]:
    """The boundaries that the config names, in several entries, which must agree.

    Example: `eagle_config`, and DeepSpec's `target_layer_ids`, have the outputs of layers 1, 8 and 15, that is the
    boundaries 2, 9 and 16; the other entries have boundaries, as vLLM reads them. Without an entry: 2, n // 2 and n − 3
    of n layers (as in EAGLE, SpecForge and vLLM).
    """
    sections = {"": config, "eagle_config.": section_of(config, "eagle_config")}
    boundaries: dict[str, tuple[int, ...]] = {}  # by the entry, as the user sees it
    for prefix, key in product(sections, (AUX_LAYERS_KEY, "layer_ids", "target_layer_ids")):
        name, layer_ids = prefix + key, sections[prefix].get(key)
        if not layer_ids:
            continue
        if not (isinstance(layer_ids, list) and all(type(layer) is int for layer in layer_ids)):
            raise UserError(f"{name}={layer_ids!r}: expected a list of layers")
        # Whether the entry has outputs of layers: the output of layer i is boundary i + 1.
        has_outputs = key == "target_layer_ids" or name == f"eagle_config.{AUX_LAYERS_KEY}"
        boundaries[f"{name}={layer_ids!r}"] = tuple(layer + has_outputs for layer in layer_ids)
    if len(set(boundaries.values())) > 1:
        conflict = "; ".join(f"{name} means boundaries {list(taps)}" for name, taps in boundaries.items())
        raise UserError(f"{conflict}: expected the same, or give reading.taps")
    if not boundaries and target_layer_count < 7:
        cause = f"the target's {target_layer_count} layers are too few to choose"
        raise UserError(f"names no {AUX_LAYERS_KEY}: expected them, as {cause}; or give reading.taps")
    return next(iter(boundaries.values()), default_aux_layers(target_layer_count))


def require_expressible(reading: Reading, shapes: Shapes, dialect: ExportDialect, target: PreTrainedConfig) -> None:
    """Raise `UserError` unless a head written in `dialect` gives `reading` when it is read, here and by other readers.

    shapes: of the head's tensors, by their names here.
    """
    if not reading.own_head:
        raise UserError("reading.own_head=false: expected null: a written head holds the rows of its own logits")
    # A head is always written with these two values.
    fields = asdict(replace(reading, draft_ids="offset", own_head=True))
    unread = _READER_DEFAULTS.keys() - _SUPPORTED[dialect]
    lost_fields = [name for name, default in _READER_DEFAULTS.items() if name in unread and fields[name] != default]
    # The embedding is not a layer's output, and the others' code supports exactly three aux hidden states.
    if dialect != "speculators" and (reading.taps[0] == 0 or len(reading.taps) != 3):
        lost_fields.append("taps")
    config = config_in_dialect(reading, dialect, target, target_name="", drafted=1)
    reread_fields = asdict(read_config(config, shapes, target_layers=0, source="export"))
    lost_fields += [name for name, value in fields.items() if reread_fields[name] != value and name not in lost_fields]
    if lost_fields:
        listing = ", ".join(f"{name}={fields[name]!r}" for name in lost_fields)
        why = "so its readers would run another head; take another dialect"
        raise UserError(f"dialect={dialect}: has no word for {listing}, {why}")


def config_in_dialect(
    reading: Reading, dialect: ExportDialect, target: PreTrainedConfig, target_name: str, drafted: int
) -> dict[str, object]:
    """config.json of a head in `dialect`. target, target_name, drafted: as in `save_head`."""
    config: dict[str, object] = {
        "draft_vocab_size": reading.draft_vocabulary,
        AUX_LAYERS_KEY: list(reading.taps),  # vLLM reads boundaries here, SGLang outputs of layers in eagle_config
        **{_SWITCHES[name][0]: getattr(reading, name) for name in _SUPPORTED[dialect] if name in _SWITCHES},
    }
    if len(reading.taps) != 3:
        config["num_aux_hidden_states"] = len(reading.taps)
    if reading.hidden != reading.target_hidden:  # with this key EAGLE's own loader takes no embedding from the target
        config["target_hidden_size"] = reading.target_hidden
    layer_fields = layer_fields_of(reading, target)
    if dialect != "speculators":
        eagle_config = {"use_aux_hidden_state": True, AUX_LAYERS_KEY: [boundary - 1 for boundary in reading.taps]}
        return {"architectures": ["LlamaForCausalLMEagle3"], **config, **layer_fields, "eagle_config": eagle_config}
    if window_sizes := set(filter(None, reading.windows)):
        layer_types = ["full_attention" if window is None else "sliding_attention" for window in reading.windows]
        layer_fields |= {"use_sliding_window": True, "sliding_window": max(window_sizes), "layer_types": layer_types}
    if "num_aux_hidden_states" in config:  # vLLM reads it among these fields
        layer_fields["num_aux_hidden_states"] = config["num_aux_hidden_states"]
    return config | {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer_fields,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafted}],
            "verifier": {"name_or_path": target_name, "architectures": list(target.architectures or ())},
        },
    }
