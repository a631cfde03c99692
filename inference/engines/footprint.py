"""Bytes that a model and its sessions take in decoding, from configs alone."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig

from draft_models.targets.anatomy import key_heads
from draft_models.targets.empty_models import empty_model
from inference.engines.graphs.fixed_shapes import WIDTHS


@dataclass(frozen=True)
class Place:
    """How models are held: `itemsize` bytes a value, texts of up to `positions` tokens."""

    itemsize: int
    positions: int

    @property
    def slots(self) -> int:
        """Of a cache for passes of fixed shape (see `inference.engines.graphs.cuda_graphs.Arena`)."""
        widest = WIDTHS[-1]
        return -(-(self.positions + widest) // widest) * widest + widest


def count(module: nn.Module) -> int:
    """Its parameters, those it has under two names once."""
    return sum(parameter.numel() for parameter in module.parameters())


def weight_bytes(config: PreTrainedConfig, place: Place) -> int:
    """Of the weights of a model."""
    return count(empty_model(config)) * place.itemsize


def cache_bytes(config: PreTrainedConfig, place: Place, layers: int | None = None) -> int:
    """Of the keys and values of `layers` layers, by default all."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    every = config.num_hidden_layers if layers is None else layers
    return 2 * every * key_heads(config) * width * place.slots * place.itemsize


def pass_bytes(config: PreTrainedConfig, place: Place) -> int:
    """Of what passes of fixed shape read and write outside of the model: hidden states and logits of the widest."""
    return WIDTHS[-1] * (4 * config.hidden_size + config.vocab_size) * place.itemsize
