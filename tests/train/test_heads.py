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
from outrider.train.finetune_drafter import SmallLMStudent
from outrider.train.parts.heldout import HeldOutText
from outrider.train.parts.on_policy import OnPolicy
from tests.families import LAYERS, save_family
from tests.tiers import quick_where
from tests.train.jobs import exit_student
from tests.train.test_small_lm_student import batch, on_own_samples

SATURATED = {"final_logit_softcapping": 0.01}  # most logits are the cap, and the first of them is the choice
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "bias": ("phi", {}),
    "cap": ("gemma2", {}),
    "cap that most logits reach": ("gemma2", SATURATED),
    "divisor": ("granite", {}),
    "factor": ("cohere", {}),
}
QUICK = ("bias", "cap that most logits reach")


@pytest.fixture(scope="module", params=quick_where(lambda name: name in QUICK, HEADS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenTarget:
    family, changes = HEADS[request.param]
    path = save_family(tmp_path_factory.mktemp("target"), family, **changes)
    return open_target(str(path))


def own_logits(model: Any) -> Tensor:
    """[24, V] of a row of two documents, by the forward of `model` over each document alone."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.cat([model(part).logits[0] for part in batch(1, 24)["input_ids"].split(12, dim=1)])


def whole(target: OpenTarget) -> Any:
    return AutoModelForCausalLM.from_pretrained(target.source, dtype=torch.float32).eval()


def test_what_is_watched_are_the_models_choices(target: OpenTarget) -> None:
    rows = batch(1, 24)
    few = target.layers(exit_layers(target.config, 2), dtype=torch.float32)
    student, stack, keep = exit_student(few, 2), target.stack(dtype=torch.float32), rows["labels"] != IGNORE
    (choices,) = HeldOutText([{name: value[0] for name, value in rows.items()}], 1, stack).choices
    assert torch.equal(choices != IGNORE, keep)
    watched = student.drafter.logits_after_norm(student.run_supervised(rows)[0]).argmax(-1)
    for found, model in ((watched, few), (choices[keep], whole(target))):
        assert torch.equal(found, own_logits(model).argmax(-1)[keep[0]])


def test_a_small_lm_learns_from_its_own_samples(target: OpenTarget) -> None:
    """As drafter and as teacher; written out with whole forwards."""
    rows, policy = batch(1, 24), OnPolicy(1.0, 6, 5, frozenset())
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
    student = exit_student(model, 2, train_layer=False, objective="forward_kl")
    inputs = {name: value for name, value in batch(1, 24).items() if name != "labels"}
    for found, expected in zip(student.train().hidden(**inputs), student.eval().hidden(**inputs), strict=True):
        assert torch.equal(found, expected)
    assert student.train().drafter.training
