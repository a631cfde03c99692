"""Models in other files than safetensors: read where they are; config and tokenizer are described once."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from outrider.base.errors import UserError
from outrider.draft_models.formats import convert
from outrider.draft_models.formats.convert import (
    RECORD_FILE,
    description_location,
    find_original,
    write_description,
)
from outrider.draft_models.formats.gguf_model import GgufModel
from outrider.draft_models.targets.fingerprint import deciding_config
from outrider.draft_models.targets.model_files import load_generation_config
from outrider.draft_models.targets.open_target import open_target
from tests.draft_models.formats.test_torch_files import as_bin, save_fp8
from tests.gguf_files import write_gguf
from tests.refusals import refusal


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def forms(llama: Path, written: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model in every format that is converted."""
    folder = tmp_path_factory.mktemp("forms")
    return {"gguf": written, "bin": as_bin(llama, folder / "bin"), "fp8": save_fp8(folder, "llama")[0]}


@pytest.fixture
def fetches(forms: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is fetched from now on, of a Hub that has someone/bin and someone/fp8."""
    names: list[str] = []

    def held(source: str, file: str) -> Path | None:
        place = forms[source.removeprefix("someone/")] / file if source.startswith("someone/") else Path(source, file)
        return place if place.exists() else None

    def fetch(source: str, *, allow_patterns: list[str], **_: object) -> str:
        origin, place = forms[source.removeprefix("someone/")], tmp_path / "hub" / source
        place.mkdir(parents=True, exist_ok=True)
        wanted = {file for pattern in allow_patterns for file in origin.glob(pattern)}
        names.extend(Path(shutil.copy(file, place)).name for file in wanted if not (place / file.name).exists())
        return str(place)

    monkeypatch.setattr(convert, "cached_file", lambda source, file, **_: (at := held(source, file)) and str(at))
    monkeypatch.setattr(convert, "has_file", lambda source, file, **_: held(source, file) is not None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    convert._open_on_hub.cache_clear()
    return names


@pytest.mark.parametrize("form", ["gguf", "bin", "fp8"])
def test_its_weights_are_read_where_they_are(kept: Path, forms: dict[str, Path], form: str) -> None:
    """What is written is its description, once: by whomever it is asked for, and however often."""
    source = str(forms[form])
    target = open_target(source)
    target.layers(dtype=torch.float32)
    (entry,) = kept.iterdir()
    changed = {file.name: file.stat().st_mtime_ns for file in entry.iterdir()}
    assert changed.keys() >= {"config.json", "tokenizer.json", RECORD_FILE}
    assert not [name for name in changed if name.endswith((".safetensors", ".bin"))]
    assert json.loads((entry / RECORD_FILE).read_text())["made_of"] == source
    assert target.fingerprint == open_target(source).fingerprint
    assert (target.source, target.fingerprint.target) == (source, source)
    assert {file.name: file.stat().st_mtime_ns for file in entry.iterdir()} == changed


def test_the_second_start_looks_at_no_byte(kept: Path, llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf")
    before, stat = description_location(str(path)), path.stat()
    path.write_bytes(b"GGUF" + bytes(stat.st_size - 4))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert description_location(str(path)) == before


@pytest.mark.parametrize("file", ["config.json", "merges.txt", "pytorch_model.bin"])
def test_every_file_of_a_directory_counts(kept: Path, llama: Path, tmp_path: Path, file: str) -> None:
    """Its content, and its name."""
    path = as_bin(llama, tmp_path / "bin")
    (path / "vocab.txt").write_text("a")
    before = description_location(str(path))
    if file == "merges.txt":
        (path / "vocab.txt").rename(path / file)
    elif file == "pytorch_model.bin":
        weights = torch.load(path / file)
        torch.save({name: tensor + 1 for name, tensor in weights.items()}, path / file)
    else:
        (path / file).write_text(json.dumps(json.loads((path / file).read_text()) | {"of_a_later_version": 1}))
    assert description_location(str(path)) != before


@dataclass(frozen=True)
class Touched(GgufModel):
    """A GGUF file that changes, or breaks with `error`, while it is described."""

    error: BaseException | None = None

    def describe(self, folder: Path) -> None:
        super().describe(folder)
        os.utime(self.path)
        if self.error is not None:
            raise self.error


def test_a_file_that_changes_meanwhile_is_refused(kept: Path, llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf")
    refusal(r"model\.gguf: changed while it was read", write_description, Touched(str(path), path))
    assert [*kept.iterdir()] == []


@pytest.mark.parametrize("form", ["gguf", "bin", "fp8"])
def test_a_copy_elsewhere_is_described_alike(kept: Path, forms: dict[str, Path], tmp_path: Path, form: str) -> None:
    def said(source: str) -> tuple[object, ...]:
        target = open_target(source, by_layers=False)
        return target.tokenizer.get_vocab(), load_generation_config(source), deciding_config(source, None)

    origin, copied = forms[form], tmp_path / forms[form].name
    (shutil.copytree if origin.is_dir() else shutil.copy)(origin, copied)
    (first, _), (second, _) = description_location(str(origin)), description_location(str(copied))
    files = [file.name for file in Path(first).iterdir() if file.name != RECORD_FILE]
    assert first != second
    assert all((Path(first, name)).read_bytes() == Path(second, name).read_bytes() for name in files)
    assert said(str(origin)) == said(str(copied))


@pytest.mark.parametrize("form", ["bin", "fp8"])
def test_config_and_tokenizer_are_read_without_fetching_weights(kept: Path, fetches: list[str], form: str) -> None:
    source = f"someone/{form}"
    target = open_target(source)
    assert len(target.tokenizer) > 0
    assert find_original(source, weights=False).quantised == (form == "fp8")
    assert "config.json" in fetches
    assert not [name for name in fetches if name.endswith((".bin", ".safetensors"))]
    assert target.files.file_of
    assert [name for name in fetches if name.endswith((".bin", ".safetensors"))]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=repr)
def test_a_description_that_ends_early_leaves_nothing(kept: Path, written: Path, error: BaseException) -> None:
    """Whether it is interrupted or the disk fills."""
    with pytest.raises((KeyboardInterrupt, UserError)) as raised:
        write_description(Touched(str(written), written, error))
    if isinstance(error, OSError):
        assert "No space left on device); free space, or say by OUTRIDER_CACHE" in str(raised.value)
    assert [*kept.iterdir()] == []


def test_what_somebody_removed_is_made_again(kept: Path, written: Path) -> None:
    place, _ = description_location(str(written))
    whole = {file.name: file.read_bytes() for file in Path(place).iterdir()}
    (Path(place) / RECORD_FILE).unlink()
    assert description_location(str(written)) == (place, None)
    (Path(place) / "tokenizer.json").write_bytes(whole["tokenizer.json"][:-1])
    assert description_location(str(written)) == (place, None)
    assert {file.name: file.read_bytes() for file in Path(place).iterdir()} == whole
