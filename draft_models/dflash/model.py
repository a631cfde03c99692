"""A block drafter: decoder layers that draft a block of tokens in one pass (DFlash; DSpark, with a Markov head).

The *context* is the target's feature at each verified position: normed `fc` of hidden states at k layers (aux hidden
states). A layer makes keys and values of features by its own matrices. The *block* is the text's last token, the root,
whose feature is not known yet, and masks. Its rows stand at the positions after the context, and see the context and,
unless the layer is causal, each other. Example with a block of 4:

    position    0   1   2   3      4      5      6
    context     a   b   c
    block                   root   mask   mask   mask
    DFlash                         x      y      z      a row predicts the token at its position
    DSpark                  x      y      z      …      a row predicts the token after its position

DSpark's Markov head adds a bias to the logits of a row, by the token before the predicted one: a drafted token changes
the distribution of the next. Its confidence head estimates whether the predicted token will be accepted.

A training runs `store_context` for a text, then `run` on the blocks of many positions with masks of its own. Shapes: B
texts, Q rows, width H (of the target: H_t), D of an attention head; V tokens, of which V_d can be drafted.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.draft_models.dflash.packed import PackedBlocks
from outrider.draft_models.dflash.reading import BlockReading
from outrider.draft_models.heads.layers import DraftHead, HeadAttention, head_mlp
from outrider.draft_models.targets.target import Band, LayerCache, Mask, Rotary

if TYPE_CHECKING:
    from outrider.draft_models.targets.stack import LayerStack


class BlockAttention(HeadAttention):
    """Attention of a layer: rows of the block over the context and the block, which the cache joins."""

    def __init__(self, reading: BlockReading, layer_idx: int):
        super().__init__(reading, reading.hidden, layer_idx)
        self.neox = reading.neox

    def store(self, x: Tensor, rotary: Rotary, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """Put keys and values of x [B, Q, H] into the cache; returns all its K entries, [B, key heads, K, D]."""
        key, value = self.split_heads(self.k_proj(x)), self.split_heads(self.v_proj(x))
        return cache.update(self.rotate(self.k_norm(key), rotary), value, self.layer_idx)

    def forward(self, x: Tensor, mask: Mask, rotary: Rotary, cache: LayerCache) -> Tensor:
        """x [B, Q, H] → [B, Q, H]."""
        query = self.rotate(self.q_norm(self.split_heads(self.q_proj(x))), rotary)
        keys_values = self.store(x, rotary, cache)
        if isinstance(cache, PackedBlocks):  # in training: each block sees a context of its own
            assert isinstance(mask, Band)
            return cast("Tensor", self.o_proj(cache.attend(self, query, keys_values, mask, self.layer_idx).flatten(2)))
        return self.attend(query, *keys_values, mask)

    def rotate(self, x: Tensor, rotary: Rotary) -> Tensor:
        """As `HeadAttention.rotate`. Neighbours that rotate together first move half a head apart, in queries and keys
        alike, which changes no product of the two."""
        return super().rotate(x if self.neox else x.unflatten(-1, (-1, 2)).mT.flatten(-2), rotary)


class BlockLayer(GradientCheckpointingLayer):
    """A decoder layer."""

    def __init__(self, reading: BlockReading, layer_idx: int):
        super().__init__()
        self.self_attn = BlockAttention(reading, layer_idx)
        self.mlp = head_mlp(reading)
        self.input_layernorm = LlamaRMSNorm(reading.hidden, reading.epsilon)
        self.post_attention_layernorm = LlamaRMSNorm(reading.hidden, reading.epsilon)

    def forward(self, hidden: Tensor, mask: Mask, rotary: Rotary, cache: LayerCache) -> Tensor:
        """hidden [B, Q, H] → [B, Q, H]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), mask, rotary, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class MarkovHead(nn.Module):
    """The bias of logits by the token before: a matrix [V, V_d] of low rank."""

    def __init__(self, reading: BlockReading):
        super().__init__()
        self.markov_w1 = nn.Embedding(reading.vocabulary, reading.markov_rank)
        self.markov_w2 = nn.Linear(reading.markov_rank, reading.draft_vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] → the bias [..., V_d]."""
        return self.markov_w2(self.markov_w1(tokens))


class ConfidenceHead(nn.Module):
    """The probability that the token drafted next is accepted if those before it are; it is a stop rule's
    `AcceptanceHead`."""

    def __init__(self, reading: BlockReading):
        super().__init__()
        self.proj = nn.Linear(reading.hidden + reading.markov_rank * (reading.confidence == "markov"), 1)

    def forward(self, target_hidden: Tensor, evidence: Tensor, *_: Tensor) -> Tensor:
        """Logits [n] for `DFlash.evidence` [n, d]. Other heads of stop rules read the other arguments."""
        return self.proj(evidence)[..., 0]


class DFlash(DraftHead):
    """The drafter: `features` of aux hidden states, `store_context`, `run` on blocks, `draft_logits`, `bias`."""

    reading: BlockReading

    def __init__(self, reading: BlockReading, *, all_tokens: bool):
        """Create it on the meta device, without weights. all_tokens: without a draft vocabulary."""
        super().__init__(reading, all_tokens=all_tokens)
        joined_size, hidden_size = len(reading.taps) * reading.target_hidden, reading.hidden
        with torch.device("meta"):
            self.fc = nn.Linear(joined_size, hidden_size, bias=False)
            self.hidden_norm = LlamaRMSNorm(hidden_size, reading.epsilon)
            self.layers = nn.ModuleList(BlockLayer(reading, index) for index in range(reading.layers))
            self.norm = LlamaRMSNorm(hidden_size, reading.epsilon)
            self.lm_head = nn.Linear(hidden_size, reading.draft_vocabulary, bias=False) if reading.own_head else None
            self.embed_tokens = nn.Embedding(reading.vocabulary, hidden_size) if reading.own_embedding else None
            self.markov_head = MarkovHead(reading) if reading.markov_rank else None
            self.confidence_head = ConfidenceHead(reading) if reading.confidence != "none" else None
        self.shared_head: list[nn.Module] = []  # a list, so that the target's head does not become a submodule

    @property
    def unpacked_weight(self) -> Tensor:
        return self.hidden_norm.weight

    def use_head(self, head: nn.Module) -> None:
        """Share the target's head (only if the drafter has none)."""
        self.shared_head = [head]

    def use_target(self, stack: "LayerStack") -> None:
        """Share what the drafter lacks with its target: the embedding, and the head."""
        if not self.reading.own_embedding:
            self.use_embedding_of(stack)
        if not self.reading.own_head:
            self.use_head(stack.head)

    def embed(self, tokens: Tensor) -> Tensor:
        embedding, scale = super().embed(tokens), self.reading.embedding_scale
        return embedding if scale == 1.0 else embedding * scale

    def features(self, aux: Tensor) -> Tensor:
        """aux [B, Q, k · H_t], the target's aux hidden states at `reading.taps`, concatenated → features [B, Q, H]."""
        return self.hidden_norm(self.fc(aux))

    def store_context(self, features: Tensor, rotary: Rotary, cache: LayerCache) -> None:
        """Put keys and values of features [B, Q, H] at their positions into the cache, in every layer."""
        for layer in self.layers:
            cast("BlockLayer", layer).self_attn.store(features, rotary, cache)

    def run(self, embedding: Tensor, masks: Sequence[Mask], rotary: Rotary, cache: LayerCache) -> Tensor:
        """The rows of blocks: embeddings [B, Q, H] → normed hidden states [B, Q, H].

        masks: of each layer, over all entries that the cache returns.
        """
        hidden = embedding
        for layer, mask in zip(self.layers, masks, strict=True):
            hidden = layer(hidden, mask, rotary, cache)
        return self.norm(hidden)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """The output of `run` [..., H] → logits over the draft vocabulary [..., V_d], without the Markov bias."""
        return (self.shared_head[0] if self.lm_head is None else self.lm_head)(hidden)

    def bias(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Logits [..., V_d] of the rows that predict the tokens after `tokens` [...], with the Markov head's bias."""
        return logits if self.markov_head is None else logits + self.markov_head(tokens)

    def evidence(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """What the prediction of the tokens after `tokens` [n] is made from: the rows' hidden states [n, H], and the
        Markov embedding if the confidence head reads it."""
        if self.markov_head is None or self.reading.confidence == "hidden":
            return hidden
        return torch.cat([hidden, self.markov_head.markov_w1(tokens)], dim=-1)
