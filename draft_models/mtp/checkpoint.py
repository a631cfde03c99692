"""MTP heads on disk: opened strictly, in any spelling, and written back. Missing and unexpected tensors are errors.

A spelling is the names and the layout of a family's or an engine's files. A reading says how the tensors are read:
sizes, rope, where norms are. "Here" means in this code base, in whose names and layout `MtpHead` has its tensors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedConfig

from outrider.base.errors import UserError
from outrider.base.files import read_mapping, require_writable, write_atomically, write_json
from outrider.draft_models.eagle3.checkpoint import StoredHead, head_shapes
from outrider.draft_models.eagle3.model import Eagle3
from outrider.draft_models.formats.stored_tensors import CONFIG_FILE, SAFETENSORS
from outrider.draft_models.heads.files import choose_weights, require_shapes
from outrider.draft_models.heads.sizes import AS_DECLARED, HeadSizes, apply_changes, require_fitting_target
from outrider.draft_models.mtp.model import MtpHead
from outrider.draft_models.mtp.reading import MtpReading, read_shapes
from outrider.draft_models.mtp.spellings import LAYER, find_head
from outrider.draft_models.targets.settings import ReadingChanges
from outrider.draft_models.targets.tensor_files import find_file

# The fields of config.json that state the number of MTP layers.
DECLARED_BY = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_QUERY, _GATE = (f"{LAYER}self_attn.{name}_proj" for name in ("q", "gate"))
# Instructions in the README.md of a trained head; {…:option} stands for the value of an option.
USE = """An MTP head: it drafts from the last hidden state of the target, and belongs to that target alone.

Outrider, and a target without a head with this one, for servers:

```
evaluate-checkpoint target={target:option} mtp={path:option}
outrider restore-mtp target={target:option} base={path:option} out_dir=runs/restored
```"""


class StoredMtp(StoredHead):
    """An MTP head on disk, checked but not loaded; `dialect` is its spelling. A target's config.json describes it."""

    reading: MtpReading
    module: ClassVar[type[Eagle3]] = MtpHead

    def make(self, reading: HeadSizes, tensors: Mapping[str, Tensor]) -> Eagle3:
        assert isinstance(reading, MtpReading)
        weights = choose_weights(head_shapes(reading, MtpHead), arrange_tensors(reading, tensors), self.where)
        return MtpHead.of(reading, weights)


def open_mtp(source: str, target: PreTrainedConfig, changes: ReadingChanges = AS_DECLARED) -> StoredMtp:
    """The MTP head in `source`, a directory, Hub name or GGUF file, for a target of config `target`.

    Reads headers only. changes: overrides of the declared reading. Raises `UserError` if there is no such head, it is
    of an unsupported kind, is for another target, or its tensors do not fit.
    """
    head, where = find_head(source), f"mtp={source}"
    if head is None:
        remedy = lost_head(source, target) or "give a model that has one, or its base model, or another drafter"
        raise UserError(f"{where}: no tensors of an MTP head there; {remedy}")
    head.require_supported()
    stored_tensors = dict(head.files.open_stored(head.files.file_of))
    shapes = {name: tuple(stored_tensors[stored_name].shape) for name, stored_name in head.stored_names.items()}
    try:
        declared = read_shapes(shapes, target, head.spelling)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    meta_tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}  # to learn their shapes
    config_path = None if head.spelling == "gguf" else find_file(source, CONFIG_FILE, revision=None)
    config = {} if config_path is None else read_mapping(config_path, "description of a model", "fetch it again")
    mtp_shapes = {name: tuple(tensor.shape) for name, tensor in arrange_tensors(declared, meta_tensors).items()}
    opened = StoredMtp(
        source=source, where=where, config=config, files=head.files, stored_names=head.stored_names, shapes=mtp_shapes,
        dialect=head.spelling, reading=declared,
    )  # fmt: skip
    require_shapes(declared, head_shapes(declared, MtpHead), opened, lambda name: head.stored_names.get(name, name))
    reading = apply_changes(declared, changes, target)
    require_fitting_target(reading, target.get_text_config(), where)
    return StoredMtp(**vars(opened) | {"reading": reading})


def lost_head(source: str, target: PreTrainedConfig) -> str:
    """What happened to an MTP head that the config `target` declares and the model in `source` lacks; "": none."""
    layer_counts = {key: getattr(target.get_text_config(), key, None) for key in DECLARED_BY}
    declared = ", ".join(f"{key}={count}" for key, count in layer_counts.items() if count)
    if not declared or find_head(source) is not None:
        return ""
    return (
        f"the target's config declares an MTP head ({declared}) that its weights lack: it was skipped when the model "
        "was saved, or lost in fine-tuning; outrider restore-mtp takes it from the base model"
    )


def arrange_tensors(reading: MtpReading, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors`, as `reading` reads them, by the names and in the layout of `MtpHead`; they may be on meta.

    fc's columns become [embedding; hidden state], norms' weights factors, and q_proj's rows, which alternate between
    heads of queries and of gates, two matrices.
    """
    arranged = dict(tensors)
    if reading.hidden_first and "fc.weight" in arranged:
        arranged["fc.weight"] = arranged["fc.weight"].roll(reading.hidden, 1)  # [H, 2 H]: swaps the halves
    if reading.norm_offset:
        arranged |= {name: 1 + tensor for name, tensor in arranged.items() if "norm" in name}
    for kind in ("weight", "bias") if reading.output_gate else ():
        if (query_gate := arranged.get(f"{_QUERY}.{kind}")) is not None:
            parts = query_gate.unflatten(0, (reading.heads, 2, reading.head_dim))  # [heads, 2, D, …]
            arranged[f"{_QUERY}.{kind}"], arranged[f"{_GATE}.{kind}"] = (part.flatten(0, 1) for part in parts.unbind(1))
    return arranged


def spell_tensors(stored: StoredMtp, weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The float32 `weights`, by the names of `MtpHead`, as `stored` has them in its files, in `dtype`.

    The inverse of `arrange_tensors`. A norm's weight w is read as 1 + w, so w is rounded to a multiple of 2⁻²³.
    """
    reading, tensors = stored.reading, dict(weights)
    for kind in ("weight", "bias") if reading.output_gate else ():
        if f"{_QUERY}.{kind}" in tensors:
            query_gate = [tensors[f"{name}.{kind}"].unflatten(0, (reading.heads, -1)) for name in (_QUERY, _GATE)]
            tensors[f"{_QUERY}.{kind}"] = torch.stack(query_gate, 1).flatten(0, 2)  # [heads · 2 · D, …]
    if reading.norm_offset:
        tensors |= {name: tensor - 1 for name, tensor in tensors.items() if "norm" in name}
    if reading.hidden_first:
        tensors["fc.weight"] = tensors["fc.weight"].roll(reading.hidden, 1)  # [H, 2 H]
    return {stored_name: tensors[name].to(dtype) for name, stored_name in stored.stored_names.items()}


def save_mtp(path: Path, head: Eagle3, stored: StoredMtp, dtype: torch.dtype) -> None:
    """Write `head` in `dtype` to directory `path`, in the spelling of `stored`, with which its training began.

    config.json is that beside `stored`, by which restore-mtp finds out to which models the head belongs.
    """
    require_writable(path)
    weights = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    write_atomically(path / SAFETENSORS.single, save(spell_tensors(stored, weights, dtype), metadata={"format": "pt"}))
    config = {key: value for key, value in stored.config.items() if key != "quantization_config"}
    write_json(path / CONFIG_FILE, config)
