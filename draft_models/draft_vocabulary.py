"""A drafter that predicts over some tokens of the target's vocabulary only: those that its text consists of.

The head of a small target is a fifth of its weights or more, and a drafter reads it in every step. Most of a large
vocabulary is hardly ever said. Verification stays exact: the drafter's probability of every other token is 0.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from draft_models.losses import IGNORE


def count_tokens(rows: Iterable[Mapping[str, Tensor]], vocabulary: int) -> Tensor:
    """How often each token [vocabulary] is a supervised label in `rows`."""
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for row in rows:
        labels = row["labels"]
        counts += torch.bincount(labels[labels != IGNORE], minlength=vocabulary)[:vocabulary]
    return counts


def choose_tokens(counts: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """The `size` most frequent tokens, ascending; of equally frequent ones the lower ids. always: ids that are in."""
    wanted = counts.clone()
    wanted[list(always)] = torch.iinfo(wanted.dtype).max
    return wanted.sort(descending=True, stable=True).indices[:size].sort().values


def coverage(counts: Tensor, tokens: Tensor) -> float:
    """The share of what was counted that consists of `tokens`; 1 of nothing."""
    return float(counts[tokens].sum() / counts.sum()) if counts.sum() else 1.0


def spread(logits: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """logits [..., k] of `tokens` [k] → [..., vocabulary], so low elsewhere that the probability is 0.

    They stay finite, as what is not finite counts as a broken drafter.
    """
    lowest = torch.finfo(logits.dtype).min / 2
    return logits.new_full((*logits.shape[:-1], vocabulary), lowest).index_copy_(-1, tokens, logits)


def places(labels: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """For each label its place among `tokens`; IGNORE where it is none of them."""
    place = torch.full((vocabulary,), IGNORE, dtype=labels.dtype, device=labels.device)
    place[tokens] = torch.arange(len(tokens), dtype=labels.dtype, device=labels.device)
    return torch.where(labels == IGNORE, IGNORE, place[labels.clamp(min=0)])
