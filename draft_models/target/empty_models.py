"""Models without weights, of all layers of a target or of some, and the anatomy of any of them."""

import copy
from collections.abc import Sequence
from typing import Any

from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from draft_models.target.anatomy import Anatomy
from draft_models.target.attention import ATTENTION
from draft_models.target.model_files import CONFIG_FILE
from draft_models.target.watching import observe
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


def decoder_layers(model: PreTrainedModel) -> Any:
    """The module list of its decoder layers."""
    return model.get_submodule(anatomy_of(model).layers)


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
    parts = anatomy(config)
    model = empty_model(config)
    base, _, attribute = parts.layers.rpartition(".")
    every: Any = model.get_submodule(parts.layers)
    # A layer may be wanted twice. All go on looking at one config, by which transformers chooses their attention.
    chosen = [copy.deepcopy(every[index], {id(model.config): model.config}) for index in layers]
    for place, layer in enumerate(chosen):
        number_layer(layer, place)
    setattr(model.get_submodule(base), attribute, nn.ModuleList(chosen))
    for name, values in list(vars(config).items()):
        if isinstance(values, list | tuple) and len(values) == config.num_hidden_layers:  # one for each layer
            setattr(model.config, name, [values[index] for index in layers])
    model.config.num_hidden_layers = len(layers)
    model.anatomy = parts.select(layers)  # type: ignore[assignment]
    return model


def number_layer(layer: nn.Module, index: int) -> None:
    """Make `layer` the one with this number: its keys and values go there in a cache."""
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = index  # type: ignore[assignment]
