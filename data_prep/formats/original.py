"""A model as it was published, and what has to be known of it to convert it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

CONFIG_FILE, GENERATION_FILE, TOKENIZER_FILE = "config.json", "generation_config.json", "tokenizer_config.json"
AS_WRITTEN = "loaded_as_written"  # marks a tokenizer that is all in tokenizer.json, whatever transformers knows of such
HEAD = "lm_head.weight"
MOST_LAYERS = 2**12


@dataclass(frozen=True)
class Stored:
    """A tensor of a model that is to be converted. dtype, shape: of what `read` gives."""

    dtype: torch.dtype
    shape: Sequence[int]
    read: Callable[[], Tensor]


class Original(Protocol):
    """A model as it was published. Whatever is asked of it raises `UserError` where it is damaged or not understood."""

    @property
    def source(self) -> str:
        """What it is called."""

    @property
    def files(self) -> Mapping[str, Path]:
        """All files of which it is made, by what they are called in it."""

    @property
    def quantised(self) -> bool:
        """Whether its weights are quantised as they are stored."""

    def tensors(self) -> Mapping[str, Stored]:
        """Its tensors by Hugging Face's names; none is read yet."""

    def describe(self, folder: Path) -> None:
        """Write all but the weights into the empty `folder`: config, tokenizer, generation config."""
