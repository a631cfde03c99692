"""EAGLE-3 heads on disk: opened strictly, in any dialect. Missing and unexpected tensors are errors.

A head with tensors filled in or dropped would draft badly without any error. A new one, for training, has random
weights except for the logits' matrix.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from outrider.base.errors import UserError, reason
from outrider.base.files import package_version, read_mapping, require_writable, write_atomically, write_json
from outrider.base.words import list_words
from outrider.draft_models.card import describe_serving
from outrider.draft_models.eagle3.dialects import (
    FIRST_LAYER,
    MIDLAYER,
    Shapes,
    config_in_dialect,
    dialect_of,
    layer_config,
    local_name,
    read_config,
    require_expressible,
)
from outrider.draft_models.eagle3.model import Eagle3
from outrider.draft_models.eagle3.reading import Reading, apply_changes, require_fitting_target
from outrider.draft_models.formats.folder_model import require_weights
from outrider.draft_models.formats.gguf_file import MetadataValue
from outrider.draft_models.formats.gguf_model import tensor_names
from outrider.draft_models.formats.gguf_write import require_gguf, write_file
from outrider.draft_models.formats.stored_tensors import CONFIG_FILE, SAFETENSORS
from outrider.draft_models.targets.model_files import empty_model
from outrider.draft_models.targets.settings import Dialect, ExportDialect, ReadingChanges, WrittenDialect
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.tensor_files import TensorFiles, find_file, open_tensors

D2T, T2D, DRAFT_TOKENS = "d2t", "t2d", "draft_tokens"
MADE_WITH = "made_with"  # key in config.json of heads trained here: this toolkit's version
AS_DECLARED = ReadingChanges()


@dataclass(frozen=True)
class StoredHead:
    """A head on disk, checked but not loaded: its dialect, its reading, and its tensors' locations.

    config: its config.json. reading: the one that its config declares, with overrides applied. stored_names: this
    toolkit's name of each tensor → its name in the files.
    """

    source: str
    dialect: Dialect
    config: Mapping[str, object]
    reading: Reading
    files: TensorFiles
    stored_names: Mapping[str, str]

    def tensors(self, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """All tensors by their names here, in `dtype` unless they are integers. Raises `UserError`."""
        read = self.files.read(self.stored_names.values(), dtype, device=device)
        return {name: read[stored_names] for name, stored_names in self.stored_names.items()}

    def load(self, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Eagle3:
        """The head, frozen (see `make_head`). A missing embedding or head is set later, from the target."""
        return make_head(self.reading, self.tensors(dtype, device), self.source)

    @property
    def made_here(self) -> bool:
        """Whether this toolkit trained it, so that its declared reading is right."""
        return str(self.config.get(MADE_WITH, "")).startswith("outrider")


def open_head(source: str, target: PreTrainedConfig, changes: ReadingChanges = AS_DECLARED) -> StoredHead:
    """The head in `source`, a directory or Hub name, for a target of config `target`. Reads headers only.

    changes: overrides of the declared reading. Raises `UserError` if it is not an EAGLE-3 head, is for another target,
    or its tensors do not match its config.
    """
    file = find_file(source, CONFIG_FILE, None)
    if file is None:
        raise UserError(f"eagle3={source}: no {CONFIG_FILE} there; give a directory or Hub name of an EAGLE-3 head")
    config = read_mapping(file, "description of a head", "fetch it again")
    files = open_tensors(source)
    dialect = dialect_of(config, files.file_of, source)
    stored_names = {local_name(name): name for name in files.file_of}
    if len(stored_names) < len(files.file_of):
        twice = sorted(set(files.file_of) - set(stored_names.values()))
        raise UserError(f"eagle3={source}: tensors stored twice, under two names: {list_words(twice)}; fetch it again")
    tensors = dict(files.open_stored(files.file_of))
    require_weights(f"eagle3={source}", tensors)  # without a config: transformers does not load the head
    shapes = {name: tuple(tensors[stored_name].shape) for name, stored_name in stored_names.items()}
    try:
        declared = read_config(config, shapes, target.num_hidden_layers, source)
    except UserError:
        if changes.taps is None:
            raise
        declared = read_config(config, shapes, target.num_hidden_layers, source, changes.taps)
    reading = apply_changes(declared, changes, target)
    require_fitting_target(reading, target, source)
    try:
        _require_shapes(declared, shapes, dialect, source)
    except UserError:
        if reading == declared:
            raise
        _require_shapes(reading, shapes, dialect, source)  # the config is wrong, and the overrides fit
    return StoredHead(source, dialect, config, reading, files, stored_names)


def stored_tokens(source: str, changes: ReadingChanges = AS_DECLARED) -> list[int] | None:
    """The draft vocabulary of the head in `source`, from its d2t; None without a d2t, or if it has all tokens.

    changes: as in `open_head`. Raises `UserError` if it cannot be read.
    """
    files = open_tensors(source)
    stored_names = {local_name(name): name for name in files.file_of}
    maps = {name: files.read([stored_names[name]])[stored_names[name]] for name in (D2T, T2D) if name in stored_names}
    if D2T not in maps or (T2D in maps and len(maps[T2D]) == len(maps[D2T])):
        return None
    d2t = maps[D2T].long()
    return (d2t if changes.draft_ids == "index" else torch.arange(len(d2t)) + d2t).tolist()


def make_head(reading: Reading, tensors: Mapping[str, Tensor], source: str) -> Eagle3:
    """The head of `reading` with `tensors`, by their names here, d2t and t2d included.

    The reading may override the declared reading: then it may use only some of the tensors, and missing norms become
    identities. Raises `UserError` if another tensor is missing or has another shape, and for invalid maps.
    """
    fc, weights = tensors["fc.weight"], dict[str, Tensor]()
    for name, shape in head_shapes(reading).items():
        if name not in tensors and "norm" not in name:
            raise UserError(f"eagle3={source}: has no {name}, which the reading asks for; take back that change")
        weights[name] = tensors[name] if name in tensors else torch.ones(shape, dtype=fc.dtype, device=fc.device)
        if tuple(weights[name].shape) != shape:
            raise UserError(
                f"eagle3={source}: tensor {name} has shape {list(weights[name].shape)}, but the reading asks for "
                f"{list(shape)}; take back that change"
            )
    tokens = draft_tokens(reading, tensors.get(D2T), tensors.get(T2D), source)
    return Eagle3.of(reading, weights if tokens is None else {**weights, DRAFT_TOKENS: tokens})


def draft_tokens(reading: Reading, d2t: Tensor | None, t2d: Tensor | None, source: str) -> Tensor | None:
    """Ids [V_d], ascending, of the draft vocabulary; None: all tokens.

    d2t [V_d]: see `Reading.draft_ids`; t2d [V]: whether a token is in it. Raises `UserError` for an id outside the
    target's vocabulary, for repeated ids, and if the two maps disagree.
    """
    if d2t is not None and d2t.is_floating_point():
        raise UserError(f"eagle3={source}: {D2T} holds {d2t.dtype}: expected integers; fetch the head again")
    positions = torch.arange(reading.draft_vocabulary, device=None if d2t is None else d2t.device)
    entries = torch.zeros_like(positions) if d2t is None else d2t.long()
    ids = entries if reading.draft_ids == "index" else positions + entries
    inverse = "offset" if reading.draft_ids == "index" else "index"
    remedy = f"It holds {reading.draft_ids}s: reading.draft_ids={inverse} reads it otherwise. Or fetch the head again"
    outside = (ids < 0) | (ids >= reading.vocabulary)
    wrong = outside | (ids <= torch.nn.functional.pad(ids[:-1], (1, 0), value=-1))
    if wrong.any():
        index = int((outside if outside.any() else wrong).nonzero()[0])
        raise UserError(
            f"eagle3={source}: {D2T}[{index}]={int(entries[index])} makes draft token {index} the target's token "
            f"{int(ids[index])}; expected ascending ones, 0 to {reading.vocabulary - 1}. {remedy}"
        )
    if len(ids) == reading.vocabulary:
        return None  # t2d may then be anything: trainers ignore it
    if t2d is not None and not torch.equal(t2d.nonzero().flatten(), ids):
        raise UserError(
            f"eagle3={source}: {D2T} and {T2D} name other tokens ({len(ids)} and {int(t2d.count_nonzero())}); "
            f"expected the same. The trainer may have changed one map without the other. {remedy}"
        )
    return ids


def _require_shapes(reading: Reading, shapes: Shapes, dialect: Dialect, source: str) -> None:
    """Raise `UserError` naming tensors that are missing, unexpected, or of another shape than in the reading."""
    expected = head_shapes(reading)
    if reading.draft_vocabulary < reading.vocabulary or D2T in shapes:
        expected[D2T] = (reading.draft_vocabulary,)
    if T2D in shapes:
        expected[T2D] = (reading.vocabulary,)
    for what, names in ("missing", expected.keys() - shapes), ("unknown", shapes.keys() - expected):
        if names:
            listing = list_words([dialect_name(name, dialect) for name in sorted(names)])
            raise UserError(
                f"eagle3={source}: {what} tensors: {listing}. Expected those that its {CONFIG_FILE} asks for, and no "
                "others; fetch the head again, or correct its description"
            )
    misfit = next((name for name in sorted(expected) if expected[name] != shapes[name]), None)
    if misfit is not None:
        raise UserError(
            f"eagle3={source}: tensor {dialect_name(misfit, dialect)} has shape {list(shapes[misfit])}: expected "
            f"{list(expected[misfit])}, as its {CONFIG_FILE} describes the head; correct that, or fetch it again"
        )


def head_shapes(reading: Reading) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights under this reading, by their names here."""
    try:
        weights = Eagle3(reading, all_tokens=True).state_dict()
    except TypeError as error:  # sizes beyond what a tensor can have
        raise UserError(f"an EAGLE-3 head of impossible sizes ({reason(error)}); correct its {CONFIG_FILE}") from None
    return {name: tuple(weight.shape) for name, weight in weights.items()}


@torch.no_grad()
def new_head(reading: Reading, stack: LayerStack, tokens: Tensor | None, seed: int) -> Eagle3:
    """The head before training, in float32 on the target's device: a deterministic function of its arguments.

    tokens [k]: the draft vocabulary; None: all. The logits' matrix and norm are initialised from the target: rows of
    its head, and the scale of its last norm. Other matrices preserve the magnitude of their input.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in head_shapes(reading).items():
        weight = torch.randn(shape, generator=generator) * shape[-1] ** -0.5 if len(shape) == 2 else torch.ones(shape)
        weights[name] = weight.to(stack.device)
    rows = stack.head.weight[: reading.vocabulary] if tokens is None else stack.head.weight[tokens]
    weights["lm_head.weight"] = rows.detach().float().clone()  # a copy: the target keeps its own
    signs = torch.ones(reading.hidden, dtype=stack.dtype, device=stack.device)
    signs[::2] = -1  # mean 0 and mean square 1, so that no norm rescales them
    weights["norm.weight"] = (stack.norm(signs) * signs).float()  # not read: some norms multiply by 1 + their weight
    if tokens is not None:
        weights[DRAFT_TOKENS] = tokens.to(stack.device)
    return Eagle3.of(reading, weights)


def dialect_name(name: str, dialect: Dialect) -> str:
    """The name in a file of `dialect` of the tensor `name`, the inverse of `local_name`."""
    has_midlayer = dialect in ("eagle", "specforge") and name.startswith(FIRST_LAYER)
    return MIDLAYER + name.removeprefix(FIRST_LAYER) if has_midlayer else name


def save_head(
    path: Path,
    head: Eagle3,
    dialect: WrittenDialect,
    target: PreTrainedConfig,
    target_name: str,
    drafted: int = 7,
    *,
    made_here: bool = True,
) -> None:
    """Write `head` to directory `path` in `dialect`, for reloading: config.json and model.safetensors.

    target, target_name: config and name of its target. drafted: suggested tokens per round for a server. made_here:
    False for another trainer's head, whose reading may be wrong. Raises `UserError` naming fields that `dialect` lacks.
    """
    require_expressible(head.reading, head_shapes(head.reading), dialect, target)
    written_tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    ids = written_tensors.pop(DRAFT_TOKENS, None)
    if ids is not None or dialect == "specforge":  # which requires d2t and t2d
        indices = torch.arange(head.reading.draft_vocabulary)
        ids = indices if ids is None else ids
        written_tensors[D2T] = ids - indices
        written_tensors[T2D] = torch.zeros(head.reading.vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    tensors = {dialect_name(name, dialect): tensor for name, tensor in written_tensors.items()}
    config = config_in_dialect(head.reading, dialect, target, target_name, drafted)
    config["dtype"] = config["torch_dtype"] = str(head.dtype).removeprefix("torch.")
    if made_here:
        config[MADE_WITH] = f"outrider {package_version()}"
    require_writable(path)
    write_atomically(path / SAFETENSORS.single, save(tensors, metadata={"format": "pt"}))
    write_json(path / CONFIG_FILE, config)


# The tensors of a head that no Llama has.
_OF_HEADS = {
    "fc.weight": "fc.weight", "input_norm.weight": "enc.output_norm.weight", DRAFT_TOKENS: "d2t",
    f"{FIRST_LAYER}hidden_norm.weight": "blk.0.attn_norm_2.weight",
}  # fmt: skip


def write_gguf_head(
    head: Eagle3,
    target: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    block_kind: str | None = None,
) -> None:
    """Write `head`, for a target of config `target` and with its `tokenizer`, as `write_gguf` writes a model.

    Facts of llama.cpp's src/models/eagle3.cpp and conversion/llama.py (2026-10): its layer is a Llama's, with rotary
    pairs side by side; target_layers are boundaries; d2t has ids. Raises `UserError` for what that cannot express.
    """
    reading = head.reading
    require_expressible(reading, head_shapes(reading), "gguf", target)
    config = layer_config(config_in_dialect(reading, "gguf", target, target_name="", drafted=1), layers=1)
    head_fields: dict[str, MetadataValue] = {
        "target_layers": [*reading.taps],
        "target_hidden_size": reading.target_hidden,
    }
    head_fields |= {"norm_before_residual": reading.norm_before_residual, "norm_before_fc": reading.joint_norm}
    metadata = {key.replace("llama.", "eagle3."): value for key, value in require_gguf(config, tokenizer).items()}
    metadata |= {"general.architecture": "eagle3", **{f"eagle3.{key}": value for key, value in head_fields.items()}}
    ggml_names = tensor_names(empty_model(config), "llama").items()
    names = {parameter.removeprefix("model."): name for name, parameter in ggml_names} | _OF_HEADS
    tensors = {names[parameter]: tensor for parameter, tensor in head.state_dict().items()}
    write_file(config, metadata, tensors, path, block_kind)


TRAINING_FILE = "eagle3.json"  # written next to the weights, last, by training in this toolkit


def describe_use(dialect: ExportDialect) -> str:
    """Instructions for a head in `dialect`, here and in servers that read it, with {path} and {target} to fill in."""
    what = "An EAGLE-3 head: it drafts from hidden states of the target, and belongs to that target alone."
    if dialect == "gguf":
        return f"{what}\n\n{describe_serving(4, 'llama_cpp', head=True)}"
    refusal = "SGLang: not in this dialect; `outrider export engine=sglang` writes another."
    sglang = describe_serving(4, "sglang", head=True) if dialect == "specforge" else refusal
    return "\n\n".join([what, _OUTRIDER_USAGE, describe_serving(4, "vllm", head=True), sglang])


_OUTRIDER_USAGE = """Outrider:

```
evaluate-checkpoint target={target:option} eagle3={path:option}
```"""
