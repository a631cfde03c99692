"""Heads with a bias, and logits that are scaled, divided or capped: what is trained and watched equals own forwards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.draft_models.early_exit.model import exit_layers
from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.model_files import layer_stack
from outrider.draft_models.targets.open_target import OpenTarget, open_target
from outrider.train.parts.heldout import HeldOutText
from outrider.train.parts.on_policy import OnPolicy
from outrider.train.recipes.early_exit import EarlyExitStudent
from outrider.train.recipes.small_lm import SmallLMStudent
from tests.families import LAYERS, save_family
from tests.tiers import quick_where
from tests.tiny import random_prompt
from tests.train.test_small_lm_student import on_own_samples

SATURATED = {"final_logit_softcapping": 0.01}  # most logits are the cap, and the first of them is the choice
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "bias": ("phi", {}),
    "cap": ("gemma2", {}),
    "cap that most logits reach": ("gemma2", SATURATED),
    "divisor": ("granite", {}),
    "factor": ("cohere", {}),
}
QUICK = ("bias", "cap that most logits reach")
SPLIT = 14  # where the second document of a row begins


@pytest.fixture(scope="module", params=quick_where(lambda name: name in QUICK, HEADS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenTarget:
    family, changes = HEADS[request.param]
    path = save_family(tmp_path_factory.mktemp("target"), family, **changes)
    return open_target(str(path))


def batch() -> dict[str, Tensor]:
    """A row of two documents, every third position of it unsupervised."""
    ids = torch.tensor([random_prompt(24, seed=3)])
    labels = ids.roll(-1, 1).masked_fill(torch.arange(24) % 3 == 0, IGNORE)
    labels[:, [SPLIT - 1, -1]] = IGNORE
    positions = torch.cat([torch.arange(SPLIT), torch.arange(24 - SPLIT)])[None]
    return {"input_ids": ids, "labels": labels, "positions": positions, "documents": (torch.arange(24) >= SPLIT)[None]}


def own_logits(model: Any) -> Tensor:
    """[24, V] of `batch`, by the forward of `model` over each document alone."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.cat([model(part).logits[0] for part in batch()["input_ids"].split((SPLIT, 24 - SPLIT), dim=1)])


def whole(target: OpenTarget) -> Any:
    return AutoModelForCausalLM.from_pretrained(target.source, dtype=torch.float32).eval()


@pytest.mark.parametrize("distill", [False, True])
@pytest.mark.parametrize("train_head", [False, True])
def test_an_early_exit_learns_from_what_models_say(target: OpenTarget, train_head: bool, distill: bool) -> None:
    rows = batch()
    few = target.layers(exit_layers(target.config, 2), dtype=torch.float32)
    student = EarlyExitStudent(
        target.layers(dtype=torch.float32) if distill else target.layers([0, 1, LAYERS - 1], dtype=torch.float32),
        2,
        train_head=train_head,
        objective="forward_kl" if distill else "cross_entropy",
    )
    keep = rows["labels"][0] != IGNORE
    q, p = own_logits(few)[keep].log_softmax(-1), own_logits(whole(target))[keep].log_softmax(-1)
    expected = (p.exp() * (p - q)).sum() if distill else -q.gather(1, rows["labels"][0][keep][:, None]).sum()
    torch.testing.assert_close(student(**rows)["loss_sum"], expected, rtol=1e-4, atol=1e-4)


def test_what_is_watched_are_the_models_choices(target: OpenTarget) -> None:
    rows = batch()
    few = target.layers(exit_layers(target.config, 2), dtype=torch.float32)
    student = EarlyExitStudent(few, 2, train_head=True)
    stack = target.stack(dtype=torch.float32)
    (choices,) = HeldOutText([{name: value[0] for name, value in rows.items()}], 1, stack).choices
    for found, model in ((student.judged(rows)[0], few), (choices, whole(target))):
        expected = own_logits(model).argmax(-1)[None].masked_fill(rows["labels"] == IGNORE, IGNORE)
        assert torch.equal(found, expected)


def test_a_small_lm_learns_from_its_own_samples(target: OpenTarget) -> None:
    """As drafter and as teacher; written out with whole forwards."""
    rows, policy = batch(), OnPolicy(1.0, 6, 5, None)
    lm = target.layers([0, LAYERS - 1], dtype=torch.float32).requires_grad_(True)
    one = SmallLMStudent(lm, "reverse_kl", layer_stack(target.layers(dtype=torch.float32)), policy)
    one.begin_step(3)
    expected = on_own_samples(lm.eval(), whole(target), rows)
    one.train()
    for module in lm.modules():  # nothing drops out
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    torch.testing.assert_close(one(**rows)["loss_sum"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_what_is_frozen_does_not_drop_out(tmp_path: Path, family: str) -> None:
    """Their configs say dropout 0.1: neither what an early exit sits on nor what it learns from may have any."""
    opened = open_target(str(save_family(tmp_path, family)))
    model = opened.layers(dtype=torch.float32)
    student = EarlyExitStudent(model, 2, train_head=True, train_layer=False, objective="forward_kl")
    inputs = {name: value for name, value in batch().items() if name != "labels"}
    for found, expected in zip(student.train().hidden(**inputs), student.eval().hidden(**inputs), strict=True):
        assert torch.equal(found, expected)
    assert student.train().drafter.training
