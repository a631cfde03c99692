"""How good a calibration head is, token by token and for whole drafts, on held-out text."""

import io
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from draft_models.calibration.head import CalibrationHead
from train.sequential_temperature import describe, fit_temperatures, log_loss, rounds_of, survivals

BINS = 10
Batch = dict[str, Tensor]


@torch.no_grad()
def predict(head: CalibrationHead, captured: Batch) -> Tensor:
    """The head's probabilities [n]."""
    return logits_of(head, captured).sigmoid()


def logits_of(head: CalibrationHead, captured: Batch) -> Tensor:
    """The head's logits [n]."""
    names = ("target_hidden", "draft_hidden", "position")
    return head(*(captured[name] for name in names), captured["confidence"].log())


@torch.no_grad()
def temper(head: CalibrationHead, heldout: Batch) -> dict[str, Any]:
    """Give `head` temperatures, fitted on the first half of the rounds of `heldout`, if they are better on the other.
    What is said is of the other half.

    heldout: whole rounds, as `capture` leaves them.
    """
    rounds = rounds_of(logits_of(head, heldout), heldout["position"], heldout["label"])
    half = len(rounds.accepted) // 2
    temperatures, rest = fit_temperatures(rounds.part(slice(half))), rounds.part(slice(half, None))
    none = torch.ones_like(temperatures)
    kept = log_loss(rest, temperatures) < log_loss(rest, none)
    before, after = (expected_calibration_error(reliability(*survivals(rest, each))) for each in (none, temperatures))
    head.temperature.copy_(temperatures if kept else none)
    return describe(temperatures, kept, before, after, rest)


def later_half(captured: Batch) -> Batch:
    """The rounds of `captured` on which `temper` has fitted nothing."""
    row = (captured["position"] == 1).cumsum(0) - 1
    kept = row >= (int(row[-1]) + 1) // 2
    return {name: value[kept] for name, value in captured.items()}


def brier(predicted: Tensor, label: Tensor) -> float:
    """Mean squared difference of predicted probability and outcome; 0 is a perfect prophet."""
    return float((predicted - label).square().mean())


def reliability(predicted: Tensor, label: Tensor) -> list[dict[str, float]]:
    """For `BINS` equal bins of predicted probability: mean prediction, share that came true, number of tokens."""
    place = (predicted * BINS).long().clamp(0, BINS - 1)
    rows = []
    for index in range(BINS):
        inside = place == index
        if inside.any():
            means = {"predicted": float(predicted[inside].mean()), "observed": float(label[inside].mean())}
            rows.append({**means, "count": int(inside.sum())})
    return rows


def expected_calibration_error(curve: Sequence[dict[str, float]]) -> float:
    """ECE: |predicted − observed| of each bin, weighted by its share of the tokens."""
    total = sum(row["count"] for row in curve)
    return sum(abs(row["predicted"] - row["observed"]) * row["count"] for row in curve) / total


def judge(head: CalibrationHead, train: Batch, heldout: Batch) -> dict[str, Any]:
    """Brier score, ECE and reliability curve on held-out tokens: of the head, a constant, and the draft's own q."""
    label = heldout["label"]
    predictions = {
        "head": predict(head, heldout),
        "constant": torch.full_like(label, float(train["label"].mean())),
        "confidence": heldout["confidence"],
    }
    rows = {}
    for name, predicted in predictions.items():
        curve = reliability(predicted, label)
        rows[name] = {"brier": brier(predicted, label), "ece": expected_calibration_error(curve), "reliability": curve}
    return {"tokens": len(label), "accepted": float(label.mean()), "predictors": rows}


def plot_reliability(judged: dict[str, Any]) -> bytes:
    """Predicted against observed acceptance, as a PNG; marker area ~ tokens."""
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="black", linewidth=1, linestyle="--")
    for index, (name, row) in enumerate(judged["predictors"].items()):
        curve = row["reliability"]
        x, y = [point["predicted"] for point in curve], [point["observed"] for point in curve]
        label = f"{name}: Brier {row['brier']:.3f}, ECE {row['ece']:.3f}"
        axes.plot(x, y, color=f"C{index}", label=label)
        axes.scatter(x, y, s=[200 * p["count"] / judged["tokens"] + 8 for p in curve], color=f"C{index}")
    axes.set(xlabel="predicted", ylabel="accepted by the target", xlim=(0, 1), ylim=(0, 1))
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    return image.getvalue()
