"""Block drafters on disk: opened strictly, in any dialect, and written in z-lab's.

A dialect is the form of config.json and names that one writer of such files has. A reading (`BlockReading`) is what the
config says of the tensors; a user may correct it. Taps are the target's layers whose hidden states the drafter reads.
"""

from pathlib import Path

from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedConfig

from outrider.base.errors import UserError
from outrider.base.files import require_writable, write_atomically, write_json
from outrider.draft_models.card import describe_serving
from outrider.draft_models.dflash.dialects import config_of, dialect_of, local_name, read_config
from outrider.draft_models.dflash.model import DFlash
from outrider.draft_models.dflash.reading import BlockReading
from outrider.draft_models.formats.stored_tensors import CONFIG_FILE, SAFETENSORS
from outrider.draft_models.heads import files
from outrider.draft_models.heads.initial import initial_weights
from outrider.draft_models.heads.sizes import AS_DECLARED, apply_changes, require_fitting_target
from outrider.draft_models.targets.settings import DFLASH, ReadingChanges
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.tensor_files import find_file

MASK_FILE = "mask_embedding.pt"  # a mask's embedding beside the weights, which is not read here
TRAINING_FILE = "dflash.json"  # written next to the weights, last, by training in this toolkit


class StoredBlock(files.StoredDrafter[DFlash]):
    """A block drafter on disk."""

    reading: BlockReading
    record, module = TRAINING_FILE, DFlash


def open_drafter(source: str, target: PreTrainedConfig, changes: ReadingChanges = AS_DECLARED) -> StoredBlock:
    """The block drafter in `source`, a directory or Hub name, for a target of config `target`. Reads headers only.

    changes: overrides of the declared reading. Raises `UserError` if it is none, is for another target, or its tensors
    do not match its config.
    """
    stored = files.open_files(DFLASH, source, "a DFlash or DSpark drafter", local_name)
    if find_file(source, MASK_FILE, revision=None) is not None:
        raise UserError(f"{stored.where}: {MASK_FILE}: expected the mask in the embedding, as mask_token_id")
    try:
        dialect = dialect_of(stored.config, stored.files.file_of)
        declared_reading = read_config(stored.config, stored.shapes, changes.taps)
    except UserError as error:
        raise UserError(f"{stored.where}: {error}; fetch the drafter again, or correct it") from None
    reading = apply_changes(declared_reading, changes, target)
    require_fitting_target(reading, target, stored.where)
    files.require_shapes(declared_reading, files.module_shapes(DFlash, declared_reading), stored)
    return StoredBlock(**vars(stored), dialect=dialect, reading=reading)


def vllm_method(reading: BlockReading) -> str:
    """vLLM's name of the drafter's method."""
    return "dspark" if reading.markov_rank else "dflash"


def require_vllm(reading: BlockReading) -> None:
    """Raise `UserError` for a reading that vLLM does not have for `vllm_method`, and would replace by its own."""
    field_fits = {"sample_from_anchor": reading.sample_from_anchor == (reading.markov_rank > 0)}
    field_fits["embedding_scale"] = reading.embedding_scale == 1.0
    if unread := ", ".join(f"{name}={getattr(reading, name)!r}" for name, is_read in field_fits.items() if not is_read):
        method = vllm_method(reading)
        raise UserError(f"engine=vllm: has no word for {unread} of {method}, so it would run another drafter")


def describe_use(reading: BlockReading, engine: str = "vllm") -> str:
    """Instructions for a drafter in the format of `engine`, with {path} and {target} to fill in: for that engine, and
    for Outrider, which does not read such a drafter in llama.cpp's format."""
    serving = describe_serving(reading.drafted, engine, head=vllm_method(reading))
    summary, local_usage = _USAGE
    return "\n\n".join([summary, serving] if engine == "llama_cpp" else [summary, local_usage, serving])


_USAGE = (
    "A block drafter: it drafts from hidden states of the target, and belongs to that target alone.",
    """Outrider:

```
evaluate-checkpoint target={target:option} dflash={path:option}
```""",
)


def new_drafter(reading: BlockReading, stack: LayerStack, draft_tokens: Tensor | None, seed: int) -> DFlash:
    """The drafter before training (see `initial_weights`). Its Markov head begins without a bias. draft_tokens: the
    target's ids of its draft vocabulary; None: all tokens."""
    weights = initial_weights(reading, files.module_shapes(DFlash, reading), stack, draft_tokens, seed)
    if reading.markov_rank:
        weights["markov_head.markov_w2.weight"].zero_()
    return DFlash(reading, all_tokens=draft_tokens is None).with_weights(weights)


def save_drafter(folder: Path, drafter: DFlash, target: PreTrainedConfig, *, made_here: bool = True) -> None:
    """Write `drafter` to directory `folder` in z-lab's layout, which vLLM loads too: config.json and model.safetensors.

    target: config of its target. made_here: whether Outrider trained it. Raises `UserError` naming what it lacks.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    if (draft_ids := tensors.pop(files.DRAFT_TOKENS, None)) is not None:
        tensors |= files.map_tensors(draft_ids, drafter.reading.vocabulary)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    config = config_of(drafter.reading, shapes, target) | files.written_facts(drafter.dtype, made_here=made_here)
    require_writable(folder)
    write_atomically(folder / SAFETENSORS.single, save(tensors, metadata={"format": "pt"}))
    write_json(folder / CONFIG_FILE, config)
