"""Block drafters on disk: opened strictly, in any dialect, and written in z-lab's."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedConfig

from outrider.base.errors import UserError, reason
from outrider.base.files import require_writable, write_atomically, write_json
from outrider.draft_models.card import describe_serving
from outrider.draft_models.dflash.dialects import BlockDialect, config_of, dialect_of, local_name, read_config
from outrider.draft_models.dflash.model import DFlash
from outrider.draft_models.dflash.reading import BlockReading, change_reading
from outrider.draft_models.formats.stored_tensors import CONFIG_FILE, SAFETENSORS
from outrider.draft_models.heads.files import (
    DRAFT_TOKENS,
    HeadFiles,
    choose_weights,
    draft_tokens,
    map_tensors,
    open_files,
    require_shapes,
    written_facts,
)
from outrider.draft_models.heads.initial import initial_weights
from outrider.draft_models.heads.sizes import require_fitting_target
from outrider.draft_models.targets.settings import DFLASH, ReadingChanges
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.tensor_files import find_file

MASK_FILE = "mask_embedding.pt"
AS_DECLARED = ReadingChanges()
TRAINING_FILE = "dflash.json"  # written next to the weights, last, by training in this toolkit


@dataclass(frozen=True, kw_only=True)
class StoredDrafter(HeadFiles):
    """A block drafter on disk, checked but not loaded, with the reading that its config declares, and overrides."""

    dialect: BlockDialect
    reading: BlockReading

    def load(self, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> DFlash:
        """The drafter, frozen. A missing embedding or head is set later, from the target."""
        return make_drafter(self.reading, self.tensors(dtype, device), self.where)


def open_drafter(source: str, target: PreTrainedConfig, changes: ReadingChanges = AS_DECLARED) -> StoredDrafter:
    """The block drafter in `source`, a directory or Hub name, for a target of config `target`. Reads headers only.

    changes: overrides of the declared reading. Raises `UserError` if it is none, is for another target, or its tensors
    do not match its config.
    """
    stored = open_files(DFLASH, source, "a DFlash or DSpark drafter", local_name)
    if find_file(source, MASK_FILE, None) is not None:
        raise UserError(f"{stored.where}: {MASK_FILE}: expected the mask in the embedding, as mask_token_id")
    try:
        dialect = dialect_of(stored.config, stored.files.file_of)
        declared = read_config(stored.config, stored.shapes, changes.taps)
    except UserError as error:
        raise UserError(f"{stored.where}: {error}; fetch the drafter again, or correct it") from None
    reading = change_reading(declared, changes, target)
    require_fitting_target(reading, target, stored.where)
    require_shapes(declared, drafter_shapes(declared), stored)
    return StoredDrafter(**vars(stored), dialect=dialect, reading=reading)


def make_drafter(reading: BlockReading, tensors: Mapping[str, Tensor], where: str) -> DFlash:
    """The drafter of `reading` with `tensors`, by their names here, d2t and t2d included. Raises `UserError`."""
    weights, tokens = choose_weights(drafter_shapes(reading), tensors, where), draft_tokens(reading, tensors, where)
    return DFlash.of(reading, weights if tokens is None else {**weights, DRAFT_TOKENS: tokens})


def drafter_shapes(reading: BlockReading) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights under this reading, by their names here."""
    try:
        weights = DFlash(reading, all_tokens=True).state_dict()
    except TypeError as error:  # sizes beyond what a tensor can have
        raise UserError(f"a drafter of impossible sizes ({reason(error)}); correct its {CONFIG_FILE}") from None
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def vllm_method(reading: BlockReading) -> str:
    """vLLM's name of the drafter's method."""
    return "dspark" if reading.markov_rank else "dflash"


def describe_use(reading: BlockReading) -> str:
    """Instructions for a written drafter, here and in vLLM, with {path} and {target} to fill in."""
    serving = describe_serving(reading.drafted, "vllm", head=vllm_method(reading))
    return f"{_USAGE}\n\n{serving}"


_USAGE = """A block drafter: it drafts from hidden states of the target, and belongs to that target alone.

Outrider:

```
evaluate-checkpoint target={target:option} dflash={path:option}
```"""


def new_drafter(reading: BlockReading, stack: LayerStack, tokens: Tensor | None, seed: int) -> DFlash:
    """The drafter before training (see `initial_weights`). Its Markov head begins without a bias."""
    weights = initial_weights(reading, drafter_shapes(reading), stack, tokens, seed)
    if reading.markov_rank:
        weights["markov_head.markov_w2.weight"].zero_()
    return DFlash.of(reading, weights)


def save_drafter(path: Path, drafter: DFlash, target: PreTrainedConfig, *, made_here: bool = True) -> None:
    """Write `drafter` to directory `path` in z-lab's layout, which vLLM loads too: config.json and model.safetensors.

    target: config of its target. made_here: as `HeadFiles.made_here`. Raises `UserError` naming what the layout lacks.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    if (ids := tensors.pop(DRAFT_TOKENS, None)) is not None:
        tensors |= map_tensors(ids, drafter.reading.vocabulary)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    config = config_of(drafter.reading, shapes, target) | written_facts(drafter.dtype, made_here=made_here)
    require_writable(path)
    write_atomically(path / SAFETENSORS.single, save(tensors, metadata={"format": "pt"}))
    write_json(path / CONFIG_FILE, config)
