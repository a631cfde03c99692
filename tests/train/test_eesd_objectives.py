"""What an early exit learns from: every objective, by the whole target or its cached top-k; what is then known of τ."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import default_collate

from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.early_exit.checkpoint import WEIGHTS_FILE
from outrider.draft_models.early_exit.model import exit_layers
from outrider.draft_models.losses import DIVERGENCES, IGNORE
from outrider.draft_models.targets.open_target import OpenTarget, open_target
from outrider.train.eesd import make_evaluation, train_early_exit
from outrider.train.parts.top_k_rows import load_top_k_rows
from tests.tiers import quick_where, typical_where
from tests.tiny import LAYERS, VOCABULARY, byte_tokenizer, save_target
from tests.train.jobs import FIT, by_document, distilling, exit_student, save_responses

K = 5


@pytest.fixture
def opened(target: Path) -> OpenTarget:
    return open_target(str(target))


@torch.no_grad()
def own_logits(opened: OpenTarget, row: dict[str, Tensor], layers: list[int] | None) -> Tensor:
    """Of those layers of the target, by transformers' own forward of each document of a row [T] alone; [T, V]."""
    model = opened.layers(layers, dtype=torch.float32)
    model.set_attn_implementation("eager")
    found = torch.zeros(len(row["labels"]), VOCABULARY)
    for part, logits in by_document(model, row):
        found[part] = logits
    return found


CASES = list(itertools.product(DIVERGENCES, ("online", "cached")))
TYPICAL = {("kl_tv", "cached"), ("forward_kl", "online"), ("acceptance", "online")}  # values: the test above


@pytest.mark.parametrize(
    ("objective", "teacher"),
    typical_where(TYPICAL.__contains__, quick_where(lambda case: case == ("kl_tv", "cached"), CASES)),
)
def test_every_objective_makes_the_drafter_like_the_target(tmp_path: Path, objective: str, teacher: str) -> None:
    """On the text that it learns: its loss falls, and a draft is longer than the untrained drafter's.

    A random target's answers to other text are other ones, so there the same training may make it worse. The target is
    sure, so that its top-k is most of its distribution.
    """
    path = save_target(tmp_path / "target", kv_heads=2, peak=8.0)
    opened, data = open_target(str(path)), save_responses(path, tmp_path / "responses")
    options = {"objective": objective, "teacher": teacher}
    run = distilling(path, data, tmp_path / "out", **options, fit=replace(FIT, steps=24, lr=5e-3, save_every=None))
    load, layers = (load_rows, None) if teacher == "online" else (load_top_k_rows, exit_layers(opened.config, 2))
    rows = load(data, opened.tokenizer, 64, "train")
    student = exit_student(opened.layers(layers, dtype=torch.float32), 2, **options)
    evaluate = make_evaluation(run, opened, rows, student)

    @torch.no_grad()
    def measured() -> tuple[float, float]:
        loss = student(**default_collate([rows[i] for i in range(len(rows))]))["loss_sum"]
        return loss.item(), evaluate(0)["tau_analytic"]

    loss, tau = measured()
    train_early_exit(run)
    student.drafter.load_state_dict(load_file(tmp_path / "out" / WEIGHTS_FILE))
    trained_loss, trained_tau = measured()
    assert trained_loss < 0.9 * loss
    assert 1 < tau < 0.9 * trained_tau <= 4.5


def windows_mean(rows: list[dict[str, Tensor]], accepted: list[Tensor]) -> float:
    """1 + α₁ + α₁α₂ + … over the four positions from each on, where all are supervised and of one document."""
    found = []
    for row, alpha in zip(rows, accepted, strict=True):
        labels, documents = row["labels"].tolist(), row["documents"].tolist()
        for start in range(len(labels) - 3):
            places = range(start, start + 4)
            if IGNORE in [labels[i] for i in places] or len({documents[i] for i in places}) > 1:
                continue
            survives, tokens = 1.0, 1.0
            for i in places:
                survives *= alpha[i].item()
                tokens += survives
            found.append(tokens)
    return sum(found) / len(found)


def test_the_analytic_tau_uses_the_best_distribution_available(
    tmp_path: Path, opened: OpenTarget, corpus: DataConfig
) -> None:
    data = save_responses(Path(opened.source), tmp_path / "responses")
    text = load_rows(corpus, opened.tokenizer, 64, "heldout", max_rows=4)
    known = load_top_k_rows(data, byte_tokenizer(), 64, "heldout", max_rows=4)
    rows = {False: [text[i] for i in range(len(text))], True: [known[i] for i in range(len(known))]}
    exact, least = {}, []
    for cached, found in rows.items():
        p, q = ([own_logits(opened, row, layers).softmax(-1) for row in found] for layers in (None, [0, 1, LAYERS - 1]))
        exact[cached] = windows_mean(found, [torch.minimum(*pair).sum(-1) for pair in zip(p, q, strict=True)])
        if cached:
            least = [
                torch.minimum(row["top_logprobs"].exp(), one.gather(1, row["top_ids"])).sum(-1)
                for row, one in zip(found, q, strict=True)
            ]
    bound = windows_mean(rows[True], least)
    assert bound < exact[True] - 0.01
    for objective, teacher, prompts, expected in (
        ("forward_kl", "online", 0, exact[False]),
        ("kl_tv", "online", 2, exact[False]),
        ("cross_entropy", "online", 2, exact[False]),
        ("cross_entropy", "online", 0, None),
        ("kl_tv", "cached", 2, exact[True]),
        ("kl_tv", "cached", 0, bound),
    ):
        cached = teacher == "cached"
        run = distilling(
            Path(opened.source), data if cached else corpus, tmp_path / "out", objective=objective, teacher=teacher,
            decode_prompts=prompts, decode_tokens=8, eval_batch_rows=3,
        )  # fmt: skip
        layers = exit_layers(opened.config, 2) if cached or objective == "cross_entropy" else None
        model = opened.layers(layers, dtype=torch.float32)
        student = exit_student(model, 2, objective=objective, teacher=teacher)
        metrics = make_evaluation(run, opened, known if cached else text, student)(1)
        assert metrics.get("tau_analytic") == (None if expected is None else pytest.approx(expected, rel=2e-3))


@pytest.mark.parametrize("parallel", [0, 2])
def test_an_exit_that_nothing_decoded_with_has_the_tau_of_its_right_guesses(
    tmp_path: Path, opened: OpenTarget, corpus: DataConfig, parallel: int
) -> None:
    """Of a text in which it guesses two of three tokens."""
    text, rows = load_rows(corpus, opened.tokenizer, 64, "heldout", max_rows=4), []
    for row in (text[i] for i in range(len(text))):
        guesses = own_logits(opened, row, [0, 1, LAYERS - 1]).argmax(-1)
        right = (row["labels"] != IGNORE) & (torch.arange(64) % 3 > 0)
        rows.append({**row, "labels": torch.where(right, guesses, row["labels"])})
    shares = [(own_logits(opened, row, [0, 1, LAYERS - 1]).argmax(-1) == row["labels"]).float() for row in rows]
    assert 1.2 < (expected := windows_mean(rows, shares)) < 4
    run = distilling(Path(opened.source), corpus, tmp_path / "out", objective="cross_entropy", parallel=parallel)
    student = exit_student(opened.layers(exit_layers(opened.config, 2), dtype=torch.float32), 2, parallel=parallel)
    metrics = make_evaluation(run, opened, rows, student)(1)
    assert metrics["tau_text"] == pytest.approx(expected)
    assert "tau_analytic" not in metrics
