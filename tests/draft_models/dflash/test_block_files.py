"""Files of block drafters: how each dialect is read, which files are refused, and what is written and read again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.draft_models.dflash.checkpoint import open_drafter, require_vllm, save_drafter
from outrider.draft_models.targets.settings import ReadingChanges
from tests.block_drafters import DIALECTS, FULL, SLIDING, TARGET, drafter_weights, write_drafter
from tests.refusals import refusal


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_tensor_too_few_or_too_many_is_named(tmp_path: Path, dialect: str) -> None:
    facts, weights = DIALECTS[dialect], drafter_weights(DIALECTS[dialect])
    names = ["layers.0.self_attn.o_proj.weight", "layers.1.mlp.up_proj.weight", "norm.weight", "d2t",
             "markov_head.markov_w2.weight", "confidence_head.proj.bias"]  # fmt: skip
    if facts.draft_tokens != DIALECTS["z-lab"].draft_tokens:
        names.append("lm_head.weight")
    for name in names:
        if name in weights:
            fewer = {key: tensor for key, tensor in weights.items() if key != name}
            where = write_drafter(tmp_path, facts, fewer)
            refusal(f"missing tensors: .*{name}|draft_vocabulary=", open_drafter, where, TARGET)
    more = {**weights, "layers.0.extra.weight": torch.ones(1)}
    refusal("unknown tensors: layers.0.extra.weight", open_drafter, write_drafter(tmp_path, facts, more), TARGET)
    more = {**weights, "layers.2000000000.extra.weight": torch.ones(1)}
    refusal("2000000001 layers with head_dim", open_drafter, write_drafter(tmp_path, facts, more), TARGET)
    open_drafter(write_drafter(tmp_path, facts, {f"model.{name}": w for name, w in weights.items()}), TARGET)


def nested(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": {**DIALECTS["z-lab"].config["dflash_config"], **changes}}


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "another vocabulary": ("z-lab", {"vocab_size": 41}, "with vocab_size=41"),
    "another width": ("z-lab", {"target_hidden_size": 32}, "hidden=16: expected target_hidden=32, or an embedding"),
    "a tap beyond": ("z-lab", nested(target_layer_ids=[1, 3, 6]), r"boundaries \[2, 4, 7\], but expected are 0 to 6"),
    "no taps": ("z-lab", nested(target_layer_ids=[]), "names no target_layer_ids: expected .*reading.taps"),
    "taps at odds": (
        "z-lab", {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, r"means boundaries \[2, 4, 5\]: expected one list"
    ),
    "no mask": ("z-lab", nested(mask_token_id=None), "mask_token=None"),
    "no block": ("z-lab", {"block_size": None}, "block=None"),
    "layers without types": ("z-lab", {"layer_types": [FULL]}, "layer_types=.*expected one for each of 2 layers"),
    "a window of no size": ("z-lab", {"layer_types": [FULL, SLIDING]}, "expected swa_window_size or sliding_window"),
    "a gated head": ("deepspec", {"markov_head_type": "gated"}, "markov_head_type='gated': expected 'vanilla'"),
    "Domino": ("z-lab", nested(projector_type="domino"), "projector_type='domino': expected 'dflash' or 'dspark'"),
    "sinks": ("z-lab", nested(attention_sink_bias=True), "attention_sink_bias=True: expected False"),
    "another kind": ("speculators", {"speculators_model_type": "xpress"}, "'xpress': expected dflash or dspark"),
    "another layer": ("z-lab", {"model_type": "gpt2"}, "model_type='gpt2': a head has layers of one of llama, qwen3"),
    "a head that was lost": ("z-lab", nested(markov_rank=4), "missing tensors: markov_head.markov_w1.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_before_weights_are_read(tmp_path: Path, case: str) -> None:
    dialect, changes, said = WRONG[case]
    facts = DIALECTS[dialect]
    where = write_drafter(tmp_path, facts, drafter_weights(facts), **changes)
    assert refusal(said, open_drafter, where, TARGET).startswith(f"dflash={where}: ")


@pytest.mark.parametrize(("name", "family"), [
    ("mask_hidden", "P-EAGLE"), ("layers.0.conv.weight", "DFlash2"), ("selector.weight", "DFlash2"),
    ("markov_head.gate_proj.weight", "a gated Markov head"), ("gru.weight_ih_l0", "Domino"),
])  # fmt: skip
def test_drafters_that_are_not_read_are_named(tmp_path: Path, name: str, family: str) -> None:
    facts = DIALECTS["z-lab"]
    where = write_drafter(tmp_path, facts, {**drafter_weights(facts), name: torch.ones(1)})
    refusal(f"those of {family}: expected DFlash", open_drafter, where, TARGET)


def test_a_mask_in_a_file_of_its_own_is_refused(tmp_path: Path) -> None:
    facts = DIALECTS["z-lab"]
    where = write_drafter(tmp_path, facts, drafter_weights(facts))
    torch.save(torch.ones(16), tmp_path / "mask_embedding.pt")
    refusal("mask_embedding.pt: expected the mask in the embedding", open_drafter, where, TARGET)


SPANS: dict[str, tuple[dict[str, Any], tuple[int | None, ...], tuple[bool, ...]]] = {
    "plain": ({}, (None, None), (False, False)),
    "sliding is causal": ({"layer_types": [SLIDING, FULL], "sliding_window": 5}, (5, None), (True, False)),
    "use_swa is not": (nested(use_swa=True, swa_window_size=7), (7, 7), (False, False)),
    "of no type": ({"layer_types": None, "sliding_window": 5, **nested(use_swa=True)}, (5, 5), (False, False)),
    "a type says more": (
        {"layer_types": [SLIDING, FULL], "sliding_window": 5, **nested(use_swa=True)}, (5, None), (True, False)
    ),
    "dflash_config.causal": (
        {"layer_types": [SLIDING, FULL], "sliding_window": 5, **nested(causal=False)}, (5, None), (False, False)
    ),
    "is_causal comes first": ({"is_causal": True, **nested(causal=False)}, (None, None), (True, True)),
}  # fmt: skip


@pytest.mark.parametrize("case", SPANS)
def test_windows_and_causality_are_those_of_vllm(tmp_path: Path, case: str) -> None:
    changes, windows, causal = SPANS[case]
    facts = DIALECTS["z-lab"]
    reading = open_drafter(write_drafter(tmp_path, facts, drafter_weights(facts), **changes), TARGET).reading
    assert reading.spans == [*zip(windows, causal, strict=True)]


TAPS: dict[str, dict[str, Any]] = {
    "as they are": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], **nested(target_layer_ids=None)},
    "inside": {},
    "of DeepSeek": {"dspark_target_layer_ids": [1, 3, 4], **nested(target_layer_ids=None)},
    "at the top": {"target_layer_ids": [1, 3, 4], **nested(target_layer_ids=None)},
    "layer_ids": nested(target_layer_ids=None, layer_ids=[2, 4, 5]),
    "twice": {"target_layer_ids": [1, 3, 4], "eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
}


@pytest.mark.parametrize("case", TAPS)
def test_hidden_states_by_all_names_of_writers(tmp_path: Path, case: str) -> None:
    facts = DIALECTS["z-lab"]
    where = write_drafter(tmp_path, facts, drafter_weights(facts), **TAPS[case])
    assert open_drafter(where, TARGET).reading.taps == (2, 4, 5)


def test_a_reading_replaces_what_a_config_says(tmp_path: Path) -> None:
    facts = DIALECTS["speculators"]
    weights = drafter_weights(facts)
    where = write_drafter(tmp_path, facts, {**weights, "d2t": torch.tensor(facts.draft_tokens)})
    refusal("It holds offsets: reading.draft_ids=index reads it", open_drafter(where, TARGET).load)
    changes = ReadingChanges(draft_ids="index", causal=True, taps=(1, 2), neox=False)
    reading = open_drafter(where, TARGET, changes).reading
    assert (reading.causal, reading.taps, reading.neox) == (True, (1, 2), False)
    drafter = open_drafter(where, TARGET, changes).load(torch.float32)
    assert drafter.draft_tokens is not None
    assert drafter.draft_tokens.tolist() == [*facts.draft_tokens]
    said = "reading.final_norm: this kind of head has no such reading"
    refusal(said, open_drafter, where, TARGET, ReadingChanges(final_norm=False))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_written_is_read_again(tmp_path: Path, dialect: str) -> None:
    """Every bit of it; what engines read stands where they read it."""
    facts = DIALECTS[dialect]
    stored = open_drafter(write_drafter(tmp_path / "a", facts, drafter_weights(facts)), TARGET)
    drafter = stored.load(torch.bfloat16)
    save_drafter(tmp_path / "b", drafter, TARGET, made_here=False)
    again = open_drafter(str(tmp_path / "b"), TARGET)
    assert (again.dialect, again.reading, again.made_here) == ("z-lab", stored.reading, False)
    torch.testing.assert_close(again.load(torch.bfloat16).state_dict(), drafter.state_dict(), rtol=0, atol=0)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == [tap - 1 for tap in facts.taps]
    assert config["architectures"] == ["Qwen3DSparkModel" if facts.rank else "DFlashDraftModel"]
    assert config.get("markov_rank", 0) == facts.rank
    assert (config["block_size"], config["is_neox_style"]) == (facts.block, not facts.neighbours)


def test_a_file_of_deepspec_predicts_the_token_after_each_row_whatever_its_rank(tmp_path: Path) -> None:
    """vLLM has no DFlash that does, and none that scales its embedding."""
    facts = DIALECTS["deepspec"]
    weights = {name: tensor for name, tensor in drafter_weights(facts).items() if "_head." not in name or "lm_" in name}
    config = {"markov_rank": 0, "enable_confidence_head": False}
    where = write_drafter(tmp_path, replace(facts, rank=0, confidence=0), weights, **config)
    reading = open_drafter(where, TARGET).reading
    assert (reading.sample_from_anchor, reading.markov_rank) == (True, 0)
    refusal("engine=vllm: has no word for sample_from_anchor=True", require_vllm, reading)
    require_vllm(replace(reading, sample_from_anchor=False))
    scaled = replace(reading, sample_from_anchor=False, embedding_scale=3.0)
    refusal("has no word for embedding_scale=3.0", require_vllm, scaled)


def test_what_the_layout_cannot_say_is_refused(tmp_path: Path) -> None:
    facts = DIALECTS["z-lab"]
    weights = drafter_weights(facts)
    drafter = open_drafter(write_drafter(tmp_path / "a", facts, weights), TARGET).load()
    drafter.reading = replace(drafter.reading, windows=(3, 4))
    refusal(r"has no word for windows=\(3, 4\)", save_drafter, tmp_path / "b", drafter, TARGET)
    without = {name: tensor for name, tensor in weights.items() if "_norm" not in name or "layernorm" in name}
    bare: dict[str, Tensor] = {**without, "hidden_norm.weight": weights["hidden_norm.weight"]}
    plain = open_drafter(write_drafter(tmp_path / "c", facts, bare), TARGET).load()
    refusal("has no word for head_norms=True", save_drafter, tmp_path / "b", plain, TARGET)
    assert not (tmp_path / "b").exists()
