"""Blocks learnt after many positions at once are those that a loop drafts one after the other: values and draws."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.draft_models.dflash import packed
from outrider.draft_models.dflash.checkpoint import open_drafter
from outrider.draft_models.losses import IGNORE
from outrider.train import dspark
from outrider.train.dspark import DSparkStudent
from outrider.train.parts.steps import loss_mask_per_step
from outrider.train.settings.fit import FitConfig
from tests.block_drafters import (
    DIALECTS,
    LAYERS,
    TARGET,
    VOCABULARY,
    WIDTH,
    Facts,
    drafter_weights,
    reference,
    slot_logits,
    write_drafter,
)
from tests.faults import plant
from tests.tiny import open_stack, save_target

DSPARK, DFLASH = DIALECTS["speculators, dspark"], DIALECTS["speculators"]
DFLASH = replace(
    DFLASH, embeds=False, sees=DSPARK.sees,
    config={**DFLASH.config, "transformer_layer_config": DSPARK.config["transformer_layer_config"]},
)  # fmt: skip
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 5, [0] * 9 + [1] * 1 + [-1] * 2])
OPTIONS = {"objective": "forward_kl", "position_weights": "decay", "step_decay": 0.8, "train_head": True}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., DSparkStudent]:
    folder = tmp_path_factory.mktemp("dspark")
    path = save_target(
        folder / "target", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, bos_token_id=0
    )
    _, stack = open_stack(path)

    def student(anchors: float = 1.0, facts: Facts = DSPARK) -> DSparkStudent:
        where = write_drafter(folder / f"rank {facts.rank}", facts, drafter_weights(facts))
        config: Any = SimpleNamespace(**OPTIONS, anchors=anchors, fit=FitConfig(steps=1, seed=4))
        return DSparkStudent(stack, open_drafter(where, stack.config).load(torch.float32), config)

    return student


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    """Two packed rows; one position within the first document has no label."""
    ids = torch.randint(VOCABULARY, DOCUMENTS.shape, generator=torch.Generator().manual_seed(2))
    begins = torch.tensor([[0] * 7 + [7] * 5, [0] * 9 + [9] + [10] * 2])
    inside = torch.nn.functional.pad(DOCUMENTS[:, 1:] == DOCUMENTS[:, :-1], (0, 1)) & (DOCUMENTS >= 0)
    labels = torch.where(inside, ids.roll(-1, 1), IGNORE)
    labels[0, 3] = IGNORE
    return {"input_ids": ids, "labels": labels, "positions": torch.arange(12) - begins, "documents": DOCUMENTS}


@torch.no_grad()
def errors(student: DSparkStudent, batch: dict[str, Tensor], facts: Facts = DSPARK) -> list[float]:
    """Of the logits of every prediction, against the reference, which runs one block after another."""
    ids, documents = batch["input_ids"], batch["documents"]
    aux = student.target_states(ids, batch["positions"], documents)[:, :, :-1]  # [B, T, k, H]
    mask = loss_mask_per_step(batch["labels"], documents, student.steps)
    predictions = student.unroll(ids, batch["positions"], documents, aux.flatten(2), mask)
    assert len(predictions.labels) == int(mask.sum()) > 30
    assert predictions.labels.tolist() == sorted(predictions.labels.tolist())
    states, matrix = student.product(predictions, ids)
    weights, embedding = drafter_weights(facts), student.stack.embed_tokens.weight.double()
    found = []
    for logits, label, slot in zip(
        states @ matrix.T, predictions.labels.tolist(), predictions.steps.tolist(), strict=True
    ):
        row, column = divmod(label, ids.shape[1])
        last = column - 1 - slot  # of the block's context
        first = int((documents[row] == documents[row, last]).nonzero()[0])
        hidden = reference(facts, weights, embedding, aux[row, first : last + 1].double(), int(ids[row, last + 1]))
        token = int(ids[row, column])
        expected = slot_logits(facts, weights, embedding, hidden, slot, token)
        found.append(float((logits - expected).abs().max()))
    return found


@pytest.mark.parametrize("facts", [DSPARK, DFLASH], ids=["dspark", "dflash"])
def test_blocks_of_a_text_are_those_of_a_loop(
    make: Callable[..., DSparkStudent], batch: dict[str, Tensor], facts: Facts
) -> None:
    student = make(facts=facts)
    assert student.steps == facts.block - (facts is DFLASH)
    assert max(errors(student, batch, facts)) < 1e-4


FAULTS: dict[str, tuple[Any, str, str, str]] = {
    "a block sees the feature of its own root": (
        DSparkStudent, "unroll", "(anchors % documents.shape[1])", "((anchors + 1) % documents.shape[1])"
    ),
    "blocks stand one position early": (dspark, "block_positions", "None] + 1 +", "None] +"),
    "a row sees the block of another anchor": (
        packed.PackedBlocks, "attend", "by_anchor.repeat", "by_anchor.roll(1, 1).repeat"
    ),
    "the Markov head is given the token two before": (
        DSparkStudent, "product", "[predictions.labels]", "[predictions.labels - 1]"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(
    make: Callable[..., DSparkStudent], batch: dict[str, Tensor], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, *FAULTS[fault])
    assert max(errors(make(), batch)) > 1e-2


def test_a_confidence_head_that_stays_behind_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config: Any = SimpleNamespace(start="s", seq_len=64, decode_tokens=8)
    stored = open_drafter(write_drafter(tmp_path, DSPARK, drafter_weights(DSPARK)), TARGET)
    dspark.reading_of(config, stored, SimpleNamespace(config=TARGET))  # type: ignore[arg-type]
    assert "start=s: its confidence head does not learn along" in capsys.readouterr().err


def test_drawn_blocks_teach_the_same_on_average(make: Callable[..., DSparkStudent], batch: dict[str, Tensor]) -> None:
    """A step's blocks depend on each row's content, and all parts of the drafter but the confidence head learn."""
    student, whole = make(anchors=0.5), make()
    with torch.no_grad():
        everything = float(whole(**batch)["loss_sum"])
        losses = []
        for step in range(200):
            student.begin_step(step)
            losses.append(float(student(**batch)["loss_sum"]))
    drawn = torch.tensor(losses)
    assert abs(drawn.mean() - everything) < 5 * drawn.std() / 200**0.5
    swapped = {name: values.flip(0) for name, values in batch.items()}
    with torch.no_grad():
        assert float(student(**swapped)["loss_sum"]) == pytest.approx(losses[-1], rel=1e-5)
    whole(**batch)["loss_sum"].backward()
    still = [name for name, part in whole.head.named_parameters() if part.grad is None or not part.grad.abs().sum()]
    assert still == [name for name, part in whole.head.named_parameters() if not part.requires_grad]
    assert all(name.startswith(("confidence_head", "embed_tokens")) for name in still)
