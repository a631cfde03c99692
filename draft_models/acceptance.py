"""Acceptance computed from the target's distribution p and the drafter's q alone, without decoding.

Shapes: n positions, V tokens, d the width of hidden states; [B, T]: T positions in each of B rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

HALF_PRECISION_ZERO = 2.0**-25  # float16 rounds smaller numbers to 0, which has no logarithm
FLOAT32_BYTES = 4
# Bytes of a block of logits, of which several exist at a time. On a CPU: the largest that the C heap reuses; a larger
# one is mapped again each time, and all its pages are cleared.
BLOCK_BYTES = {"cpu": 2**25, "cuda": 2**27}

Logits = Callable[[Tensor], Tensor]  # hidden states [n, d] → logits [n, V]
# (a drafter's logits [n, V], the slice of the positions they are of) → their acceptance [n] under the target's p.
AcceptanceOf = Callable[[Tensor, slice], Tensor]


def logits_at_once(vocab_size: int, device: torch.device) -> int:
    """The number of positions whose logits over `vocab_size` tokens are a block of fewer bytes than `BLOCK_BYTES`."""
    return max(1, (BLOCK_BYTES.get(device.type, BLOCK_BYTES["cuda"]) - 1) // (FLOAT32_BYTES * vocab_size))


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """α = Σ min(p, q) [...] of log-probabilities [..., V]: the probability that a token drawn from q is accepted.

    It is 1 − the total variation between p and q (Leviathan et al. 2023, theorem 3.5).
    """
    return torch.minimum(log_p, log_q).exp().sum(-1).clamp_max(1.0)


def acceptance_by_target(to_logits: Logits, target_hidden: Tensor) -> AcceptanceOf:
    """Acceptance under the target's full p. target_hidden [n, d]: its hidden states at all positions, on any device.

    If the vocabularies differ (padded embeddings) p and q are taken over the shared ids.
    """

    def accept(draft_logits: Tensor, positions: slice) -> Tensor:
        target_logits = to_logits(target_hidden[positions].to(draft_logits.device)).to(draft_logits.dtype)
        shared_size = min(target_logits.shape[-1], draft_logits.shape[-1])
        return acceptance(target_logits[:, :shared_size].log_softmax(-1), draft_logits[:, :shared_size].log_softmax(-1))

    return accept


def acceptance_by_top_k(top_ids: Tensor, top_logprobs: Tensor, tail_p: Tensor) -> AcceptanceOf:
    """Acceptance under the target's top-k: ids, log-probabilities [n, k], and the probability `tail_p` [n] of the rest.

    The acceptance is a lower bound: the overlap of p and q in the tail is unknown and counts as 0.
    """

    def accept(draft_logits: Tensor, positions: slice) -> Tensor:
        log_p = top_k_logs(top_logprobs[positions].to(draft_logits.dtype), tail_p[positions].to(draft_logits.dtype))
        return acceptance(log_p[:, :-1], draft_logits.log_softmax(-1).gather(-1, top_ids[positions]))  # not the tail

    return accept


def acceptance_by_tokens(next_tokens: Tensor) -> AcceptanceOf:
    """Acceptance by a text with these next `next_tokens` [n]: the drafter's probability of each."""

    def accept(draft_logits: Tensor, positions: slice) -> Tensor:
        return draft_logits.log_softmax(-1).gather(-1, next_tokens[positions, None])[:, 0].exp()

    return accept


def top_k_logs(top_logprobs: Tensor, tail_p: Tensor) -> Tensor:
    """log p [n, k + 1]: the k most likely tokens, then all others as one bucket of probability `tail_p` [n].

    Normalised again, since the inputs may have been stored in half precision.
    """
    tail_mass = torch.where(tail_p > 0, tail_p, HALF_PRECISION_ZERO)
    return torch.cat([top_logprobs, tail_mass.log()[:, None]], -1).log_softmax(-1)


def argmax_and_acceptance(head: Logits, hidden: Tensor, accept: AcceptanceOf | None) -> tuple[Tensor, Tensor | None]:
    """A drafter's argmax [n] at its hidden states [n, d], and with `accept` its acceptance [n], in float32 or
    better."""
    argmax_ids = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
    acceptances = None  # allocated once: small blocks between large ones would fragment the C heap
    start, block_size = 0, 1  # a first block of one position shows the size of the vocabulary
    while start < max(1, len(hidden)):  # once even without positions: `acceptances` becomes a tensor
        positions = slice(start, start + block_size)
        draft_logits = head(hidden[positions])
        start, block_size = start + block_size, logits_at_once(draft_logits.shape[-1], draft_logits.device)
        argmax_ids[positions] = draft_logits.argmax(-1)
        if accept is not None:
            block_rates = accept(draft_logits.to(torch.promote_types(draft_logits.dtype, torch.float32)), positions)
            acceptances = block_rates.new_empty(len(hidden)) if acceptances is None else acceptances
            acceptances[positions] = block_rates
    return argmax_ids, acceptances


def scatter_positions(values: Tensor, keep_mask: Tensor, fill: float) -> Tensor:
    """Scatter values [n] to the n positions marked by `keep_mask` [B, T]; `fill` elsewhere."""
    return values.new_full(keep_mask.shape, fill).masked_scatter(keep_mask, values)


def analytic_tau(alpha: Tensor, document_ids: Tensor, window_length: int) -> Tensor:
    """1 + Σ_k Π_{i≤k} α_i over every window of `window_length` positions, [windows]: the expected tokens of a round.

    With a constant α this is Leviathan et al. 2023, equation 1. alpha [B, T]: α, NaN where unknown. document_ids [B, T]
    numbers the documents packed in a row. Only windows inside one document with all α known are used.
    """
    if alpha.shape[1] < window_length:
        return alpha.new_empty(0)
    alpha_windows, document_windows = alpha.unfold(1, window_length, 1), document_ids.unfold(1, window_length, 1)
    return tau_of_rounds(alpha_windows[document_windows[..., 0] == document_windows[..., -1]])


def tau_of_rounds(alpha: Tensor) -> Tensor:
    """1 + Σ_k Π_{i≤k} α_i of every row of alpha [..., length] without NaN: the expected tokens, [rows]."""
    return 1 + alpha[~alpha.isnan().any(-1)].cumprod(-1).sum(-1)
