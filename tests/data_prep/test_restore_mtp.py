"""A fine-tuned model gets its base model's MTP head back, whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.base.errors import UserError
from outrider.data_prep import restore_mtp as restoring
from outrider.data_prep.restore_mtp import SHARD_FILE, declare_head, restore_mtp
from outrider.data_prep.settings import RestoreConfig
from outrider.draft_models.mtp.checkpoint import open_mtp
from outrider.draft_models.mtp.spellings import find_head
from outrider.draft_models.targets.open_target import load_config, open_target
from outrider.draft_models.targets.tensor_files import open_tensors
from tests.mtp_heads import FAMILIES, head_weights, stored_tensors, write_head
from tests.refusals import refusal
from tests.tiny import save_target

HEAD = stored_tensors("qwen", head_weights(FAMILIES["gguf"]), offset=0.0)
DECLARED = {"num_nextn_predict_layers": 1}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = save_target(tmp_path / "base", "qwen3", kv_heads=2, **DECLARED)
    save_file({**load_file(path / "model.safetensors"), **HEAD}, path / "model.safetensors", {"format": "pt"})
    return path


def fine_tuned(tmp_path: Path, **changes: Any) -> Path:
    return save_target(tmp_path / "tuned", "qwen3", **{"kv_heads": 2, "seed": 5, **changes})


def restored(base: Path | str, target: Path, **options: Any) -> Path:
    out = target.parent / "out"
    restore_mtp(RestoreConfig(target=str(target), base=str(base), out_dir=str(out), **options))
    return out


def read_all(path: Path) -> dict[str, Tensor]:
    files = open_tensors(str(path))
    return files.read(files.file_of)


@pytest.mark.parametrize("shard", ["5GB", "100KB"])
def test_the_copy_has_both_models_tensors(base: Path, tmp_path: Path, shard: str) -> None:
    """Bit for bit; the shards are links. transformers and this runtime load the copy, and its config declares it."""
    target = fine_tuned(tmp_path, shard=shard)
    (target / "convert_target.json").write_text("{}")  # it was converted itself
    out = restored(base, target)
    torch.testing.assert_close(read_all(out), {**read_all(target), **HEAD}, rtol=0, atol=0)
    shards = [file for file in out.glob("*.safetensors") if file.name != SHARD_FILE]
    assert len(shards) == len([*target.glob("*.safetensors")]) == (1 if shard == "5GB" else len(shards)) > 0
    assert all(any(os.path.samefile(file, other) for other in target.glob("*.safetensors")) for file in shards)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name for name, file in index.items() if file == SHARD_FILE} == {*HEAD}
    config = load_config(str(out))
    assert config.num_nextn_predict_layers == 1
    assert open_mtp(str(out), config).dialect == "qwen"
    loaded, tuned = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (out, target))
    torch.testing.assert_close(loaded, tuned, rtol=0, atol=0)
    assert restored(base, target, resume=True) == out
    assert open_target(str(out)).tokenizer("abc") == open_target(str(target)).tokenizer("abc")


def test_a_head_of_its_own_gets_the_names_of_the_target(tmp_path: Path) -> None:
    """One that speculators trained, for example on the fine-tuned model's answers."""
    weights = head_weights(FAMILIES["speculators"])
    alone = write_head(tmp_path / "alone", "speculators", stored_tensors("speculators", weights))
    out = restored(alone, fine_tuned(tmp_path))
    head = find_head(str(out))
    assert head is not None
    expected = stored_tensors("qwen", weights, offset=0.0)
    torch.testing.assert_close(head.files.read(head.files.file_of), expected, rtol=0, atol=0)


def test_a_head_that_only_servers_run_is_copied(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experts = {**HEAD, "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.randn(8, 64)}
    save_file({**load_file(base / "model.safetensors"), **experts}, base / "model.safetensors", {"format": "pt"})
    head = find_head(str(restored(base, fine_tuned(tmp_path))))
    assert head is not None
    assert {*head.files.file_of} == {*experts}
    assert "shapes=unchecked reason=" in capsys.readouterr().out


WRITES = ["link_shards", "write_atomically", "declare_head"]


@pytest.mark.parametrize("step", WRITES)
def test_a_killed_run_leaves_nothing_that_loads(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    target = fine_tuned(tmp_path)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(restoring, step, stop)
        with pytest.raises(KeyboardInterrupt):
            restored(base, target)
    with pytest.raises(UserError):
        load_config(str(tmp_path / "out"))
    refusal("resume=true", restored, base, target)
    torch.testing.assert_close(read_all(restored(base, target, resume=True)), {**read_all(target), **HEAD})
    restored(base, target, resume=True)  # finished already
    refusal("target", restored, base, base, resume=True)


def test_what_does_not_belong_together_is_refused(base: Path, tmp_path: Path) -> None:
    target = fine_tuned(tmp_path)
    refusal(r"target=.*: has an MTP head", restored, base, base)
    refusal(r"base=.*: no tensors of an MTP head there", restored, target, target)
    other = save_target(tmp_path / "other", "qwen3", kv_heads=2, rms_norm_eps=1e-3)
    refusal(r"base=.*expected the model that .*config.json differs in rms_norm_eps", restored, base, other)
    narrow = save_target(tmp_path / "narrow", "qwen3", hidden_size=32)
    alone = write_head(tmp_path / "alone", "speculators", stored_tensors("speculators", head_weights(FAMILIES["gguf"])))
    refusal(r"has shape \[64\]: expected \[32\]", restored, alone, narrow)
    torch.save({"lm_head.weight": torch.ones(2, 2)}, tmp_path / "tuned/pytorch_model.bin")
    (tmp_path / "tuned/model.safetensors").unlink()
    refusal("expected unquantised safetensors", restored, base, target)
    assert not (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize("whole", ["base", "tuned"])
def test_the_text_model_of_a_composite_one_is_compared(base: Path, tmp_path: Path, whole: str) -> None:
    """A fine-tune saved by AutoModelForCausalLM has the text model's config alone."""
    target = fine_tuned(tmp_path)
    file = tmp_path / whole / "config.json"
    text = json.loads(file.read_text())
    file.write_text(json.dumps({"model_type": "qwen3_vl", "text_config": {**text, "use_cache": False}}))
    if whole == "tuned":  # which does not run here
        assert declare_head(file, str(base / "config.json"))["text_config"]["num_nextn_predict_layers"] == 1
        return
    out = restored(base, target)
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
    file.write_text(json.dumps({"model_type": "qwen3_vl", "text_config": {**text, "rms_norm_eps": 1e-3}}))
    refusal("differs in rms_norm_eps", restored, base, fine_tuned(tmp_path / "again"))


def test_hybrid_targets_are_stitched(tmp_path: Path) -> None:
    """A Qwen3-Next-like model does not run here, but gets its head back all the same."""
    settings = {
        "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 0, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "max_position_embeddings": 256,
    }  # fmt: skip
    config = AutoConfig.for_model("qwen3_next", **settings)
    for name in ("base", "tuned"):
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
    file, head = tmp_path / "base/model.safetensors", stored_tensors("qwen", head_weights(FAMILIES["qwen"]))
    save_file({**load_file(file), **head}, file, {"format": "pt"})
    out = restored(tmp_path / "base", tmp_path / "tuned")
    assert open_mtp(str(out), config).reading.norm_offset
    torch.testing.assert_close(read_all(out), {**read_all(tmp_path / "tuned"), **head}, rtol=0, atol=0)
