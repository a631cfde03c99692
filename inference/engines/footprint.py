"""Bytes that a model and its sessions take in decoding, from configs alone."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig

from draft_models.targets.empty_models import anatomy, empty_model
from draft_models.targets.tensor_parallel import own_heads, own_layer, split_model
from inference.engines.graphs.fixed_shapes import WIDTHS
from outrider.groups import Group


@dataclass(frozen=True)
class Place:
    """How models are held: of `size` processes with a copy, each has a part; `itemsize` bytes a value; texts of up to
    `positions` tokens."""

    size: int
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
    """Of the weights of a model that one process has."""
    model = empty_model(config)
    tied = model.get_output_embeddings() is not None and bool(config.tie_word_embeddings)
    if place.size > 1:
        split_model(model, Group(size=place.size))
        if tied:  # split, they are two layers of one matrix
            own_layer(model.get_submodule(anatomy(config).head)).weight = None
    return count(model) * place.itemsize


def cache_bytes(config: PreTrainedConfig, place: Place, layers: int | None = None) -> int:
    """Of the keys and values of `layers` layers, by default all, that one process has."""
    _, own = own_heads(config, place.size)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    every = config.num_hidden_layers if layers is None else layers
    return 2 * every * own * width * place.slots * place.itemsize


def pass_bytes(config: PreTrainedConfig, place: Place) -> int:
    """Of what passes of fixed shape read and write outside of the model: hidden states and logits of the widest."""
    return WIDTHS[-1] * (4 * config.hidden_size + config.vocab_size) * place.itemsize
