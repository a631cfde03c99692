"""The objectives of drafters: the loss of predictions, and rows with what it compares them with."""

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
from outrider.train.parts.top_k_rows import TopKRows, load_top_k_rows
from outrider.train.settings.drafters import EesdConfig, FinetuneConfig


def load_taught_rows(
    config: EesdConfig | FinetuneConfig, target: OpenTarget, split: Split, max_rows: int | None = None
) -> PackedRows | TopKRows:
    """The first rows of a split of `config.data`; with teacher=cached they contain the target's top k."""
    load = load_top_k_rows if config.teacher == "cached" else load_rows
    return load(config.data, target.tokenizer, config.seq_len, split, max_rows=max_rows)


def draft_loss(
    objective: str,
    drafter: position_weights.Factors,
    labels: Tensor,
    draft_tokens: Tensor | None,
    vocab_size: int,
    *,
    rule: losses.LogitRule,
    target: position_weights.Factors | None = None,
    target_rule: losses.LogitRule = losses.PLAIN,
    top_k: Mapping[str, Tensor] = MappingProxyType({}),
    slots: position_weights.Slots | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """The loss of a drafter's predictions, summed over the positions whose label is not IGNORE.

    cross_entropy: on `labels` [...], token ids. Another objective is a divergence from the logits of the `target`, or
    else from its cached top k: top_ids, top_logprobs [..., k] and tail [...] (see `TopKRows`).
    draft_tokens [k]: the draft vocabulary, part of the target's `vocab_size`; None: all. rule, target_rule: from
    products to logits. shares [...]: weights of the positions. slots: what the positions are in drafts, by which they
    are weighted too; the packed rows are then the first columns of `labels`.
    """
    classes = draft_indices(labels, draft_tokens, vocab_size)
    if slots is not None:
        if slots.kind == "dpace":
            slot_weights = position_weights.dpace_weights(
                slots, position_weights.probabilities_of(classes, drafter, rule), labels != losses.IGNORE
            )
        else:
            slot_weights = position_weights.cat_weights(
                slots, _text_probabilities(labels[:, : slots.rows[1]], target, target_rule, top_k)
            )
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
    labels: Tensor, target: position_weights.Factors | None, target_rule: losses.LogitRule, top_k: Mapping[str, Tensor]
) -> Tensor:
    """The target's probability of each of `labels` [B, T], the first columns of `target` or of its cached top k."""
    column_count = labels.shape[1]
    if target is None:
        return position_weights.cached_probabilities(labels, *(top_k[name][:, :column_count] for name in TOP_K))
    states, matrix = target
    return position_weights.probabilities_of(labels, (states[:, :column_count], matrix), target_rule)
