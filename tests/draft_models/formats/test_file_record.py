"""What was found out about a large model's files is known as long as they, and what it depends on, are the same."""

import json
import os
from pathlib import Path

import pytest
import torch

from outrider.base.errors import UserError
from outrider.draft_models.formats.convert import cache_folder
from outrider.draft_models.targets import file_record
from outrider.draft_models.targets import open_target as opening
from outrider.draft_models.targets.file_record import FileRecord
from outrider.draft_models.targets.open_target import open_target
from tests.gguf_files import write_gguf


@pytest.fixture
def model(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that is large enough for a record, in an empty cache."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(file_record, "SMALLEST", 1)
    return write_gguf(llama, tmp_path / "model.gguf")


def test_a_model_is_proven_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> torch.Tensor:
        target = open_target(str(model))
        assert target.fingerprint == open_target(str(model)).fingerprint
        return target.layers(dtype=torch.float32).lm_head.weight

    def fail(*_: object, **__: object) -> None:
        raise UserError("proven again")

    weight = load()
    monkeypatch.setattr(opening, "prove_layers", fail)
    monkeypatch.setattr(opening, "fingerprint_target", fail)
    assert torch.equal(load(), weight)
    os.utime(model, (1, 1))
    with pytest.raises(UserError, match="proven again"):
        load()


def test_a_refused_model_is_not_remembered(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("outrider.draft_models.targets.proof.EXACT", -1.0)
        with pytest.raises(UserError, match="unknown step"):
            open_target(str(model)).layers(dtype=torch.float32)
    calls: list[object] = []
    monkeypatch.setattr(opening, "prove_layers", lambda *_: calls.append(_))
    open_target(str(model)).layers(dtype=torch.float32)
    assert len(calls) == 1


def test_a_record_is_of_files_code_and_conditions(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_target(str(model)).files
    FileRecord(files, "proof", 1).write({"a": 2})
    assert FileRecord(files, "proof", 2).read() is FileRecord(files, "digest", 1).read() is None
    (record,) = [file for file in (cache_folder() / "records").iterdir() if json.loads(file.read_text()) == {"a": 2}]
    record.write_text("{")  # a full disk
    assert FileRecord(files, "proof", 1).read() is None
    for name, value in (("_CODE_CRC", 1), ("package_version", lambda: "other"), ("SMALLEST", 2**40)):
        FileRecord(files, "proof", 1).write(True)
        with monkeypatch.context() as patched:
            patched.setattr(file_record, name, value)
            assert FileRecord(files, "proof", 1).read() is None
    monkeypatch.setenv("OUTRIDER_CACHE", str(model / "file"))
    FileRecord(files, "proof", 1).write(True)  # where nothing can be written
