"""The weights of a checkpoint, read tensor by tensor, whatever the format of its files."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from transformers.utils import cached_file

from draft_models.targets.gguf_file import find_gguf
from draft_models.targets.gguf_tensors import open_gguf_tensors
from draft_models.targets.stored_tensors import TYPES, StoredTensor, open_pickled, open_safetensors, readable
from outrider.errors import UserError
from outrider.files import read_json
from outrider.progress import counted

BASE_PREFIX, HEAD = "model.", "lm_head.weight"
SCALES = "_scale_inv"  # after the name of an fp8 weight: what its blocks are to be multiplied with
_PIECES, _PIECE = 32, 512  # a tensor's sample: so many pieces of so many bytes, 4 MB of a model of 7 B parameters
_BLOCK = 2**22  # bytes of a tensor held at once where all of it is hashed
_NUMBERED = re.compile(r".+?\.\d+(?=\.)")


@dataclass(frozen=True)
class Kind:
    """A format of weights, and how transformers names the files of a checkpoint in it."""

    name: str
    single: str
    suffix: str
    open_file: Callable[[str], Mapping[str, StoredTensor]]

    @property
    def index(self) -> str:
        """The file that says which tensor is in which of several files."""
        return f"{self.single}.index.json"


SAFETENSORS = Kind("safetensors", "model.safetensors", ".safetensors", open_safetensors)
PICKLES = Kind("torch files", "pytorch_model.bin", ".bin", open_pickled)
GGUF = Kind("GGUF", "model.gguf", ".gguf", open_gguf_tensors)


@dataclass
class TensorFiles:
    """The tensors of a checkpoint by name. Files are located, and on the Hub fetched, only on `read`.

    Names are those of the causal LM, also where the checkpoint was saved without the head and its "model." prefix.
    """

    source: str
    revision: str | None
    file_of: dict[str, str]  # tensor name → file name
    headless: bool = False  # saved without the prefix
    kind: Kind = SAFETENSORS
    block: tuple[int, int] | None = None  # of fp8 weights: rows and columns under one scale
    bytes_read: int = field(default=0)
    tensors_read: int = field(default=0)
    bytes_hashed: int = field(default=0)

    def read(
        self,
        names: Iterable[str],
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> dict[str, Tensor]:
        """Exactly the tensors in `names`, in `dtype` where one is given; `bytes_read` grows by their stored size.

        Without `dtype` each is of its stored type, or float32 where it was quantised. Integers always are of their
        stored type. device: where each goes as soon as it is read. Raises `UserError`.
        """
        tensors, wanted = {}, list(names)
        for name, stored in counted(self.stored(wanted), f"reading {self.source}", "tensors", len(wanted)):
            tensor = self._unscaled(name, stored) if name + SCALES in self.file_of else self._read(name, stored)
            tensor = tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
            tensors[name] = tensor.to(device)
        return tensors

    def _unscaled(self, name: str, stored: StoredTensor) -> Tensor:
        assert self.block is not None
        ((scales, held),) = self.stored([name + SCALES])
        return unscaled(self._read(name, stored), self._read(scales, held), self.block, f"{self.source}: {name}")

    def _read(self, name: str, stored: StoredTensor) -> Tensor:
        with readable(self.source, f"tensor {name!r}"):
            tensor = stored.read()
        self.bytes_read += tensor.nbytes
        self.tensors_read += 1
        return tensor

    def described(self) -> dict[str, tuple[torch.dtype, int]]:
        """Of every tensor of the model, the type that `read` gives it and how many values. Reads headers only."""
        found = {}
        for name, stored in self.stored(self.file_of):
            own = TYPES[stored.type_name]
            if not name.endswith(SCALES):
                scaled = name + SCALES in self.file_of
                found[name] = (torch.float32 if scaled else own, stored.nbytes // own.itemsize)
        return found

    def stored(self, names: Iterable[str]) -> Iterator[tuple[str, StoredTensor]]:
        """(name, what is stored under it) of `names`, file by file; nothing is read but headers. Raises `UserError`."""
        for file, wanted in self._by_file(names).items():
            yield from self._of(file, wanted).items()

    def numbered_layers(self) -> int:
        """How many layers the names speak of at most: numbers after one prefix, as "model.layers.3."."""
        found: dict[str, set[str]] = {}
        for name in self.file_of:
            prefix, _, number = part_of(name).rpartition(".")
            if number.isdecimal():
                found.setdefault(prefix, set()).add(number)
        return max(map(len, found.values()), default=0)

    def digests(self, names: Iterable[str], *, whole: bool = False, fetch: bool = True) -> dict[str, str]:
        """A short hash of each part (`part_of`) of the model: name, type, shape and bytes of its tensors as stored.

        The same tensors have the same hash in any format of file; those of a GGUF file are hashed as they are used,
        under their names here and, where they are quantised, in float32. Of a tensor `_PIECES` pieces are read, spread
        evenly over it. A change is seen unless it lies wholly between two pieces, within the 32nd part of one tensor.
        whole: read every byte instead, and see any change. fetch: fetch files that are not here yet; otherwise leave
        out parts that are not all here. `bytes_hashed` grows by what was read. Raises `UserError`.
        """
        hashes: dict[str, bytes] = {}
        incomplete: set[str] = set()
        with ThreadPoolExecutor() as pool:  # reading and hashing let go of the interpreter
            for file, wanted in self._by_file(names).items():
                if not fetch and self._path(file, fetch) is None:
                    incomplete |= {part_of(name) for name in wanted}
                    continue
                jobs = {name: pool.submit(_hash, name, one, whole) for name, one in self._of(file, wanted).items()}
                for name, job in counted(jobs.items(), f"hashing {self.source}", "tensors"):
                    hashes[name], size = job.result()
                    self.bytes_hashed += size
        parts: dict[str, Any] = {}
        for name in sorted(hashes):
            parts.setdefault(part_of(name), hashlib.sha256()).update(hashes[name])
        return {part: digest.hexdigest()[:16] for part, digest in parts.items() if part not in incomplete}

    def digest(self, names: Iterable[str]) -> str:
        """A short hash of three rows (or the scalar) of each named tensor: all that earlier versions recorded."""
        stored, digest = dict(self.stored(names)), hashlib.sha256()
        for name in sorted(stored):
            length = stored[name].shape[0] if stored[name].shape else 1
            row = stored[name].nbytes // max(1, length)
            places = [(max(0, index) * row, row) for index in sorted({0, length // 2, length - 1})]
            for piece in stored[name].pieces(places):
                digest.update(name.encode() + piece)
        return digest.hexdigest()[:16]

    def _by_file(self, names: Iterable[str]) -> dict[str, list[str]]:
        by_file: dict[str, list[str]] = {}
        for name in names:
            if name not in self.file_of:
                raise UserError(f"{self.source}: no tensor {name!r} in its weights; is this a supported causal LM?")
            by_file.setdefault(self.file_of[name], []).append(name)
        return by_file

    def _of(self, file: str, names: Iterable[str]) -> dict[str, StoredTensor]:
        path = self._path(file)
        if path is None:
            raise UserError(
                f"{self.source}: {file} is named in {self.kind.index} but missing; fetch the checkpoint again"
            )
        held = self.kind.open_file(path)
        missing = next((name for name in names if self._stored(name) not in held), None)
        if missing is not None:
            raise UserError(
                f"{path}: holds no tensor {missing!r}, which {self.kind.index} says it does; fetch it again"
            )
        return {name: held[self._stored(name)] for name in names}

    def holds(self, name: str) -> bool:
        """Whether the file that the index names holds the tensor; an output head may be no tensor of its own there."""
        path = self._path(self.file_of[name])
        return path is None or self._stored(name) in self.kind.open_file(path)

    def _stored(self, name: str) -> str:
        return name.removeprefix(BASE_PREFIX) if self.headless else name

    def _path(self, file: str, fetch: bool = True) -> str | None:
        if Path(self.source).is_file():
            return self.source
        return cached_file(
            self.source,
            file,
            revision=self.revision,
            local_files_only=not fetch,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=fetch,
        )


def part_of(name: str) -> str:
    """The part of a model that a tensor belongs to: its layer ("model.layers.3"), or its module outside of them."""
    numbered = _NUMBERED.match(name)
    return numbered[0] if numbered else name.rpartition(".")[0] or name


def open_tensors(source: str, revision: str | None = None) -> TensorFiles:
    """The tensor index of a GGUF file, a local directory or a Hub repository; reads no weights. Raises `UserError`.

    Also for an index that is damaged, or that names a file outside the directory. Where there are safetensors and
    pickles (.bin), it is that of the safetensors.
    """
    if (gguf := find_gguf(source)) is not None:
        return TensorFiles(source, None, dict.fromkeys(open_gguf_tensors(str(gguf)), gguf.name), kind=GGUF)
    for kind in (SAFETENSORS, PICKLES):
        index = find_file(source, kind.index, revision)
        if index is not None:
            return _named(source, revision, _read_weight_map(Path(index), kind), kind)
        single = find_file(source, kind.single, revision)
        if single is not None:
            return _named(source, revision, dict.fromkeys(kind.open_file(single), kind.single), kind)
    raise UserError(
        f"{source}: no {SAFETENSORS.single} or {SAFETENSORS.index} there; expected a safetensors checkpoint, "
        f"{PICKLES.single}, or a GGUF file (convert other formats with model.save_pretrained)"
    )


def _read_weight_map(path: Path, kind: Kind) -> dict[str, str]:
    """Tensor name → file name, of a sharded checkpoint's index. A symlink in the directory may lead anywhere."""
    what, remedy = f"index of {kind.name}", "fetch the checkpoint again"
    content = read_json(path, what, remedy)
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found:
        raise UserError(f"{path}: damaged {what} (no weight_map of tensor and file names); {remedy}")
    for name, file in found.items():
        inside = isinstance(file, str) and file.endswith(kind.suffix) and "\0" not in file
        if not inside or PurePath(file).is_absolute() or ".." in PurePath(file).parts:
            raise UserError(
                f"{path}: damaged {what} (weight_map.{name}={file!r}: expected a {kind.suffix} file in its directory); "
                f"{remedy}"
            )
    return found


def _hash(name: str, stored: StoredTensor, whole: bool) -> tuple[bytes, int]:
    """sha256 of one tensor, or of its sample, and how many bytes of it were read.

    sha256 is the fastest of the standard library where the processor knows it, and half as fast as others elsewhere.
    """
    digest, read = hashlib.sha256(f"{name} {stored.type_name} {stored.shape} ".encode()), 0
    for piece in stored.pieces(_places(stored.nbytes, whole)):
        digest.update(piece)
        read += len(piece)
    return digest.digest(), read


def _places(size: int, whole: bool) -> Iterator[tuple[int, int]]:
    """(first byte, how many) of what is to be read of a tensor of `size` bytes."""
    if whole or size <= _PIECES * _PIECE:
        yield from ((at, min(_BLOCK, size - at)) for at in range(0, size, _BLOCK))
    else:
        yield from ((index * (size - _PIECE) // (_PIECES - 1), _PIECE) for index in range(_PIECES))


def _named(source: str, revision: str | None, file_of: dict[str, str], kind: Kind) -> TensorFiles:
    begins = {name.partition(".")[0] for name in file_of}
    headless = BASE_PREFIX[:-1] not in begins and bool(begins & {"layers", "embed_tokens", "decoder"})
    if headless:
        file_of = {n if n.startswith("lm_head.") else BASE_PREFIX + n: file for n, file in file_of.items()}
    files = TensorFiles(source, revision, file_of, headless, kind)
    if kind is PICKLES and HEAD in file_of and not files.holds(HEAD):
        del file_of[HEAD]  # another name of the embedding
    if any(name.endswith(SCALES) for name in file_of):
        files.block = _fp8_block(source, revision)
    return files


def _fp8_block(source: str, revision: str | None) -> tuple[int, int]:
    """Rows and columns of the blocks of fp8 weights, as config.json says. Raises `UserError`."""
    file, what = find_file(source, "config.json", revision), "description of a model"
    described = read_json(file, what, "fetch the model again") if file else {}
    quantised = described.get("quantization_config") if isinstance(described, dict) else None
    block = quantised.get("weight_block_size") if isinstance(quantised, dict) else None
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(one, int) and one > 0 for one in block):
        raise UserError(
            f"{source}: has scales of fp8 weights, but quantization_config.weight_block_size={block!r} in config.json: "
            "expected rows and columns; give the model in another format"
        )
    return block[0], block[1]


def unscaled(weight: Tensor, scales: Tensor, block: tuple[int, int], what: str) -> Tensor:
    """weight [n, m] times the scale of each of its blocks, in float32.

    scales: [⌈n / rows of a block⌉, ⌈m / columns⌉]; the last blocks may be cut off. Raises `UserError` naming `what`.
    """
    expected = [-(-size // one) for size, one in zip(weight.shape, block, strict=True)]
    if list(scales.shape) != expected:
        raise UserError(f"{what}: scales of shape {list(scales.shape)}: expected {expected}; fetch the model again")
    rows = scales.float().repeat_interleave(block[0], 0)[: weight.shape[0]]
    return weight.float() * rows.repeat_interleave(block[1], 1)[:, : weight.shape[1]]


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
