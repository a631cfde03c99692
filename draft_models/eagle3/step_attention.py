"""Attention of training-time test (EAGLE-3, arXiv 2503.01840, section 3.2): draft steps at all positions in parallel.

Step 0 runs on the target's features, every later step on the previous step's output at the same position. Position i of
step t represents the t-th drafted token after position i. It sees what the cache of a draft would hold: the entries of
step 0 up to i, and its own position's entries of steps 1 to t.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draft_models.targets.attention import grouped_attention
from draft_models.targets.band import Band

Entry = tuple[Tensor, Tensor]  # keys and values [B, Hk, T, D] of a step
EXTRA = 8  # columns that `_widened` adds; fused kernels prefer widths that are multiples of this


class Steps:
    """The entries of all steps so far, by layer; used in place of a KV cache in training.

    `now` is the current step. A step may run twice, as it does when activations are recomputed.
    """

    def __init__(self) -> None:
        self.now = 0
        self._entries: dict[int, dict[int, Entry]] = {}

    def attend(
        self, module: nn.Module, query: Tensor, entry: Entry, mask: Tensor | Band | None, layer: int, scaling: float
    ) -> Tensor:
        """query [B, H, T, D] of step `now`, whose keys and values are `entry` → [B, T, H, D].

        mask: the mask of the entries of step 0, as in `grouped_attention`.
        """
        steps = self._entries.setdefault(layer, {})
        steps[self.now] = entry
        if self.now == 0:
            return grouped_attention(module, query, *entry, mask, scaling=scaling)[0]
        own = [steps[step] for step in range(1, self.now + 1)]
        return join(module, query, steps[0], own, mask, scaling)


def join(
    module: nn.Module, query: Tensor, first: Entry, own: Sequence[Entry], mask: Tensor | Band | None, scaling: float
) -> Tensor:
    """One softmax over the entries `first`, by `mask`, and the entries of `own` at the query's position: [B, T, H, D].

    query [B, H, T, D]. The entries of `own` at a position act as one additional key: its score is the logsumexp of
    their scores, and its value is their softmax-weighted mean. So the score matrix is never larger than for `first`.
    """
    scores = torch.stack([_by_place(query, key) for key, _ in own], -1) * scaling  # [B, H, T, steps]
    weights = scores.softmax(-1)
    group = query.shape[1] // first[0].shape[1]
    mean = torch.zeros_like(query)
    for step, (_, value) in enumerate(own):
        mean = mean + weights[..., step, None] * value.repeat_interleave(group, 1)
    if mask is None:
        length = query.shape[2]
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()[None, None]
    seen = replace(mask, front=1) if isinstance(mask, Band) else F.pad(mask, (1, 0), value=True)
    wide = _widened(query, *first, scores.logsumexp(-1) / scaling)
    out, _ = grouped_attention(module, *wide, seen, scaling=scaling)
    found, share = out[..., :-EXTRA], out[..., -EXTRA, None]
    return found + share * mean.transpose(1, 2).to(out.dtype)


def _by_place(query: Tensor, key: Tensor) -> Tensor:
    """Scores [B, H, T] of queries [B, H, T, D] and keys [B, Hk, T, D] at the same positions, in float32 or better."""
    exact = torch.promote_types(query.dtype, torch.float32)
    grouped = query.unflatten(1, (key.shape[1], -1)).to(exact)
    return (grouped * key[:, :, None].to(exact)).sum(-1).flatten(1, 2)


def _widened(query: Tensor, key: Tensor, value: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three tensors, `EXTRA` columns wider, with an additional first key whose scores are `score` [B, H, T].

    A query holds its score in two columns, the rounded value and the remainder: 16 bits alone would err by 0.4 %. The
    additional key's value is 1 in a column where the others are 0, so that the output there is its attention weight.
    """
    dtype = value.dtype
    held = score.to(dtype)
    left = (score - held).to(dtype)
    query = F.pad(torch.cat([query.to(dtype), held[..., None], left[..., None]], -1), (0, EXTRA - 2))
    wide = key.shape[-1] + EXTRA
    front = key.new_zeros(wide, dtype=dtype)
    front[-EXTRA : 2 - EXTRA] = 1
    ahead = value.new_zeros(wide)
    ahead[-EXTRA] = 1

    def with_front(part: Tensor, row: Tensor) -> Tensor:
        padded = F.pad(part.to(dtype), (0, EXTRA))
        return torch.cat([row.expand(*part.shape[:2], 1, wide), padded], 2)

    return query, with_front(key, front), with_front(value, ahead)
