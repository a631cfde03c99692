"""The name of a model: what its files or the Hub call it, whatever its folder is called."""

from pathlib import Path

import pytest

from outrider.draft_models.formats.model_name import model_name, write_name
from tests.gguf_files import GgufWriter

SNAPSHOT = "models--HuggingFaceTB--SmolLM2-135M-Instruct/snapshots/12fd25f77366"


@pytest.mark.parametrize(("path", "config", "name"), [
    ("fetch", '{"_name_or_path": "HuggingFaceTB/SmolLM2-135M"}', "HuggingFaceTB/SmolLM2-135M"),
    ("fetch", '{"_name_or_path": "gpt2"}', "gpt2"),
    ("my-bot", '{"_name_or_path": "/home/me/runs/step-500"}', "my-bot"),
    ("my-bot", '{"_name_or_path": "./out"}', "my-bot"),
    ("my-bot", '{"_name_or_path": 7}', "my-bot"),
    ("my-bot", "damaged", "my-bot"),
    ("my-bot", None, "my-bot"),
    (SNAPSHOT, '{"_name_or_path": "/fsx/of/its/makers"}', "HuggingFaceTB/SmolLM2-135M-Instruct"),
])  # fmt: skip
def test_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, config: str | None, name: str) -> None:
    (folder := tmp_path / path).mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(config)
    assert model_name(str(folder)) == name
    monkeypatch.chdir(folder)
    assert model_name(".") == name
    if config and config.startswith("{") and path != SNAPSHOT:
        write_name(folder, "toy-9M")
        assert model_name(".") == "toy-9M"


@pytest.mark.parametrize(
    ("general_name", "name"), [("Qwen3 0.6B\n", "Qwen3 0.6B"), (" . ", "q4"), (3, "q4"), (None, "q4")]
)
def test_a_gguf_file(tmp_path: Path, general_name: object, name: str) -> None:
    writer = GgufWriter(tmp_path / "q4.gguf", "llama")
    if general_name is not None:
        writer.add("general.name", general_name)
    path = writer.close()
    assert model_name(str(path)) == name
    assert model_name(str(tmp_path)) == (name if name != "q4" else tmp_path.name)
