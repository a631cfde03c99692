"""An EAGLE-3 head (arXiv 2503.01840): a decoder layer on aux hidden states of the target and the next token.

Index t takes the target's feature at position t and token t + 1, and predicts token t + 2. A feature is `fc` of aux
hidden states, the target's at k layers (`taps`). Shapes: B texts, Q or N positions, T tokens a text, width H (of the
target: H_t), Hk key heads of width D; V tokens, of which V_d can be drafted.

`Eagle3` is the head. A draft calls `features`, `run` and `logits` in this order, and calls `run` again with its own
output as the features of the next token.

Training-time test (section 3.2) runs draft steps at many positions in parallel, by `Steps`. Step 0 runs on the target's
features at all positions. Every later step runs on the previous step's output at the same position. Position i of step
t stands for the t-th drafted token after position i. It sees what the cache of a draft would hold: the entries of step
0 up to i, and the entries of steps 1 to t at position i. Example: in the text a b c d e f, position 1 of step 2 reads
the token e and predicts f. It sees entries 0 and 1 of step 0, and entry 1 of steps 1 and 2. No position sees other
positions of a step after step 0. So a step can leave out positions, which later steps then leave out too.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from outrider.draft_models.eagle3.reading import Reading
from outrider.draft_models.heads.joint import KeysValues, attend_jointly
from outrider.draft_models.heads.layers import DraftHead, HeadAttention, head_mlp
from outrider.draft_models.targets.attention import grouped_attention
from outrider.draft_models.targets.target import Band, LayerCache, Mask, Masks, Rotary

if TYPE_CHECKING:
    from outrider.draft_models.targets.stack import LayerStack


class Steps:
    """The keys and values of all steps so far, by layer; used in place of a KV cache in training.

    step: the number of the running step. A step may run twice, as it does when activations are recomputed. tokens: by
    step, the flat indices [B, N] in the texts of the tokens that the step's positions read. picks: by step, the flat
    indices [B, N] of the step's positions among those of the step before; missing if the positions are the same.
    """

    def __init__(self) -> None:
        self.step = 0
        self.tokens: dict[int, Tensor] = {}
        self.picks: dict[int, Tensor] = {}
        self._token_products: list[Tensor] = []  # by layer of `products`: [B · T, outputs]
        self._first_entries: dict[int, KeysValues] = {}  # of step 0, by layer
        self._later_entries: dict[tuple[int, int], KeysValues] = {}  # by layer and step: [B, N, Hk, steps, D]

    def products(self, layers: Sequence[nn.Linear], embedding: Tensor, features: Tensor) -> list[Tensor]:
        """The outputs of `layers` for inputs [B, N, 2 · H]: the embeddings of the step's tokens, then the features.

        embedding: of all tokens of the texts, [B, T, H], in step 0. All steps read tokens of these texts, so step 0
        multiplies the embeddings once for all steps. features [B, N, H].
        """
        width = embedding.shape[-1]
        if self.step == 0:
            self._token_products = [F.linear(embedding, x.weight[:, :width], x.bias).flatten(0, 1) for x in layers]
        indices, pairs = self.tokens[self.step], zip(layers, self._token_products, strict=True)
        return [F.linear(features, layer.weight[:, width:]) + F.embedding(indices, product) for layer, product in pairs]

    def attend(
        self, module: nn.Module, query: Tensor, entry: KeysValues, mask: Band, layer: int, scaling: float
    ) -> Tensor:
        """Attention of the running step: query [B, H, N, D] and its keys and values `entry` → [B, N, H, D].

        mask: the mask of the entries of step 0, as in `grouped_attention`. layer: the number of the head's layer.
        """
        if self.step == 0:
            self._first_entries[layer] = entry
            return grouped_attention(module, query, *entry, mask, scaling=scaling)[0]
        key, value = (x.transpose(1, 2)[..., None, :] for x in entry)  # [B, N, Hk, 1, D]
        if self.step > 1:
            old_entries = map(self._pick_positions, self._later_entries[layer, self.step - 1])
            key, value = (torch.cat(pair, 3) for pair in zip(old_entries, (key, value), strict=True))
        self._later_entries[layer, self.step] = key, value
        return attend_jointly(module, query, self._first_entries[layer], (key, value), mask, scaling)

    def _pick_positions(self, entries: Tensor) -> Tensor:
        """The entries [B, N', Hk, steps, D] of the last step at the positions of the running step."""
        flat_indices = self.picks.get(self.step)
        if flat_indices is None:
            return entries
        return F.embedding(flat_indices, entries.flatten(0, 1).flatten(1)).unflatten(-1, entries.shape[2:])


HeadCache = LayerCache | Steps | None


class StepAttention(HeadAttention):
    """Attention of a layer of the head, of passes and of the steps of training."""

    def __init__(self, reading: Reading, input_width: int, layer_idx: int):
        super().__init__(reading, input_width, layer_idx)
        self.gate_proj = None
        if reading.output_gate:  # of MTP heads, which read no input in parts
            self.gate_proj = nn.Linear(input_width, reading.heads * reading.head_dim, bias=reading.attention_bias)

    def forward(self, x: Sequence[Tensor], mask: Mask, rotary: Rotary, cache: HeadCache) -> Tensor:
        """x: its input [B, Q, width] in parts, side by side → [B, Q, H]."""
        if torch.is_autocast_enabled(x[0].device.type):
            x = [part.to(torch.get_autocast_dtype(part.device.type)) for part in x]  # once, not for three products
        layers = [self.q_proj, self.k_proj, self.v_proj]
        if isinstance(cache, Steps) and len(x) > 1:
            projections = cache.products(layers, *x)
        else:
            joined = torch.cat([*x], -1)
            projections = [layer(joined) for layer in layers]
        gate = None if self.gate_proj is None else self.gate_proj(torch.cat([*x], -1))  # [B, Q, heads · D]
        query, key, value = map(self.split_heads, projections)
        query, key = self.rotate(self.q_norm(query), rotary), self.rotate(self.k_norm(key), rotary)
        if isinstance(cache, Steps):
            assert isinstance(mask, Band)
            attended = cache.attend(self, query, (key, value), mask, self.layer_idx, self.head_dim**-0.5)
            return self.project(attended, gate)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        return self.attend(query, key, value, mask, gate)


class HeadLayer(GradientCheckpointingLayer):
    """A decoder layer of the head. A joint one also takes the embedding of the token after the feature.

    It inherits from transformers' class, by which optimizers and launchers recognise a layer.
    """

    def __init__(self, reading: Reading, layer_idx: int, *, joint: bool):
        super().__init__()
        self.self_attn = StepAttention(reading, reading.hidden * (2 if joint else 1), layer_idx)
        self.mlp = head_mlp(reading)
        self.norm_before_residual = reading.norm_before_residual
        has_input_norm = reading.embedding_norm or not joint
        self.input_layernorm = LlamaRMSNorm(reading.hidden, reading.epsilon) if has_input_norm else nn.Identity()
        self.hidden_norm = LlamaRMSNorm(reading.hidden, reading.epsilon) if joint else None
        self.post_attention_layernorm = LlamaRMSNorm(reading.hidden, reading.epsilon)

    def forward(self, embedding: Tensor, hidden: Tensor, mask: Mask, rotary: Rotary, cache: HeadCache) -> Tensor:
        """embedding, hidden [B, Q, H] → [B, Q, H]; only a joint layer reads the embedding."""
        if self.hidden_norm is None:
            attention_inputs = [self.input_layernorm(hidden)]
        else:
            normed_hidden = self.hidden_norm(hidden)
            attention_inputs = [self.input_layernorm(embedding), normed_hidden]
            hidden = normed_hidden if self.norm_before_residual else hidden
        hidden = hidden + self.self_attn(attention_inputs, mask, rotary, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3(DraftHead):
    """The head: `features` of the aux hidden states, `run` on features and tokens, `logits` of the output of `run`.

    The output of `run` is also the next step's feature, since the target has not computed the true feature. A cache
    must keep the entries of true features only: entries of drafted tokens are dropped at the end of a round (a draft
    and its check), and accepted tokens run again, all in one pass.
    """

    reading: Reading

    def __init__(self, reading: Reading, *, all_tokens: bool):
        """Create it on the meta device, without weights. all_tokens: without a draft vocabulary."""
        super().__init__(reading, all_tokens=all_tokens)
        with torch.device("meta"):
            self._add_layers(reading)
            self.norm = LlamaRMSNorm(reading.hidden, reading.epsilon) if reading.final_norm else nn.Identity()
            self.lm_head = nn.Linear(reading.hidden, reading.draft_vocabulary, bias=False)
            self.embed_tokens = nn.Embedding(reading.vocabulary, reading.hidden) if reading.own_embedding else None

    def _add_layers(self, reading: Reading) -> None:
        """Add the modules from the aux hidden states to the last layer."""
        width, joined_size = reading.target_hidden, len(reading.taps) * reading.target_hidden
        norms = [LlamaRMSNorm(width, reading.epsilon) for _ in reading.taps] if reading.tap_norms else []
        self.fc_norm = nn.ModuleList(norms)
        self.input_norm = LlamaRMSNorm(joined_size, reading.epsilon) if reading.joint_norm else nn.Identity()
        self.fc = nn.Linear(joined_size, reading.hidden, bias=reading.fc_bias)
        self.layers = nn.ModuleList(HeadLayer(reading, index, joint=index == 0) for index in range(reading.layers))

    @classmethod
    def of(cls, reading: Reading, weights: Mapping[str, Tensor]) -> Self:
        """The head of `reading` with `weights`, by the names of this module; frozen.

        `draft_models.eagle3.checkpoint` checks names and shapes first, with a `UserError`.
        """
        return cls(reading, all_tokens="draft_tokens" not in weights).with_weights(weights)

    @property
    def unpacked_weight(self) -> Tensor:
        return self.layers[0].get_parameter("hidden_norm.weight")

    def use_target(self, stack: "LayerStack") -> None:
        """Take what the head lacks from its target: the embedding, and a copy of rows of the output head."""
        if not self.reading.own_embedding:
            self.use_embedding_of(stack)
        if not self.reading.own_head:
            weight = stack.head.weight  # [V, H]
            rows = weight if self.draft_tokens is None else weight[self.draft_tokens]
            self.lm_head.weight = nn.Parameter(rows.detach().to(self.dtype).clone(), requires_grad=False)

    def features(self, aux: Tensor) -> Tensor:
        """aux [B, Q, k · H_t], the target's aux hidden states at `reading.taps`, concatenated → features [B, Q, H]."""
        if len(self.fc_norm):
            parts = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(self.input_norm(aux))

    def run(self, embedding: Tensor, features: Tensor, masks: Masks, rotary: Rotary, cache: HeadCache = None) -> Tensor:
        """The layers on tokens' embeddings and the features one position before them: [B, Q, H] → [B, Q, H].

        A feature is the target's, or the output of `run` at that position. masks: by window (see `windows`), over all
        entries that the cache returns. With `Steps` as the cache, this is a step of training; `embedding` is then that
        of all texts in step 0, and empty later.
        """
        hidden = features
        for layer, window in zip(self.layers, self.windows, strict=True):
            hidden = layer(embedding, hidden, masks[window], rotary, cache)
        return self.norm(hidden) if self.reading.norm_output else hidden

    def normalise(self, hidden: Tensor) -> Tensor:
        """The output of `run` [..., H] → the input of the logits' matrix [..., H]."""
        return hidden if self.reading.norm_output else self.norm(hidden)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """The output of `run` [..., H] → logits over the draft vocabulary [..., V_d]."""
        return self.lm_head(self.normalise(hidden))
