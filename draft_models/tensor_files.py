"""The safetensors of a checkpoint, read tensor by tensor."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from draft_models.errors import UserError, reason
from draft_models.files import read_json

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
BASE_PREFIX = "model."


@dataclass
class TensorFiles:
    """The safetensors of a checkpoint by tensor name. Files are located, and on the Hub fetched, only on `read`.

    Names are those of the causal LM, also where the checkpoint was saved without the head and its "model." prefix.
    """

    source: str
    revision: str | None
    file_of: dict[str, str]  # tensor name → file name
    headless: bool = False  # saved without the prefix
    bytes_read: int = field(default=0)
    tensors_read: int = field(default=0)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Exactly the tensors in `names`, as stored; `bytes_read` grows by their size. Raises `UserError`."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            if name not in self.file_of:
                raise UserError(f"{self.source}: no tensor {name!r} in its safetensors; is this a supported causal LM?")
            by_file.setdefault(self.file_of[name], []).append(name)
        tensors = {}
        for file, wanted in by_file.items():
            with self._open(file) as handle:
                for name in wanted:
                    tensors[name] = handle.get_tensor(self._stored(name))
                    self.bytes_read += tensors[name].nbytes
                    self.tensors_read += 1
        return tensors

    def digest(self, names: Iterable[str]) -> str:
        """A short hash of three rows (or the scalar) of each named tensor: tells fine-tunes apart on little reading."""
        digest = hashlib.sha256()
        for name in sorted(names):
            with self._open(self.file_of[name]) as handle:
                rows = handle.get_slice(self._stored(name))
                if shape := rows.get_shape():
                    pieces = [rows[row : row + 1] for row in sorted({0, shape[0] // 2, shape[0] - 1})]
                else:
                    pieces = [handle.get_tensor(self._stored(name))]
            for piece in pieces:
                digest.update(name.encode() + piece.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def _stored(self, name: str) -> str:
        return name.removeprefix(BASE_PREFIX) if self.headless else name

    @contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        path = cached_file(self.source, file, revision=self.revision, _raise_exceptions_for_missing_entries=False)
        if path is None:
            raise UserError(f"{self.source}: {file} is named in {INDEX_FILE} but missing; fetch the checkpoint again")
        try:
            with safe_open(path, framework="pt") as handle:
                yield handle
        except Exception as error:  # its own class for a bad header and a missing tensor, OSError for the rest
            raise UserError(f"{path}: not a readable safetensors file ({reason(error)}); fetch it again") from None


def open_target(source: str, revision: str | None = None) -> TensorFiles:
    """The tensor index of a local directory or Hub repository; reads no weights. Raises `UserError`.

    Also for an index that is damaged, or that names a file outside the directory.
    """
    index = find_file(source, INDEX_FILE, revision)
    if index is not None:
        return _named(source, revision, _read_weight_map(Path(index)))
    single = find_file(source, SINGLE_FILE, revision)
    if single is None:
        raise UserError(
            f"{source}: no {SINGLE_FILE} or {INDEX_FILE} there; expected a safetensors checkpoint "
            "(convert other formats with model.save_pretrained)"
        )
    with TensorFiles(source, revision, {})._open(SINGLE_FILE) as handle:
        return _named(source, revision, dict.fromkeys(handle.keys(), SINGLE_FILE))


def _read_weight_map(path: Path) -> dict[str, str]:
    """Tensor name → file name, of a sharded checkpoint's index. A symlink in the directory may lead anywhere."""
    what, remedy = "index of safetensors", "fetch the checkpoint again"
    content = read_json(path, what, remedy)
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found:
        raise UserError(f"{path}: damaged {what} (no weight_map of tensor and file names); {remedy}")
    for name, file in found.items():
        inside = isinstance(file, str) and file.endswith(".safetensors") and "\0" not in file
        if not inside or PurePath(file).is_absolute() or ".." in PurePath(file).parts:
            raise UserError(
                f"{path}: damaged {what} (weight_map.{name}={file!r}: expected a .safetensors file in its directory); "
                f"{remedy}"
            )
    return found


def _named(source: str, revision: str | None, file_of: dict[str, str]) -> TensorFiles:
    if any(name.startswith(BASE_PREFIX) for name in file_of):
        return TensorFiles(source, revision, file_of)
    named = {name if name.startswith("lm_head.") else BASE_PREFIX + name: file for name, file in file_of.items()}
    return TensorFiles(source, revision, named, headless=True)


def find_file(source: str, file: str, revision: str | None) -> str | None:
    """Where a file of a local directory or Hub repository lies here, fetched if need be; None where there is none."""
    return cached_file(
        source,
        file,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
