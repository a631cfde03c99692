"""A head as a GGUF file: its tensors and facts under llama.cpp's names are the head's; engines' tests run one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.base.errors import UserError
from outrider.draft_models.eagle3.checkpoint import DRAFT_TOKENS
from outrider.draft_models.eagle3.model import Eagle3
from outrider.draft_models.eagle3.reading import new_reading
from outrider.draft_models.formats.gguf_write import write_gguf_head
from outrider.draft_models.targets.open_target import OpenTarget, open_target
from tests.gguf_files import permuted, save_plain_target

NAMES = {
    "fc": "fc", "enc.output_norm": "input_norm", "output_norm": "norm", "output": "lm_head",
    "token_embd": "embed_tokens", "blk.0.attn_norm": "layers.0.input_layernorm",
    "blk.0.attn_norm_2": "layers.0.hidden_norm", "blk.0.ffn_norm": "layers.0.post_attention_layernorm",
    **{f"blk.0.attn_{part}": f"layers.0.self_attn.{part}_proj" for part in "qkv"},
    "blk.0.attn_output": "layers.0.self_attn.o_proj",
    **{f"blk.0.ffn_{part}": f"layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")},
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> OpenTarget:
    return open_target(str(save_plain_target(tmp_path_factory.mktemp("target"))))


def made(target: OpenTarget, tokens: Tensor | None = None, **changes: Any) -> Eagle3:
    """A random head for the target. changes: of its reading."""
    size = target.config.vocab_size if tokens is None else len(tokens)
    plain = new_reading(target.config, taps=(1, 2, 3), version="3", draft_vocabulary=size, intermediate=96)
    empty = Eagle3(replace(plain, **changes), all_tokens=True)
    weights = {name: torch.rand(weight.shape) for name, weight in empty.state_dict().items()}
    return Eagle3.of(empty.reading, weights if tokens is None else {**weights, DRAFT_TOKENS: tokens})


SWITCHES = {"norm_before_residual": True, "joint_norm": True, "own_embedding": True}


@pytest.mark.parametrize(("some", "changes"), [(True, {}), (False, SWITCHES)])
def test_the_file_has_the_head(target: OpenTarget, tmp_path: Path, some: bool, changes: dict[str, Any]) -> None:
    """Rows of queries and keys are laid out as a Llama's; ids of drafted tokens are the target's."""
    head = made(target, torch.arange(5, target.config.vocab_size, 3) if some else None, **changes)
    write_gguf_head(head, target.config, target.tokenizer, tmp_path / "head.gguf")
    reader, reading = gguf.GGUFReader(tmp_path / "head.gguf"), head.reading
    said = {name.removeprefix("eagle3."): field.contents() for name, field in reader.fields.items()}
    held, heads = {one.name: one.data for one in reader.tensors}, {"q": reading.heads, "k": reading.key_heads}
    for part, count in heads.items():
        rows = held[f"blk.0.attn_{part}.weight"]
        held[f"blk.0.attn_{part}.weight"] = rows[np.argsort(permuted(np.arange(len(rows)), count))]
    found = {f"{NAMES[name.removesuffix('.weight')]}.weight": held[name] for name in held if name != "d2t"}
    found |= {DRAFT_TOKENS: held["d2t"]} if some else {}
    assert found.keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert (found[name] == tensor.numpy()).all()
        assert found[name].dtype == tensor.numpy().dtype
    assert said["general.architecture"] == "eagle3"
    assert tuple(said["target_layers"]) == reading.taps
    assert [said[name] for name in ("block_count", "attention.head_count", "attention.head_count_kv")] == [
        1,
        *heads.values(),
    ]
    assert (said["norm_before_fc"], said["norm_before_residual"]) == (not some, not some)
    assert (said["embedding_length"], said["target_hidden_size"]) == (reading.hidden, reading.target_hidden)
    assert (said["rope.freq_base"], said["attention.key_length"]) == (reading.rope["rope_theta"], reading.head_dim)
    assert len(said["tokenizer.ggml.tokens"]) == said["vocab_size"] == reading.vocabulary


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tap_norms": True, "norm_output": True}, "dialect=gguf: has no word for tap_norms=True, norm_output=True"),
    ({"windows": (8,)}, r"no word for windows=\(8,\)"),
    ({"attention_bias": True}, "no word for attention_bias=True"),
    ({"taps": (0, 1, 2)}, r"no word for taps=\(0, 1, 2\)"),
    ({"activation": "gelu"}, "GGUF: not supported here: hidden_act='gelu'"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_llama_cpp_would_read_as_another_head_is_refused(
    target: OpenTarget, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        write_gguf_head(made(target, **changes), target.config, target.tokenizer, tmp_path / "head.gguf")
    assert not [*tmp_path.iterdir()]
