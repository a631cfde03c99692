"""What an MTP head learns at all positions at once equals drafting position by position: values and gradients."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.draft_models.losses import PLAIN
from outrider.draft_models.mtp.checkpoint import StoredMtp, arrange_tensors, open_mtp
from outrider.draft_models.targets.model_spec import LogitRule
from outrider.train.eagle3 import MtpStudent
from outrider.train.parts.head_student import score_batch
from outrider.train.settings.fit import FitConfig
from tests.draft_models.mtp.test_mtp_heads import config_of
from tests.mtp_heads import FAMILIES, VOCABULARY, head_weights, reference, stored_tensors, write_head
from tests.tiny import open_stack, save_target, shake_norms_and_biases
from tests.train.test_eagle3_student import OPTIONS, STEPS, Case, drafts, expected, with_rows

RULE = LogitRule(factor=0.5)  # of the target: the logits by its matrix are halved


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_target(tmp_path_factory.mktemp("models") / "target", kv_heads=2)
    shake_norms_and_biases(path)
    return path


def open_case(target: Path, folder: Path, spelling: str, changes: Mapping[str, Any] = {}, **options: Any) -> tuple[
    Case, StoredMtp
]:  # fmt: skip
    """The case of a head in this spelling. changes: of its reading."""
    family, (_, stack) = FAMILIES[spelling], open_stack(target)
    where = write_head(folder, spelling, stored_tensors(spelling, head_weights(family)))
    stored = open_mtp(where, config_of(family.architecture))
    stack.spec = replace(stack.spec, logits=RULE)
    head = stored.make(replace(stored.reading, **changes), stored.tensors(torch.float32))
    config: Any = SimpleNamespace(
        **OPTIONS | {"objective": "forward_kl", "keep": 1.0, **options}, fit=FitConfig(steps=1, seed=4)
    )
    shared, own_head = (stack.norm, stack.head.weight), "head" in family.on

    def logits_of(_: object, weights: dict[str, Tensor], embedding: Tensor, rows: Any) -> list[Tensor]:
        logits = reference(family, weights, embedding, *shared, rows)
        return logits if own_head else [RULE(row) for row in logits]

    facts = SimpleNamespace(taps=(4,), draft_tokens=tuple(range(VOCABULARY)))
    case = with_rows(target, MtpStudent(stack, head, config), facts, logits_of)
    return replace(case, logits=RULE(case.logits)), stored


def require_same(case: Case, stored: StoredMtp) -> None:
    """The loss and all gradients are those of the reference, whose gradients are arranged as the weights are."""
    spelling, student = stored.dialect, case.student
    weights = {role: weight.requires_grad_() for role, weight in head_weights(FAMILIES[spelling]).items()}
    slow = expected(case, student.objective, weights)
    slow.backward()
    loss = student(**case.batch)["loss_sum"]
    loss.backward()
    torch.testing.assert_close(loss, slow, rtol=1e-4, atol=1e-5)
    by_role = {role: torch.zeros_like(w) if w.grad is None else w.grad for role, w in weights.items()}
    in_file = stored_tensors(spelling, by_role, offset=0.0)
    gradients = {name: in_file[stored_name] for name, stored_name in stored.stored_names.items()}
    gradients = arrange_tensors(replace(stored.reading, norm_offset=False), gradients)
    trained = {name: parameter for name, parameter in student.head.named_parameters() if parameter.requires_grad}
    assert trained.keys() == gradients.keys() - {"embed_tokens.weight"}
    for name, parameter in trained.items():
        torch.testing.assert_close(
            parameter.grad, gradients[name], rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("spelling", "options"),
    [
        ("qwen", {"keep": 0.6}),
        ("mimo", {"objective": "cross_entropy"}),
        ("deepseek", {}),
        ("speculators", {"position_weights": "dpace"}),
    ],
)
def test_loss_and_gradients_are_those_of_drafts(
    target: Path, tmp_path: Path, spelling: str, options: dict[str, Any]
) -> None:
    """With gates, norms of 1 + weight, biases, own matrices and without the target's norm."""
    require_same(*open_case(target, tmp_path, spelling, **options))


FAULTS = {
    "the feedback before the norm": {"norm_output": False},
    "the target's state after its norm": {"target_norm": True},
    "the target's rule is left out": {},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if not FAULTS[fault]:
        monkeypatch.setattr(MtpStudent, "rule", PLAIN)
    with pytest.raises(AssertionError, match="Scalars are not close"):
        require_same(*open_case(target, tmp_path, "mimo", FAULTS[fault]))


def test_what_is_watched_is_of_drafts(target: Path, tmp_path: Path) -> None:
    """Also where the target computes in bfloat16, whose matrix the head shares."""
    case, _ = open_case(target, tmp_path, "mimo")
    _, accepted = score_batch(case.student, case.batch, STEPS)
    slow = torch.full_like(accepted, torch.nan)
    with torch.no_grad():
        for (b, start, step), logits in drafts(case, head_weights(FAMILIES["mimo"])).items():
            at = start + 1 + step
            if case.batch["labels"][b, at] >= 0:
                slow[b, at, step] = torch.minimum(case.logits[b, at].softmax(-1), logits.softmax(-1)).sum()
    torch.testing.assert_close(accepted, slow, equal_nan=True)
    case.student.stack.to(torch.bfloat16)
    _, rounded = score_batch(case.student, case.batch, STEPS)
    torch.testing.assert_close(rounded, accepted, rtol=0, atol=0.1, equal_nan=True)
