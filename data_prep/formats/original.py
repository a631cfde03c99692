"""A model as it was published, with the interface for its conversion."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

CONFIG_FILE, GENERATION_FILE, TOKENIZER_FILE = "config.json", "generation_config.json", "tokenizer_config.json"
AS_WRITTEN = "loaded_as_written"  # marks a tokenizer that is loaded from tokenizer.json alone
HEAD = "lm_head.weight"
MOST_LAYERS = 2**12


@dataclass(frozen=True)
class Stored:
    """A tensor of a model to be converted. dtype, shape: of the result of `read`."""

    dtype: torch.dtype
    shape: Sequence[int]
    read: Callable[[], Tensor]


class Original(Protocol):
    """A model as it was published. All members raise `UserError` if it is damaged or not supported."""

    @property
    def source(self) -> str:
        """Its name: a path or Hub name."""

    @property
    def files(self) -> Mapping[str, Path]:
        """All its files, by their names in the model."""

    @property
    def quantised(self) -> bool:
        """Whether its stored weights are quantised."""

    def tensors(self) -> Mapping[str, Stored]:
        """Its tensors by Hugging Face's names; none is read yet."""

    def describe(self, folder: Path) -> None:
        """Write everything except the weights to the empty `folder`: config, tokenizer, generation config."""
