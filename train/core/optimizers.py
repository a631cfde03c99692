"""Optimizers: AdamW, and Muon for the matrices of transformer layers."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from outrider.base.errors import UserError
from outrider.base.machine import fast_dtype
from outrider.train.settings.fit import FitConfig


class Float32Muon(torch.optim.Muon):
    """Muon that orthogonalises in float32, for devices with slow bfloat16, which torch's Muon uses.

    It assumes adjust_lr_fn="original" and Nesterov momentum.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.grad))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                nesterov = parameter.grad.lerp(momentum, group["momentum"])
                rows, columns = parameter.shape
                update = orthogonal(nesterov, group["ns_coefficients"], group["ns_steps"], group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * math.sqrt(max(1.0, rows / columns)))


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], iteration_count: int, eps: float) -> Tensor:
    """`matrix` [m, n] with all singular values near 1, in its dtype, which must be at least float32.

    The Newton-Schulz iteration of Muon (Jordan et al., 2024): divide by the matrix norm, then map every singular value
    s to a s + b s³ + c s⁵, `iteration_count` times, with coefficients a, b, c. eps: the smallest norm to divide by.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    iterate = (matrix.T if is_tall else matrix) / matrix.norm().clamp(min=eps)
    for _ in range(iteration_count):
        gram = iterate @ iterate.T
        iterate = torch.addmm(iterate, torch.addmm(gram, gram, gram, beta=b, alpha=c), iterate, beta=a)
    return iterate.T if is_tall else iterate


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the layers' matrices and AdamW for everything else, as one optimizer with one state.

    The two parts work on views of this optimizer's groups and state, so a scheduler, a state dict and a
    launcher see an ordinary optimizer.
    """

    def __init__(self, adamw: torch.optim.AdamW, muon: torch.optim.Muon) -> None:
        self._parts = (adamw, muon)
        super().__init__([*adamw.param_groups, *muon.param_groups], {})
        self._share()

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Let each part see its share of this optimizer's groups, and all of the state."""
        group_start = 0
        for optimizer in self._parts:
            group_end = group_start + len(optimizer.param_groups)
            optimizer.param_groups, optimizer.state = self.param_groups[group_start:group_end], self.state
            group_start = group_end

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for optimizer in self._parts:
            optimizer.step()


def build_optimizer(model: nn.Module, config: FitConfig) -> torch.optim.Optimizer:
    """AdamW, or Muon for the layers' matrices with AdamW for the rest. Vectors have no weight decay.

    Raises `UserError` if no parameter requires a gradient, or with Muon no matrix of a layer.
    """
    matrices = layer_matrices(model) if config.optimizer == "muon" else []
    matrix_ids = {id(p) for p in matrices}
    adamw_parameters = [p for p in model.parameters() if p.requires_grad and id(p) not in matrix_ids]
    adamw_groups = [
        {"params": [p for p in adamw_parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in adamw_parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw_groups = [group for group in adamw_groups if group["params"]]
    adamw = torch.optim.AdamW(adamw_groups, lr=config.lr, betas=config.betas, fused=True) if adamw_groups else None
    if config.optimizer == "adamw":
        if adamw is None:
            raise UserError("model: no parameter requires a gradient; there is nothing to train")
        return adamw
    if not matrices:
        raise UserError("optimizer=muon: no matrix of a transformer layer is trained; use optimizer=adamw")
    # "original" scales a step to a fixed spectral norm per matrix, times sqrt(max(1, rows / columns)). So muon_lr
    # transfers across widths. "match_rms_adamw" would tie it to AdamW's scale instead.
    muon_class = torch.optim.Muon if fast_dtype(matrices[0].device) == torch.bfloat16 else Float32Muon
    muon = muon_class(
        matrices, lr=config.muon_lr, weight_decay=config.weight_decay, momentum=0.95, adjust_lr_fn="original"
    )
    return muon if adamw is None else MuonAdamW(adamw, muon)


def layer_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained 2-D parameters inside transformer layers, each once: no embedding, head or norms."""
    # Every layer of a model of transformers has this base class.
    layers = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    layer_params = (parameter for layer in layers for parameter in layer.parameters())
    return list(dict.fromkeys(p for p in layer_params if p.requires_grad and p.ndim == 2))
