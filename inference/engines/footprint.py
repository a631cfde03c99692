"""Memory of a model and its sessions in decoding, from configs alone."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig

from draft_models.targets.empty_models import empty_model
from draft_models.targets.model_spec import key_heads
from inference.engines.graphs.fixed_shapes import WIDTHS


@dataclass(frozen=True)
class Place:
    """The storage of models: `itemsize` bytes per value, texts of up to `positions` tokens."""

    itemsize: int
    positions: int

    @property
    def slots(self) -> int:
        """The slots of a cache for fixed-shape passes (see `inference.engines.graphs.cuda_graphs.Arena`)."""
        widest = WIDTHS[-1]
        return -(-(self.positions + widest) // widest) * widest + widest


def count(module: nn.Module) -> int:
    """The number of its parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def weight_bytes(config: PreTrainedConfig, place: Place) -> int:
    """Bytes of a model's weights."""
    return count(empty_model(config)) * place.itemsize


def cache_bytes(config: PreTrainedConfig, place: Place, layers: int | None = None) -> int:
    """Bytes of the keys and values of `layers` layers, by default all."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    every = config.num_hidden_layers if layers is None else layers
    return 2 * every * key_heads(config) * width * place.slots * place.itemsize


def pass_bytes(config: PreTrainedConfig, place: Place) -> int:
    """Bytes of the inputs and outputs of fixed-shape passes: hidden states and logits of the widest one."""
    return WIDTHS[-1] * (4 * config.hidden_size + config.vocab_size) * place.itemsize
