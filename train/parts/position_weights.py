"""How much each slot of a draft counts in the loss, by how likely a draft reaches the slot.

A draft of K slots begins at an anchor, a column of packed rows. Slot 0 predicts the label of the anchor's column. Slot
k predicts the label k columns later. For example, a draft has K = 3 slots, and its labels have these probabilities:

    slot                                0      1      2
    teacher's probability p             .5     .8     .9
    weight by `cat`                     1      .5     .4      1, p0, p0 · p1
    drafter's probability q             0      .6     .2
    confidence (q + 1) / 2              .5     .8     .6
    chance to get past the slot         .5     .4     .24     products of the confidences
    weight by `dpace`                   1.14   .64    .24     sums of the chances from the slot on

Weights have no gradient, and a loss is not divided by their sum. So the gradient of a slot is its weight times the
gradient without weights. If all p are 1, all weights by `cat` are 1. Weights by `dpace` are between 1/2^K and K.
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.draft_models.acceptance import acceptance_by_tokens, argmax_and_acceptance, scatter_positions
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.model_spec import LogitRule

Factors = tuple[Tensor, Tensor]  # states [..., d] and a matrix [V, d]: the logits are rule(states · matrixᵀ)
SMOOTHING = 0.5  # α of D-PACE (arXiv 2605.18810), the paper's: a slot never counts as out of reach


class Slots(NamedTuple):
    """Predictions [...] as slots of drafts of at most `longest` slots, which are weighted by `kind`.

    anchors [...]: for each prediction, the flat index of its draft's first column in packed rows of the shape `rows`,
    (B, T): row · T + column. numbers [...]: the slot of each prediction, from 0.
    """

    kind: Literal["cat", "dpace"]
    anchors: Tensor
    numbers: Tensor
    longest: int
    rows: torch.Size


def cat_weights(slots: Slots, teacher_probs: Tensor) -> Tensor:
    """The product of the labels' probabilities in the slots before each prediction [...] (CAT, the weights of PARD-2).

    teacher_probs [B, T]: the teacher's, of the label of each column; 0 without a label, since no draft gets past it.
    """
    slot_probs = F.pad(teacher_probs, (0, slots.longest - 1)).unfold(1, slots.longest, 1)  # [B, T, K], by anchor
    reach_probs = F.pad(slot_probs.cumprod(-1)[..., :-1], (1, 0), value=1.0)  # [B, T, K]: products before the slot
    return reach_probs.flatten(0, 1)[slots.anchors, slots.numbers]


def dpace_weights(slots: Slots, drafter_probs: Tensor, is_supervised: Tensor) -> Tensor:
    """The expected number of accepted tokens from each slot on (D-PACE, arXiv 2605.18810, equations 7 and 8), [...].

    drafter_probs [...]: the drafter's, of each prediction's label. is_supervised [...]: which predictions have a label.
    A draft ends at the first slot that is not among the predictions, or has no label.
    """
    anchors, slot_numbers = slots.anchors[is_supervised], slots.numbers[is_supervised]  # [n] each
    confidences = drafter_probs.new_zeros(math.prod(slots.rows), slots.longest)  # [B · T, K]
    confidences[anchors, slot_numbers] = SMOOTHING + (1 - SMOOTHING) * drafter_probs[is_supervised]
    survival_probs = confidences.cumprod(-1)  # [B · T, K]
    return survival_probs.flip(-1).cumsum(-1).flip(-1)[slots.anchors, slots.numbers]


@torch.no_grad()
def probabilities_of(tokens: Tensor, factors: Factors, rule: LogitRule) -> Tensor:
    """The probability [...] of each of `tokens` [...] by the logits of `factors`; 0 for IGNORE.

    It is computed, some positions at a time, as an acceptance: a text with these next tokens accepts a drafted token
    with the drafter's probability of the text's.
    """
    (states, matrix), supervised = factors, tokens != IGNORE
    matrix = matrix.to(states.dtype)
    acceptance_of = acceptance_by_tokens(tokens[supervised])  # [1], below: the acceptances, after the argmaxes
    probabilities = argmax_and_acceptance(lambda hidden: rule(hidden @ matrix.T), states[supervised], acceptance_of)[1]
    assert probabilities is not None
    return scatter_positions(probabilities, supervised, 0.0)


def cached_probabilities(labels: Tensor, top_ids: Tensor, top_logprobs: Tensor, tail: Tensor) -> Tensor:
    """The probability [...] of each label by the cached top k: ids, log-probabilities [..., k] and the `tail` [...].

    The least likely of the k tokens and the tail both bound the probability of another label. The smaller counts.
    """
    probabilities, is_label = top_logprobs.exp(), top_ids == labels[..., None]  # [..., k] each
    upper_bound = torch.minimum(probabilities.amin(-1), tail)  # [...]
    label_probs = torch.where(is_label.any(-1), (probabilities * is_label).sum(-1), upper_bound)
    return label_probs * (labels != IGNORE)
