"""Decoder layers for inference with fewer and larger products; on a CPU a layer may also run as one compiled call.

Linear layers are `nn.Linear`, `Int8Linear` (int8 codes and a scale of each output) or `CodedLinear` (quantised weights
as a GGUF file stores them).
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from outrider.draft_models.targets.attention import grouped_attention
from outrider.draft_models.targets.coded import CodedLinear
from outrider.draft_models.targets.int8 import Int8Linear, Linear
from outrider.draft_models.targets.target import LayerCache
from outrider.inference.core.cache import KVCache
from outrider.inference.engines.graphs.attention_kernels import triton_kernels

if TYPE_CHECKING:
    from outrider.inference.engines.cpu.at_once import LayersAtOnce

# Architectures whose arithmetic is known to equal the fused layers'. Layers of others run unchanged.
_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
FUSED_LAYERS = {*(f"{family}DecoderLayer" for family in _FAMILIES), "OPTDecoderLayer"}
SILU = (nn.SiLU, SiLUActivation)
FUSED_NORMS = {f"{family}RMSNorm" for family in _FAMILIES}


class RMSNorm(nn.Module):
    """transformers' RMSNorm of the supported architectures in few steps: weight · round(x / rms(x))."""

    floor: Tensor  # eps, as a tensor
    divides_by_rms = True  # unlike a LayerNorm: read by `apply_norm_and_head`, which compiles norm and head together

    def __init__(self, norm: Any):
        super().__init__()
        self.weight = norm.weight
        self.shape = tuple(norm.weight.shape)
        self.eps = norm.variance_epsilon
        self.register_buffer("floor", torch.full((), self.eps, device=norm.weight.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and x.device.type == "cpu":  # PyTorch's own is nine small operations here
            norm = torch.linalg.vector_norm(x, 2, -1, True)  # along the last axis, which stays
            mean_square = torch.addcmul(self.floor, norm, norm, value=1 / x.shape[-1])
            return mean_square.rsqrt_().mul(x).mul_(self.weight)
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        return F.rms_norm(x, self.shape, None, self.eps) * self.weight  # in 16 bits a single step would round only once

    __call__ = forward  # a module's own call looks for hooks, which none of these has: 1 to 2 µs of a token's time each


class FusedLayer(nn.Module):
    """A decoder layer of a supported architecture for inference: the same arithmetic in fewer steps.

    Queries, keys and values come from one product, gate and up from another; queries and keys are rotated together.
    The original layer stays usable: its weights become views of the joined ones. After one of its modules is replaced,
    call `bind` again.
    """

    signs: Tensor | None
    head_scale: Tensor | None
    _parts: tuple[Callable[[Tensor], Tensor], ...]

    def __init__(self, layer: Any):
        super().__init__()
        attention = layer.self_attn
        self.layer_idx = attention.layer_idx
        self.head_dim = attention.head_dim
        self.heads = attention.q_proj.out_features // self.head_dim  # of queries
        self.rotated = self.heads + attention.k_proj.out_features // self.head_dim  # heads of queries and keys
        self.qkv = join_linears([attention.q_proj, attention.k_proj, attention.v_proj])
        signs = head_scale = None
        self.is_opt = not hasattr(layer, "mlp")  # the other families have Llama's layer
        self.head_eps = 0.0  # of the norms of queries and keys, if there are such norms
        if self.is_opt:
            self.attention_norm = layer.self_attn_layer_norm
            self.out = attention.out_proj
            self.mlp_norm = layer.final_layer_norm
            self.up, self.down = layer.fc1, layer.fc2
            self.activation = layer.activation_fn
        else:
            self.attention_norm = RMSNorm(layer.input_layernorm)
            self.out = attention.o_proj
            self.mlp_norm = RMSNorm(layer.post_attention_layernorm)
            self.up, self.down = join_linears([layer.mlp.gate_proj, layer.mlp.up_proj]), layer.mlp.down_proj
            self.activation = layer.mlp.act_fn
            signs = self.attention_norm.weight.new_ones(self.head_dim)  # [D]: a rotation subtracts in its first half
            signs[: self.head_dim // 2] = -1
        self.gates_by_silu = not self.is_opt and isinstance(self.activation, SILU)
        if hasattr(attention, "q_norm"):
            self.head_eps = attention.q_norm.variance_epsilon
            query_scale, key_scale = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
            head_scale = torch.stack([query_scale] * self.heads + [key_scale] * (self.rotated - self.heads))  # [n, D]
        self.register_buffer("signs", signs, persistent=False)
        self.register_buffer("head_scale", head_scale, persistent=False)
        self.at_once: LayersAtOnce | None = None  # the compiled call of this layer, if no stack runs it with others
        self.bind()

    @property
    def products(self) -> list[Linear]:
        return [self.qkv, self.out, self.up, self.down]

    def bind(self) -> None:
        """Cache its modules in attributes: a module look-up takes longer than a view of a tensor."""
        self._parts = (self.attention_norm, self.qkv, self.out, self.mlp_norm, self.up, self.activation, self.down)

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: LayerCache | None = None,
        position_ids: Tensor | None = None,  # not read
    ) -> Tensor:
        """Run the layer like transformers': hidden [B, Q, d] → [B, Q, d]. position_embeddings: cos, sin [1, Q, D]."""
        if self.at_once is not None:  # `run` of layers 0 … 0: it has this layer alone
            output = self.at_once.run(hidden, 0, 1, position_embeddings, attention_mask, past_key_values)
            if output is not None:  # None: the compiled call does not support this pass
                return output
        return self.one_by_one(hidden, attention_mask, position_embeddings, past_key_values)

    __call__ = forward

    def one_by_one(
        self, hidden: Tensor, attention_mask: Tensor | None, position_embeddings: tuple[Tensor, Tensor] | None,
        past_key_values: LayerCache | None,
    ) -> Tensor:  # fmt: skip
        """`forward` by separate operations."""
        batch, query_count, _ = hidden.shape
        if self.gates_by_silu and isinstance(past_key_values, KVCache) and past_key_values.fixed is not None:
            kernels = triton_kernels(hidden.device, hidden.dtype)
            if kernels is not None:
                return self._in_few_launches(kernels, hidden, attention_mask, position_embeddings, past_key_values)
        attention_norm, qkv, out, mlp_norm, up, activation, down = self._parts
        qkv_heads = qkv(attention_norm(hidden)).view(batch, query_count, -1, self.head_dim)
        rotated = self._rotate(qkv_heads[:, :, : self.rotated], position_embeddings)
        query, key = rotated[:, :, : self.heads].transpose(1, 2), rotated[:, :, self.heads :].transpose(1, 2)
        value = qkv_heads[:, :, self.rotated :].transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        mixed, _ = grouped_attention(self, query, key, value, attention_mask, scaling=self.head_dim**-0.5)
        hidden = hidden + out(mixed.reshape(batch, query_count, -1))
        mlp_hidden = up(mlp_norm(hidden))
        if self.is_opt:
            mlp_hidden = activation(mlp_hidden)
        else:
            gate, mlp_hidden = mlp_hidden.chunk(2, -1)
            mlp_hidden = activation(gate).mul_(mlp_hidden)
        return hidden + down(mlp_hidden)

    def _in_few_launches(
        self, kernels: ModuleType, hidden: Tensor, mask: Tensor | None, rotary: tuple[Tensor, Tensor] | None,
        cache: KVCache,
    ) -> Tensor:  # fmt: skip
        """`forward` of a fixed-shape pass, which a CUDA graph replays, by `inference.engines.graphs.triton_kernels`."""
        assert cache.fixed is not None
        query_count, (slots, key_count) = hidden.shape[1], cache.fixed  # slots [Q] to write; keys that are read
        attn_norm, mlp_norm = self.attention_norm, self.mlp_norm
        hidden = hidden.contiguous()
        heads = self.qkv(kernels.norm(hidden, attn_norm.weight, attn_norm.eps)).view(1, query_count, -1, self.head_dim)
        key, value = heads[:, :, self.heads : self.rotated], heads[:, :, self.rotated :]
        keys, values = cache.views(key.transpose(1, 2), value.transpose(1, 2), self.layer_idx)
        query = kernels.rotate_and_store(heads, rotary, self.head_scale, self.head_eps, slots, keys, values)
        operands = (query, keys[:, :, :key_count], values[:, :, :key_count], mask)
        mixed, _ = grouped_attention(self, *operands, scaling=self.head_dim**-0.5)
        attention_out = self.out(mixed.reshape(1, query_count, -1))
        hidden, normed = kernels.add_and_norm(hidden, attention_out, mlp_norm.weight, mlp_norm.eps)
        return hidden + self.down(kernels.gate(self.up(normed)))

    def _rotate(self, heads: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Heads [B, Q, n, D], queries before keys, normalised (Qwen3) and rotated by cos and sin (all but OPT)."""
        if self.head_scale is not None:
            heads = F.rms_norm(heads, (self.head_dim,), None, self.head_eps) * self.head_scale
        if self.signs is None or rotary is None:
            return heads
        cos, sin = rotary[0][:, :, None], (rotary[1] * self.signs)[:, :, None]
        return heads * cos + torch.roll(heads, self.head_dim // 2, -1) * sin


def join_linears(linears: Sequence[Linear]) -> Linear:
    """One linear layer for the outputs of `linears`, all of one type; their weights become views of its weight."""
    coded = [linear for linear in linears if isinstance(linear, CodedLinear)]
    if coded:
        like = coded[0].like
        return CodedLinear([part for linear in coded for part in linear.parts], _join_biases(coded, like), like.dtype)
    int8_linears = [linear for linear in linears if isinstance(linear, Int8Linear)]
    return _join_int8(int8_linears) if int8_linears else _join_floats([x for x in linears if isinstance(x, nn.Linear)])


def _join_int8(linears: Sequence[Int8Linear]) -> Int8Linear:
    out_sizes = [linear.out_features for linear in linears]
    codes, scale = torch.cat([linear.codes for linear in linears]), torch.cat([linear.scale for linear in linears])
    for linear, own_codes, own_scale in zip(linears, codes.split(out_sizes), scale.split(out_sizes), strict=True):
        linear.codes, linear.scale = own_codes, own_scale
    return Int8Linear(codes, scale, _join_biases(linears, scale))


def _join_biases(linears: Sequence[Linear], like: Tensor) -> Tensor | None:
    """The biases concatenated, zeros for a layer without one; None if all lack one. like: of their dtype and device."""
    if all(linear.bias is None for linear in linears):
        return None
    zeros = [like.new_zeros(linear.out_features) for linear in linears]
    return torch.cat([z if linear.bias is None else linear.bias for linear, z in zip(linears, zeros, strict=True)])


def _join_floats(linears: Sequence[nn.Linear]) -> nn.Linear:
    out_sizes = [linear.out_features for linear in linears]
    weight = torch.cat([linear.weight.detach() for linear in linears])
    for linear, weight_part in zip(linears, weight.split(out_sizes), strict=True):
        linear.weight = nn.Parameter(weight_part, requires_grad=False)
    return frozen_linear(weight, _join_biases(linears, weight))


def frozen_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer of these very tensors, without gradient."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def fuse_layers(model: nn.Module) -> None:
    """Fuse the decoder layers and RMSNorms that `model` holds directly, as a `LayerStack` (a target's layers) and an
    early exit do. The model from which a stack was made keeps its own layers."""
    for name, child in model.named_children():
        fused = nn.ModuleList(map(_fuse, child)) if isinstance(child, nn.ModuleList) else _fuse(child)
        setattr(model, name, fused)


def _fuse(module: nn.Module) -> nn.Module:
    name = type(module).__name__
    kinds = {type(linear) for linear in module.modules() if isinstance(linear, nn.Linear | CodedLinear | Int8Linear)}
    if name in FUSED_LAYERS and len(kinds) == 1:  # a file may store some of a layer's matrices as codes, others not
        return FusedLayer(module)
    return RMSNorm(module) if name in FUSED_NORMS else module
