"""The cache of converted models: made once, known by content, whole or absent, and no larger than it may be."""

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from transformers import PreTrainedTokenizerFast

from data_prep.formats import cache, convert, door
from data_prep.formats.cache import RECORD_FILE, cache_folder, content_key
from data_prep.formats.door import as_described, as_safetensors, was_quantised
from data_prep.formats.gguf_model import GgufModel
from data_prep.formats.torch_files import PICKLES
from data_prep.formats.torch_folder import FolderModel
from draft_models.targets.fingerprint import deciding_config
from draft_models.targets.model_files import load_generation_config
from draft_models.targets.open_target import open_target
from draft_models.targets.tensor_files import open_tensors
from outrider.errors import UserError
from outrider.run_dirs import system_lock
from tests.data_prep.formats.test_bin_files import as_bin
from tests.data_prep.formats.test_quantised import save_fp8
from tests.forked import Fork
from tests.gguf_files import write_gguf
from tests.tiny import save_target

ROOT = Path(__file__).parents[3]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is converted from now on."""
    made: list[str] = []
    whole: Callable[..., int] = convert.write_safetensors

    def write(original: GgufModel, *given: object, **more: object) -> int:
        made.append(original.source)
        return whole(original, *given, **more)

    monkeypatch.setattr(cache, "write_safetensors", write)
    return made


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

    monkeypatch.setattr(door, "cached_file", lambda source, file, **_: (at := held(source, file)) and str(at))
    monkeypatch.setattr(door, "has_file", lambda source, file, **_: held(source, file) is not None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    door._on_hub.cache_clear()
    return names


def test_it_is_converted_once(kept: Path, written: Path, conversions: list[str]) -> None:
    """Whatever is asked of it, and by however many."""
    target = open_target(str(written))
    target.layers(dtype=torch.float32)
    assert target.fingerprint == open_target(str(written)).fingerprint
    assert (target.source, target.fingerprint.target) == (str(written), str(written))
    assert conversions == [str(written)]
    (entry,) = entries(kept)
    assert {file.name for file in entry.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert json.loads((entry / RECORD_FILE).read_text())["made_of"] == str(written)


def test_the_second_start_looks_at_no_byte(kept: Path, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = as_safetensors(str(written))
    monkeypatch.setattr(cache, "_sha256", None)
    monkeypatch.setattr(GgufModel, "file", None)
    assert as_safetensors(str(written)) == before


def test_the_same_content_elsewhere_is_not_converted_again(
    kept: Path, written: Path, tmp_path: Path, conversions: list[str]
) -> None:
    copied = shutil.copy(written, tmp_path / "other.gguf")
    assert as_safetensors(str(written)) == as_safetensors(str(copied))
    assert conversions == [str(written)]


def test_changed_content_is_another_model(kept: Path, llama: Path, tmp_path: Path, conversions: list[str]) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf")
    before = open_target(str(path)).fingerprint
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert open_target(str(path)).fingerprint.tensors != before.tensors
    assert len(conversions) == len(entries(kept)) == 2


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "pytorch_model.bin"])
def test_every_file_of_a_directory_counts(kept: Path, llama: Path, tmp_path: Path, file: str) -> None:
    path = as_bin(llama, tmp_path / "bin")
    before = as_safetensors(str(path))
    if file == "pytorch_model.bin":
        weights = torch.load(path / file)
        torch.save({name: tensor + 1 for name, tensor in weights.items()}, path / file)
    else:
        (path / file).write_text(json.dumps(json.loads((path / file).read_text()) | {"of_a_later_version": 1}))
    assert as_safetensors(str(path)) != before


def test_a_file_that_changes_meanwhile_is_refused(
    kept: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(llama, tmp_path / "model.gguf")
    whole = convert.read_as

    def touch(*given: Any) -> torch.Tensor:
        os.utime(path)
        return whole(*given)

    monkeypatch.setattr(convert, "read_as", touch)
    with pytest.raises(UserError, match=r"model\.gguf: changed while it was converted"):
        as_safetensors(str(path))
    assert entries(kept) == []


@pytest.mark.parametrize("form", ["gguf", "bin", "fp8"])
def test_config_and_tokenizer_are_read_without_a_conversion(
    kept: Path, forms: dict[str, Path], conversions: list[str], form: str
) -> None:
    """They are the conversion's, file by file; once there is one, it is read."""
    source = str(forms[form])
    target = open_target(source, by_layers=False)
    alone = target.config.to_dict(), target.tokenizer.get_vocab(), load_generation_config(source)
    files, config = all_but_weights(as_described(source)), deciding_config(source, None)
    open_target(source)
    assert conversions == entries(kept) == []
    place = as_safetensors(source)
    assert conversions == [source]
    assert all_but_weights(place) == files
    assert as_described(source) == place
    again = open_target(source, by_layers=False)
    assert (again.config.to_dict(), again.tokenizer.get_vocab(), load_generation_config(source)) == alone
    assert deciding_config(source, None) == config


@pytest.mark.parametrize("form", ["bin", "fp8"])
def test_config_and_tokenizer_are_read_without_fetching_weights(
    kept: Path, fetches: list[str], conversions: list[str], form: str
) -> None:
    source = f"someone/{form}"
    target = open_target(source)
    assert len(target.tokenizer) > 0
    assert was_quantised(source) == (form == "fp8")
    assert "config.json" in fetches
    assert not [name for name in fetches if name.endswith((".bin", ".safetensors"))]
    assert conversions == []
    files = all_but_weights(as_described(source))
    assert target.files.file_of
    assert [name for name in fetches if name.endswith((".bin", ".safetensors"))]
    assert conversions == [source]
    assert all_but_weights(as_described(source)) == all_but_weights(as_safetensors(source)) == files


def test_a_file_that_could_not_be_converted_is_refused_at_once(kept: Path, written: Path, tmp_path: Path) -> None:
    (tmp_path / "short.gguf").write_bytes(written.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"short\.gguf: ends within tensor"):
        open_target(str(tmp_path / "short.gguf"))


HUB_ERRORS = [
    httpx.ReadError("cut off"), httpx.ProxyError("no proxy"), OfflineModeIsEnabled("offline"), OSError("gated"),
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

    monkeypatch.setattr(door, "has_file", fail)
    assert as_described("someone/bin") == ("someone/bin", None)  # it has safetensors as far as is known here
    monkeypatch.setattr(door, "cached_file", fail)
    door._on_hub.cache_clear()
    for read in (as_safetensors, as_described, open_target, open_tensors):
        with pytest.raises(UserError, match=r"someone/bin: config\.json cannot be fetched \("):
            read("someone/bin")


def test_safetensors_are_read_where_they_are(kept: Path, llama: Path, tmp_path: Path) -> None:
    for source in (str(llama), str(tmp_path / "nowhere"), "someone/nowhere"):
        assert as_safetensors(source, "main") == (source, "main")
    assert not kept.exists()


def test_a_killed_conversion_leaves_nothing_that_is_read(
    kept: Path, written: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[str]
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(convert, "read_as", die)
        patched.setattr(cache.shutil, "rmtree", lambda *_, **__: None)  # nobody clears up after a kill
        with pytest.raises(KeyboardInterrupt):
            as_safetensors(str(written))
    assert [part.suffix for part in kept.iterdir() if part.is_dir() and part.name != "known"] == [".part"]
    assert entries(kept) == []
    open_target(str(written)).layers(dtype=torch.float32)
    assert len(conversions) == 2
    assert not list(kept.glob("*.part"))


def test_a_directory_loads_only_once_it_is_whole(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[Path] = []
    replace = os.replace

    def note(source: Path, place: Path) -> None:
        put.append(Path(place))
        replace(source, place)

    monkeypatch.setattr(convert.os, "replace", note)
    convert.write_safetensors(GgufModel(str(written), written), tmp_path / "made", remedy="")
    placed = [place.name for place in put if place.parent == tmp_path / "made"]
    assert placed[-1] == "config.json"
    assert len(placed) == len(set(placed)) > 2


def test_what_somebody_removed_is_made_again(kept: Path, written: Path, conversions: list[str]) -> None:
    place, _ = as_safetensors(str(written))
    (Path(place) / RECORD_FILE).unlink()
    assert as_safetensors(str(written)) == (place, None)
    shutil.rmtree(place)
    assert as_safetensors(str(written)) == (place, None)
    assert len(conversions) == 3


def test_what_was_not_used_for_longest_goes_first(
    kept: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing that was used within the hour; a command says what it removed."""
    files = [write_gguf(llama, tmp_path / f"{name}.gguf", template=name) for name in "abcd"]
    places = [Path(as_safetensors(str(file))[0]) for file in files[:3]]
    size = cache._size(places[0])
    now = time.time()
    for place, hours in zip(places, (5, 9, 0.5), strict=True):
        os.utime(place, (now - 3600 * hours,) * 2)
    as_safetensors(str(files[0]))  # used again
    capsys.readouterr()
    monkeypatch.setenv("OUTRIDER_CACHE_GB", str(2.5 * size / 1e9))
    last, _ = as_safetensors(str(files[3]))
    assert entries(kept) == sorted([places[0], places[2], Path(last)])
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: "))
    assert "removed the conversion of " in line
    assert "b.gguf" in line
    assert len(list((kept / "known").iterdir())) == 3


def test_what_was_just_asked_for_stays(
    kept: Path, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long ago it was converted under another name, and however little room there is."""
    place = Path(as_safetensors(str(written))[0])
    os.utime(place, (0, 0))
    monkeypatch.setenv("OUTRIDER_CACHE_GB", "1e-9")
    assert as_safetensors(str(shutil.copy(written, tmp_path / "other.gguf"))) == (str(place), None)
    assert entries(kept) == [place]


def test_a_file_under_another_name_is_another_content(tmp_path: Path) -> None:
    keys = set()
    for name in ("merges.txt", "vocab.txt"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("the same")
        keys.add(content_key(FolderModel("m", folder, PICKLES)))
    assert len(keys) == 2


def test_who_finds_it_being_made_waits(kept: Path, written: Path, conversions: list[str]) -> None:
    kept.mkdir()
    with ThreadPoolExecutor(1) as pool:
        with system_lock(kept / ".lock"):  # another process, at work
            asked = pool.submit(as_safetensors, str(written))
            with pytest.raises(TimeoutError):
                asked.result(timeout=0.3)
            assert conversions == []
        assert asked.result(timeout=60) == (str(entries(kept)[0]), None)


@pytest.mark.parametrize("size", ["much", "nan", "-1", "-inf"])
def test_a_size_that_is_none_is_refused(kept: Path, written: Path, monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_GB", size)
    with pytest.raises(UserError, match=f"OUTRIDER_CACHE_GB={size}: expected a number of gigabytes, 0 or more"):
        as_safetensors(str(written))


def test_a_full_disk_is_told_before_anything_is_written(
    kept: Path, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(ROOT)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"GB are to be written, 0\.0 GB are free; free space, or say by OUTRIDER"):
        as_safetensors(str(written))
    assert entries(kept) == []
    assert not list(kept.glob("*.part"))


def test_a_disk_that_fills_meanwhile_is_told_too(kept: Path, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outrider.files.os.fsync", full)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\); free space, or say by OUTRI"):
        as_safetensors(str(written))
    assert not list(kept.glob("*.part"))


def test_a_disk_that_fills_under_a_tokenizer_is_told_and_leaves_nothing(
    kept: Path, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library that writes tokenizers raises a bare exception, after a part of the file."""

    def full(_: object, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text("{")
        raise Exception("No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
        with pytest.raises(UserError, match=r"cannot be written \(No space left on device .*; free space"):
            as_safetensors(str(written))
    assert entries(kept) == []
    assert not list(kept.glob("*.part"))
    assert Path(as_safetensors(str(written))[0], "tokenizer.json").exists()


def test_a_place_that_cannot_be_written_is_named(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"OUTRIDER_CACHE=.*cannot be written \(Not a directory\); .* choose another"):
        as_safetensors(str(written))


def test_a_cache_of_others_is_read(kept: Path, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was filled beforehand, and cannot be written now."""
    before = as_safetensors(str(written))

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(cache.os, "utime", refuse)
    monkeypatch.setattr(cache, "require_writable", refuse)
    assert as_safetensors(str(written)) == before


@pytest.mark.parametrize(
    ("set_to", "expected"),
    [
        ({"OUTRIDER_CACHE": "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/outrider/targets"),
        ({"HOME": "/h"}, "/h/.cache/outrider/targets"),
    ],
)
def test_where_it_is(monkeypatch: pytest.MonkeyPatch, set_to: dict[str, str], expected: str) -> None:
    for name in ("OUTRIDER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


@pytest.mark.slow
def test_processes_that_start_at_once_convert_once(kept: Path, written: Path) -> None:
    code = f"from data_prep.formats.door import as_safetensors; print(as_safetensors({str(written)!r})[0])"
    runs = [Fork(["-c", code]) for _ in range(3)]
    said = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], said
    assert {out.strip() for out, _ in said} == {str(entries(kept)[0])}
    assert sum(f"converted {written} once: " in error for _, error in said) == 1


def test_a_prefixless_checkpoint_is_the_same_model(kept: Path, tmp_path: Path) -> None:
    source = save_target(tmp_path / "source", tied=True)
    path = as_bin(source, tmp_path / "bin", bare=True)
    one, other = (open_target(str(folder)).layers(dtype=torch.float32).state_dict() for folder in (source, path))
    assert all(torch.equal(one[name], other[name]) for name in one)
