"""A target of which only the tokenizer is here, and maybe the config: what is known of it, without its weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.data_prep.ngrams.building import build_table
from outrider.data_prep.settings import TrigramConfig
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.formats.gguf_file import open_gguf
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.targets.model_spec import UNLIMITED, context_limit
from outrider.draft_models.targets.open_target import load_tokenizer, open_target
from outrider.draft_models.targets.unseen_target import open_unseen
from outrider.draft_models.targets.vocabulary import rows_of, tokenizer_digest
from outrider.inference.loading.target_setup import end_tokens
from tests import gguf_files
from tests.refusals import refusal
from tests.tiny import save_target

LIMITED = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 96}


def without_weights(path: Path) -> None:
    """Delete the weights, and the tensors of a GGUF file: all after its header."""
    for file in path.glob("*.safetensors"):
        file.unlink()
    for file in path.glob("*.gguf"):
        start = min(tensor.begin for tensor in open_gguf(file).tensors.values())
        file.write_bytes(file.read_bytes()[:start])


def save_plain(path: Path) -> None:
    save_target(path, rope_parameters=LIMITED)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 105]}))


def save_gguf(path: Path) -> None:
    model = gguf_files.save_plain_target(path.parent / "model", num_hidden_layers=1)
    path.mkdir()
    gguf_files.write_gguf(model, path / "model.gguf", "Q8_0")


@pytest.mark.parametrize("save", [save_plain, save_gguf])
def test_the_same_is_known_as_of_the_whole_target(tmp_path: Path, save: Callable[[Path], None]) -> None:
    path = tmp_path / "whole"
    save(path)
    whole, folder = open_target(str(path)), Path(shutil.copytree(path, tmp_path / "part"))
    without_weights(folder)
    refusal("", lambda: open_target(str(folder)).fingerprint)
    unseen = open_unseen(str(folder))
    assert (unseen.config.vocab_size, unseen.config.hidden_size) == (whole.config.vocab_size, whole.config.hidden_size)
    assert context_limit(unseen.config) == context_limit(whole.config)
    assert end_tokens(unseen) == end_tokens(whole)
    assert tokenizer_digest(unseen.tokenizer) == tokenizer_digest(whole.tokenizer)
    assert unseen.tokenizer.chat_template == whole.tokenizer.chat_template
    assert unseen.identity == {"vocabulary": whole.vocabulary_digest, "weights_seen": False}
    assert rows_of(unseen.tokenizer) == unseen.vocabulary_size == whole.vocabulary_size
    assert unseen.resize(10**6) is unseen
    refusal("tokenizer=.*: no weights are read there; give target=", lambda: unseen.files)


@pytest.mark.parametrize("config", [None, {"model_type": "mamba9", "vocab_size": 300, "max_position_embeddings": 64},
                                    {"model_type": "vision9", "text_config": {"vocab_size": 300}}])  # fmt: skip
def test_a_model_that_is_not_known_has_its_tokenizer(tmp_path: Path, config: dict[str, object] | None) -> None:
    """A LoRA has no config; some architectures only their own program knows."""
    save_target(tmp_path)
    without_weights(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "somebody/base"}))
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    target, tokens = open_unseen(str(tmp_path)), len(load_tokenizer(str(tmp_path), role="tokenizer"))
    assert target.config.vocab_size == (300 if config else tokens)
    assert context_limit(target.config) == (64 if config and "max_position_embeddings" in config else UNLIMITED)
    assert target.vocabulary_size == (300 if config else None)
    assert end_tokens(target) == {257}
    assert target.resize(400).config.vocab_size == (300 if config else 401)
    assert target.resize(3).config.vocab_size == target.config.vocab_size


def test_a_table_is_counted_by_the_tokenizer_of_a_file_without_tensors(tmp_path: Path) -> None:
    save_gguf(tmp_path / "served")
    without_weights(tmp_path / "served")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "the fox and the fox and the dog " * 9}))
    data = DataConfig(source="local", path=str(tmp_path / "text.jsonl"), heldout_fraction=0.0)
    tokenizer = str(tmp_path / "served" / "model.gguf")
    build_table(TrigramConfig(tokenizer=tokenizer, data=data, out_dir=str(tmp_path / "table"), workers=1))
    TrigramTable.open(tmp_path / "table").require_tokenizer(open_unseen(tokenizer).vocabulary_digest, "table")


def test_what_has_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refusal(f"tokenizer={tmp_path}: no usable tokenizer", open_unseen, str(tmp_path))
