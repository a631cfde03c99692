"""An exported early exit is an ordinary causal LM, which computes the drafter's very logits."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from draft_models.early_exit import checkpoint as exports
from draft_models.early_exit.checkpoint import save_pretrained
from draft_models.early_exit.model import EarlyExit
from draft_models.targets.attention import additive
from draft_models.targets.open_target import open_target
from outrider.errors import UserError
from tests.families import FAMILIES, TYPICAL, save_family
from tests.tiers import quick_where, typical_where
from tests.tiny import VOCABULARY, random_prompt, save_target
from train.exporting import export_drafter
from train.settings.export import ExportConfig

TEXT = torch.tensor(random_prompt(40))


def save_exit(path: Path, where: Path, exit_layer: int = 2, **shape: Any) -> EarlyExit:
    """An exit whose every parameter is another than its target's, in directory `where`."""
    target = open_target(str(path))
    model = target.layers(dtype=torch.float32)
    drafter = EarlyExit.from_model(model, exit_layer, **{"own_head": True, **shape}).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in drafter.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    save_pretrained(where, drafter, target.fingerprint, {}, torch.float32)
    return drafter


def drafted(path: Path, drafter: EarlyExit) -> Tensor:
    """The logits [n, V] of `drafter` on `TEXT`, after the target's layers, as it drafts."""
    stack = open_target(str(path)).stack(dtype=torch.float32)
    positions = torch.arange(len(TEXT))
    visible = positions[:, None] >= positions
    masks = {}
    for window in {*stack.windows, drafter.window}:
        seen = visible if window is None else visible & (positions > positions[:, None] - window)
        masks[window] = additive(seen, torch.float32)
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
    drafter = save_exit(target, tmp_path / "exit")
    if family == "diffllama":  # a weight of its attention is computed from the layer's number
        with pytest.raises(UserError, match="depends on its number"):
            exported(tmp_path / "exit", tmp_path / "out")
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
    drafter = save_exit(target, tmp_path / "exit", **shape)
    if drafter.head is None:
        drafter.use_head(open_target(str(target)).layers(dtype=torch.float32).get_output_embeddings())
    model = exported(tmp_path / "exit", tmp_path / "out")
    require_same(target, drafter, model)
    assert model.config.num_hidden_layers == 2 + shape.get("depth", 1) * shape.get("own_layer", True)
    tokenizers = [AutoTokenizer.from_pretrained(place) for place in (target, tmp_path / "out")]
    assert tokenizers[0]("a text")["input_ids"] == tokenizers[1]("a text")["input_ids"]
    assert '"method": "draft_model"' in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("fault", ["decoder_layers", "final_norm", "_put_head"])
def test_a_part_that_stays_the_targets_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    drafter = save_exit(target, tmp_path / "exit")
    faults: dict[str, Callable[..., Any]] = {  # weights go into a copy, or nowhere
        "decoder_layers": lambda model: copy.deepcopy(model.model.layers),
        "final_norm": lambda model: copy.deepcopy(model.model.norm),
        "_put_head": lambda *_: None,
    }
    monkeypatch.setattr(exports, fault, faults[fault])
    model = exported(tmp_path / "exit", tmp_path / "out")
    with pytest.raises(AssertionError, match="not close"):
        require_same(target, drafter, model)


def test_transformers_drafts_with_it(tmp_path: Path) -> None:
    """Assisted generation gives the target's own text, and the exit's proposals are accepted as often as they agree."""
    path = save_target(tmp_path / "target")
    save_exit(path, tmp_path / "exit")
    target, drafter = AutoModelForCausalLM.from_pretrained(path), exported(tmp_path / "exit", tmp_path / "out")
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(TEXT[None], **options)
    assert torch.equal(target.generate(TEXT[None], assistant_model=drafter, **options), plain)


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    path = save_target(tmp_path / "target")
    save_exit(path, tmp_path / "exit")
    given = ExportConfig(checkpoint=str(tmp_path / "exit"), out_dir=str(tmp_path / "out"))
    exported(tmp_path / "exit", tmp_path / "out", dtype="bfloat16")
    with pytest.raises(UserError, match="out: holds a model already; resume=true replaces it"):
        export_drafter(given)
    export_drafter(replace(given, resume=True))
    with pytest.raises(UserError, match="a small LM is an ordinary causal LM"):
        export_drafter(replace(given, checkpoint=str(path), out_dir=str(tmp_path / "other")))
    other = save_target(tmp_path / "another", seed=1)
    with pytest.raises(UserError, match="trained for another target"):
        export_drafter(replace(given, target=str(other), out_dir=str(tmp_path / "other")))
