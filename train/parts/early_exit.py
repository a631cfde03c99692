"""The early exit in training: its shape from the settings, and the target layers that it is built on."""

from dataclasses import replace

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from draft_models.early_exit.checkpoint import read_meta
from draft_models.early_exit.model import EarlyExit, EarlyExitStudent, exit_layers
from draft_models.targets.open_target import OpenTarget
from draft_models.targets.tensor_files import TensorFiles
from train.parts.drafter import frozen_dtype, parameters_of
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
