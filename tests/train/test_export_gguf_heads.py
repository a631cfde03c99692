"""EAGLE-3 heads and block drafters for llama.cpp: its names, its layout, its facts, and what it has no word for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from outrider.draft_models.dflash.checkpoint import new_drafter, open_drafter, save_drafter
from outrider.draft_models.dflash.reading import new_reading as new_block_reading
from outrider.draft_models.eagle3.checkpoint import save_head, write_gguf_head
from outrider.draft_models.eagle3.model import Eagle3
from outrider.draft_models.eagle3.reading import new_reading
from outrider.draft_models.targets.open_target import OpenTarget, load_config, open_target
from outrider.draft_models.targets.settings import ReadingChanges
from outrider.train.export import export_drafter
from outrider.train.settings.export import ExportConfig
from tests.gguf_files import laid_out, save_plain_target
from tests.refusals import refusal


def test_llama_cpp_gets_a_block_drafter(tmp_path: Path) -> None:
    """Rows as they are; ids of drafted tokens are the target's; the mask is a token. Other readings are refused."""
    opened, where = open_target(str(save_plain_target(tmp_path / "target"))), tmp_path / "drafter"
    out = tmp_path / "out"
    tokens = torch.arange(5, opened.config.vocab_size, 3)
    reading = new_block_reading(
        opened.config, taps=(1, 3), layers=1, drafted=4, mask_token=7, markov_rank=8, draft_vocabulary=len(tokens),
        intermediate=96,
    )  # fmt: skip
    save_drafter(where, new_drafter(reading, opened.stack(dtype=torch.float32), tokens, seed=1), opened.config)
    target, drafter = opened.source, str(where)
    given = ExportConfig(checkpoint=drafter, target=target, engine="llama_cpp", out_dir=str(out))
    export_drafter(given)
    stored, reader = open_drafter(drafter, load_config(target)), gguf.GGUFReader(out / "model.gguf")
    reading, tensors, found = stored.reading, stored.tensors(), {tensor.name: tensor.data for tensor in reader.tensors}
    for name, parameter in OF_BLOCKS.items():
        np.testing.assert_array_equal(found[name], tensors[parameter].numpy(), strict=True)
    ids = torch.arange(reading.draft_vocabulary) + tensors["d2t"]
    assert found["d2t"].tolist() == ids.tolist()
    said = {name: field.contents() for name, field in reader.fields.items()}
    assert said["dflash.target_layers"] == [*reading.taps]
    assert said["dflash.block_size"] == reading.block
    assert said["tokenizer.ggml.mask_token_id"] == reading.mask_token
    shifted = ReadingChanges(causal=True)
    refusal(r"no word for causal=True", export_drafter, replace(given, reading=shifted, resume=True))


OF_BLOCKS = {
    "enc.output_norm.weight": "hidden_norm.weight", "output.weight": "lm_head.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight", "blk.0.attn_k.weight": "layers.0.self_attn.k_proj.weight",
}  # fmt: skip
OF_HEADS = {  # llama.cpp's names of tensors that no Llama has
    "fc.weight": "fc.weight", "input_norm.weight": "enc.output_norm.weight", "draft_tokens": "d2t",
    "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
}  # fmt: skip


def head_for(target: OpenTarget, tokens: torch.Tensor | None = None, **changes: Any) -> Eagle3:
    """A random head. changes: of its reading."""
    size = target.config.vocab_size if tokens is None else len(tokens)
    plain = new_reading(target.config, taps=(1, 2, 3), version="3", draft_vocabulary=size, intermediate=96)
    empty = Eagle3(replace(plain, **changes), all_tokens=True)
    weights = {name: torch.rand(weight.shape) for name, weight in empty.state_dict().items()}
    return Eagle3.of(empty.reading, weights if tokens is None else {**weights, "draft_tokens": tokens})


@pytest.mark.parametrize(("changes", "dtype"), [
    ({}, None), ({}, "q8_0"), ({"norm_before_residual": True, "joint_norm": True, "own_embedding": True}, None),
])  # fmt: skip
def test_llama_cpp_gets_the_head(tmp_path: Path, changes: dict[str, Any], dtype: Any) -> None:
    """By its names, rows of queries and keys as a Llama's; ids of drafted tokens are the target's. Its facts, too."""
    target = open_target(str(save_plain_target(tmp_path / "target")))
    head = head_for(target, None if changes else torch.arange(5, target.config.vocab_size, 3), **changes)
    where, out = tmp_path / "head", tmp_path / "out"
    save_head(where, head, "speculators", target.config, target.source)
    given = ExportConfig(checkpoint=str(where), target=target.source, engine="llama_cpp", out_dir=str(out))
    export_drafter(replace(given, dtype=dtype))
    reader, reading, state = gguf.GGUFReader(out / "model.gguf"), head.reading, head.state_dict()
    expected = {OF_HEADS[name]: state.pop(name).numpy() for name in OF_HEADS.keys() & state}
    whole = {name if name == "lm_head.weight" else f"model.{name}": tensor for name, tensor in state.items()}
    expected |= laid_out(whole, target.config, "llama")
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        blocks = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0) if dtype and array.ndim == 2 else array
        np.testing.assert_array_equal(found[name], blocks, strict=True)
    said = {name.removeprefix("eagle3."): field.contents() for name, field in reader.fields.items()}
    facts = {
        "general.architecture": "eagle3", "target_layers": [*reading.taps], "block_count": 1,
        "attention.head_count": reading.heads, "attention.head_count_kv": reading.key_heads,
        "attention.key_length": reading.head_dim, "rope.freq_base": reading.rope["rope_theta"],
        "embedding_length": reading.hidden, "target_hidden_size": reading.target_hidden,
        "norm_before_fc": bool(changes), "norm_before_residual": bool(changes), "vocab_size": reading.vocabulary,
    }  # fmt: skip
    assert {name: said[name] for name in facts} == facts
    assert len(said["tokenizer.ggml.tokens"]) == reading.vocabulary


def test_what_llama_cpp_would_read_as_another_head_is_refused(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"tap_norms": True, "norm_output": True}, "dialect=gguf: has no word for tap_norms=True, norm_output=True"),
        ({"windows": (8,)}, r"no word for windows=\(8,\)"),
        ({"attention_bias": True}, "no word for attention_bias=True"),
        ({"taps": (0, 1, 2)}, r"no word for taps=\(0, 1, 2\)"),
        ({"activation": "gelu"}, "GGUF: not supported here: hidden_act='gelu'"),
    ]
    target, file = open_target(str(save_plain_target(tmp_path / "target"))), tmp_path / "head.gguf"
    for changes, words in refused:
        refusal(words, write_gguf_head, head_for(target, **changes), target.config, target.tokenizer, file)
        assert not file.exists()
