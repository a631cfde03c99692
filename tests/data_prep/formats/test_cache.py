"""The cache of converted models: made once, known by content, whole or absent, and no larger than it may be."""

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.formats import cache, convert
from data_prep.formats.cache import RECORD_FILE, cache_folder, content_key
from data_prep.formats.door import as_safetensors
from data_prep.formats.gguf_model import GgufModel
from data_prep.formats.torch_files import PICKLES
from data_prep.formats.torch_folder import FolderModel
from draft_models.targets.open_target import open_target
from outrider.errors import UserError
from outrider.run_dirs import system_lock
from tests.data_prep.formats.test_bin_files import as_bin
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
    return sorted(file.parent for file in kept.glob(f"*/{RECORD_FILE}"))


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


def test_a_size_that_is_none_is_refused(kept: Path, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_GB", "much")
    with pytest.raises(UserError, match="OUTRIDER_CACHE_GB=much: expected a number of gigabytes"):
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
