"""The modules that draft heads share: attention, an MLP, rotary tables, and what every head has besides its layers.

In shapes B is texts, Q positions, H the hidden size, D the size of an attention head, V tokens. A draft vocabulary is
the tokens that a head has logits for. `Rotary` is cos and sin of positions. A `LayerStack` is a target.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from outrider.base.errors import UserError, reason
from outrider.draft_models.heads.sizes import HeadSizes
from outrider.draft_models.targets.attention import grouped_attention
from outrider.draft_models.targets.coded import CodedEmbedding
from outrider.draft_models.targets.narrowed import spread_logits
from outrider.draft_models.targets.target import Mask, Rotary

if TYPE_CHECKING:
    from outrider.draft_models.targets.stack import LayerStack


class HeadAttention(nn.Module):
    """Attention of a layer of a head. `layer_idx` is its index in the head's own cache."""

    def __init__(self, sizes: HeadSizes, input_width: int, layer_idx: int):
        """input_width: of its input; the first layer's input may be wider than its output."""
        super().__init__()
        self.layer_idx, self.head_dim, self.rotary_dim = layer_idx, sizes.head_dim, sizes.rotary_dim
        query_width, key_width = sizes.heads * sizes.head_dim, sizes.key_heads * sizes.head_dim
        bias = sizes.attention_bias
        self.q_proj = nn.Linear(input_width, query_width, bias=bias)
        self.k_proj = nn.Linear(input_width, key_width, bias=bias)
        self.v_proj = nn.Linear(input_width, key_width, bias=bias)
        self.o_proj = nn.Linear(query_width, sizes.hidden, bias=bias and sizes.output_bias)
        self.q_norm = LlamaRMSNorm(sizes.head_dim, sizes.epsilon) if sizes.head_norms else nn.Identity()
        self.k_norm = LlamaRMSNorm(sizes.head_dim, sizes.epsilon) if sizes.head_norms else nn.Identity()

    def split_heads(self, projection: Tensor) -> Tensor:
        """A projection [B, Q, heads · D] → [B, heads, Q, D]."""
        return projection.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def rotate(self, x: Tensor, rotary: Rotary) -> Tensor:
        """x [B, heads, Q, D] at its positions: the first `rotary_dim` dimensions rotate."""
        cos, sin = (table[:, None] for table in rotary.tables[0])  # a head has one rotary table
        rotating, unrotated = x.split([self.rotary_dim, self.head_dim - self.rotary_dim], dim=-1)
        rotating = rotating * cos + rotate_half(rotating) * sin
        return torch.cat([rotating, unrotated], dim=-1) if unrotated.shape[-1] else rotating

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, gate: Tensor | None = None) -> Tensor:
        """query [B, heads, Q, D] over keys and values [B, key heads, K, D] → the output [B, Q, H]."""
        attended, _ = grouped_attention(self, query, key, value, mask, scaling=self.head_dim**-0.5)
        return self.project(attended, gate)

    def project(self, attended: Tensor, gate: Tensor | None) -> Tensor:
        """The output [B, Q, H] from mixed values [B, Q, heads, D], times the sigmoid of `gate` [B, Q, heads · D]."""
        attended = attended.flatten(2)
        return cast("Tensor", self.o_proj(attended if gate is None else attended * gate.sigmoid()))


def head_mlp(sizes: HeadSizes) -> LlamaMLP:
    """The MLP of a head's layer."""
    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        mlp_bias=sizes.mlp_bias,
        hidden_act=sizes.activation,
        num_attention_heads=1,  # the default of 32 heads refuses a width that 32 does not divide
    )
    return LlamaMLP(config)


class DraftHead(nn.Module, ABC):
    """What every draft head has besides its layers: its vocabulary, its embedding, its rotary tables.

    reading: the sizes. draft_tokens: the target's ids [V_d], ascending, that it has logits for; None: all. cos, sin
    [positions, rotary_dim]: see `reserve`. Without its own embedding, `use_target` must be called first; the target's
    is kept in a list, so that it does not become a submodule.
    """

    reading: HeadSizes
    draft_tokens: Tensor | None
    embed_tokens: nn.Embedding | None
    cos: Tensor
    sin: Tensor
    layered = None  # engines take the target's layers from it; a head is no target

    def __init__(self, sizes: HeadSizes, *, all_tokens: bool):
        """all_tokens: without a draft vocabulary."""
        super().__init__()
        self.reading, self.windows = sizes, list(sizes.windows)
        draft_ids = None if all_tokens else torch.empty(sizes.draft_vocabulary, dtype=torch.long, device="meta")
        self.register_buffer("draft_tokens", draft_ids)
        self.vocabulary = sizes.vocabulary
        self.shared_embedding: list[Callable[[Tensor], Tensor]] = []
        self._rotary = [_rotary_of(sizes)]  # in a list, so that its frequencies stay in float32
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)

    def with_weights(self, weights: Mapping[str, Tensor]) -> Self:
        """Itself with `weights`, by the names of this module; frozen. The callers check names and shapes first."""
        self.load_state_dict(dict(weights), strict=True, assign=True)
        return self.requires_grad_(False).eval()

    @property
    @abstractmethod
    def unpacked_weight(self) -> Tensor:
        """A weight that no engine packs into another layout, so that it shows the head's device and dtype."""

    @property
    def device(self) -> torch.device:
        return self.unpacked_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.unpacked_weight.dtype

    @property
    def tables(self) -> tuple[tuple[Tensor, Tensor], ...]:
        return ((self.cos, self.sin),)

    def reserve(self, position_count: int) -> None:
        """Compute the rotary tables `cos` and `sin` for at least `position_count` positions."""
        if position_count <= len(self.cos):
            return
        # The module reads only dtype and device of its first argument.
        cos, sin = self._rotary[0](torch.empty(1, dtype=torch.float32), torch.arange(position_count)[None])
        self.cos, self.sin = (table[0].to(self.device, self.dtype) for table in (cos, sin))

    def rotary(self, positions: Tensor) -> Rotary:
        return Rotary(positions, ((self.cos[positions], self.sin[positions]),))

    def use_embedding(self, weight: Tensor) -> None:
        """Share the target's embedding [V, H], unscaled (only if the head has none)."""
        self.shared_embedding = [partial(F.embedding, weight=weight)]

    def use_embedding_of(self, stack: "LayerStack") -> None:
        """Share the embedding of a target, whose rows may be codes, unscaled (only if the head has none)."""
        table = stack.embed_tokens
        if isinstance(table, CodedEmbedding):
            self.shared_embedding = [table]
        else:
            self.use_embedding(table.weight)

    @abstractmethod
    def use_target(self, stack: "LayerStack") -> None:
        """Share what the head lacks with its target: the embedding, and the output head."""

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [...] → their embeddings [..., H]."""
        return (self.embed_tokens or self.shared_embedding[0])(tokens)

    @abstractmethod
    def draft_logits(self, hidden: Tensor) -> Tensor:
        """The output of the layers [..., H] → logits over the draft vocabulary [..., V_d]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """`draft_logits` over the vocabulary [..., V], where tokens outside the draft vocabulary have probability 0."""
        return self.spread(self.draft_logits(hidden))

    def spread(self, logits: Tensor) -> Tensor:
        """Logits over the draft vocabulary [..., V_d] → over the vocabulary [..., V]."""
        return logits if self.draft_tokens is None else spread_logits(logits, self.draft_tokens, self.vocabulary)


def _rotary_of(sizes: HeadSizes) -> LlamaRotaryEmbedding:
    """The module that computes rotary tables; its config's head_dim is the number of dimensions that rotate."""
    rope: dict[str, Any] = {name: value for name, value in sizes.rope.items() if name != "partial_rotary_factor"}
    try:
        config = LlamaConfig(
            hidden_size=sizes.heads * sizes.rotary_dim,
            num_attention_heads=sizes.heads,
            head_dim=sizes.rotary_dim,
            max_position_embeddings=sizes.max_positions,
            rope_parameters=rope,
        )
        return LlamaRotaryEmbedding(config)
    except Exception as error:  # any error of transformers for an unknown type, or one that lacks a parameter
        raise UserError(
            f"rope_parameters={sizes.rope}: describe no rotary embedding of transformers ({reason(error)}); correct "
            "them in the head's config.json"
        ) from None
