"""What a drafter belongs to: a changed target is refused by name, the same one in other words is not.

Digests of stored tensors: what a sample sees, what it costs, and that all bytes are seen where it matters.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from outrider.base.errors import UserError
from outrider.draft_models.calibration import META_FILE as CALIBRATION_FILE
from outrider.draft_models.calibration import load_calibration, save_calibration
from outrider.draft_models.calibration_head import CalibrationHead
from outrider.draft_models.early_exit.checkpoint import digest_parts_below, from_pretrained, read_meta
from outrider.draft_models.early_exit.model import EarlyExit
from outrider.draft_models.formats.stored_tensors import Stored
from outrider.draft_models.targets.fingerprint import fingerprint_target, require_text_alone
from outrider.draft_models.targets.model_files import load_causal_lm
from outrider.draft_models.targets.open_target import load_config, load_tokenizer, open_target, why_not_by_layers
from outrider.draft_models.targets.tensor_files import TensorFiles, open_tensors
from outrider.inference.loading.memory_plan import Storage, weight_bytes
from tests.refusals import refusal
from tests.tiers import as_many
from tests.tiny import ARCHITECTURES, LAYERS, save_exit, save_target

EXIT = 1  # so that of the layers only the first and, at first, the last are in the drafter
WEIGHTS = "model.safetensors"


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Path]:
    """A folder with a target and a drafter made for it."""

    def make(architecture: str = "llama", **changes: Any) -> Path:
        path = save_target(tmp_path / "target", architecture, **changes)
        save_exit(tmp_path / "drafter", path, EXIT)
        return tmp_path

    return make


def load(folder: Path, target: Path | None = None) -> EarlyExit:
    opened = open_target(str(target or folder / "target"))
    return from_pretrained(folder / "drafter", opened.config, opened.fingerprint, dtype=torch.float32)


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


@pytest.mark.parametrize("architecture", ["llama", "opt"])
@pytest.mark.slow
def test_any_tensor_of_any_layer_is_checked(trained: Callable[..., Path], architecture: str) -> None:
    """Each in turn replaced by noise of the same size; the error names its layer."""
    folder = trained(architecture, kv_heads=4 if architecture == "opt" else 2)
    stored = load_file(folder / "target" / WEIGHTS)
    load(folder)
    assert any(".layers.2." in name for name in stored)
    said: dict[str, str] = {}
    for name, tensor in stored.items():
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)) * (tensor.std() + 0.1)
        save_file({**stored, name: noise.to(tensor.dtype)}, folder / "target" / WEIGHTS, metadata={"format": "pt"})
        try:
            load(folder)
            said[name] = ""
        except UserError as error:
            said[name] = str(error)
    assert [name for name in said if not said[name]] == []
    for name, message in said.items():
        layer = re.match(r".*\.layers\.\d+", name)
        part = layer[0] if layer else name.rpartition(".")[0]
        assert "was trained for another target" in message
        assert f"the weights differ in {part}. Give" in message


def test_what_training_read_is_checked_to_the_byte(trained: Callable[..., Path]) -> None:
    """The lowest bit of any one number in the trunk, the last layer, embedding, norm and head."""
    folder = trained(hidden_size=128, intermediate_size=352)  # large enough for samples to leave out most of it
    path = folder / "target" / WEIGHTS
    stored = load_file(path)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in stored.items():
        if any(f".layers.{layer}." in name for layer in range(EXIT, LAYERS - 1)):
            continue
        changed = tensor.clone()
        at = int(torch.randint(changed.numel(), (1,), generator=generator))
        changed.view(torch.int32).view(-1)[at] ^= 1
        save_file({**stored, name: changed}, path, metadata={"format": "pt"})
        refusal("was trained for another target", load, folder)
    save_file(stored, path, metadata={"format": "pt"})
    load(folder)


SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 128}  # fmt: skip
DECIDING: list[tuple[str, str, Callable[[dict[str, Any]], object]]] = [
    ("llama", "rope_theta", lambda c: c["rope_parameters"].update(rope_theta=5e5)),
    ("llama", "rope_parameters.rope_type", lambda c: c.update(rope_parameters=SCALED)),
    ("llama", "head_dim", lambda c: c.update(head_dim=8)),
    ("llama", "num_attention_heads", lambda c: c.update(num_attention_heads=2, head_dim=32)),
    ("llama", "num_key_value_heads", lambda c: c.update(num_key_value_heads=2)),
    ("llama", "rms_norm_eps", lambda c: c.update(rms_norm_eps=1e-5)),
    ("llama", "hidden_act", lambda c: c.update(hidden_act="gelu")),
    ("llama", "attention_bias", lambda c: c.update(attention_bias=True)),
    ("llama", "mlp_bias", lambda c: c.update(mlp_bias=True)),
    ("llama", "pretraining_tp", lambda c: c.update(pretraining_tp=2)),
    ("llama", "max_position_embeddings", lambda c: c.update(max_position_embeddings=128)),
    ("llama", "intermediate_size", lambda c: c.update(intermediate_size=128)),
    ("llama", "tie_word_embeddings", lambda c: c.update(tie_word_embeddings=True)),
    ("llama", "eos_token_id", lambda c: c.update(eos_token_id=7)),
    ("llama", "of_a_later_version", lambda c: c.update(of_a_later_version=0.1)),
    ("mistral", "sliding_window", lambda c: c.update(sliding_window=24)),
    ("qwen2", "sliding_window", lambda c: c.update(sliding_window=24)),
    ("qwen2", "layer_types", lambda c: c.update(layer_types=["full_attention"] * LAYERS)),
    ("opt", "activation_function", lambda c: c.update(activation_function="gelu")),
    ("opt", "enable_bias", lambda c: c.update(enable_bias=False)),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "name", "change"), DECIDING, ids=lambda v: v if isinstance(v, str) else "")
def test_a_changed_config_is_refused_by_name(
    trained: Callable[..., Path], architecture: str, name: str, change: Callable[[dict[str, Any]], object]
) -> None:
    folder = trained(architecture)
    load(folder)
    edit(folder / "target/config.json", change)
    refusal(rf"was trained for another target .*config\.(\w+\.)*{name}[.:]", load, folder)


def other(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return 2 * value + 1
    if isinstance(value, list):
        return value[:-1]
    return "other" if isinstance(value, str) else {**value, "other": 1.5}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_field_decides_but_those_that_are_known_not_to(trained: Callable[..., Path], architecture: str) -> None:
    """Whatever config.json holds: of some fields it is known that they decide no number; all others count."""
    from outrider.draft_models.targets.fingerprint import NOT_DECIDING, config_differences, deciding_config

    path = trained(architecture) / "target"
    before, stored = deciding_config(str(path), None), json.loads((path / "config.json").read_text())
    free = {"_name_or_path": "a/b", "torch_dtype": "float16", "id2label": {"0": "x"}, "_commit_hash": "0123"}
    for name, value in {**stored, **free, "unheard_of": 1}.items():
        if name == "model_type":
            continue
        (path / "config.json").write_text(json.dumps({**stored, name: other(value)}))
        found = config_differences(before, deciding_config(str(path), None))
        assert [key.partition(".")[0] for key, _, _ in found if key.startswith(name)] == (
            [] if name in NOT_DECIDING else [name]
        )
        assert bool(found) == (name not in NOT_DECIDING), (name, found)


def test_the_same_target_in_other_words_is_the_same(trained: Callable[..., Path]) -> None:
    """Another place, another writer, other shards, and defaults that are spelt out, left out or named as before."""
    folder = trained()
    moved = shutil.copytree(folder / "target", folder / "moved")

    def rewrite(config: dict[str, Any]) -> None:
        config |= {"transformers_version": "4.40.0", "torch_dtype": config.pop("dtype"), "use_cache": False}
        config |= {"_name_or_path": "somebody/model", "architectures": ["Renamed"], "initializer_range": 0.5}
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        del config["attention_dropout"]

    edit(moved / "config.json", rewrite)
    stored = load_file(moved / WEIGHTS)
    (moved / WEIGHTS).unlink()
    shards = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(stored)}
    for file in set(shards.values()):
        save_file({n: t for n, t in stored.items() if shards[n] == file}, moved / file, metadata={"format": "pt"})
    (moved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    load(folder, moved)
    assert open_target(str(moved)).layers(dtype=torch.float32).config.name_or_path == str(moved)
    assert load_causal_lm(str(moved)).name_or_path == str(moved)  # transformers wants "metadata" in an index


def warnings(captured: Any) -> list[str]:
    return [line for line in captured.err.splitlines() if line.startswith("warning: ")]


def test_a_calibration_belongs_to_the_target_too(trained: Callable[..., Path], capsys: pytest.CaptureFixture) -> None:
    folder = trained()
    drafter, path = folder / "drafter", str(folder / "target")
    sha = read_meta(drafter).weights_sha256

    def target() -> dict[str, Any]:
        found = fingerprint_target(open_tensors(path), load_config(path), load_tokenizer(path))
        return {"config": found.config, "tensors": found.tensors}

    save_calibration(drafter, CalibrationHead(64, 64), sha, {"target": target()})
    load_calibration(drafter, sha, "cpu", target())
    assert warnings(capsys.readouterr()) == []
    edit(folder / "target/config.json", lambda c: c["rope_parameters"].update(rope_theta=5e5))
    with pytest.raises(UserError, match=r"calibration head is of another target: config\.rope_parameters\.rope_theta"):
        load_calibration(drafter, sha, "cpu", target())
    edit(drafter / CALIBRATION_FILE, lambda meta: meta.pop("target"))
    refusal("does not say for which target", load_calibration, drafter, sha, "cpu", target())
    edit(drafter / CALIBRATION_FILE, lambda meta: meta.update(format=3))
    refusal("of format 3, not 2", load_calibration, drafter, sha, "cpu", target())


SAMPLE = 2**14  # bytes read of a tensor that is larger


def digests(folder: Path, tensors: dict[str, torch.Tensor], whole: bool = False) -> tuple[dict[str, str], int]:
    """What `digests` says of a checkpoint with these tensors, and how many bytes it has read."""
    save_file(tensors, folder / "model.safetensors")
    files = open_tensors(str(folder))
    found = files.digests(files.file_of, full=whole)
    assert files.bytes_read == 0  # hashing is not loading
    return found, files.bytes_hashed


@settings(max_examples=as_many(60), deadline=None)
@given(rows=st.integers(1, 400), columns=st.integers(1, 400), begin=st.floats(0, 1), share=st.floats(0, 1))
def test_a_sample_sees_what_is_not_small_and_in_one_place(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int, begin: float, share: float
) -> None:
    """Changed is one stretch of one tensor as long as the gap between two pieces; of a small tensor, one byte."""
    folder = tmp_path_factory.mktemp("sample")
    before = torch.zeros(rows, columns, dtype=torch.uint8)
    size = before.numel()
    gap = 1 if size <= SAMPLE else -(-size // 31)
    length = gap + int(share * (size - gap))
    after, start = before.clone(), int(begin * (size - length))
    after.view(-1)[start : start + length] = 1
    sampled, read = digests(folder, {"model.x.mask": before})
    assert read == min(size, SAMPLE)
    assert sampled != digests(folder, {"model.x.mask": after})[0]


def test_whole_means_every_byte(tmp_path: Path) -> None:
    before = torch.zeros(5 * 2**20 + 3, dtype=torch.uint8)  # more than is hashed at once
    whole, read = digests(tmp_path, {"model.x.mask": before}, whole=True)
    assert read == before.numel()
    for at in (0, 2**22 - 1, 2**22, before.numel() - 1):
        after = before.clone()
        after[at] = 1
        assert digests(tmp_path, {"model.x.mask": after}, whole=True)[0] != whole


def test_a_large_targets_digests_cost_little(tmp_path: Path) -> None:
    """Of each matrix of a megabyte 16 kB are read; what training reads is read whole, and nothing else."""
    path = save_target(tmp_path, hidden_size=512, intermediate_size=512)
    config, files = load_config(str(path)), open_tensors(str(path))
    sizes = {name: tensor.nbytes for name, tensor in load_file(path / "model.safetensors").items()}
    files.digests(files.file_of)
    assert files.bytes_hashed == sum(min(size, SAMPLE) for size in sizes.values()) < sum(sizes.values()) / 30
    files.bytes_hashed = 0
    digest_parts_below(files, config, 1)
    middle = ("model.layers.1.", "model.layers.2.")
    assert files.bytes_hashed == sum(size for name, size in sizes.items() if not name.startswith(middle))


def test_tensors_that_may_have_to_be_decoded_are_hashed_one_by_one() -> None:
    threads = set[int]()  # each has a whole tensor in memory

    def read() -> torch.Tensor:
        threads.add(get_ident())
        return torch.zeros(2**20)

    stored = {f"model.layers.{number}.x": Stored(torch.float32, [2**20], read) for number in range(8)}
    original = Mock(tensors=lambda: stored)
    files = TensorFiles("model", None, dict.fromkeys(stored, "model"), ("model", None), original=original)
    assert len(files.digests(files.file_of)) == 8 * len(threads) == 8


def test_a_model_with_other_parts_than_text_is_named() -> None:
    """Before anything of it is computed: by the memory of a run, and by its fingerprint."""
    config = AutoConfig.for_model("gemma3")
    refusal("a gemma3 model has other parts than text; give its text model alone", require_text_alone, config)
    refusal("has other parts than text", weight_bytes, config, Storage(2, 64))
    assert "has other parts than text" in str(why_not_by_layers(config))
    require_text_alone(config.get_text_config())
