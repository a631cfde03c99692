"""Training losses that never hold a whole [tokens, vocabulary] logit matrix."""

import torch
from torch import Tensor

IGNORE = -100  # label of a position that is not supervised


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward computes the gradients chunk by chunk, so backward only scales them: no logits are kept."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
    ) -> Tensor:
        compute = hidden.dtype
        matrix = weight.to(compute)
        exact = torch.promote_types(compute, torch.float32)
        loss = hidden.new_zeros((), dtype=exact)
        need_hidden, need_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]  # type: ignore[attr-defined]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if need_weight else None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = (hidden[rows] @ matrix.T).to(exact)
            normaliser = logits.logsumexp(-1, keepdim=True)
            picked = labels[rows, None]
            loss += (normaliser - logits.gather(-1, picked)).sum()
            if need_hidden or need_weight:
                grad = logits.sub_(normaliser).exp_()  # softmax, in the logits' own memory
                grad.scatter_add_(-1, picked, grad.new_full((1, 1), -1.0).expand_as(picked))
                grad = grad.to(compute)
                if grad_hidden is not None:
                    grad_hidden[rows] = grad @ matrix
                if grad_weight is not None:
                    grad_weight += grad.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)  # type: ignore[arg-type]  # None is allowed
        ctx.weight_dtype = weight.dtype  # type: ignore[attr-defined]
        return loss

    @staticmethod
    def backward(ctx, scale):  # type: ignore[no-untyped-def]
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
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    if not torch.is_grad_enabled():  # a Function is told what requires a gradient, not whether one is wanted
        hidden, weight = hidden.detach(), weight.detach()
    keep = labels != IGNORE
    return _LinearCrossEntropy.apply(hidden[keep], weight, labels[keep], chunk)
