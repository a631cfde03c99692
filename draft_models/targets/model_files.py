"""Models with all or some layers of a target: without weights, or as transformers loads them; their structure.

`model_spec` gives the structure of a config's model (the names of its parts), which is observed once. `empty_model` and
`empty_layers` make a model on the meta device. `load_layers` fills the chosen layers of a target with its weights, and
`load_causal_lm` loads a whole model as its own forward runs. Both refuse weights that do not fit (`load_fitting`).
`TensorFiles` are the tensors of a checkpoint by name; its `original` is the model if it is not plain safetensors, such
as a GGUF file. Codes are quantised weights as a file stores them. role: the user's option of a model, as in "target".
The `wrapper_prefix` of `TensorFiles` is what torch.compile, DistributedDataParallel or peft put before all names. It is
inferred from the names; with such a prefix, unused tensors are refused, not only warned of.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from outrider.base.errors import UserError, reason, warn_once
from outrider.base.files import read_json, read_mapping, write_json
from outrider.base.progress import Stage
from outrider.base.words import list_words
from outrider.draft_models.formats.convert import description_location, locate_file
from outrider.draft_models.formats.stored_tensors import CONFIG_FILE, GENERATION_FILE, PICKLES, SAFETENSORS
from outrider.draft_models.targets.attention import ATTENTION
from outrider.draft_models.targets.coded import keep_codes
from outrider.draft_models.targets.introspection import observe
from outrider.draft_models.targets.model_spec import ModelSpec
from outrider.draft_models.targets.stack import LayerStack, module_list
from outrider.draft_models.targets.tensor_files import BASE_PREFIX, TensorFiles, open_tensors, require_no_adapter

OnUnused = Literal["refuse", "warn", "ignore"]  # what is done if the files have tensors that the model does not use
# The tensors of a drafter beside its causal LM, and the key of config.json that describes them (small_lm/pard2.py).
PROJECTION, PROJECTION_KEY = "target_proj.", "pard2_target_layers"
_SPECS: dict[str, ModelSpec] = {}  # by the config's class and JSON


def model_spec(config: PreTrainedConfig) -> ModelSpec:
    """The structure of the model that `config` describes. Raises `UserError` if it cannot be run layer by layer."""
    key = f"{type(config).__name__} {config.to_json_string(use_diff=False)}"
    if key not in _SPECS:
        _SPECS[key] = observe(empty_model(config).float())  # 16 bits would round a scale
    return _SPECS[key]


def spec_of(model: PreTrainedModel) -> ModelSpec:
    """The structure of `model`, which may have only some of the layers of a target (see `empty_layers`)."""
    spec = getattr(model, "spec", None)
    return spec if isinstance(spec, ModelSpec) else model_spec(model.config)


def layer_stack(model: PreTrainedModel, rotary_dtype: torch.dtype | None = None) -> LayerStack:
    """The layers of `model` (see `LayerStack`). Raises `UserError` if it cannot be run layer by layer."""
    return LayerStack(model, spec_of(model), rotary_dtype)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    return module_list(model, spec_of(model).layers)


def final_norm(model: PreTrainedModel) -> nn.Module:
    return model.get_submodule(spec_of(model).norm)


def empty_model(config: PreTrainedConfig, attention_impl: str | None = ATTENTION) -> PreTrainedModel:
    """The causal LM of `config` with parameters on the meta device and real buffers (rope tables).

    attention_impl: None: transformers chooses. Raises `UserError` for a config that describes no model.
    """
    try:
        with init_empty_weights(include_buffers=False), no_init_weights():  # nothing to initialise on meta
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=attention_impl, trust_remote_code=False
            )
    except Exception as error:
        why = f"its {CONFIG_FILE} describes no model ({reason(error)})"
        if isinstance(error, KeyError) and error.args == (ATTENTION,):
            why = f"architecture {config.model_type!r} cannot be run layer by layer (its attention cannot be replaced)"
        raise UserError(f"{config.name_or_path}: {why}") from error
    model.tie_weights()
    return model


def empty_layers(config: PreTrainedConfig, layer_indices: Sequence[int]) -> PreTrainedModel:
    """`empty_model` with these layers only, in that order; each layer is configured as in the whole model."""
    return pick_layers(empty_model(config), layer_indices, {})


def pick_layers(model: PreTrainedModel, layer_indices: Sequence[int], memo: dict[int, object]) -> PreTrainedModel:
    """A copy of `model` with only the given layers, in that order.

    memo: the memo of `copy.deepcopy` (id of a part → its replacement), which is extended.
    """
    spec, all_layers = spec_of(model), decoder_layers(model)
    memo[id(all_layers)] = nn.ModuleList()
    small_model = copy.deepcopy(model, memo)
    # A layer may occur twice. All layers share one config, since transformers reads the attention to use from it.
    layer_copies = [copy.deepcopy(all_layers[index], dict(memo)) for index in layer_indices]
    for new_index, layer in enumerate(layer_copies):
        number_layer(layer, new_index)
    module_list(small_model, spec.layers).extend(layer_copies)
    for field_name, layer_values in settings_by_layer(model.config).items():
        setattr(small_model.config, field_name, [layer_values[index] for index in layer_indices])
    small_model.config.num_hidden_layers = len(layer_indices)
    small_model.spec = spec.select(layer_indices)  # type: ignore[assignment]
    return small_model


def settings_by_layer(config: PreTrainedConfig) -> dict[str, Sequence[object]]:
    """The lists in `config` that have an entry for each layer, by name."""
    list_fields = {name: entries for name, entries in vars(config).items() if isinstance(entries, list | tuple)}
    return {name: entries for name, entries in list_fields.items() if len(entries) == config.num_hidden_layers}


def number_layer(layer: nn.Module, index: int) -> None:
    """Set the index of `layer`, at which a cache stores its keys and values."""
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = index  # type: ignore[assignment]


def load_causal_lm(
    source: str, revision: str | None = None, *, role: str = "target", coded: bool = False,
    part: PreTrainedConfig | None = None, **options: object,
) -> PreTrainedModel:  # fmt: skip
    """The whole causal LM in `source` as transformers runs it. Raises `UserError`, also if its weights do not fit.

    coded: as for `load_layers`; only a GGUF file has codes. part: the config of its first layers, to load no others.
    options: passed to `from_pretrained`. The index is checked first: transformers would follow it out of the directory.
    """
    require_no_adapter(source, revision, role)
    files = open_tensors(source, revision)
    if files.original is not None and not files.original.transformers_reads_weights:  # such as a GGUF file
        return _load_original(files, role, coded, **options)
    dict(files.open_stored(files.file_of))  # raises for a tensor in two files, which transformers would accept
    name_or_path, revision = files.location
    key_options = {"key_mapping": {f"^{re.escape(files.wrapper_prefix)}": ""}} if files.wrapper_prefix else {}
    with Stage(f"loading {source} by transformers"), _with_metadata(name_or_path) as folder:
        model = load_fitting(
            AutoModelForCausalLM, folder, f"{role}={source}", revision=revision, use_safetensors=files.original is None,
            on_unused="ignore" if part else "refuse" if key_options else "warn", **({"config": part} if part else {}),
            **key_options, **options,
        )  # fmt: skip
    model.name_or_path = model.config.name_or_path = name_or_path
    if key_options:  # else saving the model would restore the prefix
        conversions = vars(model)["_weight_conversions"]  # that of `key_options` has the target ""
        conversions[:] = [conversion for conversion in conversions if conversion.target_patterns != [""]]
    return model


def _load_original(files: TensorFiles, role: str, coded: bool, **options: Any) -> PreTrainedModel:
    """The whole causal LM of other files than safetensors, in its own class; options: as for `load_causal_lm`."""
    name_or_path, revision = description_location(files.source, files.revision)
    config = AutoConfig.from_pretrained(name_or_path, revision=revision, trust_remote_code=False)
    config.dtype = options["dtype"]
    model = empty_model(config, options.get("attn_implementation"))
    names, device_map = {name: name for name in files.file_of}, options.get("device_map") or {"": torch.device("cpu")}
    on_unused: OnUnused = "refuse" if files.wrapper_prefix else "warn"
    model = _fill_weights(model, files, names, config.dtype, device_map, role, on_unused=on_unused, coded=coded)
    model.generation_config = load_generation_config(files.source, files.revision) or model.generation_config
    model.name_or_path = model.config.name_or_path = files.source
    return model


@contextmanager
def _with_metadata(source: str) -> Iterator[str]:
    """`source`; if its index lacks the "metadata" that transformers requires, a directory of links with it added."""
    index = next((index for kind in (SAFETENSORS, PICKLES) if (index := Path(source, kind.index)).exists()), Path())
    index_json = read_mapping(index, "index", "fetch the checkpoint again") if index.name else {"metadata": {}}
    if "metadata" in index_json:
        yield source
        return
    with TemporaryDirectory() as links_dir:
        for file in index.absolute().parent.iterdir():
            if file.name != index.name:
                Path(links_dir, file.name).symlink_to(file)
        write_json(Path(links_dir, index.name), {"metadata": {}, **index_json})
        yield links_dir


def load_generation_config(source: str, revision: str | None = None) -> GenerationConfig | None:
    """The contents of generation_config.json; None if there is no such file. Raises `UserError` for a damaged one."""
    name_or_path, revision = description_location(source, revision)
    config_path = locate_file(name_or_path, revision, GENERATION_FILE)
    if config_path is None:
        return None
    what, remedy = "generation config", "fetch the model again"
    read_json(config_path, what, remedy)
    try:
        return GenerationConfig.from_pretrained(name_or_path, revision=revision or "main", trust_remote_code=False)
    except Exception as error:
        raise UserError(f"{config_path}: damaged {what} ({reason(error)}); {remedy}") from error


def load_layers(
    files: TensorFiles,
    config: PreTrainedConfig,
    layer_indices: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    role: str = "target",
    coded: bool = False,
) -> PreTrainedModel:
    """The target with only `layer_indices`: layer i of the result has the weights of the target's `layer_indices[i]`.

    transformers assigns the tensors, as it does for a whole model: it renames and converts old ones, ties the head, and
    keeps some in float32. Reads only the embedding, those layers, the final norm and (if untied) the head. Frozen, in
    eval mode, with this toolkit's attention. coded: quantised weights stay as their file stores them, where they can be
    multiplied so. Raises `UserError` if the weights do not fit the config.
    """
    omits_layers = len(layer_indices) < config.num_hidden_layers
    config = copy.deepcopy(config)
    config.dtype = dtype  # also the dtype of the buffers that transformers creates
    model = empty_layers(config, layer_indices)
    stored_names = _stored_names(files, spec_of(model).layers, layer_indices)
    device_map = {"": torch.device(device)}
    on_unused: OnUnused = "refuse" if files.wrapper_prefix else "ignore" if omits_layers else "warn"
    return _fill_weights(model, files, stored_names, dtype, device_map, role, on_unused=on_unused, coded=coded)


def _fill_weights(
    model: PreTrainedModel, files: TensorFiles, stored_names: Mapping[str, str], dtype: torch.dtype, device_map: Any,
    role: str, *, on_unused: OnUnused, coded: bool,
) -> PreTrainedModel:  # fmt: skip
    """`model`, which is on meta, with the tensors of `files`. stored_names: its tensors' names → names in the files.

    transformers assigns the tensors: it loads a class whose instance is `model`.
    """
    is_tied = model.config.tie_word_embeddings  # `keep_codes` may set it to False for the loading
    if coded:
        stored_names = keep_codes(model, files.codes, stored_names, dtype)
    prefix = BASE_PREFIX if files.lacks_prefix else ""  # "model."; transformers adds its own, which may differ
    buffers = dict(model.named_non_persistent_buffers())  # transformers would recreate them, and with FSDP as zeros
    class_of_model = type(type(model).__name__, (type(model),), {"__new__": lambda *_, **__: model})
    device = device_map[""] if isinstance(device_map, dict) and [*device_map] == [""] else None
    options = {} if device == torch.device("cpu") else {"device_map": device_map}  # transformers' default is the CPU
    with Stage(f"reading {files.source}", len(stored_names), "tensors") as stage:
        tensors = files.open_for_transformers(set(stored_names.values()), device or "cpu", stage)
        load_fitting(
            class_of_model, None, f"{role}={files.source}", on_unused=on_unused, config=model.config, dtype=dtype,
            state_dict={key.removeprefix(prefix): tensors[stored] for key, stored in stored_names.items()}, **options,
        )  # fmt: skip
    for buffer_name, buffer in buffers.items():
        module_name, _, attr_name = buffer_name.rpartition(".")
        setattr(model.get_submodule(module_name), attr_name, buffer)
    model.config.tie_word_embeddings = is_tied
    model.requires_grad_(False).eval()
    return model if device is None else nn.Module.to(model, device)  # the rope buffers; PreTrainedModel's has no type


def _stored_names(files: TensorFiles, layers_name: str, layer_indices: Sequence[int]) -> dict[str, str]:
    """Tensor name in a model of `layer_indices` → name in the files; a layer may occur several times."""
    layer_pattern, name_in_file = re.compile(rf"(^|\.){layers_name.rpartition('.')[2]}\.(\d+)\."), dict[str, str]()
    for name in files.file_of:
        if (match := layer_pattern.search(name)) is None:
            name_in_file[name] = name
        else:
            new_indices = [index for index, layer_index in enumerate(layer_indices) if layer_index == int(match[2])]
            name_in_file |= {f"{name[: match.start(2)]}{index}{name[match.end(2) :]}": name for index in new_indices}
    return name_in_file


def load_fitting(cls: Any, where: str | None, name: str, *, on_unused: OnUnused, **options: object) -> PreTrainedModel:
    """The causal LM that `cls.from_pretrained` loads from `where`, without random values in place of missing tensors.

    name: the model's option and value. Raises `UserError` naming tensors that are missing, have another shape, or
    differ from the ones to which they are tied.
    """
    try:
        with _silence_transformers():
            model, info = cls.from_pretrained(
                where, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except UserError:
        raise
    except Exception as error:  # any error of an architecture for an unexpected config or unexpected weights
        raise UserError(f"{name}: cannot be loaded as a causal LM ({reason(error)})") from error
    is_pard2, missing = hasattr(model.config, PROJECTION_KEY), sorted(info["missing_keys"])
    unused = sorted(key for key in info["unexpected_keys"] if not (is_pard2 and key.startswith(PROJECTION)))
    faults = [f"no {list_words(missing)}"] if missing else []
    faults += [f"{key} of shape {[*has]}, not {[*wants]}" for key, has, wants in sorted(info["mismatched_keys"])[:1]]
    tied_pairs = model.get_expanded_tied_weights_keys(all_submodels=True).items()
    faults += [f"{a} and {b} differ, which are tied" for a, b in tied_pairs if a not in model.all_tied_weights_keys]
    if faults or (on_unused == "refuse" and unused):  # prefixes: the file has a missing tensor after one
        prefixes = {stored.removesuffix(key) for key in missing for stored in unused if stored.endswith(f".{key}")}
        hint = f"; there with the prefix {list_words(sorted(prefixes))}" if prefixes else ""
        hint = hint or f"; not known: {list_words(unused)}"
        raise UserError(
            f"{name}: its weights do not fit its {CONFIG_FILE}: {'; '.join(faults)}{hint if unused else ''}. Save or "
            f"fetch it again, or mend {CONFIG_FILE} (tie_word_embeddings: whether the head is the embedding)"
        )
    if unused and on_unused == "warn":
        warn_once(
            f"{name}: {list_words(unused)}: not read, as its {CONFIG_FILE} describes no such tensors; where they are "
            "more than other heads, as biases, adapters and scales are, it is another model without them"
        )
    return model


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Context manager: transformers shows neither progress nor warnings."""
    verbosity, shows_bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shows_bar:
            transformers_logging.enable_progress_bar()
