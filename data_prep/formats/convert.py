"""Conversion of a model of any format to an ordinary Hugging Face directory: safetensors, config, tokenizer.

The weights are written one file at a time, so that at most one is in memory. config.json is written last: a directory
without it does not load.
"""

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save
from torch import Tensor

from data_prep.formats.original import CONFIG_FILE, Original, Stored
from outrider.errors import UserError
from outrider.files import read_mapping, write_atomically, write_json
from outrider.progress import Stage

INDEX_FILE = "model.safetensors.index.json"
_PARTS = ".parts"  # everything except the weights, until these are complete


def write_safetensors(
    original: Original,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 2 * 10**9,
    remedy: str,
) -> int:
    """Write `original` to `folder` in `dtype` (None: each tensor's own type); returns the number of weight files.

    shard_bytes: the maximum size of a file, unless it is a single tensor. Existing weight files are kept.
    Raises `UserError` with `remedy` if something cannot be written.
    """
    parts = folder / _PARTS
    shutil.rmtree(parts, ignore_errors=True)
    try:
        parts.mkdir(parents=True)
        original.describe(parts)  # an unsupported model is refused before its weights are read
        tensors = original.tensors()
        if dtype is not None:
            _restate(parts / CONFIG_FILE, dtype)
        written = _write_weights(tensors, folder, dtype, shard_bytes, remedy)
        for file in sorted(parts.iterdir(), key=lambda file: file.name == CONFIG_FILE):
            os.replace(file, folder / file.name)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error}); {remedy}") from None
    finally:
        shutil.rmtree(parts, ignore_errors=True)
    return written


def _write_weights(
    tensors: Mapping[str, Stored], folder: Path, dtype: torch.dtype | None, shard_bytes: int, remedy: str
) -> int:
    """Write the missing weight files and the index; returns the number of weight files."""
    sizes = {name: math.prod(one.shape) * _written(one, dtype).itemsize for name, one in tensors.items()}
    plan = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=shard_bytes
    )
    left = {file: names for file, names in plan.filename_to_tensors.items() if not (folder / file).exists()}
    names = [name for inner in left.values() for name in inner]
    _require_room(folder, sum(sizes[name] for name in names), remedy)
    with Stage("writing", len(names), "tensors") as stage:
        for file, inner in left.items():
            weights = {}
            for name in inner:
                weights[name] = read_as(tensors[name], dtype)
                stage.advance()
            write_atomically(folder / file, save(weights, metadata={"format": "pt"}), remedy)
    if plan.is_sharded:
        write_json(folder / INDEX_FILE, {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename})
    return len(plan.filename_to_tensors)


def read_as(stored: Stored, dtype: torch.dtype | None) -> Tensor:
    """The tensor, in `dtype` if it is given and the tensor holds floats."""
    return stored.read().to(_written(stored, dtype))


def _written(stored: Stored, dtype: torch.dtype | None) -> torch.dtype:
    return stored.dtype if dtype is None or not stored.dtype.is_floating_point else dtype


def _restate(file: Path, dtype: torch.dtype) -> None:
    described = read_mapping(file, "description of a model", "fetch the model again")
    plain = {key: value for key, value in described.items() if key != "torch_dtype"}
    write_json(file, plain | {"dtype": str(dtype).removeprefix("torch.")})


def _require_room(folder: Path, size: int, remedy: str) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UserError(f"{folder}: {size / 1e9:.1f} GB are to be written, {free / 1e9:.1f} GB are free; {remedy}")
