"""MTP heads of every spelling: what they compute, and which files are refused."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

from outrider.draft_models.eagle3.model import Eagle3
from outrider.draft_models.mtp.checkpoint import arrange_tensors, lost_head, open_mtp, save_mtp, spell_tensors
from outrider.draft_models.mtp.spellings import find_head
from outrider.draft_models.targets.settings import ReadingChanges
from tests.draft_models.eagle3.test_eagle3_heads import logits_of
from tests.eagle3_heads import Row
from tests.faults import plant
from tests.mtp_heads import (
    BASE,
    EPSILON,
    FAMILIES,
    HEAD_DIM,
    HEADS,
    INNER,
    KEY_HEADS,
    VOCABULARY,
    WIDTH,
    head_weights,
    reference,
    stored_tensors,
    write_head,
)
from tests.refusals import refusal

PLACES = 5  # of a text


def config_of(architecture: str, **changes: Any) -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": BASE}
    rope |= {"partial_rotary_factor": 0.5} if architecture == "qwen3_next" else {}
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 4,
        "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": EPSILON,
        "rope_parameters": rope, "max_position_embeddings": 256, "num_experts": 0,
    }  # fmt: skip
    return AutoConfig.for_model(architecture, **{**settings, **changes})


def stand_in(seed: int = 7) -> Any:
    """What a head shares with its target: an embedding, a final norm and a head."""
    generator = torch.Generator().manual_seed(seed)
    embed, norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
    with torch.no_grad():
        for weight in (embed.weight, norm.weight, norm.bias):
            weight.copy_(torch.randn(weight.shape, generator=generator))
    matrix = torch.randn(VOCABULARY, WIDTH, generator=generator) * WIDTH**-0.5
    return SimpleNamespace(embed_tokens=embed, norm=norm, matrix=matrix, logits_after_norm=lambda x: x @ matrix.T)


def two_steps() -> list[Row]:
    """Rows with the target's hidden states, and rows with the head's own outputs, which see their own past only."""
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (PLACES + 1,)).tolist()
    first = [Row(tokens[t], t, range(t), 2 * torch.randn(1, WIDTH)) for t in range(PLACES)]
    return [*first, *(Row(tokens[t + 1], t + 1, range(t + 1), t) for t in range(PLACES))]


def loaded(
    folder: Path, spelling: str, *, changes: ReadingChanges | None = None, offset: float | None = None
) -> Eagle3:
    family = FAMILIES[spelling]
    where = write_head(folder, spelling, stored_tensors(spelling, head_weights(family), offset))
    stored = open_mtp(where, config_of(family.architecture), changes or ReadingChanges())
    assert stored.dialect == spelling
    head = stored.load(torch.float32)
    head.use_target(stand_in())
    return head


@torch.no_grad()
def compare(folder: Path, spelling: str, **options: Any) -> None:
    """Logits are the reference's, after features of the target and after the head's own."""
    family, weights, target = FAMILIES[spelling], head_weights(FAMILIES[spelling]), stand_in()
    expected = reference(family, weights, target.embed_tokens.weight, target.norm, target.matrix, two_steps())
    logits = logits_of(loaded(folder, spelling, **options), two_steps())
    torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spelling", FAMILIES)
def test_it_computes_what_its_family_does(tmp_path: Path, spelling: str) -> None:
    compare(tmp_path, spelling)


@pytest.mark.parametrize("spelling", FAMILIES)
def test_another_reading_is_another_head(tmp_path: Path, spelling: str) -> None:
    """Each difference between families changes the logits, whatever the family."""
    reading = open_mtp(write_head(tmp_path, spelling, stored_tensors(spelling, head_weights(FAMILIES[spelling]))),
                       config_of(FAMILIES[spelling].architecture)).reading  # fmt: skip
    for name in ("hidden_first", "norm_offset", "norm_output", "target_norm"):
        with pytest.raises(AssertionError, match="not close"):
            compare(tmp_path, spelling, changes=ReadingChanges(**{name: not getattr(reading, name)}))


FAULTS = {  # of the layout, and what stands there instead; with the spelling that shows it
    "queries before gates": (
        "(reading.heads, 2, reading.head_dim))",
        "(2, reading.heads, reading.head_dim)).transpose(0, 1)",
        "qwen",
    ),
    "columns as they are": ("reading.hidden_first and", "False and", "mimo"),
    "norms as they are": ("1 + tensor", "tensor", "qwen"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_of_the_layout_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    old, new, spelling = FAULTS[fault]
    source = "outrider.draft_models.mtp.checkpoint"
    plant(monkeypatch, sys.modules[source], arrange_tensors.__name__, old, new)
    with pytest.raises(AssertionError, match="not close"):
        compare(tmp_path, spelling)


@torch.no_grad()
def test_its_layer_is_transformers_own(tmp_path: Path) -> None:
    """Qwen3-Next's decoder layer with its attention, on the projected pair, over a whole text."""
    weights, config = head_weights(FAMILIES["qwen"]), config_of("qwen3_next", layer_types=["full_attention"] * 4)
    tensors = stored_tensors("qwen", weights)
    config._attn_implementation = "eager"
    layer = Qwen3NextDecoderLayer(config, 0).eval()
    prefix = "mtp.layers.0."
    layer.load_state_dict({n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)})
    norms = {}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        norms[name] = Qwen3NextRMSNorm(WIDTH, EPSILON)
        norms[name].weight.copy_(tensors[f"mtp.{name}.weight"])
    head, target = loaded(tmp_path, "qwen"), stand_in()
    aux, tokens = torch.randn(1, PLACES, WIDTH), torch.randint(VOCABULARY, (1, PLACES))
    head.reserve(PLACES)
    rotary = head.rotary(torch.arange(PLACES)[None])
    causal = torch.ones(PLACES, PLACES, dtype=torch.bool).tril()[None, None]
    pair = [norms["pre_fc_norm_embedding"](target.embed_tokens(tokens)), norms["pre_fc_norm_hidden"](target.norm(aux))]
    hidden = torch.cat(pair, -1) @ tensors["mtp.fc.weight"].T
    mask = torch.zeros(PLACES, PLACES).masked_fill(~causal[0, 0], torch.finfo(torch.float32).min)[None, None]
    expected = norms["norm"](layer(hidden, rotary.tables[0], attention_mask=mask))
    outputs = head.run(head.embed(tokens), head.features(aux), {None: causal}, rotary)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_speculators_forward_gives_the_same(tmp_path: Path) -> None:
    speculators = pytest.importorskip("speculators.models.mtp.model_definitions")
    config = config_of("qwen3")
    config._attn_implementation = "eager"
    layer = speculators.mtp_model_classes["qwen3"].first_layer_class(config, layer_idx=0).eval()
    tensors = stored_tensors("speculators", head_weights(FAMILIES["speculators"]))
    layer.load_state_dict({name.removeprefix("mtp_layers.0."): tensor for name, tensor in tensors.items()})
    head, target = loaded(tmp_path, "speculators"), stand_in()
    aux, tokens = torch.randn(1, PLACES, WIDTH), torch.randint(VOCABULARY, (1, PLACES))
    head.reserve(PLACES)
    rotary = head.rotary(torch.arange(PLACES)[None])
    causal = torch.ones(PLACES, PLACES, dtype=torch.bool).tril()[None, None]
    mask = torch.zeros(PLACES, PLACES).masked_fill(~causal[0, 0], torch.finfo(torch.float32).min)[None, None]
    expected = layer(aux, target.embed_tokens(tokens), attention_mask=mask, position_embeddings=rotary.tables[0])
    outputs = head.run(head.embed(tokens), head.features(aux), {None: causal}, rotary)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)


# --- what is written


def require_written_back(folder: Path, spelling: str, dtype: torch.dtype = torch.float32) -> None:
    """A head that is loaded and written is the file, tensor by tensor and to the bit."""
    family = FAMILIES[spelling]
    tensors = {name: tensor.to(dtype) for name, tensor in stored_tensors(spelling, head_weights(family)).items()}
    stored = open_mtp(write_head(folder / "read", spelling, tensors), config_of(family.architecture))
    save_mtp(folder / "written", stored.load(torch.float32), stored, dtype)
    torch.testing.assert_close(load_file(folder / "written" / "model.safetensors"), tensors, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", [spelling for spelling in FAMILIES if spelling != "gguf"])
def test_a_head_is_written_as_it_was_read(tmp_path: Path, spelling: str, dtype: torch.dtype) -> None:
    require_written_back(tmp_path, spelling, dtype)


WRITTEN_FAULTS = {
    "queries before gates": ("stack(query_gate, 1)", "stack(query_gate)", "qwen"),
    "columns as they are": ("if reading.hidden_first", "if False", "mimo"),
    "norms as they are": ("tensor - 1", "tensor", "qwen"),
    "norms that are rounded first": ("tensor - 1", "tensor.to(dtype) - 1", "qwen"),
}


@pytest.mark.parametrize("fault", WRITTEN_FAULTS)
def test_planted_faults_of_writing_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    old, new, spelling = WRITTEN_FAULTS[fault]
    plant(monkeypatch, sys.modules[save_mtp.__module__], spell_tensors.__name__, old, new)
    with pytest.raises(AssertionError, match="not equal"):
        require_written_back(tmp_path, spelling, torch.bfloat16)


# --- what is refused


@pytest.mark.parametrize("spelling", FAMILIES)
def test_a_tensor_too_few_or_too_many_is_named(tmp_path: Path, spelling: str) -> None:
    """By its name in the file, for every tensor but those whose absence is another reading, or another head."""
    family = FAMILIES[spelling]
    config, tensors = config_of(family.architecture), stored_tensors(spelling, head_weights(family))
    optional = ("embed_tokens.weight", "shared_head.head.weight", "q_norm.weight", "q_proj.bias")
    projection = next(name for name in tensors if name.endswith(("fc.weight", "input_proj.weight", "eh_proj.weight")))
    for name in tensors:
        if name != projection and not name.endswith(optional):
            less = {stored: tensor for stored, tensor in tensors.items() if stored != name}
            refusal("mtp=.*: missing tensors: ", open_mtp, write_head(tmp_path, spelling, less), config)
    prefix = projection.rpartition("nextn." if spelling == "gguf" else ".")[0].rpartition(".")[0]
    extra = {**tensors, f"{prefix}.mask_hidden.weight": torch.ones(1)}
    refusal("unknown tensors: .*mask_hidden", open_mtp, write_head(tmp_path, spelling, extra), config)
    wide = config_of(family.architecture, num_attention_heads=2)
    refusal("has shape .*: expected .*, as its config.json", open_mtp, write_head(tmp_path, spelling, tensors), wide)


UNLIKE: dict[str, tuple[str, str]] = {  # a tensor that such a head has, and the refusal
    "model.layers.4.mlp.experts.0.up_proj.weight": ("deepseek", "its layer has a mixture of experts .*supported: one"),
    "model.layers.4.self_attn.kv_a_proj_with_mqa.weight": ("deepseek", "multi-head latent attention .*supported: one"),
    "model.layers.5.eh_proj.weight": ("deepseek", "2 MTP layers; supported: one dense layer"),
    "mtp.layers.1.mlp.up_proj.weight": ("qwen", "2 MTP layers; supported: one dense layer"),
    "blk.4.ffn_up_exps.weight": ("gguf", "its layer has a mixture of experts"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_other_kinds_of_layers_are_refused_by_name(tmp_path: Path, name: str) -> None:
    spelling, message = UNLIKE[name]
    family = FAMILIES[spelling]
    tensors = {**stored_tensors(spelling, head_weights(family)), name: torch.ones(2, 2)}
    refusal(message, open_mtp, write_head(tmp_path, spelling, tensors), config_of(family.architecture))


def test_a_head_that_is_not_there_is_missed(tmp_path: Path) -> None:
    """Where the config declares one, the refusal says what happened and which command helps."""
    where = write_head(tmp_path, "qwen", {"model.norm.weight": torch.ones(WIDTH)})
    assert find_head(where) is None
    refusal("no tensors of an MTP head there; give a model", open_mtp, where, config_of("qwen3"))
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        declaring = config_of("qwen3", **{key: 1})
        refusal(rf"declares an MTP head \({key}=1\).*restore-mtp takes it", open_mtp, where, declaring)
    whole = write_head(tmp_path / "whole", "qwen", stored_tensors("qwen", head_weights(FAMILIES["qwen"])))
    assert lost_head(whole, declaring) == ""
    assert lost_head(where, config_of("qwen3")) == ""


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    where = write_head(tmp_path, "qwen", stored_tensors("qwen", head_weights(FAMILIES["qwen"])))
    config = config_of("qwen3_next")
    refusal(r"has shape \[64\]: expected \[128\]", open_mtp, where, config_of("qwen3_next", hidden_size=128))
    for changes, message in (
        (ReadingChanges(tap_norms=True), r"reading.tap_norms=True: expected False"),
        (ReadingChanges(taps=(1, 2)), r"reading.taps=.*one boundary"),
        (ReadingChanges(taps=(5,)), r"taps the target at the boundaries \[5\], but expected are 0 to 4"),
    ):
        refusal(message, open_mtp, where, config, changes)
    refusal("no rope, or several", open_mtp, where, AutoConfig.for_model("gpt2", n_embd=WIDTH, vocab_size=VOCABULARY))
    moved = write_head(tmp_path / "moved", "gguf", stored_tensors("gguf", head_weights(FAMILIES["gguf"])),
                       architecture="llama")  # fmt: skip
    refusal("general.architecture='llama'", open_mtp, moved, config_of("llama"))
