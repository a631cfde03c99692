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
        self, lm: PreTrainedModel, step: int, input_ids: Tensor, labels: Tensor, positions: Tensor, vocab_size: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows in which `lm` continues a prefix of each row [B, T] by samples from its first `vocab_size` tokens: ids,
        labels on the sampled tokens, positions and documents, [B, longest] each."""
        generators = [row_generator(self.seed, step, row) for row in input_ids]
        rows = zip(input_ids, labels, positions, generators, strict=True)
        prefixes = [choose_prefix(*row[:3], self.tokens, row[3]) for row in rows]
        uniforms = torch.stack([torch.from_numpy(g.random(self.tokens)) for g in generators])  # [B, tokens]
        was_training = lm.training
        lm.eval()
        ids, sampled_ids = continue_prefixes(lm, prefixes, uniforms.to(input_ids.device), vocab_size)
        lm.train(was_training)
        prefix_lengths = [len(prefix) for prefix in prefixes]
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        # A row is one document, 0, and padding, −1.
        documents = (positions < torch.tensor(prefix_lengths, device=ids.device)[:, None] + self.tokens).long() - 1
        return ids, label_samples(ids, prefix_lengths, sampled_ids, self.ends), positions, documents


def choose_prefix(
    input_ids: Tensor, labels: Tensor, positions: Tensor, new_count: int, generator: np.random.Generator
) -> Tensor:
    """The prefix of a row's continuation: its document up to a supervised position drawn with `generator`.

    All [T]. The prefix is cut from the left to T − new_count tokens, so that the new tokens fit within T.
    """
    supervised_indices = (labels != IGNORE).nonzero()[:, 0]
    if not len(supervised_indices):
        return input_ids[:1]
    last_position = int(supervised_indices[int(generator.integers(len(supervised_indices)))])
    prefix_start = max(last_position - int(positions[last_position]), last_position + 1 - (len(input_ids) - new_count))
    return input_ids[prefix_start : last_position + 1]


@torch.no_grad()
def continue_prefixes(
    lm: PreTrainedModel, prefixes: list[Tensor], uniforms: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Continue each prefix [n_b] by samples from `lm`, at temperature 1, over its first `vocab_size` tokens.

    uniforms [B, count]: uniform in [0, 1); token i of row b is the one at which the cumulative probability passes
    uniforms[b, i], so a row does not depend on the other rows. All ids are the target's; an `lm` with a draft
    vocabulary samples from it. Returns (ids [B, longest + count], padded with 0, the new tokens [B, count]).
    """
    new_count, draft_vocabulary = uniforms.shape[1], draft_vocabulary_of(lm)
    vocab_size = vocab_size if draft_vocabulary is None else len(draft_vocabulary.tokens)
    prefix_lengths = torch.tensor([len(prefix) for prefix in prefixes], device=uniforms.device)
    ids = uniforms.new_zeros((len(prefixes), int(prefix_lengths.max()) + new_count), dtype=torch.long)
    for row_ids, prefix in zip(ids, prefixes, strict=True):
        row_ids[: len(prefix)] = prefix
    # Float32 whatever the loop's precision; also, autocast might cache copies of the weights without gradients.
    with torch.autocast(ids.device.type, enabled=False):
        cache = DynamicCache(config=lm.config)
        input_ids = ids[:, : int(prefix_lengths.min())]
        for position in range(input_ids.shape[1], ids.shape[1]):
            input_ids = input_ids if draft_vocabulary is None else draft_vocabulary.to_draft_ids(input_ids)
            logits = lm(input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1, :vocab_size]
            index = position - prefix_lengths  # [B]: of the new token of each row at this position
            tokens = invert(logits.softmax(-1), uniforms.gather(1, index.clamp(0, new_count - 1)[:, None]))[:, 0]  # [B]
            tokens = tokens if draft_vocabulary is None else draft_vocabulary.tokens[tokens]
            ids[:, position] = torch.where((index >= 0) & (index < new_count), tokens, ids[:, position])
            input_ids = ids[:, position : position + 1]
    return ids, ids.gather(1, prefix_lengths[:, None] + torch.arange(new_count, device=ids.device))


def label_samples(ids: Tensor, prefix_lengths: list[int], sampled_ids: Tensor, ends: Collection[int]) -> Tensor:
    """Labels [B, T] that supervise the sampled tokens, up to and including the first of `ends`; shifted as in rows."""
    labels = torch.full_like(ids, IGNORE)
    is_end = torch.isin(sampled_ids, torch.tensor([*ends], dtype=sampled_ids.dtype, device=sampled_ids.device)).long()
    sampled_labels = sampled_ids.masked_fill(is_end.cumsum(1) > is_end, IGNORE)
    for row_labels, prefix_length, new_labels in zip(labels, prefix_lengths, sampled_labels, strict=True):
        row_labels[prefix_length - 1 : prefix_length - 1 + len(new_labels)] = new_labels
    return labels


def row_generator(seed: int, step: int, row_ids: Tensor) -> np.random.Generator:
    """A stream that depends on the row's content, not on its place in the global batch or on its process."""
    digest = hashlib.sha256(row_ids.cpu().numpy().tobytes()).hexdigest()
    return Streams(seed).arrays("on_policy", step, digest)


def draw_depths(keep_prob: float, depth_count: int, seed: int, step: int, input_ids: Tensor) -> Tensor:
    """bool [B, T, depth_count]: which depths of drafts after each position of input_ids [B, T] are kept. Depth j is
    kept with probability keep_prob ** j, and then all depths before it. A function of seed, step and row content."""
    uniforms = [torch.from_numpy(row_generator(seed, step, row).random(input_ids.shape[1])) for row in input_ids]
    return (torch.stack(uniforms)[..., None] < keep_prob ** torch.arange(depth_count)).to(input_ids.device)
