"""Targets of known shapes with random weights, made on the measured device, and their sizes."""

from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from draft_models.early_exit.model import EarlyExit
from draft_models.targets.empty_models import empty_model, layer_stack
from draft_models.targets.stack import LayerStack
from inference.drafters.shaped import Calibrated
from inference.loading.drafters import prepare
from train.parts.early_exit import default_exit_layer


def _llama(hidden: int, inner: int, layers: int, heads: int, *, key_heads: int = 0, vocabulary: int = 32000) -> Any:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads or heads,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )


SHAPES = {
    "toy": _llama(256, 704, 12, 4, vocabulary=2048),  # make demo's target
    "68m": _llama(768, 3072, 2, 12),
    "8x1024": _llama(1024, 2816, 8, 16, key_heads=8),
    "smollm2": _llama(576, 1536, 30, 9, key_heads=3, vocabulary=49152),
    "7b": _llama(4096, 11008, 32, 32),
    "13b": _llama(5120, 13824, 40, 40),
}


@dataclass(frozen=True)
class Weights:
    """Numbers, not bytes: of one layer, the head, the embedding; keys and values of a position in one layer."""

    layer: int
    head: int
    embedding: int
    position: int

    def read(self, layers: int, context: int, heads: int = 1) -> int:
        """The bytes that a pass over one row after `context` positions reads: each weight, key and value once."""
        return layers * (self.layer + self.position * context) + heads * self.head


@dataclass(frozen=True)
class Target:
    """A random target and an early-exit drafter on it, ready to decode."""

    name: str
    weights: Weights
    stack: LayerStack
    drafter: EarlyExit


def weigh(config: LlamaConfig) -> Weights:
    """The weights of a shape."""
    model: Any = empty_model(config)
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    width = model.model.layers[0].self_attn.head_dim
    embedding = model.model.embed_tokens.weight.numel()
    key_heads = model.model.layers[0].self_attn.k_proj.out_features // width
    return Weights(layer, model.lm_head.weight.numel(), embedding, 2 * key_heads * width)


def needed_bytes(config: LlamaConfig, dtype: torch.dtype, positions: int) -> int:
    """Memory for a target, its drafter (a layer and a head more) and three sessions of `positions`."""
    weights, layers = weigh(config), config.num_hidden_layers
    numbers = (layers + 1) * weights.layer + 2 * weights.head + weights.embedding
    numbers += 3 * (layers + 1) * weights.position * positions
    return int(1.1 * numbers * dtype.itemsize)  # a tenth for joined and repacked weights and for activations


def free_bytes(device: torch.device) -> int:
    """Memory that is free on `device` now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def make_target(name: str, dtype: torch.dtype, device: torch.device) -> Target:
    """The target of shape `name`, tensor by tensor on `device`, with an exit layer on 8 % of its layers."""
    config = SHAPES[name]
    model = _random_model(config, dtype, device)
    stack = layer_stack(model)
    drafter = EarlyExit.from_model(model, default_exit_layer(config), own_head=True).requires_grad_(False)
    prepare(stack, {"early_exit": Calibrated(drafter)})
    return Target(name, weigh(config), stack, drafter)


def _random_model(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    model = empty_model(config)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in list(model.named_parameters()):
        weight = torch.ones(parameter.shape, dtype=dtype, device=device)
        if parameter.ndim == 2:  # a token's embedding mostly decides the next token, so that some drafts are accepted
            weight.normal_(std=1.0 if "embed" in name else 0.02, generator=generator)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(weight, requires_grad=False))
    return model.eval().to(device)  # type: ignore[arg-type]  # the rope buffers; its stub is a decorator's
