"""A target saved as safetensors: the same target, from any format, whole or absent, resumable."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from data_prep.formats import convert
from data_prep.targets.settings import ConvertConfig
from data_prep.targets.target_copy import RECORD_FILE, convert_target
from draft_models.targets.model_files import load_causal_lm, load_generation_config
from draft_models.targets.open_target import open_target
from outrider.errors import UserError
from tests.gguf_files import TEMPLATE, save_plain_target, write_gguf
from tests.tiny import random_prompt, reference_generate

MEGABYTE = 1e-3  # in the gigabytes of `shard_gb`


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in every format, the GGUF files with quantised weights and without."""
    folder = tmp_path_factory.mktemp("sources")
    plain = save_plain_target(folder / "plain")
    pickled = Path(shutil.copytree(plain, folder / "pickled"))
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    return {
        "safetensors": plain,
        "bin": pickled,
        "gguf": write_gguf(plain, folder / "plain.gguf", template=TEMPLATE),
        "gguf Q4_0": write_gguf(plain, folder / "q4.gguf", "Q4_0", template=TEMPLATE),
    }


def config_for(source: Path, out_dir: Path, **changes: Any) -> ConvertConfig:
    return ConvertConfig(target=str(source), out_dir=str(out_dir), **changes)


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in (".lock", RECORD_FILE)}


@pytest.mark.parametrize("shard_gb", [5.0, MEGABYTE])
@pytest.mark.parametrize("source", ["safetensors", "bin", "gguf", "gguf Q4_0"])
def test_the_copy_is_the_same_target(tmp_path: Path, sources: dict[str, Path], source: str, shard_gb: float) -> None:
    convert_target(config_for(sources[source], tmp_path / "out", shard_gb=shard_gb))
    before, copied = open_target(str(sources[source])), open_target(str(tmp_path / "out"))
    assert copied.fingerprint.differences(before.fingerprint) == []
    assert copied.fingerprint.tensors == before.fingerprint.tensors
    assert copied.tokenizer("a text</s>")["input_ids"] == before.tokenizer("a text</s>")["input_ids"]
    assert copied.tokenizer.chat_template == before.tokenizer.chat_template
    ends = [load_generation_config(target.source).eos_token_id for target in (before, copied)]
    assert ends[0] == ends[1]
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (shard_gb == MEGABYTE)
    texts = [
        reference_generate(model.eval(), random_prompt(9), 24)
        for model in (
            AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32),
            load_causal_lm(str(sources[source]), dtype=torch.float32),
        )
    ]
    assert texts[0] == texts[1]


def test_the_copy_of_a_qwen2_has_the_tokenizer_of_its_file(tmp_path: Path) -> None:
    """And not the one that transformers has for the architecture."""
    file = write_gguf(save_plain_target(tmp_path / "plain", "qwen2"), tmp_path / "model.gguf")
    convert_target(config_for(file, tmp_path / "out"))
    before, copied = (open_target(str(source)) for source in (file, tmp_path / "out"))
    assert copied.fingerprint.differences(before.fingerprint) == []


def test_a_dtype_of_ones_own(tmp_path: Path, sources: dict[str, Path]) -> None:
    convert_target(config_for(sources["gguf Q4_0"], tmp_path / "out", dtype="bfloat16"))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    read = open_target(str(sources["gguf Q4_0"])).layers(dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, read[name].bfloat16()) for name, tensor in stored.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    convert_target(config_for(sources["gguf Q4_0"], tmp_path / "auto"))
    assert json.loads((tmp_path / "auto" / "config.json").read_text())["dtype"] == "bfloat16"  # as of the GGUF file
    assert {tensor.dtype for tensor in load_file(tmp_path / "auto" / "model.safetensors").values()} == {torch.float32}


def test_a_file_is_no_larger_than_asked(tmp_path: Path, sources: dict[str, Path]) -> None:
    convert_target(config_for(sources["gguf"], tmp_path / "out", shard_gb=MEGABYTE))
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert sum(tensor.nbytes for tensor in load_file(file).values()) <= 1e6


@pytest.mark.parametrize("after", [1, 3, 5])
@pytest.mark.slow
def test_a_killed_conversion_goes_on(
    tmp_path: Path, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """What was written stays, what was not is written, and until the end there is no config."""
    config = config_for(sources["gguf Q4_0"], tmp_path / "out", shard_gb=MEGABYTE)
    convert_target(replace(config, out_dir=str(tmp_path / "whole")))
    writes: list[Path] = []

    def write(path: Path, content: bytes, remedy: str) -> None:
        if len(writes) == after:
            raise KeyboardInterrupt
        writes.append(path)
        path.write_bytes(content)

    with monkeypatch.context() as patched:
        patched.setattr(convert, "write_atomically", write)
        with pytest.raises(KeyboardInterrupt):
            convert_target(config)
    assert not (tmp_path / "out" / "config.json").exists()
    with pytest.raises(UserError, match=r"holds an earlier conversion .*; resume=true continues it"):
        convert_target(config)
    made = {path: path.stat().st_mtime_ns for path in writes}
    convert_target(replace(config, resume=True))
    assert {path: path.stat().st_mtime_ns for path in writes} == made
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_finished_conversion_stays(
    tmp_path: Path, sources: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(sources["gguf"], tmp_path / "out")
    convert_target(config)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir() if path.name != ".lock"}
    capsys.readouterr()
    convert_target(replace(config, resume=True))
    assert "finished already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in made} == made


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"shard_gb": 1.0}, {"target": "gguf Q4_0"}])
def test_another_conversion_does_not_go_on_with_it(
    tmp_path: Path, sources: dict[str, Path], changes: dict[str, Any]
) -> None:
    config = config_for(sources["gguf"], tmp_path / "out")
    convert_target(config)
    if "target" in changes:
        changes = {"target": str(sources[changes["target"]])}
    with pytest.raises(UserError, match="was made with other settings"):
        convert_target(replace(config, resume=True, **changes))


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path, sources: dict[str, Path]) -> None:
    (tmp_path / "config.json").write_text("mine")
    for resume in (False, True):
        with pytest.raises(UserError, match=r"holds 'config\.json', which no conversion made"):
            convert_target(config_for(sources["gguf"], tmp_path, resume=resume))
    assert (tmp_path / "config.json").read_text() == "mine"
