"""Models whose parameters a launcher has shared out over the processes: DeepSpeed ZeRO-3 and PyTorch's FSDP2.

Everything here is called on every process and does nothing to a model that is whole. It knows the two only by the marks
they leave on a parameter: `ds_id`, or the type `DTensor`.
"""

import copy
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from outrider.errors import UserError


def whole_parameters(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """The values of named `parameters`, whole: a detached view of what is whole anyway, else a copy."""
    whole = {}
    for name, parameter in parameters:
        detached = parameter.detach()
        if isinstance(detached, DTensor):
            whole[name] = detached.full_tensor()
        elif hasattr(parameter, "ds_id"):
            with _gathered([parameter]):
                whole[name] = parameter.detach().clone()
        else:
            whole[name] = parameter.detach()
    return whole


@torch.no_grad()
def assign(parameter: nn.Parameter, value: Tensor) -> None:
    """Write the whole `value` into `parameter`, each process into the part it holds."""
    if isinstance(parameter, DTensor):
        mine = value.to(parameter.device_mesh.device_type)
        parameter.copy_(distribute_tensor(mine, parameter.device_mesh, parameter.placements))
    else:
        parameter.copy_(value)


@contextmanager
def whole(model: nn.Module, engine: nn.Module) -> Iterator[None]:
    """`model` whole on every process, so that one of them can use it alone; `engine` is what trains it.

    Parameters changed inside are not shared out again.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
        _make_copyable(module)
    offload = getattr(getattr(engine, "optimizer", None), "parameter_offload", None)  # ZeRO-3 only
    if offload is not None:
        # Its hooks would gather and release, together with processes that are not taking part.
        offload._remove_module_hooks()
        offload.forward_hooks.clear()
        offload.backward_hooks.clear()
    with _gathered([p for p in model.parameters() if hasattr(p, "ds_id")]):
        yield
    if offload is not None:
        offload.setup_zero_stage3_hooks()
    for module in sharded:
        del vars(module)["__deepcopy__"]
        module.reshard()
        module.set_reshard_after_forward(module is not model, recurse=False)


def _make_copyable(module: FSDPModule) -> None:
    """Let `copy.deepcopy` make an ordinary module of one that FSDP holds; its class forbids any copy."""
    vars(module)["__deepcopy__"] = functools.partial(_ordinary_copy, module)


def _ordinary_copy(module: FSDPModule, memo: dict[int, object]) -> nn.Module:
    """A deep copy with the class that `module` had before FSDP took it, without FSDP's hooks and state."""
    kinds = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and not issubclass(kind, FSDPModule))
    kind: type[nn.Module] = next(kinds)
    copied = memo[id(module)] = kind.__new__(kind)
    fresh = vars(nn.Module())
    for name, value in vars(module).items():
        if "hook" in name and name in fresh:
            vars(copied)[name] = fresh[name]
        # PyTorch has no public way to undo `fully_shard`, which keeps its state under names that begin like this.
        elif name != "__deepcopy__" and not name.startswith("__composable_api_state_key"):
            vars(copied)[name] = copy.deepcopy(value, memo)
    return copied


def make_whole(model: nn.Module, *, frozen: bool = False) -> None:
    """Replace the parameters of `model` that are shared out by whole ones: the trained ones, or the frozen ones too.

    Call it on every process; nothing can train the model after that, but it can be copied.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _make_copyable(module)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if (frozen or parameter.requires_grad) and is_shared_out(parameter):
                value = whole_parameters([(name, parameter)])[name]
                module._parameters[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)


def mark_layers(model: nn.Module) -> None:
    """Name the transformer layers in `model` where FSDP's TRANSFORMER_BASED_WRAP looks for them."""
    layers = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    vars(model)["_no_split_modules"] = sorted({type(layer).__name__ for layer in layers})


@contextmanager
def deepspeed_config(accelerator: Accelerator, decided: Mapping[str, float]) -> Iterator[None]:
    """While `prepare` reads DeepSpeed's config, it has what the loop has `decided` in the place of "auto".

    The next run of this process finds "auto" again. Does nothing without DeepSpeed. Raises `UserError` where the
    launcher's config decides otherwise.
    """
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        yield
        return
    from deepspeed.utils import logger  # Linux only

    logger.setLevel(logging.ERROR)
    plugin = accelerator.deepspeed_plugin
    given = plugin.deepspeed_config
    for key, value in decided.items():
        if given.get(key, "auto") not in ("auto", value):
            raise UserError(f"DeepSpeed's {key}={given[key]}: the settings of `fit` make it {value}; write auto there")
    plugin.deepspeed_config = plugin.hf_ds_config.config = {**copy.deepcopy(given), **decided}
    try:
        yield
    finally:
        plugin.deepspeed_config = plugin.hf_ds_config.config = given
    _round_once()


def _round_once() -> None:
    """Have the linear layers of ZeRO-3 add the bias before they round to bf16, as PyTorch's own do.

    ZeRO-3 puts a function in the place of `torch.nn.functional.linear`, for the whole process, so that no gathered
    weight stays until the backward. Given more than two dimensions it rounds the product and then the sum. A weight
    whose gradient is next to nothing then moves the other way than in one process.
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap  # Linux only

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None:
            return zero3_linear_wrap(input, weight)
        rows = zero3_linear_wrap(input.reshape(-1, input.shape[-1]), weight, bias)
        return rows.view(*input.shape[:-1], rows.shape[-1])

    if nn.functional.linear is zero3_linear_wrap:
        nn.functional.linear = linear


def is_shared_out(parameter: nn.Parameter) -> bool:
    """Whether this process holds only a part of `parameter`."""
    return isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")


def _gathered(parameters: list[nn.Parameter]) -> AbstractContextManager[object]:
    if not parameters:
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters  # Linux only

    gathered: AbstractContextManager[object] = GatheredParameters(parameters)
    return gathered
