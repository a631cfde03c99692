"""An MTP head: a decoder layer on the projected pair of the target's last hidden state and the next token.

Index t takes the target's hidden state at position t and token t + 1, and predicts token t + 2. Drafting runs
it like an EAGLE-3 head with another input: fc joins the token's embedding and the feature, which is the hidden state
that the head reads, before the layer. `reading` says how the tensors are read: sizes, and which norms apply.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.draft_models.eagle3.model import Eagle3, HeadCache, HeadLayer, Reading, Steps
from outrider.draft_models.mtp.reading import MtpReading
from outrider.draft_models.targets.target import Masks, Rotary

if TYPE_CHECKING:
    from outrider.draft_models.targets.stack import LayerStack


class MtpHead(Eagle3):
    """The head. `use_target` must be called before `features`, as the target's final norm and head are shared."""

    reading: MtpReading

    def __init__(self, reading: MtpReading, *, all_tokens: bool = True):
        super().__init__(reading, all_tokens=all_tokens)
        if not reading.own_head:
            del self.lm_head
        self._target: list[LayerStack] = []  # in a list, so that its parameters do not become the head's

    def _add_layers(self, reading: Reading) -> None:  # in place of `Eagle3`'s; the other modules stay
        hidden_size = reading.hidden
        self.embedding_norm = LlamaRMSNorm(hidden_size, reading.epsilon)
        self.hidden_norm = LlamaRMSNorm(hidden_size, reading.epsilon)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = nn.ModuleList([HeadLayer(reading, 0, joint=False)])

    @property
    def unpacked_weight(self) -> Tensor:
        return self.hidden_norm.weight

    def use_target(self, stack: "LayerStack") -> None:
        """Share the target's final norm, embedding and head, which stay the target's own modules."""
        self._target = [stack]
        self.use_embedding_of(stack)

    def features(self, aux: Tensor) -> Tensor:
        """aux [B, Q, H], the target's hidden state before its final norm → features [B, Q, H]."""
        return self._target[0].norm(aux) if self.reading.target_norm else aux

    def run(self, embedding: Tensor, features: Tensor, masks: Masks, rotary: Rotary, cache: HeadCache = None) -> Tensor:
        """See `Eagle3.run`: [B, Q, H] → [B, Q, H]."""
        pair = [self.embedding_norm(embedding), self.hidden_norm(features)]  # [B, Q, H] each
        hidden = cache.products([self.fc], *pair)[0] if isinstance(cache, Steps) else self.fc(torch.cat(pair, -1))
        hidden = self.layers[0](pair[0], hidden, masks[self.windows[0]], rotary, cache)
        return self.norm(hidden) if self.reading.norm_output else hidden

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """The output of `run` [..., H] → logits [..., V]."""
        normed = self.normalise(hidden)
        return self.lm_head(normed) if self.reading.own_head else self._target[0].logits_after_norm(normed)
