"""A target saved as an ordinary Hugging Face directory: safetensors, config, tokenizer.

The weights are written a file at a time, so that no more than one is in memory. config.json comes last: a directory
without it does not load.
"""

import copy
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from data_prep.targets.settings import ConvertConfig
from draft_models.targets.fingerprint import tokenizer_digest
from draft_models.targets.model_files import CONFIG_FILE, load_generation_config
from draft_models.targets.model_identity import model_identity
from draft_models.targets.open_target import OpenTarget, open_target
from draft_models.targets.tensor_files import SAFETENSORS, TensorFiles
from outrider.errors import UserError
from outrider.files import read_json, require_writable, write_atomically, write_json
from outrider.processes import from_main, join_processes, only_run_of
from outrider.progress import counted
from outrider.run_dirs import HOLDER_FILE, LOCK_FILE, check_identity

RECORD_FILE = "convert_target.json"  # what the directory is made from
SOURCE_FOLDER = ".source"  # where a caller may keep what is converted
_PARTS = ".parts"  # the tokenizer's files, until they are whole


@dataclass(frozen=True)
class Shard:
    """A file of weights to be written, and the tensors in it."""

    file: str
    names: tuple[str, ...]


def convert_target(config: ConvertConfig) -> None:
    """Save the target as safetensors in `config.out_dir`. Raises `UserError`. Of a launcher, one process does it."""
    state = join_processes()
    folder = require_writable(config.out_dir)
    with only_run_of(state, folder, "a target"):
        from_main(state, lambda: convert(config, folder))


def convert(config: ConvertConfig, folder: Path) -> None:
    """As `convert_target`, into a directory that the caller keeps other runs out of."""
    target = open_target(config.target, config.revision, by_layers=False)
    identity = {
        "target": model_identity(target.files),
        "tokenizer": tokenizer_digest(target.tokenizer),
        "dtype": config.dtype,
        "shard_gb": config.shard_gb,
    }
    _require_free(folder, identity, config.resume)
    if (folder / CONFIG_FILE).exists():
        print(f"{folder}: finished already")
        return
    write_json(folder / RECORD_FILE, identity)
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    written = _save_weights(target.files, folder, dtype, int(config.shard_gb * 1e9))
    _save_descriptions(target, folder, dtype or _commonest_type(target.files))
    print(f"convert_target out_dir={folder} tensors={len(target.files.file_of)} files={written}", flush=True)


def _save_weights(files: TensorFiles, folder: Path, dtype: torch.dtype | None, most: int) -> int:
    """Write the files of weights that are not there yet, each of at most `most` bytes, and the index; how many."""
    sizes = _sizes(files, dtype)
    shards = plan_shards(sizes, most)
    for shard in counted(shards, "writing", "files"):
        if not (folder / shard.file).exists():  # whatever has its name is whole
            weights = files.read(shard.names, dtype)
            write_atomically(folder / shard.file, save(weights, metadata={"format": "pt"}))
    if len(shards) > 1:
        weight_map = {name: shard.file for shard in shards for name in shard.names}
        total = {"total_size": sum(sizes.values())}
        write_json(folder / SAFETENSORS.index, {"metadata": total, "weight_map": weight_map})
    return len(shards)


def _require_free(folder: Path, identity: dict[str, Any], resume: bool) -> None:
    """Raise `UserError` unless the directory is empty, or holds the same conversion and is to be resumed."""
    if (folder / RECORD_FILE).exists():
        if not resume:
            raise UserError(
                f"out_dir={folder}: holds an earlier conversion ({RECORD_FILE}); resume=true continues it, another "
                "out_dir keeps both"
            )
        made = read_json(folder / RECORD_FILE, "record of a conversion", "give another out_dir")
        check_identity(made, identity, folder / RECORD_FILE)
        return
    found = {path.name for path in folder.iterdir()} - {LOCK_FILE, HOLDER_FILE, SOURCE_FOLDER}
    if found:
        raise UserError(f"out_dir={folder}: holds {min(found)!r}, which no conversion made; give an empty directory")


def _sizes(files: TensorFiles, dtype: torch.dtype | None) -> dict[str, int]:
    """How many bytes each tensor is to have."""
    return {
        name: values * (own if dtype is None or not own.is_floating_point else dtype).itemsize
        for name, (own, values) in files.described().items()
    }


def _commonest_type(files: TensorFiles) -> torch.dtype:
    """The type that most of the weights are of, once read."""
    sizes: dict[torch.dtype, int] = {}
    for own, values in files.described().values():
        sizes[own] = sizes.get(own, 0) + values
    return max(sizes, key=lambda dtype: sizes[dtype])


def plan_shards(sizes: Mapping[str, int], most: int) -> list[Shard]:
    """The files to write tensors of these sizes to, of at most `most` bytes each unless one tensor is larger."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return [Shard(SAFETENSORS.single, tuple(groups[0]))]
    stem, total = SAFETENSORS.single.removesuffix(SAFETENSORS.suffix), len(groups)
    return [
        Shard(f"{stem}-{number:05d}-of-{total:05d}{SAFETENSORS.suffix}", tuple(names))
        for number, names in enumerate(groups, start=1)
    ]


def _save_descriptions(target: OpenTarget, folder: Path, dtype: torch.dtype) -> None:
    """Write all but the weights; config.json comes last."""
    parts = folder / _PARTS
    shutil.rmtree(parts, ignore_errors=True)
    described = copy.deepcopy(target.config)
    described.dtype = dtype
    if hasattr(described, "quantization_config"):
        del described.quantization_config  # they are plain weights now
    generation = load_generation_config(target.source, target.revision)
    try:
        target.tokenizer.save_pretrained(parts)
        described.save_pretrained(parts)
        if generation is not None:
            generation.save_pretrained(parts)
        for file in sorted(parts.iterdir(), key=lambda file: file.name == CONFIG_FILE):
            os.replace(file, folder / file.name)
    except OSError as error:
        raise UserError(f"out_dir={folder}: cannot be written ({error}); free space, then resume=true") from None
    finally:
        shutil.rmtree(parts, ignore_errors=True)
