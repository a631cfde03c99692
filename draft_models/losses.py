"""Training losses that never hold a whole [tokens, vocabulary] logit matrix.

Each loss (`linear_cross_entropy`, `linear_divergence`, `linear_topk_divergence`) picks the supervised positions and
defines an objective: the value of the loss and its gradient for some rows of logits, a row for each position.
`_LinearLoss` computes the logits in chunks of rows, gives each chunk to the objective in pieces, and sums values and
gradients in its forward. A `LogitRule` is what a model does to its head's logits, such as a soft cap.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.draft_models.acceptance import FLOAT32_BYTES, acceptance, logits_at_once, top_k_logs
from outrider.draft_models.targets.model_spec import LogitRule
from outrider.draft_models.targets.settings import Divergence

PLAIN = LogitRule()
IGNORE = -100  # label of a position that is not supervised
DIVERGENCES = get_args(Divergence)
OVERLAPS = ("total_variation", "acceptance", "kl_tv")  # functions of α = Σ min(p, q)
KL_FADES = 3.0  # kl_tv: the rate η, in λ = exp(−η α), at which KL gives way to total variation
COPIES = 12  # most copies of its logits that an objective makes
PIECE = 2**20  # numbers of such a copy, on a CPU; elsewhere only `logits_at_once` limits it


def rows_at_once(vocab_size: int, device: torch.device) -> int:
    """Rows per chunk of logits over a head's `vocab_size`: enough to keep a GPU busy.

    On a CPU, enough to make the weight's gradient, which is accumulated once per chunk, a small part: in chunks of 256
    rows it took as long as the softmax over 8,192 tokens.
    """
    if device.type != "cpu":
        return max(1024, logits_at_once(vocab_size, device))
    return max(512, min(2048, 2 * logits_at_once(vocab_size, device)))


def rows_of_copies(vocab_size: int, device: torch.device) -> int:
    """Rows of logits over `vocab_size` tokens that an objective sees at a time: on a CPU few, which fit its caches."""
    return min(logits_at_once(vocab_size, device), max(1, PIECE // vocab_size) if device.type == "cpu" else 2**30)


def loss_bytes(vocab: int, columns: int, device: torch.device) -> int:
    """The most bytes that a loss of a head over `vocab` tokens takes at a time. columns: of the target's logits."""
    chunk = rows_at_once(vocab, device)
    return FLOAT32_BYTES * (chunk * (vocab + columns) + COPIES * min(chunk, rows_of_copies(columns, device)) * columns)


_ValueAndGrad = tuple[Tensor, Tensor | None]  # the loss of each row [n], its gradient w.r.t. the logits [n, V]
# (logits of some rows, which rows, whether to compute a gradient, the target's logits for them, or None)
_Objective = Callable[[Tensor, slice, bool, Tensor | None], _ValueAndGrad]


class _Teacher:
    """The target's logits for the rows of a loss, which are asked for in ascending order.

    states [m, d']; matrix [V', d'] of the logits; owners: the row of `states` for each of the n rows, ascending. The
    logits of a block of states are computed when the first of them is asked for.
    """

    def __init__(self, states: Tensor, matrix: Tensor, owners: Sequence[int]):
        self.states, self.matrix, self.owners = states, matrix, owners
        self._block = range(0)  # the rows of `states` whose logits are computed
        self._block_logits = states.new_empty(0, len(matrix))

    def logits(self, rows: slice) -> Tensor:
        """[states, V'] of the states of these rows, each state once."""
        first_state, end_state = self.owners[rows.start], self.owners[rows.stop - 1] + 1
        if end_state > self._block.stop:
            block_size = logits_at_once(len(self.matrix), self.states.device)
            self._block = range(first_state, min(max(end_state, first_state + block_size), len(self.states)))
            self._block_logits = self.states[first_state : self._block.stop] @ self.matrix.T
        return self._block_logits[first_state - self._block.start : end_state - self._block.start]


class _LinearLoss(torch.autograd.Function):
    """A loss of hidden · weightᵀ. Its forward computes the gradients chunk by chunk, so no logits are kept.

    hidden [n, d], weight [V, d]. A product has `chunk` rows. The objective makes several copies of its logits, so it
    gets `piece` of these rows at a time, transformed by `rule`. shares [n]: weights of the rows; None: 1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        objective: _Objective,
        rule: LogitRule,
        chunk: int,
        piece: int,
        shares: Tensor | None,
        teacher: _Teacher | None,
    ) -> Tensor:
        cast_weight = weight.to(hidden.dtype)
        exact_dtype = torch.promote_types(hidden.dtype, torch.float32)
        loss = hidden.new_zeros((), dtype=exact_dtype)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact_dtype) if need_weight else None
        logit_buffer = hidden.new_empty(min(chunk, hidden.shape[0]), weight.shape[0])
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = torch.mm(hidden[rows], cast_weight.T, out=logit_buffer[: hidden.shape[0] - start])  # [chunk, V]
            for begin, piece_logits in zip(range(start, start + chunk, piece), logits.split(piece), strict=False):
                piece_slice = slice(begin, begin + len(piece_logits))
                target_logits = None if teacher is None else teacher.logits(piece_slice).to(exact_dtype)
                raw_logits = piece_logits.to(exact_dtype)
                row_losses, grad = objective(rule(raw_logits), piece_slice, need_hidden or need_weight, target_logits)
                loss += row_losses.sum() if shares is None else (row_losses * shares[piece_slice]).sum()
                if grad is not None:
                    grad = grad if rule == PLAIN else grad * rule.slope(raw_logits)
                    piece_logits.copy_(grad if shares is None else grad.mul_(shares[piece_slice, None]))
            # From here on `logits` holds the loss's gradient w.r.t. the logits, if one is needed.
            if grad_hidden is not None:
                grad_hidden[rows] = logits @ cast_weight
            if grad_weight is not None:
                grad_weight += logits.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        hidden_grad = None if grad_hidden is None else grad_hidden * loss_grad.to(grad_hidden.dtype)
        weight_grad = None if grad_weight is None else (grad_weight * loss_grad).to(ctx.weight_dtype)
        return hidden_grad, weight_grad, *(None,) * 6  # the further arguments of `forward`


def head_product(head: nn.Linear, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [..., d] and a matrix [V, d] whose product is the logits of `head`; a bias is an additional column."""
    bias: Tensor | None = head.bias
    if bias is None:
        return hidden, head.weight
    ones = hidden.new_ones((*hidden.shape[:-1], 1))
    return torch.cat([hidden, ones], -1), torch.cat([head.weight, bias[:, None]], 1)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, rule: LogitRule = PLAIN, shares: Tensor | None = None
) -> Tensor:
    """The sum of −log softmax(hidden · weightᵀ)[label] over supervised positions, in float32 or better.

    hidden [..., d]; weight [V, d]; labels [...], `IGNORE` at unsupervised positions. Only supervised positions reach
    the head, `rows_at_once` of them at a time. Matrix products run in hidden's dtype, or in autocast's. The weight's
    gradient is accumulated in float32. rule: the model's transformation of its head's logits. shares [...]: weights of
    the positions. Without these two the loss equals `F.cross_entropy(hidden @ weight.T, labels, reduction="sum")`.
    """
    keep_mask = labels != IGNORE
    label_ids, shares = labels[keep_mask], None if shares is None else shares[keep_mask]

    def objective(logits: Tensor, rows: slice, need_grad: bool, target_logits: Tensor | None) -> _ValueAndGrad:
        grad, row_labels = logits.softmax(-1), label_ids[rows, None]
        row_losses = _normaliser(logits, grad) - logits.gather(-1, row_labels)[:, 0]
        if not need_grad:
            return row_losses, None
        grad.scatter_add_(-1, row_labels, grad.new_full((1, 1), -1.0).expand_as(row_labels))
        return row_losses, grad

    return _apply(hidden[keep_mask], weight, objective, rule, shares)


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    target_hidden: Tensor,
    target_weight: Tensor,
    labels: Tensor | None,
    kind: str,
    *,
    rule: LogitRule = PLAIN,
    target_rule: LogitRule = PLAIN,
    tokens: Tensor | None = None,
    owners: Tensor | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """The sum of D(p, q) over supervised positions; `kind`, one of `DIVERGENCES`, selects D.

    p = softmax(target_hidden · target_weightᵀ) is the target's distribution, q = softmax(hidden · weightᵀ) the
    drafter's. rule, target_rule: each model's transformation of its head's logits.

    forward_kl: Σ p log(p/q). reverse_kl: Σ q log(q/p). jensen_shannon: (KL(p‖m) + KL(q‖m)) / 2 with m = (p + q)/2.
    total_variation: ½ Σ |p − q| = 1 − Σ min(p, q), the probability that a token drawn from q is rejected.
    Two optimise the acceptance α = Σ min(p, q) (LK losses, arXiv:2602.23881). acceptance: −log α. kl_tv: λ · forward_kl
    + (1 − λ) · total_variation with λ = exp(−3α) per position; no gradient passes through λ.

    tokens [V]: the draft vocabulary; None: the target's. q is 0 at all other tokens. `OVERLAPS` use p unchanged: other
    tokens add nothing to Σ min(p, q), so positions where the target emits such a token count as lost. The KLs would be
    infinite there. They use p conditioned on `tokens`, which only needs these rows of target_weight.

    hidden [..., d]; weight [V, d]; target_hidden [..., d']; target_weight [V', d']. labels [...] only select positions:
    those that are not `IGNORE`. None: all of hidden [n, d]. Only then owners [n] may hold, for each row of hidden, its
    row of target_hidden [m, d']; owners ascend without gaps, and each p is computed once. shares [...]: weights of the
    positions. If V ≠ V' (padded embeddings) both distributions are taken over the shared ids. No gradient reaches the
    target's side. Chunks and dtypes are those of `linear_cross_entropy`.
    """
    if labels is not None:
        hidden, target_hidden = (states[labels != IGNORE] for states in (hidden, target_hidden))
        shares = None if shares is None else shares[labels != IGNORE]
    if tokens is not None and kind not in OVERLAPS:
        target_weight, tokens = target_weight[tokens], None
    shared_vocab = min(weight.shape[0], target_weight.shape[0])
    target_matrix = target_weight.detach()[: shared_vocab if tokens is None else None]
    target_states, pad_columns = target_hidden.detach(), weight.shape[0] - shared_vocab

    def objective(logits: Tensor, rows: slice, need_grad: bool, target_logits: Tensor | None) -> _ValueAndGrad:
        assert target_logits is not None
        p_rows = None if owners is None else owners[rows] - owners[rows.start]  # owners 4, 4, 5 → rows 0, 0, 1 of p
        if kind == "forward_kl":
            row_losses, grad = _forward_kl(target_rule(target_logits), logits[:, :shared_vocab], p_rows)
        else:
            log_p, log_q = target_rule(target_logits).log_softmax(-1), logits[:, :shared_vocab].log_softmax(-1)
            log_p = log_p if tokens is None else log_p[:, tokens]
            log_p = log_p if p_rows is None else log_p[p_rows]
            row_losses, log_q_slope = _divergence(kind, log_p, log_q)
            if not need_grad:
                return row_losses, None
            grad = log_q_slope - log_q.exp_() * log_q_slope.sum(-1, keepdim=True)
        return row_losses, F.pad(grad, (0, pad_columns)) if pad_columns else grad

    teacher_rows = range(len(hidden)) if owners is None else owners.tolist()
    return _apply(hidden, weight, objective, rule, shares, _Teacher(target_states, target_matrix, teacher_rows))


def linear_topk_divergence(
    hidden: Tensor,
    weight: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
    tail: Tensor,
    labels: Tensor,
    kind: str,
    *,
    rule: LogitRule = PLAIN,
    shares: Tensor | None = None,
) -> Tensor:
    """`linear_divergence` if only the target's k most likely tokens are known: D over k + 1 buckets.

    top_ids, top_logprobs [..., k]. tail [...]: the probability of all other tokens, which form one bucket of p and of
    q. The result equals the full divergence if p / q is constant within the tail; otherwise it is smaller (for kl_tv
    each term is smaller, but λ differs). p is normalised again (see `top_k_logs`). hidden, weight, labels, `kind` and
    shares as in `linear_divergence`.

    With a draft vocabulary, top_ids are indices into it, and `IGNORE` for tokens outside it. These tokens are treated
    as in `linear_divergence`: they add nothing to overlaps, and the KLs condition p on the others. Their share of the
    tail is unknown: the whole tail counts as the drafter's other tokens, unless the drafter has no others.
    """
    keep_mask = labels != IGNORE
    logprobs, tail_probs = top_logprobs[keep_mask], tail[keep_mask]
    all_buckets = _TopBuckets.of(top_ids[keep_mask], weight.shape[0])

    def objective(logits: Tensor, rows: slice, need_grad: bool, target_logits: Tensor | None) -> _ValueAndGrad:
        lowest = torch.finfo(logits.dtype).min / 4  # finite, since 0 · −∞ is NaN
        buckets = all_buckets.part(rows)
        empty_mask = buckets.impossible
        log_p = top_k_logs(logprobs[rows].to(logits.dtype), tail_probs[rows].to(logits.dtype))
        log_p = log_p.masked_fill(empty_mask, lowest)
        if kind not in OVERLAPS:
            log_p = log_p.log_softmax(-1)
        log_q, tail_q = buckets.buckets(logits)
        log_q = log_q.masked_fill_(empty_mask, lowest)
        row_losses, log_q_slope = _divergence(kind, log_p, log_q)
        if not need_grad:
            return row_losses, None
        return row_losses, buckets.spread(log_q_slope - log_q.exp_() * log_q_slope.sum(-1, keepdim=True), tail_q)

    return _apply(hidden[keep_mask], weight, objective, rule, None if shares is None else shares[keep_mask])


@dataclass(frozen=True)
class _TopBuckets:
    """Per row: the k tokens with known target probability, plus one bucket for all remaining tokens.

    Example: a drafter of 4 tokens, and the ids 2, `IGNORE` and 0. The four buckets are token 2, nothing, token 0, and
    tokens 1 and 3 together. Each of the k tokens needs a column of the logits to read and write. The second token
    borrows that of the first: columns are 2, 2, 0, and stand_in is 0, 0, 2. Equal values are then written to column 2.
    """

    outside: Tensor  # bool [n, k]: not in the drafter's vocabulary
    columns: Tensor  # int64 [n, k]: the column of each token; tokens outside borrow that of the first token inside
    stand_in: Tensor  # int64 [n, k]: the index along k of the token to which the column belongs
    all_outside: Tensor  # bool [n, 1]: all k tokens are outside; their columns are 0
    complete: Tensor  # bool [n, 1]: the k tokens are the whole vocabulary, so the last bucket is empty

    @classmethod
    def of(cls, ids: Tensor, vocab_size: int) -> "_TopBuckets":
        """Create it from ids [n, k] in a vocabulary of `vocab_size` tokens, `IGNORE` for those outside it."""
        outside = ids == IGNORE
        top_indices = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        stand_in = torch.where(outside, (~outside).byte().argmax(-1, keepdim=True), top_indices)
        n_inside = (~outside).sum(-1, keepdim=True)
        return cls(outside, ids.gather(-1, stand_in).clamp(min=0), stand_in, n_inside == 0, n_inside == vocab_size)

    def part(self, rows: slice) -> "_TopBuckets":
        return _TopBuckets(*(getattr(self, field.name)[rows] for field in fields(self)))

    @property
    def impossible(self) -> Tensor:
        """bool [n, k + 1]: empty buckets."""
        return torch.cat([self.outside, self.complete], -1)

    def buckets(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """log q [n, k + 1] of the buckets, and q [n, V] conditioned on the last bucket; overwrites the logits."""
        top_logits = logits.gather(-1, self.columns)
        tail_logits = logits.scatter_(-1, self.columns, torch.where(self.all_outside, top_logits, -torch.inf))
        tail_q = tail_logits.softmax(-1)
        bucket_logit = _normaliser(tail_logits, tail_q)[:, None].masked_fill(self.complete, -torch.inf)
        if self.columns.shape[1] >= logits.shape[1]:  # else no row can have `complete`
            tail_q = torch.where(self.complete, 0.0, tail_q)
        return torch.cat([top_logits.masked_fill(self.outside, -torch.inf), bucket_logit], -1).log_softmax(-1), tail_q

    def spread(self, bucket_grad: Tensor, tail_q: Tensor) -> Tensor:
        """The gradient [n, V] w.r.t. logits, from that w.r.t. buckets [n, k + 1]; overwrites `tail_q`."""
        tail_grad = tail_q.mul_(bucket_grad[:, -1:])  # the last bucket's gradient, by each token's share of the bucket
        column_grads = tail_grad.gather(-1, self.columns)
        top_gradient = torch.where(self.all_outside, column_grads, bucket_grad.gather(-1, self.stand_in))
        return tail_grad.scatter_(-1, self.columns, top_gradient)


def _normaliser(logits: Tensor, probabilities: Tensor) -> Tensor:
    """logsumexp [n] of the logits [n, V], whose softmax is given: exponentials cost more than passes.

    A softmax's largest value is 1 / Σ exp(logit − largest), with the same precision as `log_softmax`.
    """
    return logits.amax(-1) - probabilities.amax(-1).log()


def _forward_kl(target_logits: Tensor, logits: Tensor, p_rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """KL(p‖q) [n] and its gradient q − p w.r.t. the logits [n, V]; p_rows [n]: their rows of p's logits [m, V].

    The same as by `_divergence`, in few passes over the matrix, and with one exponential of each value of p.
    """
    p, q = target_logits.softmax(-1), logits.softmax(-1)
    neg_entropy = (p[:, None] @ target_logits[..., None])[:, 0, 0] - _normaliser(target_logits, p)  # Σ p log p
    if p_rows is not None:
        p, neg_entropy = p[p_rows], neg_entropy[p_rows]
    mean_logit = (p[:, None] @ logits[..., None])[:, 0, 0]
    return neg_entropy - mean_logit + _normaliser(logits, q), q.sub_(p)


def _divergence(kind: str, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """The divergence [n] of rows of log-probabilities [n, tokens], and its slope ∂D/∂log q for unconstrained q.

    For `OVERLAPS`, p may sum to less than 1: the remaining mass is outside q's support. The gradient w.r.t. the logits
    z of q is slope − q · Σ slope, since ∂log q_i/∂z_j = [i = j] − q_j. A slope c · q has the gradient 0, so the slopes
    here leave out such terms: reverse_kl q, and total variation q / 2 of q · [q > p] = q · (sign(q − p) + 1) / 2.
    """
    if kind == "acceptance":
        log_overlap = torch.minimum(log_p, log_q)  # logarithms: α itself may underflow
        log_alpha = log_overlap.logsumexp(-1, keepdim=True)
        # α grows with q where q < p; the slope of log α is each such token's share of α.
        return -log_alpha[:, 0], -(log_overlap - log_alpha).exp_() * (log_q < log_p)
    if kind == "reverse_kl":
        log_q_slope = log_q.exp() * (log_q - log_p)
        return log_q_slope.sum(-1), log_q_slope
    p = log_p.exp()
    if kind == "forward_kl":
        return (p * (log_p - log_q)).sum(-1), -p
    q = log_q.exp()
    if kind == "kl_tv":
        kl_weight = (-KL_FADES * acceptance(log_p, log_q)).exp_()[:, None]  # λ
        log_cond_p = log_p - log_p.logsumexp(-1, keepdim=True)
        cond_p = log_cond_p.exp()
        terms = kl_weight * cond_p * (log_cond_p - log_q) + (1 - kl_weight) * (q - p).clamp_min(0)
        return terms.sum(-1), (1 - kl_weight) * q * (q - p).sign() / 2 - kl_weight * cond_p
    if kind == "jensen_shannon":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        log_q_slope = q * (log_q - log_m) / 2
        return log_q_slope.sum(-1) + (p * (log_p - log_m)).sum(-1) / 2, log_q_slope
    if kind == "total_variation":
        difference = q - p  # its positive part sums to 1 − Σ min(p, q)
        return difference.clamp_min(0).sum(-1), q * difference.sign() / 2
    raise ValueError(f"kind={kind!r}: expected one of {', '.join(DIVERGENCES)}")


def _apply(
    hidden: Tensor,
    weight: Tensor,
    objective: _Objective,
    rule: LogitRule,
    row_weights: Tensor | None,
    teacher: _Teacher | None = None,
) -> Tensor:
    """`_LinearLoss` with the sizes of its chunks and pieces, in autocast's dtype."""
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        hidden = hidden.to(torch.get_autocast_dtype(device_type))
    if not torch.is_grad_enabled():  # a Function sees which inputs require grad, not whether grad is enabled
        hidden, weight = hidden.detach(), weight.detach()
    with torch.autocast(device_type, enabled=False):
        chunk_rows = rows_at_once(weight.shape[0], weight.device)
        max_columns = max(len(weight), len(teacher.matrix) if teacher is not None else 0)
        piece_rows = min(chunk_rows, rows_of_copies(max_columns, hidden.device))
        return _LinearLoss.apply(hidden, weight, objective, rule, chunk_rows, piece_rows, row_weights, teacher)
