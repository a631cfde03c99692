"""The entry point for formats: models that are not plain safetensors, read where they are, or saved as safetensors.

Config and tokenizer of such a model, its description, are written once, as files that transformers reads, to a cache: a
directory for each state of its files. A model that is saved is an ordinary Hugging Face directory: safetensors, config
and tokenizer. Its weights are written one file at a time, so that at most one is in memory, and config.json is written
last: a directory without it does not load.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save
from transformers.utils import cached_file, has_file

from outrider.base.errors import UserError, reason
from outrider.base.files import is_local, read_mapping, require_writable, user_cache, write_atomically, write_json
from outrider.base.progress import Stage, track_progress
from outrider.draft_models.formats.folder_model import FolderModel, Original, is_quantised
from outrider.draft_models.formats.gguf_file import AS_WRITTEN, find_gguf
from outrider.draft_models.formats.save_model import for_older_readers
from outrider.draft_models.formats.stored_tensors import (
    CONFIG_FILE,
    DESCRIPTIONS,
    PICKLES,
    QUANT_FILE,
    SAFETENSORS,
    TOKENIZER_FILE,
    Stored,
    WeightFormat,
)

if TYPE_CHECKING:
    from outrider.draft_models.formats.gguf_model import GgufModel

INDEX_FILE = "model.safetensors.index.json"
CACHE_VARIABLE = "OUTRIDER_CACHE"  # environment variable: the location of the cache
RECORD_FILE = "described.json"
_PARTS = ".parts"  # everything except the weights, until these are complete
_FORM = 3  # version of what is written; part of digests that name a description or a conversion
_REMEDY = f"free space, or say by {CACHE_VARIABLE} where there is more"


def description_location(source: str, revision: str | None = None) -> tuple[str, str | None]:
    """(directory or Hub name, revision) of config, generation config and tokenizer: those given, or our directory.

    No weights are fetched for them. Raises `UserError` if a model's description cannot be read or written.
    """
    original = find_original(source, revision, weights=False)
    return (source, revision) if original is None else (str(write_description(original)), None)


def find_original(source: str, revision: str | None = None, *, weights: bool = True) -> Original | None:
    """The model in `source` if it is not plain safetensors; None for these, and if there is no model. source: a GGUF
    file, a directory or a Hub name. weights: whether its weights are fetched, too. Raises `UserError`."""
    if (path := find_gguf(source)) is not None:
        stat = path.stat()
        return _open_unchanged(source, path, stat.st_size, stat.st_mtime_ns)
    if not is_local(source):
        return _open_on_hub(source, revision, weights)
    folder = Path(source)
    weight_format = _format_to_convert(lambda name: os.path.exists(folder / name), lambda name: folder / name)
    return None if weight_format is None else FolderModel(source, folder, weight_format)


@lru_cache(4)
def _open_unchanged(source: str, path: Path, size: int, changed: int) -> "GgufModel":
    """One object for all who open a file while it stays the same: they share what is read of it."""
    from outrider.draft_models.formats.gguf_model import GgufModel

    return GgufModel(source, path)


def is_loaded_as_written(source: str, revision: str | None) -> bool:
    """Whether a conversion wrote the tokenizer in `source`: then it is loaded as written, not by its architecture."""
    file_path = locate_file(source, revision, TOKENIZER_FILE)
    fields = read_mapping(file_path, "description of a tokenizer", "fetch the model again") if file_path else {}
    return fields.get(AS_WRITTEN) is True


def locate_file(source: str, revision: str | None, file: str, *, fetch: bool = True) -> str | None:
    """The local path of a file of a directory or Hub repository; None if it does not exist or the Hub is not reached.

    fetch: fetch a missing file. Raises `UserError` if the Hub refuses to give it.
    """
    try:
        return cached_file(
            source, file, revision=revision, local_files_only=not fetch, _raise_exceptions_for_missing_entries=False
        )
    except Exception as error:  # any error of the Hub's client
        raise UserError(f"{source}: {file} cannot be fetched ({reason(error)})") from None


def fetch_folder(source: str, revision: str | None, weight_format: WeightFormat, *, weights: bool = True) -> Path:
    """The local directory of a model whose weights are in `weight_format`. Raises `UserError` if it cannot be fetched.

    weights: whether they are fetched, too, or only its descriptions.
    """
    from huggingface_hub import snapshot_download

    if is_local(source):
        return Path(source)
    file_patterns = [*DESCRIPTIONS]
    if weights:
        has_single_file = _is_on_hub(source, revision, weight_format.single)
        index_path = None if has_single_file else locate_file(source, revision, weight_format.index)
        if index_path is None:
            file_patterns.append(weight_format.single)
        else:
            file_patterns += sorted({weight_format.index, *weight_format.file_of(Path(index_path)).values()})
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=file_patterns))
    except Exception as error:  # any error of the Hub's client
        raise UserError(f"{source}: cannot be fetched ({reason(error)})") from None


@lru_cache
def _open_on_hub(source: str, revision: str | None, weights: bool) -> FolderModel | None:
    if locate_file(source, revision, CONFIG_FILE) is None:
        return None
    weight_format = _format_to_convert(
        partial(_is_on_hub, source, revision), lambda name: Path(locate_file(source, revision, name) or name)
    )
    if weight_format is None:
        return None
    return FolderModel(source, fetch_folder(source, revision, weight_format, weights=weights), weight_format)


def _is_on_hub(source: str, revision: str | None, file_name: str) -> bool:
    """Whether a Hub repository has a file. If the Hub's client fails, the local cache decides."""
    try:
        return has_file(source, file_name, revision=revision)
    except Exception:  # any of its errors: a later read reports why the Hub cannot be reached
        return has_file(source, file_name, revision=revision, local_files_only=True)


def _format_to_convert(exists: Callable[[str], bool], locate: Callable[[str], Path]) -> WeightFormat | None:
    """The format of weights that are read here; None for ordinary safetensors, and if there are no weights."""
    formats = (candidate for candidate in (SAFETENSORS, PICKLES) if exists(candidate.index) or exists(candidate.single))
    weight_format = next(formats, None)
    return weight_format if weight_format is PICKLES or is_quantised(locate(CONFIG_FILE), locate(QUANT_FILE)) else None


def write_description(original: Original) -> Path:
    """The directory with config and tokenizer of a model, written now or earlier. Raises `UserError`."""
    digest = stamp_of(original.files)
    folder = cache_folder() / digest
    if _is_complete(folder):
        return folder
    require_writable(folder.parent, CACHE_VARIABLE)
    try:
        with Stage(f"describing {original.source} once"), TemporaryDirectory(dir=folder.parent) as temp_dir:
            describe_in(original, new_folder := Path(temp_dir, folder.name))
            if stamp_of(original.files) != digest:
                raise UserError(f"{original.source}: changed while it was read; start again when it is whole")
            write_json(new_folder / RECORD_FILE, {"made_of": original.source, "bytes": _description_bytes(new_folder)})
            if not _is_complete(folder):  # else another process has written it meanwhile
                shutil.rmtree(folder, ignore_errors=True)
                try:
                    os.rename(new_folder, folder)
                except OSError:
                    if not _is_complete(folder):  # else another process was faster
                        raise
    except OSError as error:
        raise UserError(f"{original.source}: cannot be described in {folder.parent} ({error}); {_REMEDY}") from None
    return folder


def cache_folder() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or user_cache() / "targets").expanduser().absolute()


def stamp_of(files: Mapping[str, Path]) -> str:
    """A digest that changes with any of the files, from their paths, sizes and times alone."""
    file_stats = [(name, str(path.resolve()), path.stat()) for name, path in sorted(files.items())]
    digest_input = [_FORM, *((name, path, stat.st_size, stat.st_mtime_ns) for name, path, stat in file_stats)]
    return hashlib.sha256(json.dumps(digest_input).encode()).hexdigest()[:32]


def _is_complete(folder: Path) -> bool:
    """Whether a description is there, and its files have as many bytes as were written. Raises `UserError`."""
    record_path = folder / RECORD_FILE
    if not record_path.exists():
        return False
    record = read_mapping(record_path, "record of a description", "remove it")
    return record.get("bytes") == _description_bytes(folder)


def _description_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.name != RECORD_FILE)


def content_key(original: Original) -> str:
    """sha256 over all files of a model, with their names in it."""
    hasher = hashlib.sha256(f"{type(original).__name__} {_FORM}".encode())
    for name, path in track_progress(sorted(original.files.items()), f"hashing {original.source}", "files"):
        with path.open("rb") as file:
            hasher.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return hasher.hexdigest()[:32]


def describe_in(original: Original, folder: Path) -> None:
    """Write everything except the weights to the new or empty `folder`, as transformers' versions 4 and 5 read it."""
    folder.mkdir(exist_ok=True)
    original.describe(folder)
    for_older_readers(folder)


def write_safetensors(
    original: Original, folder: Path, *, dtype: torch.dtype | None = None, shard_bytes: int = 2 * 10**9, remedy: str
) -> int:
    """Write `original` to `folder` in `dtype` (None: each tensor's own type); returns the number of weight files.

    shard_bytes: the maximum size of a file, unless it is a single tensor. Existing weight files are kept.
    Raises `UserError` with `remedy` if something cannot be written.
    """
    temp_folder = folder / _PARTS
    shutil.rmtree(temp_folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        describe_in(original, temp_folder)  # an unsupported model is refused before its weights are read
        tensors = original.tensors()
        if dtype is not None:
            config = read_mapping(temp_folder / CONFIG_FILE, "description of a model", "fetch the model again")
            config.pop("torch_dtype", None)
            write_json(temp_folder / CONFIG_FILE, config | {"dtype": str(dtype).removeprefix("torch.")})
        file_count = _write_weights(tensors, folder, dtype, shard_bytes, remedy)
        for file in sorted(temp_folder.iterdir(), key=lambda file: file.name == CONFIG_FILE):
            os.replace(file, folder / file.name)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error}); {remedy}") from None
    finally:
        shutil.rmtree(temp_folder, ignore_errors=True)
    return file_count


def _write_weights(
    tensors: Mapping[str, Stored], folder: Path, dtype: torch.dtype | None, shard_bytes: int, remedy: str
) -> int:
    """Write the missing weight files and the index; returns the number of weight files."""
    sizes = {name: math.prod(tensor.shape) * _written_dtype(tensor, dtype).itemsize for name, tensor in tensors.items()}
    plan = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=shard_bytes
    )
    missing_files = {file: names for file, names in plan.filename_to_tensors.items() if not (folder / file).exists()}
    names = [name for tensor_names in missing_files.values() for name in tensor_names]
    new_bytes, free = sum(sizes[name] for name in names), shutil.disk_usage(folder).free
    if new_bytes > free:
        raise UserError(f"{folder}: {new_bytes / 1e9:.1f} GB are to be written, {free / 1e9:.1f} GB are free; {remedy}")
    with Stage("writing", len(names), "tensors") as progress:
        for file, tensor_names in missing_files.items():
            shard_tensors = {}
            for name in tensor_names:
                shard_tensors[name] = tensors[name].read().to(_written_dtype(tensors[name], dtype))
                progress.advance()
            write_atomically(folder / file, save(shard_tensors, metadata={"format": "pt"}), remedy)
    if plan.is_sharded:
        write_json(folder / INDEX_FILE, {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename})
    return len(plan.filename_to_tensors)


def _written_dtype(stored: Stored, dtype: torch.dtype | None) -> torch.dtype:
    """The type in which a tensor is written: `dtype` if it is given and the tensor holds floats, else its own."""
    return stored.dtype if dtype is None or not stored.dtype.is_floating_point else dtype
