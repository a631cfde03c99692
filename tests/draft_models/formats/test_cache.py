"""The cache of converted models: made once, known by content, whole or absent."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from torch import Tensor

from outrider.base.errors import UserError
from outrider.base.files import lock, user_cache
from outrider.draft_models.formats import convert
from outrider.draft_models.formats.convert import RECORD_FILE, as_described, as_safetensors, cached, was_quantised
from outrider.draft_models.formats.gguf_model import GgufModel
from outrider.draft_models.formats.torch_files import Stored
from outrider.draft_models.targets.fingerprint import deciding_config
from outrider.draft_models.targets.model_files import load_generation_config
from outrider.draft_models.targets.open_target import open_target
from outrider.draft_models.targets.tensor_files import open_tensors
from tests.draft_models.formats.test_torch_files import as_bin, save_fp8
from tests.gguf_files import write_gguf
from tests.refusals import refusal


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """What was converted since the last call."""

    def since() -> list[str]:
        lines = capsys.readouterr().err.splitlines()
        return [line.split()[1] for line in lines if line.startswith("converted ")]

    return since


@dataclass(frozen=True)
class Watched(GgufModel):
    """A GGUF file; `reading` is called before a tensor of it is read."""

    reading: Callable[[], object] = bool

    def tensors(self) -> Mapping[str, Stored]:
        def watched(read: Callable[[], Tensor]) -> Tensor:
            self.reading()
            return read()

        return {name: replace(one, read=lambda read=one.read: watched(read)) for name, one in super().tensors().items()}


def entries(kept: Path) -> list[Path]:
    """The whole models in it: config and tokenizer alone are no conversion."""
    return sorted(file.parent for file in kept.glob(f"*/{RECORD_FILE}") if list(file.parent.glob("*.safetensors")))


def all_but_weights(place: tuple[str, str | None]) -> dict[str, bytes]:
    files = [file for file in Path(place[0]).iterdir() if file.suffix != ".safetensors" and file.name != RECORD_FILE]
    return {file.name: file.read_bytes() for file in files}


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
    convert._on_hub.cache_clear()
    return names


@pytest.mark.parametrize("form", ["gguf", "bin"])
def test_it_is_converted_once(
    kept: Path, forms: dict[str, Path], conversions: Callable[[], list[str]], form: str
) -> None:
    """Whatever is asked of it, and by however many. A GGUF file never is: its tensors are read where they are."""
    written = forms[form]
    target = open_target(str(written))
    target.layers(dtype=torch.float32)
    assert target.fingerprint == open_target(str(written)).fingerprint
    assert (target.source, target.fingerprint.target) == (str(written), str(written))
    if form == "gguf":
        assert not conversions()
        assert not entries(kept)
        return
    assert conversions() == [str(written)]
    (entry,) = entries(kept)
    assert {file.name for file in entry.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert json.loads((entry / RECORD_FILE).read_text())["made_of"] == str(written)


def test_the_second_start_looks_at_no_byte(kept: Path, llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf")
    before, stat = as_safetensors(str(path)), path.stat()
    path.write_bytes(b"GGUF" + bytes(stat.st_size - 4))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert as_safetensors(str(path)) == before


def test_the_same_content_elsewhere_is_not_converted_again(
    kept: Path, written: Path, tmp_path: Path, conversions: Callable[[], list[str]]
) -> None:
    copied = shutil.copy(written, tmp_path / "other.gguf")
    assert as_safetensors(str(written)) == as_safetensors(str(copied))
    assert conversions() == [str(written)]


def test_changed_content_is_another_model(kept: Path, llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf")
    before = open_target(str(path)).fingerprint
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert open_target(str(path)).fingerprint.tensors != before.tensors


@pytest.mark.parametrize("file", ["config.json", "merges.txt", "pytorch_model.bin"])
def test_every_file_of_a_directory_counts(kept: Path, llama: Path, tmp_path: Path, file: str) -> None:
    """Its content, and its name."""
    path = as_bin(llama, tmp_path / "bin")
    (path / "vocab.txt").write_text("a")
    before = as_safetensors(str(path))
    if file == "merges.txt":
        (path / "vocab.txt").rename(path / file)
    elif file == "pytorch_model.bin":
        weights = torch.load(path / file)
        torch.save({name: tensor + 1 for name, tensor in weights.items()}, path / file)
    else:
        (path / file).write_text(json.dumps(json.loads((path / file).read_text()) | {"of_a_later_version": 1}))
    assert as_safetensors(str(path)) != before


def test_a_file_that_changes_meanwhile_is_refused(kept: Path, llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf")
    refusal(r"model\.gguf: changed while it was converted", cached, Watched(str(path), path, lambda: os.utime(path)))
    assert entries(kept) == []


@pytest.mark.parametrize("form", ["gguf", "bin", "fp8"])
def test_config_and_tokenizer_are_read_without_a_conversion(
    kept: Path, forms: dict[str, Path], conversions: Callable[[], list[str]], form: str
) -> None:
    """They are the conversion's, file by file; once there is one, it is read."""
    source = str(forms[form])
    target = open_target(source, by_layers=False)
    alone = target.config.to_dict(), target.tokenizer.get_vocab(), load_generation_config(source)
    files, config = all_but_weights(as_described(source)), deciding_config(source, None)
    open_target(source)
    assert conversions() == entries(kept) == []
    place = as_safetensors(source)
    assert conversions() == [source]
    assert all_but_weights(place) == files
    assert as_described(source) == place
    again = open_target(source, by_layers=False)
    assert (again.config.to_dict(), again.tokenizer.get_vocab(), load_generation_config(source)) == alone
    assert deciding_config(source, None) == config


@pytest.mark.parametrize("form", ["bin", "fp8"])
def test_config_and_tokenizer_are_read_without_fetching_weights(
    kept: Path, fetches: list[str], conversions: Callable[[], list[str]], form: str
) -> None:
    source = f"someone/{form}"
    target = open_target(source)
    assert len(target.tokenizer) > 0
    assert was_quantised(source) == (form == "fp8")
    assert "config.json" in fetches
    assert not [name for name in fetches if name.endswith((".bin", ".safetensors"))]
    assert conversions() == []
    files = all_but_weights(as_described(source))
    assert target.files.file_of
    assert [name for name in fetches if name.endswith((".bin", ".safetensors"))]
    assert conversions() == [source]
    assert all_but_weights(as_described(source)) == all_but_weights(as_safetensors(source)) == files


HUB_ERRORS = [
    httpx.ReadError("cut off"), OfflineModeIsEnabled("offline"),
    HfHubHTTPError("500", response=httpx.Response(500, request=httpx.Request("HEAD", "https://huggingface.co"))),
]  # fmt: skip


@pytest.mark.parametrize("error", HUB_ERRORS, ids=lambda error: type(error).__name__)
def test_no_error_of_the_hub_is_a_traceback(
    kept: Path, fetches: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """What is on this machine is read; of anything else the error says what could not be had."""

    def fail(*_: object, local_files_only: bool = False, **__: object) -> bool:
        if local_files_only:
            return True
        raise error

    monkeypatch.setattr(convert, "has_file", fail)
    assert as_described("someone/bin") == ("someone/bin", None)  # it has safetensors as far as is known here
    monkeypatch.setattr(convert, "cached_file", fail)
    convert._on_hub.cache_clear()
    for read in (as_safetensors, as_described, open_target, open_tensors):
        refusal(r"someone/bin: config\.json cannot be fetched \(", read, "someone/bin")


def test_safetensors_are_read_where_they_are(kept: Path, llama: Path, tmp_path: Path) -> None:
    for source in (str(llama), str(tmp_path / "nowhere"), "someone/nowhere"):
        assert as_safetensors(source, "main") == (source, "main")
    assert not kept.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=repr)
def test_a_conversion_that_ends_early_leaves_nothing(kept: Path, written: Path, error: BaseException) -> None:
    """Whether it is interrupted or the disk fills; and its files are whole before there is a config."""

    def fail() -> None:
        assert [file.name for file in (kept / "part").iterdir()] == [".parts"]
        raise error

    with pytest.raises((KeyboardInterrupt, UserError)) as raised:
        cached(Watched(str(written), written, fail))
    if isinstance(error, OSError):
        assert "No space left on device); free space, or say by OUTRIDER_CACHE" in str(raised.value)
    assert {file.name for file in kept.iterdir()} == {".lock", "known"}


def test_what_somebody_removed_is_made_again(kept: Path, written: Path, conversions: Callable[[], list[str]]) -> None:
    place, _ = as_safetensors(str(written))
    (Path(place) / RECORD_FILE).unlink()
    assert as_safetensors(str(written)) == (place, None)
    shutil.rmtree(place)
    assert as_safetensors(str(written)) == (place, None)
    assert len(conversions()) == 3
    whole = (Path(place) / "model.safetensors").read_bytes()
    (Path(place) / "model.safetensors").write_bytes(whole[:-1])
    assert as_safetensors(str(written)) == (place, None)
    assert (Path(place) / "model.safetensors").read_bytes() == whole
    assert len(conversions()) == 1


def test_who_finds_it_being_made_waits(kept: Path, written: Path) -> None:
    kept.mkdir()
    with ThreadPoolExecutor(1) as pool:
        with lock(kept / ".lock"):  # another process, at work
            asked = pool.submit(as_safetensors, str(written))
            with pytest.raises(TimeoutError):
                asked.result(timeout=0.3)
            assert entries(kept) == []
        assert asked.result(timeout=60) == (str(entries(kept)[0]), None)


def test_a_full_disk_is_told_before_anything_is_written(
    kept: Path, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(written.parent)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    refusal(r"GB are to be written, 0\.0 GB are free; free space, or say by OUTRIDER", as_safetensors, str(written))


def test_a_place_that_cannot_be_written_is_named(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file" / "cache"))
    refusal(r"OUTRIDER_CACHE=.*cannot be written \(Not a directory\); .* choose another", as_safetensors, str(written))


def test_a_cache_of_others_is_read(kept: Path, written: Path) -> None:
    """One that was filled beforehand, and cannot be written now."""
    before = as_safetensors(str(written))
    (kept / ".lock").unlink()
    (kept / ".lock").mkdir()  # nobody can lock it
    assert as_safetensors(str(written)) == before


def test_a_maximum_size_is_no_more(
    kept: Path, written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_GB", "1e-9")
    as_safetensors(str(written))
    assert "OUTRIDER_CACHE_GB is gone" in capsys.readouterr().err
    assert len(entries(kept)) == 1
    monkeypatch.delenv("OUTRIDER_CACHE")
    assert convert.cache_folder() == user_cache() / "targets"
