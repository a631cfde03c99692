"""The safetensors of a checkpoint, read tensor by tensor."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from outrider.errors import UserError, reason
from outrider.files import read_json

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
BASE_PREFIX = "model."
_PIECES, _PIECE = 32, 512  # a tensor's sample: so many pieces of so many bytes, 4 MB of a model of 7 B parameters
_BLOCK = 2**22  # bytes of a tensor held at once where all of it is hashed
_NUMBERED = re.compile(r".+?\.\d+(?=\.)")


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
    bytes_hashed: int = field(default=0)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Exactly the tensors in `names`, as stored; `bytes_read` grows by their size. Raises `UserError`."""
        tensors = {}
        for file, wanted in self._by_file(names).items():
            with self._open(file) as handle:
                for name in wanted:
                    tensors[name] = handle.get_tensor(self._stored(name))
                    self.bytes_read += tensors[name].nbytes
                    self.tensors_read += 1
        return tensors

    def digests(self, names: Iterable[str], *, whole: bool = False, fetch: bool = True) -> dict[str, str]:
        """A short hash of each part (`part_of`) of the model: name, type, shape and bytes of its tensors as stored.

        Of a tensor `_PIECES` pieces are read, spread evenly over it. A change is seen unless it lies wholly between two
        pieces, within the 32nd part of one tensor. whole: read every byte instead, and see any change. fetch: fetch
        files that are not here yet; otherwise leave out parts that are not all here. `bytes_hashed` grows by what was
        read. Raises `UserError`.
        """
        hashes: dict[str, bytes] = {}
        incomplete: set[str] = set()
        with ThreadPoolExecutor() as pool:  # reading and hashing let go of the interpreter
            for file, wanted in self._by_file(names).items():
                if not fetch and self._path(file, fetch) is None:
                    incomplete |= {part_of(name) for name in wanted}
                    continue
                places = self._places(file, wanted)
                jobs = {name: pool.submit(_hash, name, *place, whole) for name, place in places.items()}
                for name, job in jobs.items():
                    hashes[name], size = job.result()
                    self.bytes_hashed += size
        parts: dict[str, Any] = {}
        for name in sorted(hashes):
            parts.setdefault(part_of(name), hashlib.sha256()).update(hashes[name])
        return {part: digest.hexdigest()[:16] for part, digest in parts.items() if part not in incomplete}

    def digest(self, names: Iterable[str]) -> str:
        """A short hash of three rows (or the scalar) of each named tensor: all that earlier versions recorded."""
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

    def _by_file(self, names: Iterable[str]) -> dict[str, list[str]]:
        by_file: dict[str, list[str]] = {}
        for name in names:
            if name not in self.file_of:
                raise UserError(f"{self.source}: no tensor {name!r} in its safetensors; is this a supported causal LM?")
            by_file.setdefault(self.file_of[name], []).append(name)
        return by_file

    def _stored(self, name: str) -> str:
        return name.removeprefix(BASE_PREFIX) if self.headless else name

    def _path(self, file: str, fetch: bool = True) -> str | None:
        return cached_file(
            self.source,
            file,
            revision=self.revision,
            local_files_only=not fetch,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=fetch,
        )

    def _places(self, file: str, names: Iterable[str]) -> dict[str, tuple[str, str, int, int]]:
        """Where tensors lie: path, type and shape, first byte, and the byte after the last."""
        with self._open(file):  # proves that the header is sound
            path = str(self._path(file))
        with open(path, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        places = {}
        for name in names:
            if (entry := header.get(self._stored(name))) is None:
                raise UserError(f"{path}: holds no tensor {name!r}, which {INDEX_FILE} says it does; fetch it again")
            begin, end = (8 + size + at for at in entry["data_offsets"])
            places[name] = (path, f"{entry['dtype']} {entry['shape']}", begin, end)
        return places

    @contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        path = self._path(file)
        if path is None:
            raise UserError(f"{self.source}: {file} is named in {INDEX_FILE} but missing; fetch the checkpoint again")
        try:
            with safe_open(path, framework="pt") as handle:
                yield handle
        except Exception as error:  # its own class for a bad header and a missing tensor, OSError for the rest
            raise UserError(f"{path}: not a readable safetensors file ({reason(error)}); fetch it again") from None


def part_of(name: str) -> str:
    """The part of a model that a tensor belongs to: its layer ("model.layers.3"), or its module outside of them."""
    numbered = _NUMBERED.match(name)
    return numbered[0] if numbered else name.rpartition(".")[0] or name


def open_tensors(source: str, revision: str | None = None) -> TensorFiles:
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


def _hash(name: str, path: str, described: str, begin: int, end: int, whole: bool) -> tuple[bytes, int]:
    """sha256 of one tensor, or of its sample, and how many bytes of it were read.

    sha256 is the fastest of the standard library where the processor knows it, and half as fast as others elsewhere.
    """
    digest, read = hashlib.sha256(f"{name} {described} ".encode()), 0
    with open(path, "rb", buffering=-1 if whole else 0) as file:
        for at, size in _pieces(begin, end, whole):
            file.seek(at)
            piece = file.read(size)
            if len(piece) != size:
                raise UserError(f"{path}: ends within tensor {name!r}; fetch it again")
            digest.update(piece)
            read += size
    return digest.digest(), read


def _pieces(begin: int, end: int, whole: bool) -> Iterator[tuple[int, int]]:
    """(first byte, size) of what is to be read of the bytes from `begin` to `end`."""
    if whole or end - begin <= _PIECES * _PIECE:
        yield from ((at, min(_BLOCK, end - at)) for at in range(begin, end, _BLOCK))
    else:
        last = end - begin - _PIECE
        yield from ((begin + index * last // (_PIECES - 1), _PIECE) for index in range(_PIECES))


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
