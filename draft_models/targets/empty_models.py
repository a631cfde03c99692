"""Models without weights, of all layers of a target or of some, and the anatomy of any of them."""

import copy
from collections.abc import Sequence

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from data_prep.formats.original import CONFIG_FILE
from draft_models.targets.anatomy import Anatomy
from draft_models.targets.attention import ATTENTION
from draft_models.targets.stack import LayerStack, module_list
from draft_models.targets.watching import observe
from outrider.errors import UserError, reason

_KNOWN: dict[str, Anatomy] = {}  # by what a config says


def anatomy(config: PreTrainedConfig) -> Anatomy:
    """The anatomy of the model that `config` describes. Raises `UserError` where it cannot be run layer by layer."""
    said = f"{type(config).__name__} {config.to_json_string(use_diff=False)}"
    if said not in _KNOWN:
        _KNOWN[said] = observe(empty_model(config).float())  # in 16 bits a scale would be seen rounded
    return _KNOWN[said]


def anatomy_of(model: PreTrainedModel) -> Anatomy:
    """The anatomy of `model`, which may have only some of the layers of a target (see `empty_layers`)."""
    found = getattr(model, "anatomy", None)
    return found if isinstance(found, Anatomy) else anatomy(model.config)


def layer_stack(model: PreTrainedModel, rotary_dtype: torch.dtype | None = None) -> LayerStack:
    """The layers of `model` (see `LayerStack`). Raises `UserError` where it cannot be run layer by layer."""
    return LayerStack(model, anatomy_of(model), rotary_dtype)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The module list of its decoder layers."""
    return module_list(model, anatomy_of(model).layers)


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm after its last layer."""
    return model.get_submodule(anatomy_of(model).norm)


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The causal LM of `config` with parameters on the meta device and real buffers (rope tables).

    Raises `UserError` for a config that no model can be made of.
    """
    try:
        with init_empty_weights(include_buffers=False), no_init_weights():  # there is nothing to draw on meta
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=ATTENTION, trust_remote_code=False
            )
    except Exception as error:
        raise UserError(f"{config.name_or_path}: its {CONFIG_FILE} describes no model ({reason(error)})") from error
    model.tie_weights()
    return model


def empty_layers(config: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedModel:
    """The same with the given layers only, in that order, each as it is in the whole model."""
    return pick_layers(empty_model(config), layers, {})


def pick_layers(model: PreTrainedModel, layers: Sequence[int], copied: dict[int, object]) -> PreTrainedModel:
    """A copy of `model` with the given ones of its layers only, in that order.

    copied: what stands in the place of a part's copy, by the part's id (as in `copy.deepcopy`). It grows.
    """
    parts, every = anatomy_of(model), decoder_layers(model)
    copied[id(every)] = nn.ModuleList()
    picked = copy.deepcopy(model, copied)
    # A layer may be wanted twice. All go on looking at one config, by which transformers chooses their attention.
    chosen = [copy.deepcopy(every[index], dict(copied)) for index in layers]
    for place, layer in enumerate(chosen):
        number_layer(layer, place)
    module_list(picked, parts.layers).extend(chosen)
    for name, values in settings_by_layer(model.config).items():
        setattr(picked.config, name, [values[index] for index in layers])
    picked.config.num_hidden_layers = len(layers)
    picked.anatomy = parts.select(layers)  # type: ignore[assignment]
    return picked


def settings_by_layer(config: PreTrainedConfig) -> dict[str, Sequence[object]]:
    """The lists in `config` that have an entry for each layer, by name."""
    lists = {name: values for name, values in vars(config).items() if isinstance(values, list | tuple)}
    return {name: values for name, values in lists.items() if len(values) == config.num_hidden_layers}


def number_layer(layer: nn.Module, index: int) -> None:
    """Make `layer` the one with this number: its keys and values go there in a cache."""
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = index  # type: ignore[assignment]
