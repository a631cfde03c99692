"""A target of any format saved as an ordinary Hugging Face directory: safetensors, config, tokenizer."""

from pathlib import Path

import torch

from data_prep.formats.convert import content_key, write_safetensors
from data_prep.formats.door import fetched, find_original
from data_prep.formats.torch_files import CONFIG_FILE, SAFETENSORS, FolderModel, Original
from data_prep.targets.settings import ConvertConfig
from draft_models.targets.open_target import open_target
from outrider.errors import UserError
from outrider.files import read_json, require_writable, write_json
from outrider.processes import from_main, join_processes, only_run_of
from outrider.run_dirs import HOLDER_FILE, LOCK_FILE, check_identity

RECORD_FILE = "convert_target.json"  # the identity of the conversion
SOURCE_FOLDER = ".source"  # where a caller may keep the input of the conversion


def convert_target(config: ConvertConfig) -> None:
    """Save the target as safetensors in `config.out_dir`. Raises `UserError`. Under a launcher, one process does it."""
    state = join_processes()
    folder = require_writable(config.out_dir)
    with only_run_of(state, folder, "a target"):
        from_main(state, lambda: convert(config, folder))


def convert(config: ConvertConfig, folder: Path) -> None:
    """Like `convert_target`, to a directory that the caller has locked against other runs."""
    original = find_original(config.target, config.revision) or _plain(config)
    if isinstance(original, FolderModel) and CONFIG_FILE not in original.files:
        raise UserError(f"target={config.target}: no {CONFIG_FILE} there; give the directory of a whole model")
    identity = {"target": content_key(original), "dtype": config.dtype, "shard_gb": config.shard_gb}
    _require_free(folder, identity, config.resume)
    if (folder / CONFIG_FILE).exists():
        print(f"{folder}: finished already")
        return
    write_json(folder / RECORD_FILE, identity)
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    shard_bytes, remedy = int(config.shard_gb * 1e9), "free space, then resume=true"
    files = write_safetensors(original, folder, dtype=dtype, shard_bytes=shard_bytes, remedy=remedy)
    print(f"convert_target out_dir={folder} files={files}", flush=True)


def _plain(config: ConvertConfig) -> Original:
    """A target that already is safetensors. Raises `UserError` if it is not a target."""
    _ = open_target(config.target, config.revision, by_layers=False).tokenizer
    return FolderModel(config.target, fetched(config.target, config.revision, SAFETENSORS), SAFETENSORS)


def _require_free(folder: Path, identity: dict[str, object], resume: bool) -> None:
    """Raise `UserError` unless the directory is empty, or holds the same conversion and `resume` is on."""
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
