"""Temperatures that make the product of a draft's conditionals a probability: that all its tokens so far are right.

Conditionals that are each a little too sure make a product that is far too sure. So the temperature of position i is
chosen with those before it in place, for the product up to i.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draft_models.calibration.head import POSITIONS

CANDIDATES = torch.linspace(-1.5, 1.5, 121).exp()  # temperatures, 1 among them
FEWEST = 100  # rounds whose drafts were right up to a position, for a temperature of its own: others say little of it


class Rounds(NamedTuple):
    """Drafts one by one. logits, there [r, d]: the head's logit of every token, and whether there is one. accepted [r]:
    how many tokens were right."""

    logits: Tensor
    there: Tensor
    accepted: Tensor

    def part(self, rows: slice) -> "Rounds":
        return Rounds(*(field[rows] for field in self))


def rounds_of(logits: Tensor, position: Tensor, label: Tensor) -> Rounds:
    """From tokens [n] in the order of drafting: position 1 begins a round. label: 1 where accepted."""
    row = (position == 1).cumsum(0) - 1
    shape = int(row[-1]) + 1, int(position.max())
    found, there = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    found[row, position - 1], there[row, position - 1] = logits.float(), True
    return Rounds(found, there, torch.zeros(shape[0]).index_add_(0, row, label.float()))


def fit_temperatures(rounds: Rounds) -> Tensor:
    """T [POSITIONS], one after the other: that of the least log loss of Π_{j≤i} sigmoid(z_j / T_j), 1 where few rounds
    came so far. Later positions share the last."""
    found, survival = torch.ones(POSITIONS), torch.ones(len(rounds.accepted))
    for place in range(min(POSITIONS, rounds.logits.shape[1])):
        there = rounds.there[:, place]
        right = (rounds.accepted > place).float()
        if (there & (rounds.accepted >= place)).sum() >= FEWEST:
            products = survival * (rounds.logits[:, place] / CANDIDATES[:, None]).sigmoid()
            losses = [F.binary_cross_entropy(product[there], right[there]) for product in products]
            found[place] = CANDIDATES[int(torch.stack(losses).argmin())]
        survival = survival * (rounds.logits[:, place] / found[place]).sigmoid()
    return found


def log_loss(rounds: Rounds, temperatures: Tensor) -> float:
    """Of the products up to every token of every round."""
    return float(F.binary_cross_entropy(*survivals(rounds, temperatures)))


def survivals(rounds: Rounds, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """The products [m] up to every token of every round, and whether all those tokens were right [m]."""
    places = torch.arange(rounds.logits.shape[1])
    each = (rounds.logits / temperatures[places.clamp(max=POSITIONS - 1)]).sigmoid()
    right = (rounds.accepted[:, None] > places).float()
    return each.cumprod(1)[rounds.there], right[rounds.there]


def describe(temperatures: Tensor, kept: bool, before: float, after: float, rounds: Rounds) -> dict[str, Any]:
    """What is said of it: the calibration error of the products without temperatures and with, and whether the head
    has them."""
    shown = [round(value, 4) for value in temperatures.tolist()]
    errors = {"ece_before": before, "ece_after": after}
    return {"rounds": len(rounds.accepted), **errors, "temperature": shown, "kept": kept}
