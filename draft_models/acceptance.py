"""Acceptance computed from the target's distribution p and the drafter's q alone, without decoding."""

from collections.abc import Callable

import torch
from torch import Tensor

HALF_PRECISION_ZERO = 2.0**-25  # float16 rounds smaller numbers to 0, which has no logarithm
FLOAT32_BYTES = 4
# Bytes of a block of logits, of which several exist at a time. On a CPU: the largest that the C heap reuses; a larger
# one is mapped again each time, and all its pages are cleared.
BLOCKS = {"cpu": 2**25, "cuda": 2**27}

Logits = Callable[[Tensor], Tensor]  # hidden states [n, d] → logits [n, V]
# (a drafter's logits [n, V], the slice of the positions they are of) → their acceptance [n] under the target's p.
AcceptanceOf = Callable[[Tensor, slice], Tensor]


def logits_at_once(columns: int, device: torch.device) -> int:
    """The number of positions whose logits over `columns` tokens are one block (see `BLOCKS`)."""
    return max(1, (BLOCKS.get(device.type, BLOCKS["cuda"]) - 1) // (FLOAT32_BYTES * columns))


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """α = Σ min(p, q) [...] of log-probabilities [..., V]: the probability that a token drawn from q is accepted.

    It is 1 − the total variation between p and q (Leviathan et al. 2023, theorem 3.5).
    """
    return torch.minimum(log_p, log_q).exp().sum(-1).clamp_max(1.0)


def acceptance_by_target(logits: Logits, hidden: Tensor) -> AcceptanceOf:
    """Acceptance under the target's full p. hidden [n, d]: its hidden states at all positions, on any device.

    If the vocabularies differ (padded embeddings) p and q are taken over the shared ids.
    """

    def accept(drafted: Tensor, rows: slice) -> Tensor:
        target_logits = logits(hidden[rows].to(drafted.device)).to(drafted.dtype)
        shared = min(target_logits.shape[-1], drafted.shape[-1])
        return acceptance(target_logits[:, :shared].log_softmax(-1), drafted[:, :shared].log_softmax(-1))

    return accept


def acceptance_by_top_k(top_ids: Tensor, top_logprobs: Tensor, tail: Tensor) -> AcceptanceOf:
    """Acceptance under the target's top-k: ids, log-probabilities [n, k], and the probability `tail` [n] of the rest.

    The acceptance is a lower bound: the overlap of p and q in the tail is unknown and counts as 0.
    """

    def accept(drafted: Tensor, rows: slice) -> Tensor:
        log_p = top_k_logs(top_logprobs[rows].to(drafted.dtype), tail[rows].to(drafted.dtype))
        return acceptance(log_p[:, :-1], drafted.log_softmax(-1).gather(-1, top_ids[rows]))

    return accept


def acceptance_by_tokens(tokens: Tensor) -> AcceptanceOf:
    """Acceptance by a text with these next `tokens` [n]: the drafter's probability of each."""

    def accept(drafted: Tensor, rows: slice) -> Tensor:
        return drafted.log_softmax(-1).gather(-1, tokens[rows, None])[:, 0].exp()

    return accept


def top_k_logs(top_logprobs: Tensor, tail: Tensor) -> Tensor:
    """log p [n, k + 1]: the k most likely tokens, then all others as one bucket of probability `tail` [n].

    Normalised again, since the inputs may have been stored in half precision.
    """
    tail_mass = torch.where(tail > 0, tail, HALF_PRECISION_ZERO)
    return torch.cat([top_logprobs, tail_mass.log()[:, None]], -1).log_softmax(-1)


def argmax_and_acceptance(logits: Logits, hidden: Tensor, accept: AcceptanceOf | None) -> tuple[Tensor, Tensor | None]:
    """A drafter's argmax [n] at its hidden states [n, d], and with `accept` its acceptance [n], in float32 or
    better."""
    choices = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
    accepted = None  # allocated once: small blocks between large ones would fragment the C heap
    start, block_size = 0, 1  # a first block of one position shows the size of the vocabulary
    while start < max(1, len(hidden)):
        rows = slice(start, start + block_size)
        drafted = logits(hidden[rows])
        start, block_size = start + block_size, logits_at_once(drafted.shape[-1], drafted.device)
        choices[rows] = drafted.argmax(-1)
        if accept is not None:
            rates = accept(drafted.to(torch.promote_types(drafted.dtype, torch.float32)), rows)
            accepted = rates.new_empty(len(hidden)) if accepted is None else accepted
            accepted[rows] = rates
    return choices, accepted


def scatter_positions(values: Tensor, keep: Tensor, fill: float) -> Tensor:
    """Scatter values [n] to the n positions marked by `keep` [B, T]; `fill` elsewhere."""
    return values.new_full(keep.shape, fill).masked_scatter(keep, values)


def analytic_tau(accepted: Tensor, documents: Tensor, window_length: int) -> Tensor:
    """1 + Σ_k Π_{i≤k} α_i over every window of `window_length` positions, [windows]: the expected tokens of a round.

    With a constant α this is Leviathan et al. 2023, equation 1. accepted [B, T]: α, NaN where unknown. documents [B, T]
    numbers the documents packed in a row. Only windows inside one document with all α known are used.
    """
    if accepted.shape[1] < window_length:
        return accepted.new_empty(0)
    windows, owners = accepted.unfold(1, window_length, 1), documents.unfold(1, window_length, 1)
    return tau_of_rounds(windows[owners[..., 0] == owners[..., -1]])


def tau_of_rounds(accepted: Tensor) -> Tensor:
    """1 + Σ_k Π_{i≤k} α_i of every row of accepted [..., length] without NaN: the expected tokens, [rows]."""
    return 1 + accepted[~accepted.isnan().any(-1)].cumprod(-1).sum(-1)
