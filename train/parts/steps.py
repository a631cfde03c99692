"""The steps of EAGLE-3's training-time test on packed rows: what each step predicts, and at which positions.

A draft begins at each position i, with the text's token i + 1, and step t drafts token i + 2 + t. Example: a row with
the labels a b c d, where labels[i] is the token after position i, and two steps. Step t at position i has the label at
position i + 1 + t:

    position   0  1  2  3
    step 0     b  c  d  –
    step 1     c  d  –  –
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.attention import packed_band
from outrider.draft_models.targets.target import Band, QueryBlock

WATCHED_DRAFT = 4  # draft length for an evaluation's τ: fixed, so that τ depends on the weights alone
NEARLY_ALL = 0.95  # share of positions from which a step runs at all of them, which is then faster than copying some


class Predictions(NamedTuple):
    """Predictions of a head, ordered by the positions of their labels."""

    hidden: Tensor  # [n, H]: the outputs of the head
    labels: Tensor  # [n]: flat indices of the labels into [B, T]
    steps: Tensor  # [n]: the step of each prediction, which is its token's number in a draft, from 0


def loss_mask_per_step(labels: Tensor, documents: Tensor, step_count: int) -> Tensor:
    """bool [B, T, step_count]: whether there is something to predict at a position i of packed rows [B, T] in step t: a
    label at position i + 1 + t of its document."""

    def ahead(values: Tensor, fill: int) -> Tensor:
        """The values at the positions i + 1 + t, `fill` beyond the row."""
        return F.pad(values, (0, step_count), value=fill).unfold(1, step_count + 1, 1)[..., 1:]  # [B, T, steps]

    return (ahead(labels, IGNORE) != IGNORE) & (ahead(documents, -2) == documents[..., None])


def acceptance_of_drafts(accept_probs: Tensor) -> Tensor:
    """α of every draft on the text, of min(`WATCHED_DRAFT`, S) tokens: [B, positions, tokens]; NaN where there is none.

    accept_probs [B, T, S]: α by the label's position and step. Step i of the draft that begins after position t has the
    label of position t + 1 + i.
    """
    draft_length = min(WATCHED_DRAFT, accept_probs.shape[2])
    draft_count = max(0, accept_probs.shape[1] - draft_length)
    return torch.stack([accept_probs[:, step + 1 : step + 1 + draft_count, step] for step in range(draft_length)], -1)


def positions_to_run(run_mask: Tensor) -> Tensor | None:
    """The flat indices [B, N] of the positions at which a step runs; None: all.

    run_mask: bool [B, T]. N is the largest number in a row; rows with fewer positions get others besides.
    """
    max_count, row_length = max(1, int(run_mask.sum(1).max())), run_mask.shape[1]
    if max_count > NEARLY_ALL * row_length:
        return None
    row_starts = row_length * torch.arange(len(run_mask), device=run_mask.device)[:, None]  # [B, 1]
    return row_starts + run_mask.byte().argsort(dim=1, descending=True, stable=True)[:, :max_count]


@dataclass(frozen=True, kw_only=True)
class QueriesAt(Band):
    """The mask of attention of N queries at positions `last` [B, N] of packed rows: query i of row b sees the keys
    first_keys[b, i] to last[b, i]. A block's queries are numbers among the N, its keys are positions."""

    last: Tensor

    @classmethod
    def of(cls, band: Band, documents: Tensor, positions: Tensor) -> Self:
        """The queries at `positions` [B, N] of the rows `documents` [B, T] with the mask `band`; on a CPU B is 1."""
        first_keys, (ranges,) = band.first_keys.gather(1, positions), packed_band(documents.gather(1, positions)).blocks
        lows, highs = first_keys.amin(0).tolist(), positions.amax(0).tolist()
        blocks = (
            QueryBlock(begin, end, min(lows[begin:end]), max(highs[begin:end]) + 1, second_key=end)  # no 2nd range
            for begin, end, *_ in ranges
        )
        return cls(first_keys, (tuple(blocks),), last=positions)

    def block(self, block: QueryBlock) -> Tensor:
        """The mask of a block, bool [B, 1, queries, extra_keys + keys]; True = attend. block[:2]: begin and end."""
        keys, query_slice = torch.arange(block.first_key, block.key_end, device=self.last.device), slice(*block[:2])
        is_visible = (keys >= self.first_keys[:, query_slice, None]) & (keys <= self.last[:, query_slice, None])
        return F.pad(is_visible[:, None], (self.extra_keys, 0), value=True)
