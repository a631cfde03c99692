"""A target's weights, loaded as transformers and as this runtime run them, and prepared for decoding.

By layers: this runtime runs the target's decoder layers itself, after a proof that they equal its own forward. Then
drafters can share them. A target for which the proof fails runs as a whole (`WholeModel`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.base.errors import UserError
from outrider.base.progress import Stage
from outrider.draft_models.targets.attention import ATTENTION
from outrider.draft_models.targets.int8 import quantise
from outrider.draft_models.targets.model_files import layer_stack, load_causal_lm
from outrider.draft_models.targets.open_target import OpenTarget, stored_dtype, why_not_by_layers
from outrider.draft_models.targets.proof import NotByLayersError, prove_layers, prove_rows, require_all_kept
from outrider.draft_models.targets.stack import WholeModel
from outrider.draft_models.targets.target import Target
from outrider.inference.core.target_session import Runtime
from outrider.inference.engines.cpu.recorded import can_pack, record_choices
from outrider.inference.loading.drafters import Drafters
from outrider.inference.loading.target_setup import TargetSetup
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS


@dataclass(frozen=True)
class Models:
    """The loaded models of an evaluation."""

    reference: PreTrainedModel  # the target as transformers runs it
    stack: Target  # the target as `runtime` runs it
    drafters: Drafters
    runtime: Runtime
    products: dict[str, str] = field(default_factory=dict)  # CPU kernels by question (see `engines.cpu.recorded`)


def load_models(
    config: EvaluateConfig, setup: TargetSetup, drafters: Drafters, kernel_choices: Mapping[str, str] | None = None
) -> Models:
    """Load the target, and prepare it and its drafters for decoding. kernel_choices: the CPU kernels; None: the fastest
    ones, measured now. Raises `UserError` for unavailable ones."""
    reference = load_reference(setup.target, setup.dtype, setup.device, int8=setup.int8)
    stack = load_stack(setup.target, reference, setup.dtype, setup.device, by_layers=config.by_layers, int8=setup.int8)
    with record_choices(kernel_choices) as cpu_kernels:
        prepare_models(stack, drafters, reference)
    return Models(reference, stack, drafters, make_runtime(config.runtime, setup.device), cpu_kernels)


def load_stack(
    target: OpenTarget,
    reference: PreTrainedModel | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    by_layers: bool,
    int8: bool = False,
) -> Target:
    """The target as this runtime runs it: layer by layer, or, unless `by_layers`, by its own forward as a fallback.

    reference: the target as transformers runs it, if loaded. int8: quantised to int8, computing in `dtype`. Raises
    `UserError` if neither can be proven equal to the target.
    """
    try:
        if (refusal := why_not_by_layers(target.config)) is not None:
            raise NotByLayersError(f"target={target.source}: {refusal}")
        if reference is None or can_pack(device, dtype):  # then load a separate copy: transformers' stays unpacked
            return target.stack(dtype=dtype, device=device, int8=int8, coded=device.type == "cpu")
        prove_layers(reference, f"target={target.source}")
        return layer_stack(reference)
    except NotByLayersError as error:  # for other errors no fallback would help
        if by_layers:
            raise
        print(f"by_layers=no reason={str(error)!r}", flush=True)
    fallback = WholeModel(reference or load_reference(target, dtype, device, int8=int8))
    float32_model = fallback if dtype == torch.float32 else WholeModel(load_reference(target, torch.float32, device))
    try:
        require_all_kept(target.config)
        prove_rows(float32_model)
    except UserError as error:
        raise UserError(f"target={target.source}: neither by layers nor by its own forward ({error})") from None
    return fallback


def load_reference(
    target: OpenTarget, dtype: torch.dtype, device: torch.device, *, int8: bool = False
) -> PreTrainedModel:
    """The whole target as transformers loads it: the reference of every comparison. int8: quantised to int8, computing
    in `dtype`. Its codes equal the stack's, as both quantise the stored weights."""
    attention_name = ATTENTION if why_not_by_layers(target.config) is None else None
    load_dtype = stored_dtype(target.config) if int8 else dtype
    model = load_causal_lm(
        target.source, target.revision, coded=device.type == "cpu", dtype=load_dtype, attn_implementation=attention_name
    )
    model.requires_grad_(False).eval()
    if int8:
        quantise(model, dtype, f"target={target.source}")
    return nn.Module.to(model, device)


def prepare_models(target: Target, drafters: Drafters, reference: PreTrainedModel | None = None) -> None:
    """Prepare a target and its drafters for decoding: fuse layers, pack weights for the device, share heads.

    reference: the target as transformers runs it; where its weights are codes, they are multiplied as the target's are.
    """
    from outrider.inference.engines.packing import lay_out, pack_codes  # the engines: imported only for decoding

    with Stage("laying out weights, compiling what is new"):
        if target.layered is not None:  # else it runs unchanged
            lay_out(target.layered, target.device)
        if reference is not None:
            pack_codes(reference)
        for kind, model in drafters.items():
            KINDS[kind].load_plugin().prepare(model, target)


def make_runtime(runtime_name: str, device: torch.device) -> Runtime:
    """The runtime called `runtime_name` (auto | eager | graphed); auto is graphed on CUDA and eager elsewhere."""
    if runtime_name == "graphed" or (runtime_name == "auto" and device.type == "cuda"):
        from outrider.inference.engines.graphs.cuda_graphs import Graphed  # an engine is loaded only where it is used

        return Graphed()
    return Runtime()
