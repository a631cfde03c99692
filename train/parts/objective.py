"""The objectives of drafters: the loss of predictions, and the rows of text that a training reads for the objective.

Logits are kept as factors, states [..., d] and a matrix [V, d] whose product the loss computes some positions at a
time. A rule is the function from the product to the logits, such as a scale.
"""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from outrider.data_prep.text.rows import PackedRows, load_rows
from outrider.data_prep.text.sources import Split
from outrider.draft_models import losses
from outrider.draft_models.draft_vocabulary import draft_indices
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.train.core.training import TOP_K
from outrider.train.parts import position_weights
from outrider.train.parts.position_weights import Factors, Slots
from outrider.train.parts.top_k_rows import TopKRows, load_top_k_rows
from outrider.train.settings.drafters import EesdConfig, FinetuneConfig


def load_taught_rows(
    config: EesdConfig | FinetuneConfig, target: OpenTarget, split: Split, max_rows: int | None = None
) -> PackedRows | TopKRows:
    """Rows of a split of `config.data`, all or `max_rows`; with teacher=cached they contain the target's top k."""
    load = load_top_k_rows if config.teacher == "cached" else load_rows
    return load(config.data, target.tokenizer, config.seq_len, split, max_rows=max_rows)


def draft_loss(
    objective: str,
    drafter: Factors,
    labels: Tensor,
    draft_tokens: Tensor | None,
    vocab_size: int,
    *,
    rule: losses.LogitRule,
    target: Factors | None = None,
    target_rule: losses.LogitRule = losses.PLAIN,
    top_k: Mapping[str, Tensor] = MappingProxyType({}),
    slots: Slots | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """The loss of a drafter's predictions, summed over the positions whose label is not IGNORE.

    cross_entropy: on `labels` [...], token ids. Another objective is a divergence from the logits of the `target`, or
    else from its cached top k: top_ids, top_logprobs [..., k] and tail [...], the probability of all other tokens.
    draft_tokens [k]: the draft vocabulary, part of the target's `vocab_size`; None: all. shares [...]: weights of the
    positions. slots: which slot (place in a draft) of which draft each position is. Kind cat weights a position by the
    target's probabilities of the draft's earlier labels, dpace by the number of accepted tokens that the drafter's
    probabilities promise from the slot on. `labels` [B, N] then begin with the columns of the packed rows.
    """
    classes = draft_indices(labels, draft_tokens, vocab_size)
    if slots is not None:
        if slots.kind == "dpace":
            drafter_probs = position_weights.probabilities_of(classes, drafter, rule)
            slot_weights = position_weights.dpace_weights(slots, drafter_probs, labels != losses.IGNORE)
        else:
            _, text_length = slots.rows  # (B, T)
            teacher_probs = _text_probabilities(labels[:, :text_length], target, target_rule, top_k)
            slot_weights = position_weights.cat_weights(slots, teacher_probs)
        shares = slot_weights if shares is None else slot_weights * shares
    if objective == "cross_entropy":
        return losses.linear_cross_entropy(*drafter, classes, rule=rule, shares=shares)
    if target is not None:
        return losses.linear_divergence(
            *drafter, *target, labels, objective, rule=rule, target_rule=target_rule, tokens=draft_tokens, shares=shares
        )
    top_ids, logprobs, tail = (top_k[name] for name in TOP_K)
    top_ids = draft_indices(top_ids, draft_tokens, vocab_size)
    return losses.linear_topk_divergence(*drafter, top_ids, logprobs, tail, labels, objective, rule=rule, shares=shares)


def _text_probabilities(
    labels: Tensor, target: Factors | None, target_rule: losses.LogitRule, top_k: Mapping[str, Tensor]
) -> Tensor:
    """The target's probability of each of `labels` [B, T], the first columns of `target` or of its cached top k."""
    column_count = labels.shape[1]
    if target is None:
        return position_weights.cached_probabilities(labels, *(top_k[name][:, :column_count] for name in TOP_K))
    states, matrix = target
    return position_weights.probabilities_of(labels, (states[:, :column_count], matrix), target_rule)
