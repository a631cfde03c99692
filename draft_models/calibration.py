"""A calibration head's files in the drafter's directory, bound to that drafter's weights and to a target.

The head estimates the probability that a drafted token is right. `model_identity` is {"config", "tensors"} of a model:
the fields that decide what it computes, and digests of samples of its tensors.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load, save

from outrider.base.errors import UserError
from outrider.base.files import digest_of, read_mapping, write_atomically, write_json
from outrider.base.words import quote_word, write_option
from outrider.draft_models.calibration_head import CalibrationHead
from outrider.draft_models.formats.stored_tensors import read_with_digest
from outrider.draft_models.targets.fingerprint import model_differences, model_identity
from outrider.draft_models.targets.tensor_files import TensorFiles

WEIGHTS_FILE, META_FILE = "calibration.safetensors", "calibration.json"
FORMAT = 2  # version of the two files


def drafter_digest(files: TensorFiles, reading: Mapping[str, object] | None = None) -> str:
    """The digest of config and a sample of every tensor, to which a head is bound if the weights record no digest.

    reading: corrections of how an EAGLE-3 head's files are read, which change what it drafts. Raises `UserError` if the
    weights cannot be read.
    """
    return digest_of({**model_identity(files), **({"reading": reading} if reading else {})})


def save_calibration(folder: Path, head: CalibrationHead, drafter_sha256: str, facts: Mapping[str, object]) -> None:
    """Store `head` in the directory `folder`, the drafter's or a subfolder, bound to weights with `drafter_sha256`.

    facts: its training, with "target", and quality, stored unchanged. A crash leaves the previous head or none.
    """
    blob = save({name: value.detach().float().cpu().contiguous() for name, value in head.state_dict().items()})
    digests = {"drafter_sha256": drafter_sha256, "weights_sha256": hashlib.sha256(blob).hexdigest()}
    write_atomically(folder / WEIGHTS_FILE, blob)
    write_json(folder / META_FILE, {**facts, "format": FORMAT, **digests})


def load_calibration(
    path: Path | str,
    drafter_sha256: str,
    device: torch.device | str = "cpu",
    target: Mapping[str, object] | None = None,
    *,
    folder: str = "",
) -> CalibrationHead:
    """The head stored in the drafter's directory `path`, or in its subfolder `folder`, in float32.

    target: the `model_identity` of the target to calibrate for. A head made without the target's weights has nothing to
    compare with it: its drafter is bound to the vocabulary.

    Raises `UserError` when there is no head; when it was trained on other weights than `drafter_sha256`, or on another
    target; when its files are damaged.
    """
    remedy = f"run outrider calibrate {quote_word(write_option('checkpoint', path))}"
    weights_file, meta_file = (Path(path) / folder / name for name in (WEIGHTS_FILE, META_FILE))
    if not weights_file.exists():
        raise UserError(f"checkpoint={path}: no calibration head there; {remedy}")
    meta = read_mapping(meta_file, "description of a calibration head", remedy)
    if meta.get("format") != FORMAT:
        raise UserError(f"checkpoint={path}: a calibration head of format {meta.get('format')}, not {FORMAT}; {remedy}")
    if meta.get("drafter_sha256") != drafter_sha256:
        raise UserError(f"checkpoint={path}: its calibration head belongs to an earlier training; {remedy}")
    if target is not None:
        identity = meta.get("target")
        keys = ("config", "tensors")
        unseen = isinstance(identity, dict) and identity.get("weights_seen") is False  # trained without its weights
        if not isinstance(identity, dict) or not (unseen or all(isinstance(identity.get(key), dict) for key in keys)):
            raise UserError(f"{meta_file}: does not say for which target; {remedy}")
        if mismatch := "; ".join(model_differences(identity, target)):
            raise UserError(f"checkpoint={path}: its calibration head is of another target: {mismatch}; {remedy}")
    weights = load(read_with_digest(weights_file, meta.get("weights_sha256"), remedy))
    head = CalibrationHead(weights["target"].shape[1], weights["draft"].shape[0])  # the hidden widths
    head.load_state_dict(weights)
    return head.to(device).requires_grad_(False)
