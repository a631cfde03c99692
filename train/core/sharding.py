"""The trained parameters of a model in a checkpoint, and parameters sharded over processes: ZeRO-3 and FSDP2.

Every process calls what gathers or scatters shards; on an unsharded model this does nothing. DeepSpeed's ZeRO-3 and
PyTorch's FSDP2 are recognised only by their marks on a parameter: `ds_id`, or the type `DTensor`.
"""

import copy
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from outrider.base.errors import UserError, reason
from outrider.base.files import write_atomically

WEIGHTS_FILE = "model.safetensors"


def whole_parameters(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """The full values of named `parameters`: a detached view of an unsharded one, else a gathered copy."""
    full_tensors = {}
    for name, parameter in parameters:
        detached = parameter.detach()
        if isinstance(detached, DTensor):
            full_tensors[name] = detached.full_tensor()
        elif hasattr(parameter, "ds_id"):
            with _gather_parameters([parameter]):
                full_tensors[name] = parameter.detach().clone()
        else:
            full_tensors[name] = detached
    return full_tensors


@torch.no_grad()
def assign(parameter: nn.Parameter, value: Tensor) -> None:
    """Write the full `value` to `parameter`; each process writes its own shard."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        parameter.copy_(distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements))
    else:
        parameter.copy_(value)


@contextmanager
def whole_model(model: nn.Module, wrapped_model: nn.Module) -> Iterator[None]:
    """Context manager: `model` is gathered on every process, so that one process can use the model alone.

    wrapped_model: DeepSpeed's engine or another training wrapper of `model`. Changes to parameters inside are not
    written back to the shards.
    """
    fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in fsdp_modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
        vars(module)["__deepcopy__"] = functools.partial(_ordinary_copy, module)
    offload = getattr(getattr(wrapped_model, "optimizer", None), "parameter_offload", None)  # ZeRO-3 only
    if offload is not None:
        # Its hooks would run collective operations, in which the other processes do not take part.
        offload._remove_module_hooks()
        offload.forward_hooks.clear()
        offload.backward_hooks.clear()
    with _gather_parameters([p for p in model.parameters() if hasattr(p, "ds_id")]):
        yield
    if offload is not None:
        offload.setup_zero_stage3_hooks()
    for module in fsdp_modules:
        del vars(module)["__deepcopy__"]
        module.reshard()
        module.set_reshard_after_forward(module is not model, recurse=False)  # of all but the root


def _ordinary_copy(module: FSDPModule, memo: dict[int, object]) -> nn.Module:
    """A deep copy with the class that `module` had before FSDP, without FSDP's hooks and state; its own class forbids
    copies. memo: as of `copy.deepcopy`."""
    bases = (base for base in type(module).__mro__ if issubclass(base, nn.Module) and not issubclass(base, FSDPModule))
    original_class: type[nn.Module] = next(bases)
    module_copy = memo[id(module)] = original_class.__new__(original_class)
    default_attrs = vars(nn.Module())
    for name, value in vars(module).items():
        if "hook" in name and name in default_attrs:
            vars(module_copy)[name] = default_attrs[name]
        # PyTorch has no public way to undo `fully_shard`, whose state is stored under names with this prefix.
        elif name != "__deepcopy__" and not name.startswith("__composable_api_state_key"):
            vars(module_copy)[name] = copy.deepcopy(value, memo)
    return module_copy


def make_whole(model: nn.Module, *, frozen: bool = False) -> None:
    """Replace the sharded parameters of `model` by full ones: the trained ones, or with `frozen` all of them.

    Call it on every process; afterwards the model can be copied, but no longer trained.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            vars(module)["__deepcopy__"] = functools.partial(_ordinary_copy, module)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if (frozen or parameter.requires_grad) and is_sharded(parameter):
                value = whole_parameters([(name, parameter)])[name]
                module._parameters[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)


@contextmanager
def deepspeed_config(accelerator: Accelerator, loop_config: Mapping[str, float]) -> Iterator[None]:
    """Context manager: DeepSpeed's config has the training loop's `loop_config` values, by key, in place of "auto".

    `Accelerator.prepare` reads the config inside. Afterwards "auto" is restored for the next run of this process. Does
    nothing without DeepSpeed. Raises `UserError` if the launcher's config contradicts `loop_config`.
    """
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        yield
        return
    from deepspeed.utils import logger  # Linux only

    logger.setLevel(logging.ERROR)
    plugin = accelerator.deepspeed_plugin
    config = plugin.deepspeed_config
    for key, value in loop_config.items():
        if config.get(key, "auto") not in ("auto", value):
            raise UserError(f"DeepSpeed's {key}={config[key]}: the settings of `fit` make it {value}; write auto there")
    plugin.deepspeed_config = plugin.hf_ds_config.config = {**copy.deepcopy(config), **loop_config}
    try:
        yield
    finally:
        plugin.deepspeed_config = plugin.hf_ds_config.config = config
    _patch_linear()  # where `prepare` has put ZeRO-3's in place


def _patch_linear() -> None:
    """Make ZeRO-3's linear layers add the bias before rounding to bf16, as PyTorch's do.

    ZeRO-3 replaces `torch.nn.functional.linear` for the whole process, so that no gathered weight is kept for the
    backward. For inputs with more than two dimensions its function rounds the product and then the sum. A weight with
    a gradient near zero then moves in the opposite direction compared with one process.
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap  # Linux only

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None:
            return zero3_linear_wrap(input, weight)
        flat_output = zero3_linear_wrap(input.reshape(-1, input.shape[-1]), weight, bias)
        return flat_output.view(*input.shape[:-1], flat_output.shape[-1])

    if nn.functional.linear is zero3_linear_wrap:
        nn.functional.linear = linear


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether `parameter` is sharded, so that this process holds only a part of it."""
    return isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")


def _gather_parameters(parameters: list[nn.Parameter]) -> AbstractContextManager[object]:
    """A context in which ZeRO-3's `parameters` are whole on every process; without parameters it does nothing."""
    if not parameters:
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters  # Linux only

    return GatheredParameters(parameters)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name; tied parameters appear once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save_trained(model: nn.Module, folder: Path, is_writer: bool) -> None:
    """Save the trained parameters to `folder`; call it on every process, with `is_writer` on the one that writes."""
    weights = whole_parameters(trained_parameters(model).items())
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / WEIGHTS_FILE, save({name: value.contiguous() for name, value in weights.items()}))


def load_trained(model: nn.Module, folder: Path) -> None:
    """Load the parameters that `save_trained` wrote to `folder`; raises `UserError` if names or shapes differ."""
    try:
        saved, trained = load_file(folder / WEIGHTS_FILE), trained_parameters(model)
    except (OSError, SafetensorError) as error:
        remedy = f"remove {folder}: resume=true goes on before it"
        raise UserError(f"{folder / WEIGHTS_FILE}: not readable ({reason(error)}); {remedy}") from None
    # Shapes are compared if both have the same names.
    wrong_names = sorted(saved.keys() ^ trained.keys())
    wrong_names = wrong_names or sorted(name for name, p in trained.items() if p.shape != saved[name].shape)
    if wrong_names:
        raise UserError(f"{folder}: does not fit the model to train; they differ in {', '.join(wrong_names[:5])}")
    for name, parameter in trained.items():
        assign(parameter, saved[name])
