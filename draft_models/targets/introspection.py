"""Introspection: the structure of a causal LM (`ModelSpec`), found by tracing its forward over probes in place of
decoder layers, so that `LayerStack` can run the layers one by one.

A transformers forward embeds the text, calls the decoder layers in order, and applies a final norm. Here the layers are
replaced by probes that record their arguments. The trace shows, without a list of names, where the parts are, which
keywords a layer takes, and which rotary table and mask it gets. No weights are needed: parameters may be on the meta
device.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from outrider.base.errors import UserError, reason
from outrider.draft_models.targets.model_spec import LayerCall, LogitRule, ModelSpec, RotaryTable

ROWS = 7  # tokens of the traced text
WINDOW = 3  # size of a sliding window while masks are traced


class _ProbeLayer(nn.Module):
    """Replaces a layer: adds its arguments to `notes`, and returns its input."""

    def __init__(self, layer: nn.Module, notes: list[dict[str, object]]):
        super().__init__()
        self._layer = [layer]  # in a list, so that its parameters do not become this module's
        self._notes = notes

    def __getattr__(self, name: str) -> Any:  # a model may read attributes of its layers before it calls them
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._layer[0], name)

    def forward(self, *args: object, **kwargs: object) -> object:
        signature = inspect.signature(type(self._layer[0]).forward)
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments.update(arguments.pop(name, {}))
        self_name, hidden_name, *_ = arguments  # the first two parameters, whatever their names
        arguments.pop(self_name)
        self._notes.append({"hidden": arguments.pop(hidden_name), **arguments})
        return self._notes[-1]["hidden"]


_ModuleCall = tuple[str, nn.Module, tuple[object, ...], dict[str, object], object]  # name, module, arguments, output


@dataclass
class _Trace:
    """The trace of one forward: the calls before and after the layers, in order, and every layer's arguments."""

    before: list[_ModuleCall]
    after: list[_ModuleCall]
    layers: list[dict[str, object]]


def find_layers(model: PreTrainedModel) -> str:
    """The name of the module list of the decoder layers. Raises `ValueError` if there is none."""
    layer_count = model.config.num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == layer_count:
            return name
    raise ValueError("it has no list of decoder layers")


def trace_forward(model: PreTrainedModel, **options: object) -> _Trace:
    """Trace the forward of the module that holds the layers. options: replace arguments of `_trace_arguments`."""
    base_name, _, list_attribute = find_layers(model).rpartition(".")
    base_module = model.get_submodule(base_name)
    trace = _Trace([], [], [])
    embed = model.get_input_embeddings()

    def note(name: str, module: nn.Module) -> RemovableHandle:
        def hook(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
            calls = trace.after if trace.layers else trace.before  # a probe that ran has made an entry in `layers`
            calls.append((name, module, args, kwargs, output))

        return module.register_forward_hook(hook, with_kwargs=True)

    with ExitStack() as exit_stack:
        exit_stack.enter_context(_probes_for_layers(model, trace.layers))
        for name, module in list(base_module.named_modules()):
            is_in_layers = name.startswith(f"{list_attribute}.") or name in ("", list_attribute)
            if not is_in_layers and module is not embed:
                exit_stack.callback(note(f"{base_name}.{name}", module).remove)
        exit_stack.enter_context(_zeros_for_meta(base_module, embed))
        with torch.no_grad():
            base_module.eval()(**{**_trace_arguments(model), **options})
    return trace


@contextmanager
def _probes_for_layers(model: PreTrainedModel, call_records: list[dict[str, object]]) -> Iterator[None]:
    """Replace the layers by probes that record their arguments in `call_records`."""
    parent_name, _, list_attribute = find_layers(model).rpartition(".")
    parent = model.get_submodule(parent_name)
    layers = getattr(parent, list_attribute)
    setattr(parent, list_attribute, nn.ModuleList([_ProbeLayer(layer, call_records) for layer in layers]))
    try:
        yield
    finally:
        setattr(parent, list_attribute, layers)


def _trace_arguments(model: PreTrainedModel) -> dict[str, object]:
    """Arguments of the traced forward: embeddings of ones, and values for everything it would choose itself."""
    device, dtype = _device_and_dtype(model)
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return {
        "inputs_embeds": torch.ones(1, ROWS, weight.shape[1], dtype=dtype, device=device),
        "position_ids": torch.arange(ROWS, device=device)[None],
        "attention_mask": torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool, device=device).tril(),
        "past_key_values": DynamicCache(),
        "use_cache": True,
    }


def _device_and_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """The device and dtype in which a forward of `model` can run: the CPU if its parameters are on the meta device."""
    first_parameter = next(model.parameters())
    return torch.device("cpu") if first_parameter.is_meta else first_parameter.device, first_parameter.dtype


@contextmanager
def _zeros_for_meta(base: nn.Module, embed: nn.Module) -> Iterator[None]:
    """Context manager: parameters on the meta device are zeros, except the token embedding's, which is unused."""
    meta_parameters = []
    for module in base.modules():
        for name, parameter in module._parameters.items():
            if module is not embed and parameter is not None and parameter.is_meta:
                meta_parameters.append((module, name, parameter))
    for module, name, parameter in meta_parameters:
        module._parameters[name] = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype), False)
    try:
        yield
    finally:
        for module, name, parameter in meta_parameters:
            module._parameters[name] = parameter


def observe(model: PreTrainedModel) -> ModelSpec:
    """The structure of `model`. Raises `UserError` if its forward does more than `LayerStack` can do."""
    try:
        return _spec_of_trace(model)
    except UserError:
        raise
    except Exception as error:  # any error of an architecture whose code does not support this
        model_type = model.config.model_type
        raise UserError(f"architecture {model_type!r} cannot be run layer by layer ({reason(error)})") from None


def _spec_of_trace(model: PreTrainedModel) -> ModelSpec:
    """The structure of `model`. Raises `ValueError` for what `LayerStack` cannot do."""
    types = {type(x) for x in DynamicCache(config=model.config).layers if not isinstance(x, DynamicLayer)}
    if types:
        raise ValueError(f"its layers do not keep keys and values, but a state ({min(k.__name__ for k in types)})")
    trace = trace_forward(model)
    layer_count = model.config.num_hidden_layers
    if len(trace.layers) != layer_count:
        raise ValueError(f"its forward calls {len(trace.layers)} decoder layers, not {layer_count}")
    name_of_module = {id(module): name for name, module in model.named_modules()}
    layer_input = trace.layers[0]["hidden"]
    assert isinstance(layer_input, Tensor)
    positions_name, input_norm_name = _modules_before_layers(trace, layer_input.shape)
    norm_names = [name for name, module, *_ in trace.after if not isinstance(module, nn.Dropout)]
    if len(set(norm_names)) != 1:
        raise ValueError(f"after its layers come {norm_names or 'nothing'}, not one norm")
    rotary_tables = _rotary_tables(trace)
    slides = _sliding_layers(model, layer_count)
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError("it has no head")
    layer_inputs = zip(trace.layers, slides, strict=True)
    return ModelSpec(
        layers=find_layers(model),
        embed=name_of_module[id(model.get_input_embeddings())],
        norm=norm_names[0],
        head=name_of_module[id(head)],
        calls=tuple(_layer_call(arguments, rotary_tables, slide) for arguments, slide in layer_inputs),
        tables=tuple(table for table, _ in rotary_tables),
        positions=positions_name,
        input_norm=input_norm_name,
        scale=1.0 if positions_name or input_norm_name else float(layer_input.flatten()[0]),  # the embeddings were ones
        logits=_logit_rule(model, name_of_module[id(head)]),
    )


def _modules_before_layers(trace: _Trace, shape: torch.Size) -> tuple[str | None, str | None]:
    """The names of the embedding of learned positions and of the norm before the layers, whose output has `shape`."""
    positions_name = input_norm_name = None
    for name, module, _, _, output in trace.before:
        if isinstance(module, nn.Dropout) or not isinstance(output, Tensor):
            continue
        if isinstance(module, nn.Embedding):
            positions_name = name
        elif output.shape == shape:
            input_norm_name = name
    return positions_name, input_norm_name


def _rotary_tables(trace: _Trace) -> list[tuple[RotaryTable, object]]:
    """Every call of a rotary module before the layers, with its output."""
    tables: list[tuple[RotaryTable, object]] = []
    for name, module, args, kwargs, output in trace.before:
        if isinstance(output, tuple) and len(output) == 2 and all(isinstance(part, Tensor) for part in output):
            parameter_names = list(inspect.signature(type(module).forward).parameters)[1:]  # without self
            arguments = {**dict(zip(parameter_names, args, strict=False)), **kwargs}
            options = {key: value for key, value in arguments.items() if not isinstance(value, Tensor)}
            tables.append((RotaryTable(name, tuple(options.items())), output))
    return tables


def _layer_call(
    arguments: Mapping[str, object], rotary_tables: Sequence[tuple[RotaryTable, object]], is_sliding: bool
) -> LayerCall:
    """How the model calls a layer, from the layer's traced arguments. Raises `ValueError` for an unknown argument."""
    keyword_of_role: dict[str, str] = {}
    table_index = 0
    for name, value in arguments.items():
        if name == "hidden" or value is None or isinstance(value, bool):
            continue
        if isinstance(value, DynamicCache):
            keyword_of_role["cache"] = name
        elif isinstance(value, Tensor) and value.dim() == 4 and value.shape[-2:] == (ROWS, ROWS):
            keyword_of_role["mask"] = name
        elif isinstance(value, Tensor) and value.shape == (1, ROWS) and not value.is_floating_point():
            keyword_of_role["positions"] = name
        elif isinstance(value, tuple) and any(value is output for _, output in rotary_tables):
            keyword_of_role["rotary"] = name
            table_index = next(i for i, (_, output) in enumerate(rotary_tables) if value is output)
        else:
            raise ValueError(f"its layers take {name!r}, which is not known here")
    if not {"cache", "mask"} <= set(keyword_of_role):
        raise ValueError("a layer without a mask or a cache of keys and values: not attention")
    return LayerCall(tuple(sorted(keyword_of_role.items())), table_index, is_sliding)


def _sliding_layers(model: PreTrainedModel, layer_count: int) -> list[bool]:
    """Whether each layer gets a mask with a sliding window, as the model itself creates it from the config. A
    traced mask is bool, or additive: 0 where a token is visible."""
    config = model.config
    window = getattr(config, "sliding_window", None)
    if window is None:
        return [False] * layer_count
    config.sliding_window = WINDOW
    try:
        layer_arguments = trace_forward(model, attention_mask=None, past_key_values=None, use_cache=False).layers
    finally:
        config.sliding_window = window
    positions = torch.arange(ROWS)
    causal_mask = positions <= positions[:, None]
    window_mask = causal_mask & (positions > positions[:, None] - WINDOW)
    sliding_flags = []
    for arguments in layer_arguments:
        mask = next((value for value in arguments.values() if isinstance(value, Tensor) and value.dim() == 4), None)
        visible = causal_mask if mask is None else (mask if mask.dtype == torch.bool else mask == 0)[0, 0].cpu()
        if not torch.equal(visible, causal_mask) and not torch.equal(visible, window_mask):
            raise ValueError("its masks are neither causal nor a sliding window")
        sliding_flags.append(torch.equal(visible, window_mask))
    return sliding_flags


class _ConstantHead(nn.Module):
    """Replaces a head: returns the same logits for every row. A model may read the dtype of its `weight`."""

    def __init__(self, logits: Tensor):
        super().__init__()
        self.logits = logits
        self.weight = nn.Parameter(torch.zeros(1, device=logits.device, dtype=logits.dtype), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.logits.expand(*hidden.shape[:-1], -1)


def _logit_rule(model: PreTrainedModel, head_name: str) -> LogitRule:
    """What the model does to its head's logits, found by a head of known output. Raises `ValueError` if unsupported."""
    device, dtype = _device_and_dtype(model)
    head_logits = torch.linspace(-40, 40, model.config.get_text_config().vocab_size, device=device, dtype=dtype)
    parent_name, _, head_attribute = head_name.rpartition(".")
    parent = model.get_submodule(parent_name)
    head_module = getattr(parent, head_attribute)
    embed = model.get_input_embeddings()
    setattr(parent, head_attribute, _ConstantHead(head_logits))
    try:
        with _probes_for_layers(model, []), _zeros_for_meta(model, embed), torch.no_grad():
            model_logits = model.eval()(**_trace_arguments(model)).logits[0, -1]
    finally:
        setattr(parent, head_attribute, head_module)
    # The config may have a cap (Gemma 2: 30), a factor (Cohere) or a divisor (Granite).
    candidates = [LogitRule(), LogitRule(cap=getattr(model.config, "final_logit_softcapping", None))]
    for name in ("logit_scale", "logits_scaling"):
        if value := getattr(model.config, name, None):
            candidates += [LogitRule(factor=value), LogitRule(divisor=value)]
    for rule in candidates:
        if torch.equal(rule(head_logits).to(model_logits.dtype), model_logits):
            return rule
    for rule in candidates:  # none is exact
        if torch.allclose(rule(head_logits).to(model_logits.dtype), model_logits, rtol=1e-5, atol=1e-6):
            return rule
    raise ValueError("it changes its head's logits in a way that is not known here")
