"""Tests that sampled tokens are draws from the target's distributions, and the number of tokens that they need.

Let p_t be the target's distribution of token x_t after the text before it, H(p_t) the entropy of p_t, and v_t a
uniform random number of ours. Two statistics are known if x_t is a draw from p_t:

* u_t = P(tokens before x_t in some order) + v_t · p_t(x_t) is uniform and independent of all earlier u (the randomised
  probability integral transform). Two orders are tested: the likeliest token first, and by id, as a sampler may go
  through the tokens. Example: p = (0.5, 0.3, 0.2) and x = the second token give u between 0.5 and 0.8.
* Σ_t (log p_t(x_t) + H(p_t)) is a martingale: each step has the mean 0.

Each test gives a p-value, which holds for any number of tokens; `independent` assumes a normal limit.

    uniform      the largest distance of the distribution of u from the diagonal, by Massart's inequality
    independent  the correlation of u_t and u_t+1
    surprise     the martingale. exp(λ · step) over its expectation has the mean 1. So the product over all tokens,
                 averaged over `LAMBDAS`, is rarely large (Markov's inequality). The product is the likelihood of the
                 answers under p^(1 + λ), over their likelihood under p
    unlikeliest  the probability of a token as unlikely as the unlikeliest token, times the number of tokens
    beginning    only the first token of each answer, by Fisher's combination of 1 − u with the likeliest token first.
                 An answer to another prompt, or by another template, is soon likely given its own beginning

`draws_of` makes the statistics of tokens, `p_values` runs the tests, and `refute` says which tests fail. For the power
of the tests, `draws_of` also draws tokens as servers with a fault would (`_faults`), and `tokens_needed` audits samples
of these draws.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.inference.core.sampling import invert

ORDERS = 2  # of the tokens, by likelihood and by id; each has its own u
ROOT_COUNT = 8  # powers of p are computed by repeated square roots: λ = ±1/2, ±1/4, …, ±1/256
LAMBDAS = torch.tensor([sign * 2.0**-k for k in range(1, ROOT_COUNT + 1) for sign in (1, -1)], dtype=torch.float64)
RUNS, MIN_HITS = 20, 18  # simulated audits, and how many of them must refuse a fault that counts as detected
MIN_TOKENS, MAX_TOKENS = 2**5, 2**16  # tokens of a simulated audit
LARGER = 4  # a simulated audit has at most so many times the tokens of the answers
SIMULATED = MAX_TOKENS // LARGER  # faults are simulated at the first tokens, at most this many
TYPICAL = (0.09, 0.3)  # ε and δ of Medusa (arXiv:2401.10774): a draft is accepted where p > min(ε, δ · exp(−H))
COPY_COUNT = 16  # draws from each distribution, for simulated audits


class Draws(NamedTuple):
    """The statistics of n drawn tokens x, float64 on the CPU. A simulation has several draws, copies, of each p."""

    u: Tensor  # [n, 2], simulated [n, copies, 2]: by likelihood and by id
    tail: Tensor  # [n], simulated [n, copies]: the probability of a token that is no likelier than x
    score: Tensor  # [n], simulated [n, copies]: log p(x) + H(p), a step of the martingale
    variance: Tensor  # [n]: of the score under p
    cumulants: Tensor  # [n, λ]: log E exp(λ · score) under p
    shift: Tensor  # [n]: the mean of the score under p as the server's precision rounds it

    @classmethod
    def join(cls, parts: "Sequence[Draws]") -> "Draws":
        """The tokens of all parts, one part after the other."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    @property
    def surprise(self) -> float:
        """The martingale in its standard deviations under p."""
        return float(self.score.sum() / self.variance.sum().sqrt().clamp(min=1e-30))


def draws_of(
    log_p: Tensor, rounded_log_p: Tensor, tokens: Tensor, generator: torch.Generator, *, simulate: bool = True
) -> tuple[Draws, dict[str, Draws]]:
    """The tokens [n] as draws from log_p float64 [n, V]; with `simulate` also draws of servers with a fault, by fault.

    rounded_log_p [n, V]: log_p in the server's precision.
    """
    cdf_by_id = log_p.exp().cumsum(-1)  # [n, V]: the probability of an id that is not larger
    log_p, ids_by_rank = log_p.sort(-1, descending=True)  # from here, columns are in the order of likelihood
    p, cdf_by_id = log_p.exp(), cdf_by_id.gather(-1, ids_by_rank)
    entropy = torch.special.entr(p).sum(-1, keepdim=True)  # [n, 1]
    scores = (log_p + entropy).where(p > 0, 0)  # [n, V]; a token without probability counts for nothing
    tail_probs = p.flip(-1).cumsum(-1).flip(-1)  # [n, V]

    def columns_of(ranks: Tensor) -> list[Tensor]:
        """u [n, k, 2], tail [n, k] and score [n, k] of the tokens with `ranks` [n, k] by likelihood."""
        tail, rank_probs = tail_probs.gather(-1, ranks), p.gather(-1, ranks)
        jitter = rank_probs * torch.rand(ranks.shape, dtype=torch.float64, generator=generator).to(p.device)
        u = torch.stack([1 - tail + jitter, cdf_by_id.gather(-1, ranks) - rank_probs + jitter], -1).clamp(0, 1)
        return [column.cpu() for column in (u, tail, scores.gather(-1, ranks))]

    variance = (p * scores.square()).sum(-1).cpu()
    shift = (rounded_log_p.exp().gather(-1, ids_by_rank) * scores).sum(-1).cpu()
    moments = [variance, _cumulants(p, entropy).cpu(), shift]  # of p, for all copies
    ranks = (ids_by_rank == tokens[:, None]).int().argmax(-1, keepdim=True)  # [n, 1]
    drawn = Draws(*(column[:, 0] for column in columns_of(ranks)), *moments)
    if not simulate:
        return drawn, {}
    uniforms = torch.rand(len(p), COPY_COUNT, dtype=torch.float64, generator=generator).to(p.device)
    return drawn, {fault: Draws(*columns_of(invert(bad_p, uniforms)), *moments) for fault, bad_p in _faults(p).items()}


def _cumulants(p: Tensor, entropy: Tensor) -> Tensor:
    """log E exp(λ (log p + H)) [n, λ] for the `LAMBDAS`, as E p^λ = Σ p^(1 + λ)."""
    power_sums, p_root = [], p
    for _ in range(ROOT_COUNT):
        p_root = p_root.sqrt()
        power_sums += [(p * p_root).sum(-1), (p / p_root).nan_to_num(0).sum(-1)]  # λ, then −λ
    return torch.stack(power_sums, -1).log() + LAMBDAS.to(p.device) * entropy


def _faults(p: Tensor) -> dict[str, Tensor]:
    """The distributions from which servers with a fault draw instead of p [n, V], likeliest token first."""
    one_hot = torch.zeros_like(p)
    one_hot[:, 0] = 1.0
    entropy = torch.special.entr(p).sum(-1, keepdim=True)
    typical_p = p.where(p > (TYPICAL[1] * (-entropy).exp()).clamp(max=TYPICAL[0]), 0)
    return {
        "a tilt of 1 %: one token in 100 is the likeliest one, not drawn": 0.99 * p + 0.01 * one_hot,
        "temperature 0.95 for 1": p ** (1 / 0.95),
        "typical acceptance of drafts that p itself draws": typical_p + (1 - typical_p.sum(-1, keepdim=True)) * p,
        "a residual forgotten: greedy drafts, and after a rejection all of p": p[:, :1] * one_hot + (1 - p[:, :1]) * p,
    }


def p_values(draws: Draws, first_token_rows: Sequence[int] = ()) -> dict[str, float]:
    """By test, a bound on the probability of draws as unusual as these. first_token_rows: of answers' first tokens."""
    n, sorted_u = len(draws.u), draws.u.sort(0).values  # [n, 2]
    ecdf_steps, centred_u = (torch.arange(n + 1) / n)[:, None], draws.u - 0.5
    max_distance = float(torch.maximum(ecdf_steps[1:] - sorted_u, sorted_u - ecdf_steps[:-1]).max())
    correlation_z = float(12 * (centred_u[1:] * centred_u[:-1]).sum(0).abs().max()) / math.sqrt(n)  # var(u) = 1/12
    # Subtract what rounding may add: errors of random sign, and a bias. Twice that, as the server rounds differently.
    rounding = 2 * (float(draws.shift.square().sum().sqrt()) + abs(float(draws.shift.sum())))
    score_sum = float(draws.score.sum())
    log_wealth = LAMBDAS * math.copysign(max(0.0, abs(score_sum) - rounding), score_sum) - draws.cumulants.sum(0)  # [λ]
    return {
        "uniform": min(1.0, ORDERS * 2 * math.exp(-2 * n * max_distance**2)),
        "independent": min(1.0, ORDERS * math.erfc(correlation_z / math.sqrt(2))),
        "surprise": math.exp(min(0.0, math.log(len(LAMBDAS)) - float(log_wealth.logsumexp(0)))),
        "unlikeliest": min(1.0, n * float(draws.tail.min())),
        "beginning": combine_u(draws.u[[*first_token_rows], 0]),
    }


def combine_u(first_u: Tensor) -> float:
    """The probability of first tokens as unlikely as those with first_u [answers] by likelihood."""
    fisher_sum = -(1 - first_u).clamp(min=torch.finfo(first_u.dtype).eps).log().sum()
    return float(torch.special.gammaincc(fisher_sum.new_tensor(len(first_u)), fisher_sum)) if len(first_u) else 1.0


def refute(p_by_test: Mapping[str, float], level: float) -> list[str]:
    """The tests that refuse, by Holm's correction: the probability that any refuses by chance is at most `level`."""
    sorted_tests = sorted(p_by_test, key=p_by_test.__getitem__)
    is_refused = [p_by_test[test] <= level / (len(sorted_tests) - rank) for rank, test in enumerate(sorted_tests)]
    return sorted_tests[: [*is_refused, False].index(False)]


def most_tried(sampled_count: int) -> int:
    """The most tokens (a power of two) of a simulated audit if `sampled_count` tokens are sampled; 0: no simulation."""
    max_tokens = min(MAX_TOKENS, LARGER * sampled_count)
    return 1 << (max_tokens.bit_length() - 1) if max_tokens >= MIN_TOKENS else 0


def tokens_needed(simulated: Draws, level: float, generator: torch.Generator) -> int | None:
    """The number of tokens (a power of two) with which 9 of 10 audits find a fault; None: more than `most_tried`.

    simulated: draws of a server with the fault.
    """
    token_count = MIN_TOKENS
    while token_count <= most_tried(len(simulated.tail)):
        detections = tries = 0
        while tries - detections <= RUNS - MIN_HITS and tries < RUNS:
            p_by_test = p_values(_sample(simulated, token_count, generator))
            detections, tries = detections + bool(refute(p_by_test, level)), tries + 1
        if detections >= MIN_HITS:
            return token_count
        token_count *= 2
    return None


def _sample(simulated: Draws, token_count: int, generator: torch.Generator) -> Draws:
    """`token_count` of the simulated tokens, drawn with replacement, one copy (of u, tail and score) of each."""
    indices, copies = (torch.randint(size, (token_count,), generator=generator) for size in simulated.tail.shape)
    return Draws(*(column[indices, copies] for column in simulated[:3]), *(column[indices] for column in simulated[3:]))
