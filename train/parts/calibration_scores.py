"""Scores of a calibration head on held-out text, per token and for whole drafts, and its temperatures.

Temperatures calibrate the product of a draft's conditionals: the probability that all its tokens so far are accepted.
Conditionals that are each slightly overconfident give a product that is far too confident. So the temperature of
position i is fitted for the product up to i, with the earlier temperatures fixed.
"""

import io
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from outrider.draft_models.calibration_head import POSITIONS, CalibrationHead
from outrider.train.core.training import Batch

CANDIDATES = torch.linspace(-1.5, 1.5, 121).exp()  # temperatures, including 1
FEWEST = 100  # rounds needed to fit a position's temperature; only rounds with all earlier tokens accepted count
BINS = 10  # of predicted probability


class Rounds(NamedTuple):
    """Drafts, one per row. logits, exists [r, d]: the head's logit of every token, and whether the token exists.
    accepted [r]: the number of accepted tokens."""

    logits: Tensor
    exists: Tensor
    accepted: Tensor

    def part(self, rows: slice) -> "Rounds":
        return Rounds(*(field[rows] for field in self))


def rounds_of(logits: Tensor, position: Tensor, label: Tensor) -> Rounds:
    """Rounds from tokens [n] in the order of drafting: position 1 begins a round. label: 1 if accepted.

    Example: the positions 1 2 3 1 2 with the labels 1 1 0 1 1 are two rounds, with 2 accepted tokens each.
    """
    round_index = (position == 1).cumsum(0) - 1
    shape = int(round_index[-1]) + 1, int(position.max())
    grid, exists = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    grid[round_index, position - 1], exists[round_index, position - 1] = logits.float(), True
    return Rounds(grid, exists, torch.zeros(shape[0]).index_add_(0, round_index, label.float()))


def fit_temperatures(rounds: Rounds) -> Tensor:
    """T [POSITIONS], fitted in order: T_i minimises the log loss of Π_{j≤i} sigmoid(z_j / T_j), z the head's logits.

    T_i is 1 if too few rounds have i − 1 accepted tokens. Positions beyond `POSITIONS` share the last temperature.
    """
    temperatures, survival = torch.ones(POSITIONS), torch.ones(len(rounds.accepted))
    for index in range(min(POSITIONS, rounds.logits.shape[1])):
        exists = rounds.exists[:, index]
        right = (rounds.accepted > index).float()  # [r]: all tokens so far are accepted
        if (exists & (rounds.accepted >= index)).sum() >= FEWEST:
            products = survival * (rounds.logits[:, index] / CANDIDATES[:, None]).sigmoid()  # [candidates, r]
            losses = [F.binary_cross_entropy(product[exists], right[exists]) for product in products]
            temperatures[index] = CANDIDATES[int(torch.stack(losses).argmin())]
        survival = survival * (rounds.logits[:, index] / temperatures[index]).sigmoid()
    return temperatures


def log_loss(rounds: Rounds, temperatures: Tensor) -> float:
    """The log loss of the products up to every token of every round."""
    return float(F.binary_cross_entropy(*survival_products(rounds, temperatures)))


def survival_products(rounds: Rounds, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """The products [m] up to every token of every round, and whether all these tokens were accepted [m]."""
    positions = torch.arange(rounds.logits.shape[1])
    probabilities = (rounds.logits / temperatures[positions.clamp(max=POSITIONS - 1)]).sigmoid()
    right = (rounds.accepted[:, None] > positions).float()
    return probabilities.cumprod(1)[rounds.exists], right[rounds.exists]


class Tempering(TypedDict):
    """The calibration error of drafts' products without and with temperatures, and whether the head keeps them."""

    rounds: int
    ece_before: float
    ece_after: float
    temperature: list[float]
    kept: bool


class PredictorScore(TypedDict):
    """The scores of one predictor. reliability: see `reliability_curve`."""

    brier: float
    ece: float
    reliability: list[dict[str, float]]


class HeadScores(TypedDict):
    """The scores of the head and its baselines, by name, on held-out tokens. accepted: the share of accepted tokens."""

    tokens: int
    accepted: float
    predictors: dict[str, PredictorScore]


@torch.no_grad()
def predict_acceptance(head: CalibrationHead, captured: Batch) -> Tensor:
    """The head's probabilities [n]."""
    return logits_of(head, captured).sigmoid()


def logits_of(head: CalibrationHead, captured: Batch) -> Tensor:
    """The head's logits [n]."""
    names = ("target_hidden", "draft_hidden", "position")
    return head(*(captured[name] for name in names), captured["confidence"].log())


@torch.no_grad()
def temper_head(head: CalibrationHead, heldout: Batch, *, keep: bool = True) -> Tempering:
    """Fit temperatures of `head` on the first half of the rounds of `heldout`; keep them if they improve the second.
    keep: false for the paper's head, which has none.

    Returns the scores on the second half. heldout: whole rounds, from `capture`.
    """
    rounds = rounds_of(logits_of(head, heldout), heldout["position"], heldout["label"])
    half = len(rounds.accepted) // 2
    temperatures, tested = fit_temperatures(rounds.part(slice(half))), rounds.part(slice(half, None))
    ones = torch.ones_like(temperatures)
    improves = keep and log_loss(tested, temperatures) < log_loss(tested, ones)
    curves = (reliability_curve(*survival_products(tested, scales)) for scales in (ones, temperatures))
    error_before, error_after = map(expected_calibration_error, curves)
    head.temperature.copy_(temperatures if improves else ones)
    return {
        "rounds": len(tested.accepted),
        "ece_before": error_before,
        "ece_after": error_after,
        "temperature": [round(value, 4) for value in temperatures.tolist()],
        "kept": improves,
    }


def rounds_of_later_half(captured: Batch) -> Batch:
    """The rounds of `captured` that `temper_head` did not fit temperatures on."""
    row = (captured["position"] == 1).cumsum(0) - 1
    is_later = row >= (int(row[-1]) + 1) // 2
    return {name: value[is_later] for name, value in captured.items()}


def brier_score(predicted: Tensor, label: Tensor) -> float:
    """Mean squared difference of predicted probability and outcome; 0 is a perfect prediction."""
    return float((predicted - label).square().mean())


def reliability_curve(predicted: Tensor, label: Tensor) -> list[dict[str, float]]:
    """For `BINS` equal bins of predicted probability: mean prediction, mean outcome, number of tokens."""
    bin_index = (predicted * BINS).long().clamp(0, BINS - 1)
    bins = []
    for index in range(BINS):
        in_bin = bin_index == index
        if in_bin.any():
            means = {"predicted": float(predicted[in_bin].mean()), "observed": float(label[in_bin].mean())}
            bins.append({**means, "count": int(in_bin.sum())})
    return bins


def expected_calibration_error(curve: Sequence[dict[str, float]]) -> float:
    """The ECE: |predicted − observed| of each bin, weighted by its share of the tokens."""
    total = sum(row["count"] for row in curve)
    return sum(abs(row["predicted"] - row["observed"]) * row["count"] for row in curve) / total


def score_head(head: CalibrationHead, train: Batch, heldout: Batch) -> HeadScores:
    """Brier score, ECE and reliability curve on held-out tokens: of the head, a constant, and the draft's own q."""
    label = heldout["label"]
    predictions = {
        "head": predict_acceptance(head, heldout),
        "constant": torch.full_like(label, float(train["label"].mean())),
        "confidence": heldout["confidence"],
    }
    score_of = dict[str, PredictorScore]()
    for name, predicted in predictions.items():
        curve = reliability_curve(predicted, label)
        score_of[name] = {
            "brier": brier_score(predicted, label),
            "ece": expected_calibration_error(curve),
            "reliability": curve,
        }
    return {"tokens": len(label), "accepted": float(label.mean()), "predictors": score_of}


def plot_reliability(scores: HeadScores) -> bytes:
    """Predicted against observed acceptance, as a PNG; marker area ∝ tokens."""
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="black", linewidth=1, linestyle="--")
    for index, (name, row) in enumerate(scores["predictors"].items()):
        curve = row["reliability"]
        x, y = [point["predicted"] for point in curve], [point["observed"] for point in curve]
        label = f"{name}: Brier {row['brier']:.3f}, ECE {row['ece']:.3f}"
        axes.plot(x, y, color=f"C{index}", label=label)
        axes.scatter(x, y, s=[200 * p["count"] / scores["tokens"] + 8 for p in curve], color=f"C{index}")
    axes.set(xlabel="predicted", ylabel="accepted by the target", xlim=(0, 1), ylim=(0, 1))
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    return image.getvalue()
