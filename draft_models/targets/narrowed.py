"""Draft vocabularies: a drafter may predict only some of the target's tokens, with its own ids 0, 1, … for these."""

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outrider.base.errors import UserError

MARK = "draft_vocabulary"  # the key in the config.json of a model with a draft vocabulary


def spread_logits(logits: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """logits [..., k] of `tokens` [k] → [..., vocabulary]. The others have the probability 0, and are finite, since
    non-finite logits indicate a broken drafter."""
    filler_logit = torch.finfo(logits.dtype).min / 2  # half: the sum of two is finite too
    return logits.new_full((*logits.shape[:-1], vocab_size), filler_logit).index_copy_(-1, tokens, logits)


def widen_rows(weights: Tensor, filler_row: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """weights [k, …] of `tokens` [k] → [vocabulary, …], with `filler_row` […] for every other token. For a head, give
    the mean of the rows: its logit is the mean of the draft tokens' logits, so never the largest."""
    return filler_row.expand(vocab_size, *filler_row.shape).clone().index_copy_(0, tokens.to(weights.device), weights)


class DraftVocabulary(nn.Module):
    """A draft vocabulary: k tokens of the target's vocabulary that a model has, and the mapping between the ids. The
    model's id k represents every other token of the target. It occurs as input and is never proposed."""

    tokens: Tensor  # int64 [k], ascending: the target's ids of the model's ids 0..k−1
    draft_id_of: Tensor  # int64 [vocabulary + 1]: the model's id of each of the target's ids

    def __init__(self, tokens: Tensor, vocabulary: int):
        super().__init__()
        draft_id_of = tokens.new_full((vocabulary + 1,), len(tokens))  # the last entry: for ids of padded embeddings
        draft_id_of[tokens] = torch.arange(len(tokens), device=tokens.device)
        self.vocabulary = vocabulary
        self.register_buffer("tokens", tokens, persistent=False)
        self.register_buffer("draft_id_of", draft_id_of, persistent=False)

    def to_draft_ids(self, ids: Tensor) -> Tensor:
        """The model's ids for the target's."""
        return self.draft_id_of[ids.clamp(max=self.vocabulary)]

    def to_target_logits(self, logits: Tensor) -> Tensor:
        """The model's logits [..., k + 1] → [..., vocabulary], without that of its id k."""
        return spread_logits(logits[..., : len(self.tokens)], self.tokens, self.vocabulary)


def draft_vocabulary_of(model: nn.Module) -> DraftVocabulary | None:
    """The draft vocabulary of `model`; None if it has all of the target's tokens."""
    vocabulary = getattr(model, "draft_vocabulary", None)
    return vocabulary if isinstance(vocabulary, DraftVocabulary) else None


def is_narrowed(config: PreTrainedConfig) -> bool:
    """Whether the model of `config` has a draft vocabulary."""
    return getattr(config, MARK, None) is not None


def require_tokens(tokens: Tensor | None, count: int, vocab_size: int, file: str | Path) -> None:
    """Raise `UserError` unless `tokens`, read from `file`, are `count` ascending ids of a vocabulary of that size."""
    ids = [] if tokens is None or tokens.dtype != torch.long else tokens.flatten().tolist()
    bounded_ids = [-1, *ids, vocab_size]  # with both bounds: the ids are in range if this list ascends
    if len(bounded_ids) != count + 2 or any(low >= high for low, high in pairwise(bounded_ids)):
        raise UserError(
            f"{file}: expected {count} ascending token ids below {vocab_size} (draft vocabulary); restore it"
        )
