"""EESD's calibration head: how likely is the token just drafted to be right?"""

import torch
from torch import Tensor, nn

POSITIONS = 10  # draft positions with a matrix of their own; later ones share the last


class CalibrationHead(nn.Module):
    """θ_M = sigmoid(W_p [W^i H_t^(T) ; H_{t+i}^(D)]), EESD §3.3, as a logit.

    H_t^(T) [d_T]: the target's last hidden state at the last verified position; H_{t+i}^(D) [d_D]: the
    drafter's at draft position i; W^i ∈ R^{d_T × d_T} for i = min(i, 10); W_p to one logit. Inputs are
    detached: the head never trains what feeds it. Starts with W^i = 1, so position matters only once learnt.
    """

    def __init__(self, target_width: int, draft_width: int):
        super().__init__()
        self.position = nn.Parameter(torch.eye(target_width).repeat(POSITIONS, 1, 1))
        self.out = nn.Linear(target_width + draft_width, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, target_hidden: Tensor, draft_hidden: Tensor, position: Tensor) -> Tensor:
        """Logits [n] for target_hidden [n, d_T], draft_hidden [n, d_D] and draft positions [n], counted from 1."""
        matrices = self.position[position.clamp(1, POSITIONS) - 1]
        seen = torch.einsum("nij,nj->ni", matrices, target_hidden.detach().to(matrices.dtype))
        return self.out(torch.cat([seen, draft_hidden.detach().to(seen.dtype)], dim=-1))[:, 0]
