"""The checkpoint of an early-exit drafter: weights, metadata, and the fingerprint of its target.

A directory with `drafter.safetensors` and `drafter.json`. The JSON is written last and names the weights'
digest, so a directory that loads is complete. For serving engines the drafter becomes an ordinary causal LM. A
fingerprint has a model's name, the fields of config.json that decide its logits, and digests of samples of its tensors.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Ge, Le
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from outrider.base.errors import UserError, require, warn
from outrider.base.files import digest_of, package_version, read_mapping, require_writable, write_atomically, write_json
from outrider.base.run_dirs import code_version
from outrider.base.settings import Count, construct
from outrider.base.words import list_words
from outrider.draft_models.early_exit.model import EarlyExit, NoLayer, exit_layers
from outrider.draft_models.formats.gguf_file import MOST_LAYERS
from outrider.draft_models.formats.stored_tensors import read_with_digest
from outrider.draft_models.targets.attention import stock_attention
from outrider.draft_models.targets.fingerprint import Fingerprint, changed_parts
from outrider.draft_models.targets.model_files import decoder_layers, empty_layers, empty_model, final_norm, model_spec
from outrider.draft_models.targets.narrowed import require_tokens, widen_rows
from outrider.draft_models.targets.proof import SHORT
from outrider.draft_models.targets.settings import FloatDtype
from outrider.draft_models.targets.tensor_files import TensorFiles, open_tensors, part_of

if TYPE_CHECKING:
    from outrider.draft_models.targets.open_target import OpenTarget

WEIGHTS_FILE, META_FILE = "drafter.safetensors", "drafter.json"
FORMAT = 2  # of drafter.json; other formats are refused


@dataclass(frozen=True)
class DrafterMeta:
    """drafter.json: the kind of drafter, its shape, its target and how it was made."""

    kind: str
    exit_layer: Count  # the number of the target's first layers that it runs on
    own_head: bool
    dtype: FloatDtype
    fingerprint: Fingerprint
    trained_on: dict[str, str]  # see `digest_parts_below`
    training: dict[str, object] = field(default_factory=dict)
    made_with: dict[str, str] = field(default_factory=dict)
    weights_sha256: str = ""
    own_layer: bool = True  # false: norm and head directly on the target's first layers
    exit_depth: Annotated[int, Ge(1), Le(MOST_LAYERS)] = 1  # transformer layers of the exit
    format: int = FORMAT
    draft_vocabulary: Count | None = None  # tokens that it has logits of; null: all
    parallel: Annotated[int, Ge(2), Le(2**10)] | None = None  # tokens that it drafts in one pass; null: one
    sealed: str = ""  # see `digest_of_meta`


def digest_parts_below(files: TensorFiles, config: PreTrainedConfig, exit_layer: int) -> dict[str, str]:
    """Digests of all bytes of the target that a drafter of this exit layer is built from and runs on: embedding, first
    layers, last layer, norm and head, 1–2 GB for a target of 7 B parameters.

    With the target as an online teacher, training reads the other layers too; the fingerprint samples those.
    """
    prefixes = model_spec(config).prefixes(exit_layers(config, exit_layer))
    return files.digests([name for name in files.file_of if name.startswith(prefixes)], full=True)


def save_pretrained(
    folder: Path,
    drafter: EarlyExit,
    fingerprint: Fingerprint,
    training: Mapping[str, object],
    dtype: torch.dtype,
    trained_on: Mapping[str, str] | None = None,
) -> None:
    """Write `drafter` in `dtype` to directory `folder`. A crash or a full disk leaves the previous contents.

    trained_on: `digest_parts_below` of the target that training read; None: of the target now.
    """
    if trained_on is None:
        files = open_tensors(fingerprint.target, fingerprint.revision)
        config = AutoConfig.for_model(fingerprint.architecture).from_dict({**fingerprint.config})
        trained_on = digest_parts_below(files, config, drafter.exit_layer)
    target_path = Path(fingerprint.target)
    if target_path.exists() and not target_path.is_absolute():  # elsewhere it would look like a name on the Hub
        fingerprint = dataclasses.replace(fingerprint, target=f"./{target_path}")
    weights = {name: move_tensor(x.detach(), "cpu", dtype).contiguous() for name, x in drafter.state_dict().items()}
    blob = save(weights, metadata={"format": "pt"})
    meta = DrafterMeta(
        kind="early_exit",
        exit_layer=drafter.exit_layer,
        own_head=drafter.head is not None,
        own_layer=not isinstance(drafter.layer, NoLayer),
        exit_depth=len(drafter.layers),
        draft_vocabulary=None if drafter.draft_tokens is None else len(drafter.draft_tokens),
        parallel=drafter.parallel or None,
        dtype=construct(FloatDtype, str(dtype).removeprefix("torch."), "dtype"),
        fingerprint=fingerprint,
        training=dict(training),
        made_with=provenance(),
        weights_sha256=hashlib.sha256(blob).hexdigest(),
        trained_on=dict(trained_on),
    )
    require_writable(folder)
    write_atomically(folder / WEIGHTS_FILE, blob)
    write_meta(folder, meta)


def write_meta(folder: Path, meta: DrafterMeta) -> None:
    """Write drafter.json with its seal."""
    meta_fields = dataclasses.asdict(dataclasses.replace(meta, format=FORMAT))
    write_json(folder / META_FILE, meta_fields | {"sealed": digest_of_meta(meta_fields)})


def digest_of_meta(meta_fields: Mapping[str, Any]) -> str:
    """The digest of all in a drafter.json that decides what is drafted, and for which target, wherever that is."""
    deciding_fields = {key: meta_fields[key] for key in meta_fields.keys() - {"training", "made_with", "sealed"}}
    return digest_of(deciding_fields | {"fingerprint": {**meta_fields["fingerprint"], "target": "", "revision": None}})


def read_meta(folder: Path | str) -> DrafterMeta:
    """drafter.json of a checkpoint directory; raises `UserError` if missing, damaged, altered or of another format."""
    file = Path(folder) / META_FILE
    if not file.is_file():
        raise UserError(f"checkpoint={folder}: no {META_FILE} there; expected a drafter directory (outrider eesd)")
    content_name, remedy = "drafter description", "restore it, or train the drafter again"
    meta_fields = read_mapping(file, content_name, remedy)
    if meta_fields.get("format", FORMAT) != FORMAT:
        raise UserError(f"{file}: format {meta_fields['format']}, this version reads {FORMAT}; train the drafter again")
    try:
        meta = construct(DrafterMeta, meta_fields)
    except UserError as error:
        raise UserError(f"{file}: damaged {content_name} ({error}); {remedy}") from None
    if meta.sealed != digest_of_meta(meta_fields):
        raise UserError(f"{file}: altered after it was written (sealed={meta.sealed!r} is not its digest); {remedy}")
    return meta


def from_pretrained(
    path: Path | str,
    config: PreTrainedConfig,
    fingerprint: Fingerprint,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> EarlyExit:
    """The early-exit drafter in directory `path`, for the target of `config` and `fingerprint`.

    Raises `UserError` when it was trained for another target or its files are truncated or altered.
    """
    meta = read_meta(path)
    if meta.kind != "early_exit":
        raise UserError(f"checkpoint={path}: a {meta.kind!r} drafter, expected 'early_exit'")
    require_target(meta, fingerprint, path)
    weights = _read_weights(path, meta)
    depth = 1 + len({name.split(".")[1] for name in weights if name.startswith("deeper.")})  # after the first
    require(depth == meta.exit_depth, f"{path}: exit_depth", meta.exit_depth, f"{depth}, as it has layers")
    drafter = empty_drafter(meta, config)
    model_specs = {
        name: (f"torch.{meta.dtype}" if tensor.is_floating_point() else str(tensor.dtype), *tensor.shape)
        for name, tensor in drafter.state_dict().items()
    }
    in_file = {name: (str(tensor.dtype), *tensor.shape) for name, tensor in weights.items()}
    if misfits := sorted(name for name in {*model_specs, *in_file} if model_specs.get(name) != in_file.get(name)):
        fault = f"stored {in_file.get(misfits[0])}, expected {model_specs.get(misfits[0])}"
        raise UserError(f"checkpoint={path}: tensors do not fit the target, first {misfits[0]!r}: {fault}")
    drafter.load_state_dict({name: move_tensor(tensor, device, dtype) for name, tensor in weights.items()}, assign=True)
    return drafter.requires_grad_(False).eval()


def empty_drafter(meta: DrafterMeta, config: PreTrainedConfig) -> EarlyExit:
    """The drafter that `meta` describes, for a target of `config`, without weights (on the meta device)."""
    draft_size = meta.draft_vocabulary
    draft_tokens = None if draft_size is None else torch.empty(draft_size, dtype=torch.long, device="meta")
    return EarlyExit(
        empty_layers(config, exit_layers(config, meta.exit_layer)), meta.exit_layer, own_head=meta.own_head,
        own_layer=meta.own_layer, depth=meta.exit_depth, draft_tokens=draft_tokens, parallel=meta.parallel or 0,
    )  # fmt: skip


def read_draft_tokens(folder: Path | str) -> list[int] | None:
    """The draft vocabulary of the drafter in `folder`; None: all tokens. Raises `UserError`."""
    meta = read_meta(folder)
    return None if meta.draft_vocabulary is None else _read_weights(folder, meta)["draft_tokens"].tolist()


def move_tensor(tensor: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """`tensor` on `device`, in `dtype` unless it is an integer tensor."""
    return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)


def require_target(meta: DrafterMeta, fingerprint: Fingerprint, folder: Path | str) -> None:
    """Raise `UserError`, naming every difference, unless the target is the drafter's; warn of unrecorded fields."""
    differences = meta.fingerprint.differences(fingerprint)
    if not differences:
        files = open_tensors(fingerprint.target, fingerprint.revision)
        # part_of: the part of the model (embedding, a layer, norm, …) that a tensor belongs to
        tensor_names = [name for name in files.file_of if part_of(name) in meta.trained_on]
        differences = changed_parts(meta.trained_on, files.digests(tensor_names, full=True))
    if differences:
        fault = f"was trained for another target ({meta.fingerprint.target}) than {fingerprint.target}"
        remedy = "Give the target it was trained for, or train a drafter for this one."
        raise UserError(f"{folder} {fault}: {'; '.join(differences)}. {remedy}")
    if unchecked_parts := sorted(fingerprint.tensors.keys() - meta.fingerprint.tensors.keys()):
        warning = f"checkpoint={folder}: made with no record of the weights in {list_words(unchecked_parts)}"
        warn(f"{warning}; not checked against {fingerprint.target}")


def provenance() -> dict[str, str]:
    """Versions of the writing software: this project (with a digest of its sources), torch, transformers."""
    versions = {"torch": torch.__version__, "transformers": version("transformers")}
    return versions | {"outrider": package_version(), "code": code_version()}


def _read_weights(folder: Path | str, meta: DrafterMeta) -> dict[str, Tensor]:
    file = Path(folder) / WEIGHTS_FILE
    weights = load(read_with_digest(file, meta.weights_sha256, "restore it, or train the drafter again"))
    if meta.draft_vocabulary is not None:
        require_tokens(weights.get("draft_tokens"), meta.draft_vocabulary, meta.fingerprint.vocab_size, file)
    return weights


def as_causal_lm(drafter: EarlyExit, target: "OpenTarget", dtype: torch.dtype) -> PreTrainedModel:
    """A model of the target's family, in `dtype` on the CPU, whose logits are those of `drafter`.

    Its layers are the target's first N and the exit's. With a draft vocabulary, other tokens are never the argmax (see
    `widen_rows`).
    Raises `UserError` if the target's weights cannot be read, if a layer's index decides what it computes, or if it
    drafts several tokens in one pass.
    """
    if drafter.parallel:
        what = f"an early exit that drafts {drafter.parallel} tokens in one pass"
        raise UserError(f"{what}: no engine runs it, as no token stands for its masks; it runs here alone")
    drafter_layers = () if isinstance(drafter.layer, NoLayer) else drafter.layers
    last_index = target.config.num_hidden_layers - 1  # copies of this layer get the exit's weights below
    model = target.layers([*range(drafter.exit_layer), *(last_index for _ in drafter_layers)], dtype=dtype)
    for layer, trained_layer in zip(decoder_layers(model)[drafter.exit_layer :], drafter_layers, strict=True):
        layer.load_state_dict(trained_layer.state_dict(), assign=True)  # the old weights may be the next layer's too
    final_norm(model).load_state_dict(drafter.norm.state_dict())
    if drafter.head is None:
        head = model.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        drafter.use_head(head)
    if drafter.head is not None or drafter.draft_tokens is not None:
        _set_head(model, drafter.output_head, drafter.draft_tokens)
    _require_ordinary(model, target.config.model_type)
    return model


@torch.inference_mode()
def _require_ordinary(model: PreTrainedModel, architecture: str) -> None:
    """Raise `UserError` unless a model made from its config and weights alone computes the same."""
    rebuilt_model = empty_model(model.config)
    rebuilt_model.load_state_dict(model.state_dict(), assign=True)
    tokens = torch.arange(min(SHORT, model.config.vocab_size))[None]  # a text that exceeds no window
    with stock_attention(model, "eager"), stock_attention(rebuilt_model.eval(), "eager"):
        if not torch.equal(model(tokens).logits, rebuilt_model(tokens).logits):
            raise UserError(
                f"architecture {architecture!r}: what a layer computes depends on its number, so an exit's layer "
                "cannot stand after the first ones of an ordinary model; this drafter runs here alone"
            )


def _set_head(model: PreTrainedModel, drafter_head: nn.Linear, draft_tokens: torch.Tensor | None) -> None:
    """Give `model` the `drafter_head`, not tied to the embedding. If it has rows for `draft_tokens` only, other tokens
    get the mean row, whose logit is never the largest."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    for name, parameter in drafter_head.named_parameters():
        rows, target_rows = parameter.detach(), getattr(head, name)
        full_rows = rows if draft_tokens is None else widen_rows(rows, rows.mean(0), draft_tokens, len(target_rows))
        setattr(head, name, nn.Parameter(full_rows.to(target_rows.dtype), requires_grad=False))
    model.config.tie_word_embeddings = False


WHAT = """An EESD early exit, written as an ordinary causal LM: the target's first layers, the exit's, norm and head. It
computes the first layers itself; Outrider's runtime shares them with the target, and there the drafter is faster."""
