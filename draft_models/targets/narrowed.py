"""A model over some of a target's tokens: what translates between the ids of both."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

MARK = "draft_vocabulary"  # what its config.json calls them


def spread(logits: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """logits [..., k] of `tokens` [k] → [..., vocabulary], so low elsewhere that the probability is 0.

    They stay finite, as what is not finite counts as a broken drafter.
    """
    lowest = torch.finfo(logits.dtype).min / 2
    return logits.new_full((*logits.shape[:-1], vocabulary), lowest).index_copy_(-1, tokens, logits)


class OwnTokens(nn.Module):
    """The tokens of a model that is made of some of the target's, and which of them each of the target's ids is.

    tokens [k]: the target's ids, ascending, of the model's ids 0..k−1. Its id k stands for any other token of the
    target's `vocabulary`. It is read, and never proposed.
    """

    tokens: Tensor
    place: Tensor

    def __init__(self, tokens: Tensor, vocabulary: int):
        super().__init__()
        place = tokens.new_full((vocabulary + 1,), len(tokens))  # the last for ids beyond: of padded embeddings
        place[tokens] = torch.arange(len(tokens), device=tokens.device)
        self.vocabulary = vocabulary
        self.register_buffer("tokens", tokens, persistent=False)
        self.register_buffer("place", place, persistent=False)

    def inward(self, ids: Tensor) -> Tensor:
        """The model's ids for the target's."""
        return self.place[ids.clamp(max=self.vocabulary)]

    def outward(self, logits: Tensor) -> Tensor:
        """The model's logits [..., k + 1] → [..., vocabulary]."""
        return spread(logits[..., : len(self.tokens)], self.tokens, self.vocabulary)


def own_tokens_of(model: nn.Module) -> OwnTokens | None:
    """The tokens that `model` is made of, None where they are all of the target's."""
    found = getattr(model, "own_tokens", None)
    return found if isinstance(found, OwnTokens) else None


def is_narrowed(config: PreTrainedConfig) -> bool:
    """Whether the model of `config` is of some of a target's tokens."""
    return getattr(config, MARK, None) is not None
