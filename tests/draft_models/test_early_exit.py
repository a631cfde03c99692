"""The exit layer: what it computes, what it trains, its checkpoint, and what engines load as an ordinary model."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.base.errors import UserError
from outrider.draft_models.early_exit import checkpoint as exports
from outrider.draft_models.early_exit.checkpoint import (
    META_FILE,
    digest_of_meta,
    from_pretrained,
    read_meta,
    save_pretrained,
)
from outrider.draft_models.early_exit.model import EarlyExit, exit_layers
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.attention import additive_mask
from outrider.draft_models.targets.fingerprint import Fingerprint
from outrider.draft_models.targets.model_files import load_layers
from outrider.draft_models.targets.open_target import load_config, open_target
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.train.export import export_drafter
from outrider.train.settings.export import ExportConfig
from tests.families import FAMILIES, TYPICAL, save_family
from tests.refusals import refusal
from tests.tiers import quick_where, typical_where
from tests.tiny import ARCHITECTURES, LAYERS, VOCABULARY, byte_tokenizer, random_prompt, save_exit, save_target
from tests.train.jobs import exit_student


def load_student(path: Path, exit_layer: int, *, train_head: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    config = load_config(str(path))
    model = load_layers(open_tensors(str(path)), config, exit_layers(config, exit_layer), dtype=dtype)
    return exit_student(model, exit_layer, train_head=train_head)


def rows(count: int = 2, length: int = 40) -> dict[str, torch.Tensor]:
    """Two documents a row, the second padded and longer than a window; every third position unsupervised."""
    ids = torch.tensor(random_prompt(count * length)).view(count, length)
    documents = torch.tensor([0] * 10 + [1] * (length - 13) + [-1] * 3).expand(count, length)
    positions = torch.tensor([*range(10), *range(length - 13), 0, 0, 0]).expand(count, length)
    labels = ids.roll(-1, 1).masked_fill(torch.arange(length) % 3 == 0, IGNORE)
    labels[:, 9] = labels[:, -4:] = IGNORE
    return {"input_ids": ids, "labels": labels, "positions": positions, "documents": documents}


@pytest.mark.parametrize("train_head", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_only_the_drafter_is_trained(tmp_path: Path, train_head: bool, tied: bool) -> None:
    path = save_target(tmp_path, tied=tied)
    student = load_student(path, 2, train_head=train_head, dtype=torch.bfloat16)
    student(**rows())["loss_sum"].backward()
    trained = {name for name, p in student.named_parameters() if p.requires_grad}
    assert all(name.startswith("drafter.") for name in trained)
    assert ("drafter.head.weight" in trained) == train_head
    for name, parameter in student.named_parameters():
        if name in trained:
            assert parameter.dtype == torch.float32
            assert parameter.grad is not None
            assert parameter.grad.abs().max() > 0, name
        else:
            assert parameter.dtype == torch.bfloat16
            assert parameter.grad is None
    assert len(student.stack.layers) == 2


def test_frozen_layers_run_in_their_own_dtype(tmp_path: Path) -> None:
    """bf16 frozen layers give nearly the float32 loss; the difference is rounding, not another computation."""
    path = save_target(tmp_path)
    whole, half = load_student(path, 2), load_student(path, 2, dtype=torch.bfloat16)
    a, b = whole(**rows())["loss_sum"], half(**rows())["loss_sum"]
    assert a != b
    torch.testing.assert_close(a, b, rtol=0.05, atol=0)
    places = rows()["positions"]  # of the exit layer too, which is float32
    assert torch.equal(half.stack.rotary(places)[0], whole.stack.rotary(places)[0])


def test_frozen_layers_do_not_follow_the_loops_precision(tmp_path: Path) -> None:
    path = save_target(tmp_path)
    model = load_layers(open_tensors(str(path)), load_config(str(path)), range(LAYERS), dtype=torch.float32)
    student = exit_student(model, 2, objective="forward_kl")
    inputs = {name: value for name, value in rows().items() if name != "labels"}
    own, target = student.hidden(**inputs)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, same = student.hidden(**inputs)
    assert torch.equal(same, target)
    assert not torch.equal(rounded, own)


def fingerprint(path: Path) -> Fingerprint:
    return open_target(str(path)).fingerprint


@pytest.mark.parametrize(("own_head", "depth"), [(True, 1), (False, 2)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_checkpoint_round_trip(tmp_path: Path, architecture: str, own_head: bool, depth: int) -> None:
    path = save_target(tmp_path / "target", architecture, kv_heads=2)
    drafter = save_exit(tmp_path / "drafter", path, 2, {"lr": 1.0}, noise=0.1, own_head=own_head, depth=depth)
    loaded = from_pretrained(tmp_path / "drafter", load_config(str(path)), fingerprint(path), dtype=torch.float32)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert loaded.exit_layer == 2
    assert loaded.window == drafter.window
    assert (loaded.head is not None) == own_head
    assert len(loaded.layers) == depth
    torch.testing.assert_close(loaded.state_dict(), drafter.state_dict(), rtol=0, atol=0)
    meta = json.loads((tmp_path / "drafter" / META_FILE).read_text())
    assert meta["training"] == {"lr": 1.0}
    assert meta["fingerprint"]["layers"] == LAYERS


def test_another_tokenizer_or_template_is_another_target(tmp_path: Path) -> None:
    """The same target under another name is the same; weights and config: see test_fingerprint.py."""
    path = save_target(tmp_path / "target")
    save_exit(tmp_path / "drafter", path, 2)
    moved, tokenizer = path.rename(tmp_path / "moved"), byte_tokenizer()
    from_pretrained(tmp_path / "drafter", load_config(str(moved)), fingerprint(moved), dtype=torch.float32)
    tokenizer.add_tokens(["new"])
    for other, named in ((byte_tokenizer(chat_template="{{ messages }}"), "chat_template"), (tokenizer, "tokenizer")):
        other.save_pretrained(moved)
        with pytest.raises(UserError, match=f"{named}: drafter .*, target "):
            from_pretrained(tmp_path / "drafter", load_config(str(moved)), fingerprint(moved), dtype=torch.float32)


WRONG: dict[str, tuple[object, str]] = {  # what is hand-edited, and what is said of it where nothing is sealed
    "kind": ("small_lm", "a 'small_lm' drafter"),
    "own_head": (False, "tensors do not fit"),
    "dtype": ("float16", "tensors do not fit"),
    "exit_depth": (4000, "exit_depth=4000: expected 1, as it has layers"),
    "parallel": (3, "tensors do not fit"),
    "draft_vocabulary": (7, "expected 7 ascending token ids"),
    "trained_on": ({}, ""),
    "fingerprint": ({"vocab_size": 261}, "vocab_size: drafter 261, target 260"),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_description_that_was_edited_is_refused(tmp_path: Path, field: str) -> None:
    """By its seal; one that was sealed anew, where it does not fit weights or target, before anything is built."""
    path, folder = save_target(tmp_path / "target"), tmp_path / "drafter"
    save_exit(folder, path, 2)
    values, (value, message) = json.loads((folder / META_FILE).read_text()), WRONG[field]
    edited = {**values, field: values[field] | value if isinstance(value, dict) and value else value}
    for sealed, said in ((values["sealed"], "altered after it was written"), (digest_of_meta(edited), message)):
        (folder / META_FILE).write_text(json.dumps({**edited, "sealed": sealed}))
        if said:
            refusal(said, from_pretrained, folder, load_config(str(path)), fingerprint(path), dtype=torch.float32)
    for harmless in ({"training": {"x": 1}}, {"made_with": {}}):
        (folder / META_FILE).write_text(json.dumps({**values, **harmless}))
        from_pretrained(folder, load_config(str(path)), fingerprint(path), dtype=torch.float32)
    for huge in ({"exit_depth": 10**6}, {"parallel": 10**9}, {"dtype": "evil"}):
        (folder / META_FILE).write_text(json.dumps({**values, **huge}))
        refusal("drafter.json: damaged drafter description .*: expected", read_meta, folder)


TEXT = torch.tensor(random_prompt(40))


def save_another(path: Path, where: Path, exit_layer: int = 2, **shape: Any) -> EarlyExit:
    """An exit whose every parameter is another than its target's, in directory `where`."""
    model = open_target(str(path)).layers(dtype=torch.float32)
    drafter = EarlyExit(model, exit_layer, **{"own_head": True, **shape}).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in drafter.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    save_pretrained(where, drafter, fingerprint(path), {}, torch.float32)
    return drafter


def drafted(path: Path, drafter: EarlyExit) -> Tensor:
    """The logits [n, V] of `drafter` on `TEXT`, after the target's layers, as it drafts."""
    stack = open_target(str(path)).stack(dtype=torch.float32)
    positions = torch.arange(len(TEXT))
    visible = positions[:, None] >= positions
    masks = {}
    for window in {*stack.windows, drafter.window}:
        seen = visible if window is None else visible & (positions > positions[:, None] - window)
        masks[window] = additive_mask(seen, torch.float32)
    stack.reserve(len(TEXT))
    rotary = stack.rotary(positions[None])
    hidden = stack.run(stack.embed(TEXT[None], positions[None]), 0, drafter.exit_layer, rotary, masks)
    return drafter.logits(drafter.run(hidden, masks[drafter.window], rotary))[0]


def exported(where: Path, out_dir: Path, **options: Any) -> Any:
    export_drafter(ExportConfig(checkpoint=str(where), out_dir=str(out_dir), **options))
    return AutoModelForCausalLM.from_pretrained(out_dir).eval()


@torch.inference_mode()
def require_same(path: Path, drafter: EarlyExit, model: Any) -> None:
    wanted, found = drafted(path, drafter), model(TEXT[None]).logits[0]
    tokens = slice(None) if drafter.draft_tokens is None else drafter.draft_tokens
    torch.testing.assert_close(found[:, tokens], wanted[:, tokens], rtol=1e-4, atol=1e-4)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))  # no other token is drafted


@pytest.mark.parametrize("family", typical_where(TYPICAL.__contains__, quick_where("llama".__eq__, FAMILIES)))
def test_of_every_family(family: str, tmp_path: Path) -> None:
    target = save_family(tmp_path / "target", family)
    drafter = save_another(target, tmp_path / "exit")
    if family == "diffllama":  # a weight of its attention is computed from the layer's number
        refusal("depends on its number", exported, tmp_path / "exit", tmp_path / "out")
        assert not (tmp_path / "out/config.json").exists()
        return
    require_same(target, drafter, exported(tmp_path / "exit", tmp_path / "out"))


@pytest.mark.parametrize(
    "shape",
    [
        {"own_head": False},
        {"own_layer": False},
        {"depth": 2},
        {"draft_tokens": torch.arange(3, VOCABULARY, 2)},
        {"own_head": False, "draft_tokens": torch.arange(3, VOCABULARY, 2)},
    ],
    ids=["shared head", "no layer", "two layers", "own rows", "the target's rows"],
)
@pytest.mark.parametrize("tied", [False, True])
def test_of_every_shape(shape: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", tied=tied)
    drafter = save_another(target, tmp_path / "exit", **shape)
    if drafter.head is None:
        drafter.use_head(open_target(str(target)).layers(dtype=torch.float32).get_output_embeddings())
    model = exported(tmp_path / "exit", tmp_path / "out")
    require_same(target, drafter, model)
    assert model.config.num_hidden_layers == 2 + shape.get("depth", 1) * shape.get("own_layer", True)
    tokenizers = [AutoTokenizer.from_pretrained(place) for place in (target, tmp_path / "out")]
    assert tokenizers[0]("a text")["input_ids"] == tokenizers[1]("a text")["input_ids"]
    assert '"method": "draft_model"' in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("fault", ["decoder_layers", "final_norm", "_set_head"])
def test_a_part_that_stays_the_targets_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    drafter = save_another(target, tmp_path / "exit")
    faults: dict[str, Callable[..., Any]] = {  # weights go into a copy, or nowhere
        "decoder_layers": lambda model: copy.deepcopy(model.model.layers),
        "final_norm": lambda model: copy.deepcopy(model.model.norm),
        "_set_head": lambda *_: None,
    }
    monkeypatch.setattr(exports, fault, faults[fault])
    model = exported(tmp_path / "exit", tmp_path / "out")
    with pytest.raises(AssertionError, match="not close"):
        require_same(target, drafter, model)


def test_transformers_drafts_with_it(tmp_path: Path) -> None:
    """Assisted generation gives the target's own text, and the exit's proposals are accepted as often as they agree."""
    path = save_target(tmp_path / "target")
    save_another(path, tmp_path / "exit")
    target, drafter = AutoModelForCausalLM.from_pretrained(path), exported(tmp_path / "exit", tmp_path / "out")
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(TEXT[None], **options)
    assert torch.equal(target.generate(TEXT[None], assistant_model=drafter, **options), plain)


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    path = save_target(tmp_path / "target")
    save_another(path, tmp_path / "exit")
    given = ExportConfig(checkpoint=str(tmp_path / "exit"), out_dir=str(tmp_path / "out"))
    exported(tmp_path / "exit", tmp_path / "out", dtype="bfloat16")
    refusal("out: holds a model already; resume=true replaces it", export_drafter, given)
    export_drafter(replace(given, resume=True))
    with pytest.raises(UserError, match="a small LM is an ordinary causal LM"):
        export_drafter(replace(given, checkpoint=str(path), out_dir=str(tmp_path / "other")))
    save_another(path, tmp_path / "exit", parallel=3)
    refusal("drafts 3 tokens in one pass: no engine runs it", export_drafter, replace(given, resume=True))
    other = save_target(tmp_path / "another", seed=1)
    with pytest.raises(UserError, match="trained for another target"):
        export_drafter(replace(given, target=str(other), out_dir=str(tmp_path / "other")))
