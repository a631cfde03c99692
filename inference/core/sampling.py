"""From logits to probabilities, with one code path for target and drafter, and from probabilities to tokens.

transformers' own processors run in transformers' own order: first those that read the text (such as the repetition
penalty), then the warpers (temperature, top-k, top-p, min-p). In a draft tree every row (the root or a node) has a
context, the text before its next token: the committed tokens and its branch.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor

if TYPE_CHECKING:
    from outrider.inference.settings.sampling import SamplingConfig

# Exactly these types, no subclasses: they never read the text, so they process all rows in one call.
_IGNORE_CONTEXT = (
    transformers.EpsilonLogitsWarper,
    transformers.EtaLogitsWarper,
    transformers.InfNanRemoveLogitsProcessor,
    transformers.LogitNormalization,
    transformers.MinPLogitsWarper,
    transformers.SuppressTokensLogitsProcessor,
    transformers.TemperatureLogitsWarper,
    transformers.TopKLogitsWarper,
    transformers.TopPLogitsWarper,
    transformers.TypicalLogitsWarper,
)


class Sampler:
    """The processors of `config`, ready to apply; greedy decoding has no warpers.

    defaults: processors of the target's generation config (see `loading.generation_config`), run before `config`'s.
    reads_context: a processor reads the text. reads_ids: a token's probability depends on its id, not on logits alone.
    """

    def __init__(self, config: "SamplingConfig", defaults: Sequence[transformers.LogitsProcessor] = ()):
        self.greedy = config.temperature == 0
        self._steps = list(defaults)
        if config.repetition_penalty not in (None, 1):
            self._steps.append(transformers.RepetitionPenaltyLogitsProcessor(float(config.repetition_penalty)))
        optional_warpers = (
            (config.temperature != 1, partial(transformers.TemperatureLogitsWarper, float(config.temperature))),
            (config.top_k > 0, partial(transformers.TopKLogitsWarper, config.top_k)),
            (config.top_p < 1, partial(transformers.TopPLogitsWarper, config.top_p)),
            (config.min_p > 0, partial(transformers.MinPLogitsWarper, config.min_p)),
        )
        self._steps += [make_warper() for is_active, make_warper in optional_warpers if is_active and not self.greedy]
        self.reads_context = any(type(processor) not in _IGNORE_CONTEXT for processor in self._steps)
        self.reads_ids = self.reads_context or transformers.SuppressTokensLogitsProcessor in map(type, self._steps)

    def scores(self, logits: Tensor, contexts: Sequence[Tensor] | None = None) -> Tensor:
        """Processed logits [n, V] in float32. contexts: for each row of logits [n, V], all tokens up to it (int64
        [length], on the same device), see `branches`; needed only if `reads_context`."""
        scores = logits.float()
        for processor in self._steps:
            if type(processor) in _IGNORE_CONTEXT:
                scores = processor(None, scores)
            else:
                if contexts is None or len(contexts) != len(logits):
                    shortage = "no contexts" if contexts is None else f"{len(contexts)} contexts"
                    raise ValueError(f"{type(processor).__name__} reads the context: {len(logits)} rows but {shortage}")
                scores = self._by_context(processor, scores, contexts)
        return scores

    def probabilities(self, logits: Tensor, contexts: Sequence[Tensor] | None = None) -> Tensor:
        """The float32 distribution [n, V] of each row's next token; greedy: a point mass. contexts: as in `scores`."""
        scores = self.scores(logits, contexts)
        if self.greedy:
            return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        return scores.softmax(-1)

    def _by_context(self, step: transformers.LogitsProcessor, scores: Tensor, contexts: Sequence[Tensor]) -> Tensor:
        """Apply a processor to all rows of one length at once; it may write to its input, so it gets copies."""
        # In older versions of transformers this processor sees the first row only.
        can_group = type(step) is not transformers.EncoderRepetitionPenaltyLogitsProcessor
        rows_by_length: dict[int, list[int]] = {}
        for row, context in enumerate(contexts):
            rows_by_length.setdefault(len(context) if can_group else row, []).append(row)
        processed = torch.empty_like(scores)
        for rows in rows_by_length.values():
            processed[rows] = step(torch.stack([contexts[row] for row in rows]), scores[rows])
        return processed


def top_tokens(logits: Tensor, count: int) -> Tensor:
    """float32 [..., 2k]: the k = min(count, V) likeliest tokens after each row of logits [..., V], then their
    probabilities. One tensor is one transfer from a GPU. float32 represents ids below 2^24 exactly."""
    scores = logits.float()
    top_scores, tokens = top_k_chunked(scores, min(count, logits.shape[-1]))
    return torch.cat([tokens.float(), (top_scores - scores.logsumexp(-1, keepdim=True)).exp()], dim=-1)


def top_k_chunked(scores: Tensor, count: int, chunk_size: int = 64) -> tuple[Tensor, Tensor]:
    """`scores.topk(count)` of [..., V] in one pass over V: the results are in the `count` chunks of largest maxima.

    Example with chunks of 2: of the scores (5, 1, 7, 6, 2, 3) the best two are in the chunks (5, 1) and (7, 6).
    """
    size = scores.shape[-1]
    boundary = size - size % chunk_size
    if count * chunk_size * 4 > size:  # the best chunks would have more than a quarter of all scores
        top_scores, tokens = scores.topk(count)
        return top_scores, tokens
    chunks = scores[..., :boundary].unflatten(-1, (-1, chunk_size))
    best_chunks = chunks.amax(-1).topk(count).indices
    candidates = chunks.gather(-2, best_chunks[..., None].expand(*best_chunks.shape, chunk_size)).flatten(-2)
    indices = (best_chunks[..., None] * chunk_size + torch.arange(chunk_size, device=scores.device)).flatten(-2)
    if boundary < size:
        tail_ids = torch.arange(boundary, size, device=scores.device).expand(*scores.shape[:-1], size - boundary)
        candidates, indices = torch.cat([candidates, scores[..., boundary:]], -1), torch.cat([indices, tail_ids], -1)
    top_scores, best_indices = candidates.topk(count)
    return top_scores, indices.gather(-1, best_indices)


def branches(text: Tensor, tokens: Tensor, parents: Sequence[int]) -> list[Tensor]:
    """The text up to each row of a verified tree: `text` [length] for the root, `text` and the path for each node.

    tokens, parents [n]: the draft tree under the last token of `text`. Returns n + 1 tensors, the root's first.
    """
    texts = [text]
    for node, parent in enumerate(parents):
        texts.append(torch.cat([texts[parent + 1], tokens[node : node + 1]]))
    return texts


def invert(weights: Tensor, uniforms: Tensor | float) -> Tensor:
    """Draw from each row of weights [m, V] ≥ 0 by inverting its cumulative sum.

    uniforms: float64 [m, k] in [0, 1), or one number for a single draw from each row. Returns tokens [m, k]: the first
    token whose running sum exceeds uniform · total; −1 only if all weights of a row are 0. Example: weights (1, 3) and
    uniform 0.5 give token 1, as 1 is not more than 2 but 4 is. The sums are in float64. The error of a token's share is
    at most about V · 2⁻⁵³ of the total. There is no transfer from a GPU.
    """
    cdf = _running_sums(weights)
    tokens = torch.searchsorted(cdf, cdf[:, -1:] * uniforms, right=True).clamp_(max=weights.shape[-1] - 1)
    has_weight = weights.gather(-1, tokens) > 0
    if weights.device.type == "cpu" and bool(has_weight.all()):
        return tokens
    # Parallel sums, as on CUDA, may rise by a rounding error where the weight is 0, or fall.
    heaviest = weights.argmax(-1, keepdim=True)
    return torch.where(has_weight, tokens, torch.where(weights.gather(-1, heaviest) > 0, heaviest, -1))


def _running_sums(weights: Tensor) -> Tensor:
    return weights.to(torch.float64, copy=True).cumsum_(-1)  # in place: twice as much memory takes seven times as long
