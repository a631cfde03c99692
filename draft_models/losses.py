"""Training losses that never hold a whole [tokens, vocabulary] logit matrix."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IGNORE = -100  # label of a position that is not supervised

# (logits of some rows, which rows, whether a gradient is wanted) → (summed loss, its gradient by the logits)
_Objective = Callable[[Tensor, slice, bool], tuple[Tensor, Tensor | None]]


class _LinearLoss(torch.autograd.Function):
    """A loss of hidden · weightᵀ whose forward computes the gradients chunk by chunk, so that no logits are kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, objective: _Objective, chunk: int) -> Tensor:
        compute = hidden.dtype
        matrix = weight.to(compute)
        exact = torch.promote_types(compute, torch.float32)
        loss = hidden.new_zeros((), dtype=exact)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if need_weight else None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            value, grad = objective((hidden[rows] @ matrix.T).to(exact), rows, need_hidden or need_weight)
            loss += value
            if grad is None:
                continue
            grad = grad.to(compute)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ matrix
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * scale.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * scale).to(ctx.weight_dtype),
            None,
            None,
        )


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = 1024) -> Tensor:
    """Sum over supervised positions of −log softmax(hidden · weightᵀ)[label], in float32 or better.

    hidden [..., d]; weight [V, d]; labels [...] with `IGNORE` where a position is not supervised. Only
    supervised positions reach the head, `chunk` of them at a time, so memory is chunk × V rather than
    tokens × V. Matrix products run in hidden's dtype (the autocast dtype when autocast is on); the weight's
    gradient is accumulated in float32. Equals `F.cross_entropy(hidden @ weight.T, labels, reduction="sum")`.
    """
    keep = labels != IGNORE
    wanted = labels[keep]

    def objective(logits: Tensor, rows: slice, need_grad: bool) -> tuple[Tensor, Tensor | None]:
        log_q, picked = logits.log_softmax(-1), wanted[rows, None]
        value = -log_q.gather(-1, picked).sum()
        if not need_grad:
            return value, None
        grad = log_q.exp_()
        grad.scatter_add_(-1, picked, grad.new_full((1, 1), -1.0).expand_as(picked))
        return value, grad

    return _apply(hidden, weight, keep, objective, chunk)


def linear_kl(
    hidden: Tensor, weight: Tensor, target_hidden: Tensor, target_weight: Tensor, labels: Tensor, chunk: int = 1024
) -> Tensor:
    """Sum over supervised positions of KL(p‖q), with p = softmax(target_hidden · target_weightᵀ) and
    q = softmax(hidden · weightᵀ).

    Forward KL from the target to the drafter: its gradient by q's logits is q − p. hidden, target_hidden
    [..., d]; weight, target_weight [V, d]; labels [...] only say, by `IGNORE`, which positions count. No
    gradient reaches the target's side. Chunks and dtypes as in `linear_cross_entropy`.
    """
    keep = labels != IGNORE
    known, target_matrix = target_hidden[keep].detach(), target_weight.detach()

    def objective(logits: Tensor, rows: slice, need_grad: bool) -> tuple[Tensor, Tensor | None]:
        log_q = logits.log_softmax(-1)
        log_p = (known[rows] @ target_matrix.T).to(logits.dtype).log_softmax(-1)
        p = log_p.exp()
        value = (p * (log_p - log_q)).sum()
        return value, log_q.exp_().sub_(p) if need_grad else None

    return _apply(hidden, weight, keep, objective, chunk)


def _apply(hidden: Tensor, weight: Tensor, keep: Tensor, objective: _Objective, chunk: int) -> Tensor:
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    if not torch.is_grad_enabled():  # a Function is told what requires a gradient, not whether one is wanted
        hidden, weight = hidden.detach(), weight.detach()
    with torch.autocast(device, enabled=False):
        return _LinearLoss.apply(hidden[keep], weight, objective, chunk)
