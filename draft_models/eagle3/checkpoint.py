"""EAGLE-3 heads on disk: opened strictly, in any dialect. Missing and unexpected tensors are errors.

A head with tensors filled in or dropped would draft badly without any error. A new one, for training, has random
weights except for the logits' matrix. A dialect is the form of config.json and names that one trainer of heads has. A
reading (`Reading`) is what the config says of the tensors; a user may correct it by `ReadingChanges`. Taps are the
boundaries of the target's layers whose hidden states the head reads.
"""

from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from outrider.base.errors import UserError
from outrider.base.files import require_writable, write_atomically, write_json
from outrider.draft_models.card import describe_serving
from outrider.draft_models.eagle3 import dialects
from outrider.draft_models.eagle3.model import Eagle3
from outrider.draft_models.eagle3.reading import Reading
from outrider.draft_models.formats.gguf_file import MetadataValue
from outrider.draft_models.formats.gguf_model import tensor_names
from outrider.draft_models.formats.gguf_write import require_gguf, write_file
from outrider.draft_models.formats.stored_tensors import CONFIG_FILE, SAFETENSORS
from outrider.draft_models.heads import files
from outrider.draft_models.heads.configs import layer_config
from outrider.draft_models.heads.initial import initial_weights
from outrider.draft_models.heads.sizes import AS_DECLARED, apply_changes, require_fitting_target
from outrider.draft_models.targets.model_files import empty_model
from outrider.draft_models.targets.settings import EAGLE3, Dialect, ExportDialect, ReadingChanges, WrittenDialect
from outrider.draft_models.targets.stack import LayerStack

TRAINING_FILE = "eagle3.json"  # written next to the weights, last, by training in this toolkit


class StoredHead(files.StoredDrafter[Eagle3]):
    """An EAGLE-3 head on disk."""

    reading: Reading
    record = TRAINING_FILE
    module: ClassVar[type[Eagle3]] = Eagle3


def open_head(source: str, target: PreTrainedConfig, changes: ReadingChanges = AS_DECLARED) -> StoredHead:
    """The head in `source`, a directory or Hub name, for a target of config `target`. Reads headers only.

    changes: overrides of the declared reading. Raises `UserError` if it is not an EAGLE-3 head, is for another target,
    or its tensors do not match its config.
    """
    stored = files.open_files("eagle3", source, "an EAGLE-3 head", dialects.local_name)
    dialect = dialects.dialect_of(stored.config, stored.files.file_of, source)
    try:
        declared = dialects.read_config(stored.config, stored.shapes, target.num_hidden_layers, source)
    except UserError:
        if changes.taps is None:  # else its own taps may be what cannot be read
            raise
        declared = dialects.read_config(stored.config, stored.shapes, target.num_hidden_layers, source, changes.taps)
    reading = apply_changes(declared, changes, target)
    require_fitting_target(reading, target, stored.where)
    try:
        _require_shapes(declared, stored, dialect)
    except UserError:
        if reading == declared:
            raise
        _require_shapes(reading, stored, dialect)  # the config is wrong, and the overrides fit
    return StoredHead(**vars(stored), dialect=dialect, reading=reading)


def _require_shapes(reading: Reading, stored: files.HeadFiles, dialect: Dialect) -> None:
    files.require_shapes(reading, head_shapes(reading), stored, lambda name: dialect_name(name, dialect))


def head_shapes(reading: Reading, module_class: type[Eagle3] = Eagle3) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights of a `module_class` under this reading, by their names here."""
    return files.module_shapes(module_class, reading)


def new_head(reading: Reading, stack: LayerStack, draft_tokens: Tensor | None, seed: int) -> Eagle3:
    """The head before training (see `initial_weights`)."""
    return Eagle3.of(reading, initial_weights(reading, head_shapes(reading), stack, draft_tokens, seed))


def dialect_name(name: str, dialect: Dialect) -> str:
    """The name in a file of `dialect` of the tensor `name`, the inverse of `local_name`."""
    has_midlayer = dialect in ("eagle", "specforge") and name.startswith(dialects.FIRST_LAYER)
    return dialects.MIDLAYER + name.removeprefix(dialects.FIRST_LAYER) if has_midlayer else name


def save_head(
    folder: Path,
    head: Eagle3,
    dialect: WrittenDialect,
    target: PreTrainedConfig,
    target_name: str,
    draft_length: int = 7,
    *,
    made_here: bool = True,
) -> None:
    """Write `head` to directory `folder` in `dialect`, for reloading: config.json and model.safetensors. target,
    target_name: config and name of its target. draft_length: suggested tokens of a draft. made_here: False for another
    trainer's head, whose reading may be wrong. Raises `UserError` naming fields that `dialect` lacks."""
    dialects.require_expressible(head.reading, head_shapes(head.reading), dialect, target)
    written_tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    draft_ids = written_tensors.pop(files.DRAFT_TOKENS, None)
    if draft_ids is not None or dialect == "specforge":  # which requires d2t and t2d
        draft_ids = torch.arange(head.reading.draft_vocabulary) if draft_ids is None else draft_ids
        written_tensors |= files.map_tensors(draft_ids, head.reading.vocabulary)
    tensors = {dialect_name(name, dialect): tensor for name, tensor in written_tensors.items()}
    config = dialects.config_in_dialect(head.reading, dialect, target, target_name, draft_length)
    config |= files.written_facts(head.dtype, made_here=made_here)
    require_writable(folder)
    write_atomically(folder / SAFETENSORS.single, save(tensors, metadata={"format": "pt"}))
    write_json(folder / CONFIG_FILE, config)


# The tensors of a head that no Llama has.
_HEAD_GGUF_NAMES = {
    "fc.weight": "fc.weight", "input_norm.weight": "enc.output_norm.weight", files.DRAFT_TOKENS: "d2t",
    f"{dialects.FIRST_LAYER}hidden_norm.weight": "blk.0.attn_norm_2.weight",
}  # fmt: skip


def write_gguf_head(
    head: Eagle3,
    target: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    gguf_path: Path,
    quant_type: str | None = None,  # of matrices: `block_kind` of `write_file`
) -> None:
    """Write `head`, for a target of config `target` and with its `tokenizer`, as `write_gguf` writes a model.

    Facts of llama.cpp's src/models/eagle3.cpp and conversion/llama.py (2026-10): its layer is a Llama's, with rotary
    pairs side by side; target_layers are taps (i: the input of layer i); d2t has target ids, not offsets. Raises
    `UserError` for what that cannot express.
    """
    reading = head.reading
    dialects.require_expressible(reading, head_shapes(reading), "gguf", target)
    config = layer_config(dialects.config_in_dialect(reading, "gguf", target, target_name="", drafted=1), layers=1)
    head_fields: dict[str, MetadataValue] = {"target_layers": [*reading.taps]}
    head_fields |= {"target_hidden_size": reading.target_hidden, "norm_before_residual": reading.norm_before_residual}
    head_fields["norm_before_fc"] = reading.joint_norm
    metadata = {key.replace("llama.", "eagle3."): value for key, value in require_gguf(config, tokenizer).items()}
    metadata |= {"general.architecture": "eagle3", **{f"eagle3.{key}": value for key, value in head_fields.items()}}
    ggml_names = tensor_names(empty_model(config), "llama").items()
    ggml_by_name = {parameter.removeprefix("model."): name for name, parameter in ggml_names} | _HEAD_GGUF_NAMES
    tensors = {ggml_by_name[parameter]: tensor for parameter, tensor in head.state_dict().items()}
    write_file(config, metadata, tensors, gguf_path, quant_type)


def describe_use(dialect: ExportDialect) -> str:
    """Instructions for a head in `dialect`, here and in servers that read it (4: drafted tokens), with {path} and
    {target} to fill in, in forms of card.py: {path:option} is an option's value."""
    summary = "An EAGLE-3 head: it drafts from hidden states of the target, and belongs to that target alone."
    if dialect == "gguf":
        return f"{summary}\n\n{describe_serving(4, 'llama_cpp', head=EAGLE3)}"
    refusal = "SGLang: not in this dialect; `outrider export engine=sglang` writes another."
    sglang_usage = describe_serving(4, "sglang", head=EAGLE3) if dialect == "specforge" else refusal
    return "\n\n".join([summary, _OUTRIDER_USAGE, describe_serving(4, "vllm", head=EAGLE3), sglang_usage])


_OUTRIDER_USAGE = """Outrider:

```
evaluate-checkpoint target={target:option} eagle3={path:option}
```"""
