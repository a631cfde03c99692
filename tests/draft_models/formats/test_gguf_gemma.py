"""A user's Gemma 3 in a GGUF file is a target; what is no target says where to go."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider.base.errors import UserError
from outrider.commands import config_for
from outrider.data_prep.settings import ConvertConfig
from outrider.data_prep.targets import convert_target
from outrider.draft_models.formats.gguf_config import FAMILIES
from outrider.draft_models.targets.open_target import open_target
from outrider.train import auto_run
from outrider.train.settings.auto import AutoConfig
from outrider.train.settings.export import ExportConfig
from tests.draft_models.formats.test_gguf import example, write_family
from tests.gguf_files import rewritten
from tests.tiny import reference_generate


def test_a_quantised_gemma_3_is_converted_and_decoded_with(tmp_path: Path) -> None:
    path = write_family(example("gemma3"), "gemma3", tmp_path / "model.gguf", "Q8_0")
    convert_target(ConvertConfig(target=str(path), out_dir=str(tmp_path / "out")))
    file, copied = open_target(str(path)), open_target(str(tmp_path / "out"))
    assert copied.fingerprint.differences(file.fingerprint) == []
    assert file.layers(dtype=torch.float32).config.model_type == "gemma3_text"  # proven at load
    tokenizer, prompt = AutoTokenizer.from_pretrained(tmp_path / "out"), "one and two, one and two, one and"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    expected = reference_generate(plain, tokenizer(prompt)["input_ids"], 20, [tokenizer.eos_token_id])
    said = outrider.load(str(path), device="cpu", dtype="float32").generate(prompt, max_new_tokens=20)
    assert said == tokenizer.decode(expected, skip_special_tokens=True)


def test_auto_exports_for_another_engine_what_llama_cpp_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Gemma 3 is read in GGUF, and not written."""
    asked: list[str] = []

    def refuse_llama_cpp(script: str, words: list[str], settings: ExportConfig, log: Path) -> int:
        asked.append(settings.engine)
        return int(asked == ["llama_cpp"])

    monkeypatch.setattr("outrider.train.steps.run_command", refuse_llama_cpp)
    said = auto_run._export(AutoConfig(target="gemma3.gguf"), tmp_path, "eesd", tmp_path / "eesd", config_for)
    assert asked == ["llama_cpp", "vllm"]
    assert said.startswith("for engines:")


@pytest.mark.parametrize("name", ["bert", "mamba", "gemma4", "gpt-oss", "bloom"])
def test_another_architecture_says_what_is_read_and_the_way_out(tmp_path: Path, name: str) -> None:
    path = write_family(example("gemma3"), "gemma3", tmp_path / "model.gguf")
    with pytest.raises(UserError, match="Hugging Face directory") as refused:
        open_target(str(rewritten(path, tensors=False, **{"general.architecture": name}))).config  # noqa: B018
    assert all(word in str(refused.value) for word in (f"'{name}'", "rewritten.gguf", *FAMILIES))


def test_the_page_names_every_architecture() -> None:
    root = Path(__file__).parents[3]
    page = (root / "docs" / "getting-started.md").read_text()
    assert all(f"`{name}`" in page for name in FAMILIES)
    assert f"[{len(FAMILIES)} architectures]" in (root / "README.md").read_text()
