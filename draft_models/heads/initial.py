"""The weights of a draft head before training."""

import torch
from torch import Tensor

from outrider.draft_models.heads.files import DRAFT_TOKENS
from outrider.draft_models.heads.sizes import HeadSizes, Shapes
from outrider.draft_models.targets.stack import LayerStack


@torch.no_grad()
def initial_weights(
    sizes: HeadSizes, shapes: Shapes, stack: LayerStack, draft_ids: Tensor | None, seed: int
) -> dict[str, Tensor]:
    """Weights of `shapes`, in float32 on the target's device: a deterministic function of the arguments.

    stack: the target. draft_ids [k]: the target's tokens that the head has logits for; None: all. The logits' matrix
    and norm are rows of the target's head and the scale of its last norm. Other matrices preserve the magnitude of
    their input.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        weight = torch.randn(shape, generator=generator) * shape[-1] ** -0.5 if len(shape) == 2 else torch.ones(shape)
        weights[name] = weight.to(stack.device)
    head_rows = stack.head.weight[: sizes.vocabulary] if draft_ids is None else stack.head.weight[draft_ids]
    weights["lm_head.weight"] = head_rows.detach().float().clone()  # a copy: the target keeps its own
    signs = torch.ones(sizes.hidden, dtype=stack.dtype, device=stack.device)
    signs[::2] = -1  # mean 0 and mean square 1, so that no norm rescales them: norm(±1) · ±1 is the scale
    weights["norm.weight"] = (stack.norm(signs) * signs).float()  # not its weight: some norms multiply by 1 + weight
    return weights if draft_ids is None else {**weights, DRAFT_TOKENS: draft_ids.to(stack.device)}
