"""On-policy distillation of a small LM: texts that it continues itself, a pure function of seed, step and row."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from outrider.base.streams import Streams
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.narrowed import draft_vocabulary_of
from outrider.inference.core.sampling import invert


@dataclass(frozen=True)
class OnPolicy:
    """On-policy distillation: in a share of the steps the loss is on the drafter's own continuations."""

    share: float
    tokens: int  # sampled per row
    seed: int
    ends: frozenset[int]  # tokens with which a continuation ends

    def is_due(self, step: int) -> bool:
        """Whether the loss of optimizer step `step` is on continuations: a pure function of seed and step."""
        return Streams(self.seed).of("on_policy", step).random() < self.share

    def continue_rows(
        self, lm: PreTrainedModel, step: int, input_ids: Tensor, labels: Tensor, positions: Tensor, vocabulary: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows that `lm` samples from its first `vocabulary` tokens, one for each row [B, T]: its ids, labels on the
        sampled tokens, positions and documents, [B, longest] each."""
        generators = [row_generator(self.seed, step, row) for row in input_ids]
        rows = zip(input_ids, labels, positions, generators, strict=True)
        prefixes = [choose_prefix(*row[:3], self.tokens, row[3]) for row in rows]
        numbers = torch.stack([torch.from_numpy(g.random(self.tokens)) for g in generators])
        was_training = lm.training
        lm.eval()
        ids, sampled = continue_prefixes(lm, prefixes, numbers.to(input_ids.device), vocabulary)
        lm.train(was_training)
        prefix_lengths = [len(prefix) for prefix in prefixes]
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        documents = (positions < torch.tensor(prefix_lengths, device=ids.device)[:, None] + self.tokens).long() - 1
        return ids, label_samples(ids, prefix_lengths, sampled, self.ends), positions, documents


def choose_prefix(
    input_ids: Tensor, labels: Tensor, positions: Tensor, new_tokens: int, generator: np.random.Generator
) -> Tensor:
    """The prefix of a row's continuation: its document up to a supervised position drawn with `generator`.

    All [T]. The prefix is cut from the left to T − new_tokens tokens, so that the new tokens fit within T.
    """
    supervised = (labels != IGNORE).nonzero()[:, 0]
    if not len(supervised):
        return input_ids[:1]
    last_position = int(supervised[int(generator.integers(len(supervised)))])
    start = max(last_position - int(positions[last_position]), last_position + 1 - (len(input_ids) - new_tokens))
    return input_ids[start : last_position + 1]


@torch.no_grad()
def continue_prefixes(
    lm: PreTrainedModel, prefixes: list[Tensor], numbers: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Continue each prefix [n_b] by samples from `lm`, at temperature 1, over its first `vocabulary` tokens.

    numbers [B, count]: uniform in [0, 1); token i of row b is the one at which the cumulative probability passes
    numbers[b, i], so a row does not depend on the other rows. All ids are the target's; an `lm` with a draft vocabulary
    samples from it. Returns (ids [B, longest + count], padded with 0, the new tokens [B, count]).
    """
    count, draft_vocabulary = numbers.shape[1], draft_vocabulary_of(lm)
    vocabulary = vocabulary if draft_vocabulary is None else len(draft_vocabulary.tokens)
    prefix_lengths = torch.tensor([len(prefix) for prefix in prefixes], device=numbers.device)
    ids = numbers.new_zeros((len(prefixes), int(prefix_lengths.max()) + count), dtype=torch.long)
    for row, prefix in zip(ids, prefixes, strict=True):
        row[: len(prefix)] = prefix
    # Float32 whatever the loop's precision; also, autocast might cache copies of the weights without gradients.
    with torch.autocast(ids.device.type, enabled=False):
        cache = DynamicCache(config=lm.config)
        feed = ids[:, : int(prefix_lengths.min())]
        for position in range(feed.shape[1], ids.shape[1]):
            feed = feed if draft_vocabulary is None else draft_vocabulary.inward(feed)
            logits = lm(feed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1, :vocabulary]
            index = position - prefix_lengths  # [B]: of the new token of each row at this position
            tokens = invert(logits.softmax(-1), numbers.gather(1, index.clamp(0, count - 1)[:, None]))[:, 0]  # [B]
            tokens = tokens if draft_vocabulary is None else draft_vocabulary.tokens[tokens]
            ids[:, position] = torch.where((index >= 0) & (index < count), tokens, ids[:, position])
            feed = ids[:, position : position + 1]
    return ids, ids.gather(1, prefix_lengths[:, None] + torch.arange(count, device=ids.device))


def label_samples(ids: Tensor, prefix_lengths: list[int], sampled: Tensor, ends: Collection[int]) -> Tensor:
    """Labels [B, T] that supervise the sampled tokens, up to and including the first of `ends`; shifted as in rows."""
    labels = torch.full_like(ids, IGNORE)
    is_end = torch.isin(sampled, torch.tensor([*ends], dtype=sampled.dtype, device=sampled.device)).long()
    supervised = sampled.masked_fill(is_end.cumsum(1) > is_end, IGNORE)
    for row, start, tokens in zip(labels, prefix_lengths, supervised, strict=True):
        row[start - 1 : start - 1 + len(tokens)] = tokens
    return labels


def row_generator(seed: int, step: int, row: Tensor) -> np.random.Generator:
    """A stream that depends on the row's content, not on its place in the global batch or on its process."""
    content = hashlib.sha256(row.cpu().numpy().tobytes()).hexdigest()
    return Streams(seed).arrays("on_policy", step, content)


def draw_depths(keep: float, depths: int, seed: int, step: int, rows: Tensor) -> Tensor:
    """bool [B, T, depths]: which depths of drafts after each position of rows [B, T] are kept, j with probability
    keep ** j and all before it with it: a function of seed, step and each row's content."""
    numbers = [torch.from_numpy(row_generator(seed, step, row).random(rows.shape[1])) for row in rows]
    return (torch.stack(numbers)[..., None] < keep ** torch.arange(depths)).to(rows.device)
