"""Attention in training over two kinds of keys: those of the text, which a mask selects, and a few of each position.

Example: a later draft step of an EAGLE-3 head sees the text's keys, and the keys of earlier steps at its own position.
Shapes: B texts, N positions, H heads, Hk key heads of width D.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.draft_models.targets.attention import grouped_attention
from outrider.draft_models.targets.target import Band

KeysValues = tuple[Tensor, Tensor]  # keys and values, [B, Hk, N, D]
EXTRA = 8  # columns that `_add_key` adds; fused kernels prefer widths that are multiples of 8


def attend_jointly(
    module: nn.Module, query: Tensor, joint: KeysValues, local: KeysValues, mask: Band, scaling: float
) -> Tensor:
    """One softmax over the `joint` entries, by `mask`, and the entries `local` of the query's position: [B, N, H, D].

    query [B, H, N, D]; local: keys and values [B, N, Hk, steps, D]. The local entries of a position act as one
    additional key. The additional key's score is the logsumexp of the local scores, and its value is the mean of the
    local values, weighted by the softmax of the local scores. So the score matrix is hardly larger than for `joint`.
    """
    exact_dtype = torch.promote_types(query.dtype, torch.float32)  # float32 or better
    with torch.autocast(query.device.type, enabled=False):
        grouped_query = query.transpose(1, 2).unflatten(2, (joint[0].shape[1], -1)).to(exact_dtype)
        local_scores = grouped_query @ local[0].to(exact_dtype).mT * scaling  # [B, N, Hk, H / Hk, steps]
        local_mean = (local_scores.softmax(-1) @ local[1].to(exact_dtype)).flatten(2, 3)
    wide_qkv = _add_key(query, *joint, local_scores.logsumexp(-1).flatten(2).transpose(1, 2) / scaling)
    wider_mask = replace(mask, extra_keys=1)  # every query sees the additional key
    out, _ = grouped_attention(module, *wide_qkv, wider_mask, scaling=scaling)
    attended, local_weight = out[..., :-EXTRA], out[..., -EXTRA, None]  # [B, N, H, D], [B, N, H, 1]
    return attended + local_weight * local_mean.to(out.dtype)


def _add_key(query: Tensor, key: Tensor, value: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, `EXTRA` columns wider, with an additional first key whose scores are `score` [B, H, N].

    In the additional columns the first key is (1, 1, 0, …) and a query is (rounded score, remainder, 0, …): the score
    alone would err by 0.4 % in 16 bits. The first key's value is 1 in the first additional column, where other values
    are 0. So the output in that column is the attention weight of the first key.
    """
    dtype, padded_dim = value.dtype, key.shape[-1] + EXTRA
    rounded = score.to(dtype)
    remainder = (score - rounded).to(dtype)
    query = F.pad(torch.cat([query.to(dtype), rounded[..., None], remainder[..., None]], -1), (0, EXTRA - 2))
    first_key, first_value = torch.zeros(2, padded_dim, dtype=dtype, device=value.device)
    first_key[-EXTRA : 2 - EXTRA] = 1
    first_value[-EXTRA] = 1

    def put_first(row: Tensor, entries: Tensor) -> Tensor:
        return torch.cat([row.expand(*entries.shape[:2], 1, padded_dim), F.pad(entries.to(dtype), (0, EXTRA))], 2)

    return query, put_first(first_key, key), put_first(first_value, value)
