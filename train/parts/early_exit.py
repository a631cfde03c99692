"""The early exit in training: its shape from the settings, and the target layers that it is built on."""

from dataclasses import replace

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from draft_models.early_exit.checkpoint import read_meta
from draft_models.early_exit.model import EarlyExit, EarlyExitStudent, exit_layers
from draft_models.targets.empty_models import empty_layers
from draft_models.targets.model_spec import context_limit
from draft_models.targets.open_target import OpenTarget
from draft_models.targets.tensor_files import TensorFiles
from inference.loading.memory_plan import Held, Place, cache_bytes, planned_device, weight_bytes
from train.parts.drafter import fit_memory, frozen_dtype, parameters_of
from train.settings.drafters import EesdConfig


def as_started(config: EesdConfig) -> EesdConfig:
    """`config` with `start` replaced by the shape of the early exit stored there."""
    if config.start is None:
        return config
    meta = read_meta(config.start)
    return replace(
        config,
        start=None,
        exit_layer=meta.exit_layer,
        exit_depth=meta.exit_depth,
        train_head=meta.own_head,
        train_layer=meta.own_layer,
        draft_vocabulary=meta.draft_vocabulary,
    )


def default_exit_layer(target: PreTrainedConfig) -> int:
    """The default exit layer N: 8 % of the layers, the middle of the paper's 5–10 %, and at least one."""
    return max(1, round(0.08 * target.num_hidden_layers))


def make_student(
    config: EesdConfig,
    target: OpenTarget,
    exit_layer: int,
    device: torch.device,
    tokens: Tensor | None,
    begun: EarlyExit | None = None,
) -> EarlyExitStudent:
    """The student. begun: an early exit with this shape and draft vocabulary to continue from."""
    layers = None if config.online else exit_layers(target.config, exit_layer)
    model = target.layers(layers, dtype=frozen_dtype(config.frozen_dtype, device), device=device)
    student = student_on(model, config, exit_layer, None if tokens is None else tokens.to(device))
    if begun is not None:
        student.drafter.load_state_dict(begun.state_dict())
    return student


def student_on(model: PreTrainedModel, config: EesdConfig, exit_layer: int, tokens: Tensor | None) -> EarlyExitStudent:
    """A new exit with draft vocabulary `tokens` on the target layers `model`."""
    return EarlyExitStudent(
        model,
        exit_layer,
        train_head=config.train_head,
        train_layer=config.train_layer,
        depth=config.exit_depth,
        objective=config.loss,
        cached=config.teacher == "cached",
        draft_tokens=tokens,
    )


def empty_student(config: EesdConfig, target: PreTrainedConfig, exit_layer: int) -> tuple[EarlyExitStudent, int]:
    """The student without weights, in the dtypes that it has here, and the number of values that are read for it."""
    layers = range(target.num_hidden_layers) if config.online else exit_layers(target, exit_layer)
    model = nn.Module.to(empty_layers(target, layers), frozen_dtype(config.frozen_dtype, planned_device()))
    if target.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    stored = {id(one): one.numel() for one in model.state_dict(keep_vars=True).values()}  # tied ones once
    size = config.draft_vocabulary
    tokens = None if size is None else torch.empty(size, dtype=torch.long, device="meta")
    return student_on(model, config, exit_layer, tokens), sum(stored.values())


def memory_of(config: EesdConfig, target: PreTrainedConfig, student: EarlyExitStudent) -> list[Held]:
    """Of each device in a training of `student`, which may have no weights."""
    read, device = target.hidden_size, planned_device()
    held = fit_memory(student, config.fit, config.seq_len, read, target.vocab_size, device)
    if config.decode_prompts:  # in addition to the student, in the dtype for serving
        place = Place.of("auto", target, context_limit(target), device)
        whole = weight_bytes(target, place) + cache_bytes(target, place)
        held.append(Held("the whole target, to decode with", whole, "decode_prompts=0"))
    return held


def describe(student: EarlyExitStudent, config: EesdConfig, files: TensorFiles, exit_layer: int) -> str:
    """One greppable line: bytes read, parameter counts, processes, objective, and the source of tau_analytic."""
    accept = "whole_target" if config.online or config.decode_prompts else "none"
    accept = "top_k_lower_bound" if accept == "none" and config.distils else accept
    trained, frozen = parameters_of(student)
    return (
        f"eesd exit_layer={exit_layer} read_bytes={files.bytes_read} read_tensors={files.tensors_read}/"
        f"{len(files.file_of)} trained_parameters={trained} frozen_parameters={frozen} "
        f"processes={PartialState().num_processes} objective={config.objective} tau_analytic={accept}"
    )
