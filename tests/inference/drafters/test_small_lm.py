"""The vocabulary of a small LM: the target's."""

import json
from pathlib import Path

import pytest
import torch

from draft_models.small_lm.model import load_small_lm
from draft_models.targets.open_target import load_tokenizer
from draft_models.targets.stack import LayerStack
from inference.drafters.small_lm import fit_vocabulary
from outrider.errors import UserError
from tests.tiny import (
    byte_tokenizer,
    save_target,
)


def load(path: Path, target: Path, dtype: torch.dtype = torch.float32) -> LayerStack:
    return load_small_lm(str(path), load_tokenizer(str(target)), dtype=dtype)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path, other = save_target(tmp_path / "target"), save_target(tmp_path / "other")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    size = len(byte_tokenizer())
    message = rf"\({size + 1} tokens\) is not the target's .* {size} tokens\); 1 tokens differ, first '<new>'"
    with pytest.raises(UserError, match=message):
        load(other, path)
    byte_tokenizer().save_pretrained(other)
    stored = json.loads((other / "tokenizer.json").read_text())
    ids = stored["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (other / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match=rf"\({size} tokens\) .* {size} tokens\); 2 tokens differ, first"):
        load(other, path)


def test_fit_vocabulary() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert fit_vocabulary(logits, 2).tolist() == [[1.0, 2.0]]
    assert fit_vocabulary(logits, 4).softmax(-1)[0, 3] == 0
