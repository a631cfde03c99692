"""The weights of a checkpoint, read tensor by tensor.

`open_tensors` reads the index of a model in any format. Its `TensorFiles` then reads tensors (`read`), hands them to
transformers (`open_for_transformers`), or hashes them (`digests`: a hash for each part of the model; `digest`: one hash
of a few rows). A `Stored` is a tensor in a file: its type and shape, and a function that reads its content.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.base.errors import UserError, warn_once
from outrider.base.files import read_mapping
from outrider.base.progress import Stage, track_progress
from outrider.draft_models.formats import stored_tensors
from outrider.draft_models.formats.convert import description_location, find_original, locate_file
from outrider.draft_models.formats.folder_model import FolderModel, Original, require_weights
from outrider.draft_models.formats.stored_tensors import CONFIG_FILE, SAFETENSORS, Stored, name_unreadable

if TYPE_CHECKING:
    from outrider.draft_models.formats.gguf_codes import CodedRows

BASE_PREFIX = "model."
# Prefixes that wrappers add to tensor names: torch.compile, DistributedDataParallel, peft.
_WRAPPERS = re.compile(r"(?:(?:_orig_mod|module|base_model\.model)\.)*")
_PIECES, _PIECE_BYTES = 32, 512  # a tensor's sample: pieces, and bytes per piece; 4 MB for a model of 7 B parameters
_BLOCK_BYTES = 2**22  # bytes of a tensor held at once when all of it is hashed
_NAMES = {dtype: name for name, dtype in stored_tensors.TYPES.items()}  # torch's types → names in safetensors
_NUMBERED = re.compile(r".+?\.\d+(?=\.)")  # "model.layers.3" of "model.layers.3.mlp.up_proj.weight"


@dataclass
class TensorFiles:
    """The tensors of a checkpoint by name. Files are located, and on the Hub fetched, only on `read`. Names are those
    of the causal LM, even if it was saved without the head and the "model." prefix, or with a wrapper's prefix."""

    source: str
    revision: str | None
    file_of: dict[str, str]  # tensor name → file name
    location: tuple[str, str | None]  # directory or Hub name of the files, and its revision
    lacks_prefix: bool = False  # saved as a base model: the stored names lack `BASE_PREFIX`
    wrapper_prefix: str = ""  # a wrapper's prefix of all stored names
    original: Original | None = None  # the model, if it is not plain safetensors: its tensors are read from there
    bytes_read: int = 0  # by `read` and by transformers, so far
    tensors_read: int = 0
    bytes_hashed: int = 0
    _counting: Lock = field(default_factory=Lock, repr=False, compare=False)

    def read(
        self, names: Iterable[str], dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Read exactly the tensors in `names`, in `dtype`; without `dtype`, and integer tensors always, in their stored
        type. Each tensor is moved to `device` as soon as it is read. Adds stored sizes to `bytes_read`. Raises
        `UserError`."""
        tensors, tensor_names = {}, list(names)
        stored_by_name = self.open_stored(tensor_names)
        for name, stored in track_progress(stored_by_name, f"reading {self.source}", "tensors", len(tensor_names)):
            tensor = self._read(name, stored)
            tensor = tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
            tensors[name] = tensor.to(device)
        return tensors

    def _read(self, name: str, stored: Stored) -> Tensor:
        with name_unreadable(self.source, f"tensor {name!r}"):
            tensor = stored.read()
        with self._counting:  # transformers reads in several threads
            self.bytes_read += tensor.nbytes
            self.tensors_read += 1
        return tensor

    def open_for_transformers(
        self, names: Iterable[str], device: torch.device | str, stage: Stage
    ) -> dict[str, Stored]:
        """The tensors in `names`, which transformers will read; only shapes on the meta device. stage: counts reads."""
        only_shapes = torch.device(device).type == "meta"

        def read(name: str, tensor: Stored) -> Tensor:
            stage.advance()
            return torch.empty(tensor.shape, device=device) if only_shapes else self._read(name, tensor)

        return {name: replace(stored, read=partial(read, name, stored)) for name, stored in self.open_stored(names)}

    def paths(self) -> list[Path] | None:
        """The files of its weights, config and tokenizer; None if some weights are not on this machine."""
        if self.original is not None:
            return [*self.original.files.values()]
        paths = [self._locate(file, fetch=False) for file in {CONFIG_FILE, *self.file_of.values()}]
        return sorted(file for file in Path(str(paths[0])).parent.iterdir() if file.is_file()) if all(paths) else None

    def open_stored(self, names: Iterable[str]) -> Iterator[tuple[str, Stored]]:
        """(name, stored tensor) of each of `names`, file by file; reads headers only. Raises `UserError`."""
        for file, names_in_file in self._group_by_file(names).items():
            yield from self._open_file(file, names_in_file).items()

    def digests(self, names: Iterable[str], *, full: bool = False, fetch: bool = True) -> dict[str, str]:
        """A short hash of each part (`part_of`) of the model: name, type, shape and bytes of its tensors as stored.

        `_PIECES` pieces of each tensor are read, evenly spread. A change is detected unless it lies wholly between two
        pieces, within a 32nd of one tensor. full: read every byte instead, and detect any change. fetch: fetch missing
        files; otherwise omit parts that are not completely on this machine. Adds the bytes read to `bytes_hashed`.
        Raises `UserError`.
        """
        hash_of_tensor: dict[str, bytes] = {}
        incomplete: set[str] = set()
        # Reading and hashing release the GIL. A part of a quantised tensor may need all of it decoded: one at a time.
        with ThreadPoolExecutor(None if self.original is None else 1) as pool:
            for file, members in self._group_by_file(names).items():
                if not fetch and self.original is None and self._locate(file, fetch) is None:
                    incomplete |= {part_of(name) for name in members}
                    continue
                stored_by_name = self._open_file(file, members)
                futures = {name: pool.submit(_hash_tensor, name, x, full) for name, x in stored_by_name.items()}
                for name, future in track_progress(futures.items(), f"hashing {self.source}", "tensors"):
                    with name_unreadable(self.source, f"tensor {name!r}"):
                        hash_of_tensor[name], bytes_read = future.result()
                    self.bytes_hashed += bytes_read
        by_part: dict[str, bytes] = {}
        for name in sorted(hash_of_tensor):
            by_part[part_of(name)] = by_part.get(part_of(name), b"") + hash_of_tensor[name]
        return {part: hashlib.sha256(blob).hexdigest()[:16] for part, blob in by_part.items() if part not in incomplete}

    def digest(self, names: Iterable[str]) -> str:
        """A short hash of the first, middle and last row (or the scalar) of each named tensor."""
        stored_tensors, hasher = dict(self.open_stored(names)), hashlib.sha256()
        for name in sorted(stored_tensors):
            row_count = stored_tensors[name].shape[0] if stored_tensors[name].shape else 1
            row_bytes = stored_tensors[name].nbytes // max(1, row_count)
            byte_ranges = [(max(0, row) * row_bytes, row_bytes) for row in sorted({0, row_count // 2, row_count - 1})]
            for piece in stored_tensors[name].pieces(byte_ranges):
                hasher.update(name.encode())
                hasher.update(piece)
        return hasher.hexdigest()[:16]

    def _group_by_file(self, names: Iterable[str]) -> dict[str, list[str]]:
        names_by_file: dict[str, list[str]] = {}
        for name in names:
            if name not in self.file_of:
                raise UserError(f"{self.source}: no tensor {name!r} in its weights; is this a supported causal LM?")
            names_by_file.setdefault(self.file_of[name], []).append(name)
        return names_by_file

    def codes(self, name: str) -> "CodedRows | None":
        """A quantised weight as it is stored, where a CPU can multiply it so; else None."""
        return None if self.original is None else self._tensors[self._name_in_file(name)].codes()

    @cached_property
    def _tensors(self) -> Mapping[str, Stored]:
        return {} if self.original is None else self.original.tensors()

    def _open_file(self, file: str, names: Iterable[str]) -> dict[str, Stored]:
        if self.original is not None:
            return {name: self._tensors[self._name_in_file(name)] for name in names}
        name_in_file = {name: self._name_in_file(name) for name in names}
        elsewhere = (self._name_in_file(name) for name, source_file in self.file_of.items() if source_file != file)
        file_tensors = SAFETENSORS.open_part(self.source, file, self._locate(file), name_in_file.values(), elsewhere)
        tensors = {name: file_tensors[name_in_file[name]] for name in names}
        require_weights(self.source, tensors, self._locate(CONFIG_FILE))  # refuses codes without scales
        return tensors

    def _name_in_file(self, name: str) -> str:
        return self.wrapper_prefix + (name.removeprefix(BASE_PREFIX) if self.lacks_prefix else name)

    def _locate(self, file_name: str, fetch: bool = True) -> str | None:
        """The local path of a file of the checkpoint."""
        return locate_file(*self.location, file_name, fetch=fetch)


def part_of(name: str) -> str:
    """The part of a model that a tensor belongs to: its layer ("model.layers.3"), or its module if outside layers."""
    layer_match = _NUMBERED.match(name)
    return layer_match[0] if layer_match else name.rpartition(".")[0] or name


def open_tensors(source: str, revision: str | None = None) -> TensorFiles:
    """The tensor index of a model in any format, in a local directory or a Hub repository; reads no weights. Raises
    `UserError`, also for an index that is damaged or names a file outside the directory."""
    original = find_original(source, revision)
    location = (str(original.folder), None) if isinstance(original, FolderModel) else (source, revision)
    model_file = None if original else locate_file(*location, SAFETENSORS.single)  # transformers prefers it to an index
    index_file = None if original or model_file else locate_file(*location, SAFETENSORS.index)
    if original is not None:
        file_of = dict.fromkeys(original.tensors(), source)
    elif model_file is not None:
        file_of = dict.fromkeys(stored_tensors.open_safetensors(model_file), SAFETENSORS.single)
    elif index_file is not None:
        file_of = SAFETENSORS.file_of(Path(index_file))
    else:
        raise UserError(
            f"{source}: no {SAFETENSORS.single} or {SAFETENSORS.index} there; expected a safetensors checkpoint, "
            "pytorch_model.bin, or a GGUF file (convert other formats with model.save_pretrained)"
        )
    wrapper = min((match[0] for name in file_of if (match := _WRAPPERS.match(name))), key=len, default="")
    wrapper = wrapper if all(name.startswith(wrapper) for name in file_of) else ""
    if wrapper:
        warn_once(f"{source}: the names of its tensors begin with {wrapper!r}, which a wrapper put there; left out")
    file_of = {name.removeprefix(wrapper): file for name, file in file_of.items()}
    top_modules = {name.partition(".")[0] for name in file_of}
    lacks_prefix = BASE_PREFIX[:-1] not in top_modules and bool(top_modules & {"layers", "embed_tokens", "decoder"})
    if lacks_prefix:
        file_of = {key if key.startswith("lm_head.") else BASE_PREFIX + key: file for key, file in file_of.items()}
    return TensorFiles(source, revision, file_of, location, lacks_prefix, wrapper, original)


def require_no_adapter(source: str, revision: str | None, role: str) -> None:
    """Raise `UserError` if the directory holds an adapter: transformers would add it to the model silently."""
    file = None if os.path.isfile(source) else locate_file(source, revision, "adapter_config.json")
    if file is not None:
        base = read_mapping(file, "description of an adapter", "save it again").get("base_model_name_or_path")
        raise UserError(
            f"{role}={source}: holds an adapter for {base} ({Path(file).name}); merge it first: "
            f"from peft import AutoPeftModelForCausalLM; model = AutoPeftModelForCausalLM.from_pretrained({source!r}); "
            "model.merge_and_unload().save_pretrained('MERGED'). Copy the tokenizer's files there, and give that"
        )


def find_file(source: str, file_name: str, revision: str | None) -> str | None:
    """The local path of a file, other than weights, of a model in any format; fetches the file; None: no such file."""
    return locate_file(*description_location(source, revision), file_name)


def _hash_tensor(name: str, stored: Stored, reads_all: bool) -> tuple[bytes, int]:
    """sha256 of one tensor, or of its sample, and the number of bytes read."""
    # On CPUs with SHA instructions sha256 is the standard library's fastest hash.
    hasher, bytes_read = hashlib.sha256(f"{name} {_NAMES[stored.dtype]} {stored.shape} ".encode()), 0
    for piece in stored.pieces(_sample_ranges(stored.nbytes, reads_all)):
        hasher.update(piece)
        bytes_read += len(piece)
    return hasher.digest(), bytes_read


def _sample_ranges(nbytes: int, reads_all: bool) -> Iterator[tuple[int, int]]:
    """(first byte, number of bytes) of the pieces to read of a tensor of `nbytes`. The last piece ends with it."""
    if reads_all or nbytes <= _PIECES * _PIECE_BYTES:
        yield from ((offset, min(_BLOCK_BYTES, nbytes - offset)) for offset in range(0, nbytes, _BLOCK_BYTES))
    else:
        yield from ((index * (nbytes - _PIECE_BYTES) // (_PIECES - 1), _PIECE_BYTES) for index in range(_PIECES))
