"""Dialects: the config.json of different writers of block drafters. Three are read, one is written.

z-lab        z-lab/dflash, SpecForge: a flat config with `dflash_config`, which may also hold DSpark's keys
deepspec     DeepSpec: flat, DSpark's keys at the top
speculators  vllm-project/speculators: the layer's config nested, aux hidden states as boundaries

The drafter reads aux hidden states of the target at `taps`, boundaries of its layers: 0 is the embedding, i + 1 the
output of layer i. A reading (`BlockReading`) is what a config says of the tensors. vLLM's blocks are shorter if it is
told to draft fewer tokens than one drafts. Facts of z-lab's model.py, speculators 0.9 and vLLM 0.33 (qwen3_dflash.py,
qwen3_dspark.py, eagle3_utils.py).

To read a file: `dialect_of` and `read_config`. To write one: `config_of`, which reads its result again.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Literal

from transformers import PreTrainedConfig

from outrider.base.errors import UserError, reason
from outrider.base.settings import construct
from outrider.draft_models.dflash.reading import BlockReading
from outrider.draft_models.heads.configs import LAYER_FIELDS, layer_config, layer_fields_of, section_of
from outrider.draft_models.heads.sizes import Shapes

Config = Mapping[str, object]
BlockDialect = Literal["z-lab", "deepspec", "speculators"]
SECTION, BASE = "dflash_config", "model."  # a section of config.json; a prefix of tensors' names
W1, W2, CONFIDENCE = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"
_SLIDING = "sliding_attention"
# Parts of tensors' names by the drafter that has such tensors, and that is not read here.
_FOREIGN = {
    "mask_hidden": "P-EAGLE", "conv": "DFlash2", "selector": "DFlash2", "gru": "Domino", "sink": "attention sinks",
    "markov_head.gate_proj": "a gated Markov head", "markov_head.joint_proj": "a recurrent Markov head",
}  # fmt: skip
# Switches of which only the given values are supported; None: the config lacks the switch.
_FIXED: dict[str, tuple[object, ...]] = {
    "use_aux_hidden_state": (None, True), "logit_scale": (None, 1.0), "markov_head_type": (None, "vanilla"),
    "projector_type": (None, "dflash", "dspark"), "attention_sink_bias": (None, False),
    "add_swa_attention_sink_bias": (None, False),
}  # fmt: skip


def local_name(stored_name: str) -> str:
    """The name here of a tensor with the name `stored_name` in the file."""
    return stored_name.removeprefix(BASE)


def is_block_drafter(stored_names: Collection[str]) -> bool:
    """Whether tensors of these names are a block drafter's: fc and its norm stand outside the layers."""
    return {"fc.weight", "hidden_norm.weight"} <= set(map(local_name, stored_names))


def dialect_of(config: Config, stored_names: Collection[str]) -> BlockDialect:
    """The dialect of a block drafter. Raises `UserError` if it is another drafter."""
    kind = config.get("speculators_model_type")
    if kind not in (None, "dflash", "dspark"):
        raise UserError(f"speculators_model_type={kind!r}: expected dflash or dspark; it is another drafter")
    family = next((family for part, family in _FOREIGN.items() if any(part in name for name in stored_names)), None)
    if family is not None:
        raise UserError(f"its tensors are those of {family}: expected DFlash, or DSpark with a vanilla Markov head")
    if not is_block_drafter(stored_names):
        raise UserError("no tensors fc.weight and hidden_norm.weight there, which every block drafter has")
    if kind is not None:
        return "speculators"
    return "z-lab" if SECTION in config else "deepspec"


def _lookup(config: Config, name: str) -> object:
    """The value of a key in `dflash_config`, else at the top; None without one."""
    nested_value = section_of(config, SECTION).get(name)
    return config.get(name) if nested_value is None else nested_value


def read_config(config: Config, shapes: Shapes, taps: tuple[int, ...] | None = None) -> BlockReading:
    """The reading that `config`, the contents of config.json, declares for tensors of `shapes`, by their names here.

    taps: replace those of the config. Raises `UserError`.
    """
    try:
        return _read_declared(config, shapes, taps or _read_taps(config))
    except (UserError, TypeError, ValueError, LookupError, OverflowError) as error:  # also of odd values
        raise UserError(f"{reason(error)} (in its config.json)") from None


def _read_declared(config: Config, shapes: Shapes, taps: tuple[int, ...]) -> BlockReading:
    for name, supported in _FIXED.items():
        if (setting := _lookup(config, name)) not in supported:
            raise UserError(f"{name}={setting!r}: expected {' or '.join(map(repr, supported[1:]))}")
    fields = section_of(config, "transformer_layer_config") if "speculators_model_type" in config else config
    layer_numbers = [name.split(".")[1] for name in shapes if name.startswith("layers.")]
    layer_count = max((int(number) for number in layer_numbers if number.isdigit()), default=0) + 1
    # Windows are read by another rule (`_read_spans`) than transformers'.
    plain = {key: fields[key] for key in fields if key not in ("layer_types", "sliding_window", "use_sliding_window")}
    layer = layer_config({"model_type": "qwen3", **plain}, layer_count)
    reading_fields = {
        **{name: getattr(layer, key, False) for key, name in LAYER_FIELDS.items()},  # key: transformers' name
        **_read_heads(config, shapes, layer.hidden_size),
        **_read_spans(config, fields, layer_count),
        "taps": taps,
        "target_hidden": _lookup(config, "target_hidden_size") or layer.hidden_size,
        "draft_vocabulary": config.get("draft_vocab_size") or shapes.get("lm_head.weight", (layer.vocab_size,))[0],
        "rope": dict(layer.rope_parameters),
        "head_norms": "layers.0.self_attn.q_norm.weight" in shapes,
        "own_embedding": "embed_tokens.weight" in shapes,
        "own_head": "lm_head.weight" in shapes,
        "block": _lookup(config, "block_size"),
        "mask_token": _lookup(config, "mask_token_id"),
        "neox": _lookup(config, "is_neox_style") is not False,
        "embedding_scale": _lookup(config, "input_embedding_scale") or 1.0,
    }
    return construct(BlockReading, reading_fields)


def _read_taps(config: Config) -> tuple[int, ...]:
    """The boundaries that the config names, in entries that must agree. Engines take the first entry that they know."""
    dflash_section, eagle_section = section_of(config, SECTION), section_of(config, "eagle_config")
    entries = {  # by the entry, as the user sees it: its layers, and what is added to make boundaries of them
        "aux_hidden_state_layer_ids": (config.get("aux_hidden_state_layer_ids"), 0),
        "eagle_aux_hidden_state_layer_ids": (config.get("eagle_aux_hidden_state_layer_ids"), 0),
        f"{SECTION}.target_layer_ids": (dflash_section.get("target_layer_ids"), 1),
        "dspark_target_layer_ids": (config.get("dspark_target_layer_ids"), 1),
        "target_layer_ids": (config.get("target_layer_ids"), 1),
        f"{SECTION}.layer_ids": (dflash_section.get("layer_ids"), 0),
        "eagle_config.layer_ids": (eagle_section.get("layer_ids"), 0),
    }
    boundaries: dict[str, tuple[int, ...]] = {}
    for name, (layer_ids, offset) in entries.items():
        if layer_ids and not (isinstance(layer_ids, list) and all(type(layer) is int for layer in layer_ids)):
            raise UserError(f"{name}={layer_ids!r}: expected a list of layers")
        if isinstance(layer_ids, list) and layer_ids:
            boundaries[f"{name}={layer_ids!r}"] = tuple(layer + offset for layer in layer_ids)
    if len(set(boundaries.values())) != 1:
        conflict = "; ".join(f"{name} means boundaries {list(taps)}" for name, taps in boundaries.items())
        raise UserError(f"{conflict or 'names no target_layer_ids'}: expected one list of them, or give reading.taps")
    return next(iter(boundaries.values()))


def _read_spans(config: Config, layer_fields: Config, layer_count: int) -> dict[str, object]:
    """`windows` and `causal` of a reading, by vLLM's table: layers slide by `layer_types`, or all with `use_swa`. A
    switch of causality is of all layers; without one (None), those that slide by `layer_types` are causal."""
    section, types = section_of(config, SECTION), layer_fields.get("layer_types") or ["full_attention"] * layer_count
    if not isinstance(types, list) or len(types) != layer_count:
        raise UserError(f"layer_types={types!r}: expected one for each of {layer_count} layers")
    sliding_by_type = [kind == _SLIDING for kind in types]
    is_sliding = sliding_by_type if any(sliding_by_type) else [section.get("use_swa") is True] * layer_count
    window_size = section.get("swa_window_size") or layer_fields.get("sliding_window")
    if any(is_sliding) and window_size is None:
        raise UserError("sliding layers without a size: expected swa_window_size or sliding_window")
    window_causal = False if config.get("sliding_window_non_causal") else None
    causal_switches = (config.get("is_causal"), section.get("causal"), window_causal)
    causal = next((value for value in causal_switches if value is not None), None if any(sliding_by_type) else False)
    return {"windows": tuple(window_size if sliding else None for sliding in is_sliding), "causal": causal}


def _read_heads(config: Config, shapes: Shapes, hidden_size: int) -> dict[str, object]:
    """What a reading says of DSpark's heads, by the tensors, and of the position that a row predicts."""
    # W1 [vocabulary, rank]. The confidence head reads the hidden state, or also the Markov embedding: its width tells.
    rank = shapes[W1][1] if W1 in shapes else _lookup(config, "markov_rank") or 0
    confidence_width = shapes.get(CONFIDENCE, (1, 0))[1]
    type_names = (config.get("speculators_model_type"), _lookup(config, "projector_type"), config.get("architectures"))
    is_dspark = rank != 0 or "dspark" in str(type_names).lower()  # DeepSpec's, of any rank, say it in the class alone
    anchor_switches = (_lookup(config, name) for name in ("sample_from_anchor", "shift_label"))
    return {
        "markov_rank": rank,
        "confidence": {0: "none", hidden_size: "hidden"}.get(confidence_width, "markov"),
        "sample_from_anchor": next((value for value in anchor_switches if value is not None), is_dspark),
    }


def config_of(reading: BlockReading, shapes: Shapes, target: PreTrainedConfig) -> dict[str, object]:
    """config.json of a block drafter in z-lab's layout, with DSpark's keys where vLLM reads them.

    shapes: of the written tensors. Raises `UserError` for a reading that the layout cannot express.
    """
    target_fields = {"mask_token_id": reading.mask_token, "target_layer_ids": [tap - 1 for tap in reading.taps]}
    config: dict[str, object] = {
        **layer_fields_of(reading, target),
        **target_fields,
        "architectures": ["Qwen3DSparkModel" if reading.markov_rank else "DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": reading.block,
        "draft_vocab_size": reading.draft_vocabulary,
        "target_hidden_size": reading.target_hidden,
        "num_target_layers": target.num_hidden_layers,
        "sample_from_anchor": reading.sample_from_anchor,
        "is_neox_style": reading.neox,
        "input_embedding_scale": reading.embedding_scale,
        "layer_types": ["full_attention" if window is None else _SLIDING for window in reading.windows],
        SECTION: {**target_fields, "causal": reading.causal},
    }
    if any(reading.windows):  # windows of two sizes are refused below
        config |= {"use_sliding_window": True, "sliding_window": max(filter(None, reading.windows))}
    if reading.markov_rank:
        config |= {"markov_rank": reading.markov_rank, "markov_head_type": "vanilla"}
        config["enable_confidence_head"] = reading.confidence != "none"
        config["confidence_head_with_markov"] = reading.confidence == "markov"
    fields = asdict(replace(reading, draft_ids="offset", head_norms=True))  # as a file in this layout is read
    reread = asdict(read_config(config, shapes))
    if lost_fields := ", ".join(f"{name}={value!r}" for name, value in fields.items() if reread[name] != value):
        raise UserError(f"z-lab's layout has no word for {lost_fields}, so its readers would run another drafter")
    return config
