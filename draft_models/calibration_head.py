"""The calibration head of EESD (arXiv 2406.03853): the probability that the token just drafted is right.

The paper defines it for early exits. Here it reads a hidden state of any drafter that has one: an early exit's, a small
LM's last one, or the output of an EAGLE-3 head that is the next step's feature.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

POSITIONS = 10  # draft positions with own weights; later ones share the last
SURE = 12.0  # log-odds are clamped to ± this


# What stop rules ask how probably a drafted token is right, called as `CalibrationHead.forward`: this head or a
# drafter's own.
AcceptanceHead = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class CalibrationHead(nn.Module):
    """θ_M = sigmoid(W_p [W^i H_t^(T) ; H_{t+i}^(D)]), EESD §3.3, as a logit.

    H_t^(T) [d_T]: the target's last hidden state at the last verified position. H_{t+i}^(D) [d_D]: the drafter's at
    draft position i. W_p is [1, d_T + d_D], W^i is [d_T, d_T] with i = min(i, 10).

    W_p and W^i are consecutive linear maps, so they reduce to one vector per position, w_T W^i. With that stored as
    `target` [10, d_T], θ_M costs two dot products. `bias` [10] is per position too. Inputs are detached: gradients
    never reach the drafter.

    In addition to the paper it uses the drafter's own probability: `odds` [] weighs the log-odds log(q / (1 − q)).
    `temperature` [10], by position, divides the logit; it is fitted after the training of the other parameters.
    """

    temperature: Tensor

    def __init__(self, target_width: int, draft_width: int):
        super().__init__()
        self.target = nn.Parameter(torch.zeros(POSITIONS, target_width))
        self.draft = nn.Parameter(torch.zeros(draft_width))
        self.bias = nn.Parameter(torch.zeros(POSITIONS))
        self.odds = nn.Parameter(torch.zeros(()))
        self.register_buffer("temperature", torch.ones(POSITIONS))

    def forward(self, target_hidden: Tensor, draft_hidden: Tensor, position: Tensor, log_probability: Tensor) -> Tensor:
        """Logits [n] for target_hidden [n, d_T], draft_hidden [n, d_D], draft positions [n], counted from 1, and the
        draft's log q [n] of its tokens."""
        return self.weigh(target_hidden, draft_hidden, position, log_odds(log_probability.detach()))

    def weigh(self, target_hidden: Tensor, draft_hidden: Tensor, position: Tensor, logit: Tensor) -> Tensor:
        """The same from the draft's log-odds `logit` [n] in place of its log q."""
        index = position.clamp(1, POSITIONS) - 1
        logits = (self.target[index] * target_hidden.detach().to(self.target.dtype)).sum(-1)
        logits = logits + draft_hidden.detach().to(self.draft.dtype) @ self.draft + self.bias[index] + self.odds * logit
        return logits / self.temperature[index]


def log_odds(log_probability: Tensor) -> Tensor:
    """log(q / (1 − q)) from log q, clamped to ± `SURE`, even if q rounds to 0 or 1."""
    log_q = log_probability.float().clamp(max=-1e-6)
    return (log_q - (-log_q.expm1()).log()).clamp(-SURE, SURE)
