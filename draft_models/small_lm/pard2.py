"""PARD-2 (arXiv 2605.08632): a small LM whose input embeddings also have a projection of the target's hidden states.

The layout is that of AMD-AGI/PARD (commit 6f279bf): an ordinary causal LM with `pard_token`, and the linear layer
`target_proj` in the model's safetensors or in `warp_model.bin`. The input at position t is

    embedding(token at t) + pard2_scale · target_proj(states at t − 1)

The states at a position are hidden states of the target, side by side in the order of `pard2_target_layers`. Before the
first token they are 0. A mask token, in whose place a token is drafted in the same pass, has the states of the pass's
last token of the text. The numbers in `pard2_target_layers` are indices of
transformers' `hidden_states`: 0 is the embedding, i the output of layer i − 1, and the last one (−1) the output of the
final norm. Training leaves the projection out for some texts, so the LM also drafts without it. Shapes: B texts, n
positions, d the width of the LM, H_t of the target, k layers.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.base.errors import UserError, require
from outrider.base.settings import Count, Positive, Settings, construct
from outrider.draft_models.formats.stored_tensors import open_pickled
from outrider.draft_models.targets.model_files import PROJECTION, spec_of
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.tensor_files import TensorFiles, find_file

PROJECTION_FILE = "warp_model.bin"  # of torch.save: {"target_proj.weight": [d, k · H_t]}


@dataclass(frozen=True, kw_only=True)
class ProjectionConfig(Settings):
    """The keys of config.json that describe the projection. pard2_target_dim: k · H_t, the width of its input."""

    pard2_target_layers: tuple[int, ...]
    pard2_target_dim: Count
    pard2_scale: Positive
    pard2_proj_bias: bool = False

    def boundaries(self, target: PreTrainedConfig) -> tuple[int, ...] | None:
        """The boundaries (see `LayerStack.run_with_aux`) of a target that the projection reads; None: it does not fit.

        They are in the order of `pard2_target_layers`.
        """
        layer_count = target.num_hidden_layers
        boundaries = tuple(layer if layer >= 0 else layer_count + 1 + layer for layer in self.pard2_target_layers)
        is_valid = len({*boundaries} & {*range(layer_count + 1)}) == len(boundaries)  # distinct, and in range
        return boundaries if is_valid and len(boundaries) * target.hidden_size == self.pard2_target_dim else None


CONFIG_KEYS = ("pard2", "spd_type", *(field.name for field in fields(ProjectionConfig)))  # two marks, and its fields


def projection_config(config: PreTrainedConfig) -> ProjectionConfig | None:
    """What a small LM's config says of its projection; None: it is not PARD-2. Raises `UserError` naming the key."""
    key_values = {key: getattr(config, key) for key in CONFIG_KEYS[2:] if hasattr(config, key)}
    if not (key_values or getattr(config, "pard2", False) or getattr(config, "spd_type", None) == "pard2"):
        return None
    return construct(ProjectionConfig, key_values, f"small_lm={config.name_or_path}: config.json")


class TargetProjection(nn.Module):
    """The projection `target_proj`, frozen.

    boundaries: of the target whose hidden states it reads, ascending. normed: the hidden states of the last boundary go
    through the target's final norm first.
    """

    def __init__(self, config: ProjectionConfig, tensors: dict[str, Tensor], target: PreTrainedConfig):
        """tensors: by the names of the file. target: the config of a target that fits."""
        super().__init__()
        boundaries, weight_name = config.boundaries(target) or (), f"{PROJECTION}weight"
        weight_chunks = dict(zip(boundaries, tensors[weight_name].chunk(len(boundaries), dim=1), strict=True))
        self.boundaries, self.scale = tuple(sorted(weight_chunks)), config.pard2_scale
        self.normed = self.boundaries[-1] == target.num_hidden_layers
        weight = torch.cat([weight_chunks[boundary] for boundary in self.boundaries], dim=1)  # [d, k · H_t]
        self.target_proj = nn.Linear(weight.shape[1], weight.shape[0], bias=config.pard2_proj_bias, device="meta")
        self.load_state_dict({**tensors, weight_name: weight}, assign=True)
        self.requires_grad_(False)

    def join_states(self, aux_states: Tensor, norm: nn.Module) -> Tensor:
        """The projection's input, from the target's hidden states at `boundaries`; both [B, n, k · H_t].

        norm: the target's final norm.
        """
        if not self.normed:
            return aux_states
        *chunks, last_chunk = aux_states.chunk(len(self.boundaries), dim=-1)
        return torch.cat([*chunks, norm(last_chunk)], dim=-1)

    def forward(self, states: Tensor) -> Tensor:
        """states [B, n, k · H_t] → what is added to the embeddings [B, n, d]."""
        return self.target_proj(states) * self.scale


class Pard2(LayerStack):
    """A small LM with a projection of the target's hidden states.

    target_norm: the target's final norm, in a list so that it does not become a submodule.
    """

    def __init__(self, model: PreTrainedModel, projection: TargetProjection):
        super().__init__(model, spec_of(model))
        self.projection, self.target_norm = projection, list[nn.Module]()
        is_plain = self.spec.scale == 1.0 and self.input_norm is None
        require(is_plain, "small_lm", model.config.name_or_path, "plain embeddings, as Llama or Qwen have, for PARD-2")


def read_projection(
    files: TensorFiles, config: ProjectionConfig, hidden_size: int, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor]:
    """The projection's tensors, for embeddings [hidden_size]. Raises `UserError` if one is missing or does not fit."""
    names = [f"{PROJECTION}weight", f"{PROJECTION}bias"][: 1 + config.pard2_proj_bias]  # no bias: the first name only
    is_in_model = names[0] in files.file_of
    path = None if is_in_model else find_file(files.source, PROJECTION_FILE, files.revision)
    stored_tensors = dict(files.open_stored(names)) if is_in_model else {} if path is None else open_pickled(path)
    for name, expected_shape in zip(names, ([hidden_size, config.pard2_target_dim], [hidden_size]), strict=False):
        stored_shape = [*stored_tensors[name].shape] if name in stored_tensors else "no such tensor"
        if stored_shape != expected_shape:
            raise UserError(
                f"small_lm={files.source}: {name}: expected {expected_shape} by its config.json (PARD-2), here or in "
                f"{PROJECTION_FILE}, not {stored_shape}; fetch it again"
            )
    return {name: stored_tensors[name].read().to(device, dtype) for name in names}
