"""Scores of a calibration head on held-out text, per token and for whole drafts, and its temperatures.

The head predicts of each drafted token the probability that the target accepts it if all tokens before it in the draft
are accepted. Temperatures calibrate the product of these conditionals: the probability that all tokens so far are
accepted. Conditionals that are each slightly overconfident give a product that is far too confident. So the temperature
of position i is fitted for the product up to i, with the earlier temperatures fixed.
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

TEMPERATURES = torch.linspace(-1.5, 1.5, 121).exp()  # the candidates, from 0.22 to 4.5, including 1
MIN_ROUNDS = 100  # rounds needed to fit a position's temperature; only rounds with all earlier tokens accepted count
BINS = 10  # of predicted probability


class Rounds(NamedTuple):
    """Drafts of r rounds, the longest of d tokens. logits, exists [r, d]: the head's logit of every token, and whether
    the draft has the token. accepted [r]: the number of accepted tokens."""

    logits: Tensor
    exists: Tensor
    accepted: Tensor

    def part(self, rows: slice) -> "Rounds":
        return Rounds(*(field[rows] for field in self))


def rounds_of(logits: Tensor, position: Tensor, label: Tensor) -> Rounds:
    """Rounds from tokens [n] in the order of drafting, by their positions in drafts: position 1 begins a round.

    logits: the head's. label: 1 if accepted.
    Example: the positions 1 2 3 1 2 with the labels 1 1 0 1 1 are two rounds, with 2 accepted tokens each.
    """
    round_indices = (position == 1).cumsum(0) - 1
    grid_shape = int(round_indices[-1]) + 1, int(position.max())
    logit_grid, exists = torch.zeros(grid_shape), torch.zeros(grid_shape, dtype=torch.bool)
    logit_grid[round_indices, position - 1], exists[round_indices, position - 1] = logits.float(), True
    return Rounds(logit_grid, exists, torch.zeros(grid_shape[0]).index_add_(0, round_indices, label.float()))


def fit_temperatures(rounds: Rounds) -> Tensor:
    """T [POSITIONS], fitted in order: T_i minimises the log loss of Π_{j≤i} sigmoid(z_j / T_j), z the head's logits.

    T_i is 1 if too few rounds have i − 1 accepted tokens. Positions beyond `POSITIONS` share the last temperature.
    """
    temperatures, survival_probs = torch.ones(POSITIONS), torch.ones(len(rounds.accepted))  # [POSITIONS], [r]
    for index in range(min(POSITIONS, rounds.logits.shape[1])):
        exists = rounds.exists[:, index]
        all_accepted = (rounds.accepted > index).float()  # [r]: all tokens so far are accepted
        if (exists & (rounds.accepted >= index)).sum() >= MIN_ROUNDS:
            products = survival_probs * (rounds.logits[:, index] / TEMPERATURES[:, None]).sigmoid()  # [candidates, r]
            losses = [F.binary_cross_entropy(probs[exists], all_accepted[exists]) for probs in products]
            temperatures[index] = TEMPERATURES[int(torch.stack(losses).argmin())]
        survival_probs = survival_probs * (rounds.logits[:, index] / temperatures[index]).sigmoid()
    return temperatures


def log_loss(rounds: Rounds, temperatures: Tensor) -> float:
    """The log loss of the products up to every token of every round."""
    return float(F.binary_cross_entropy(*survival_products(rounds, temperatures)))


def survival_products(rounds: Rounds, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """The products [m] up to every token of every round, and whether all these tokens were accepted [m]."""
    positions = torch.arange(rounds.logits.shape[1])
    accept_probs = (rounds.logits / temperatures[positions.clamp(max=POSITIONS - 1)]).sigmoid()
    all_accepted = (rounds.accepted[:, None] > positions).float()
    return accept_probs.cumprod(1)[rounds.exists], all_accepted[rounds.exists]


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
    """The head's probabilities [n] that tokens of `capture` are accepted."""
    return logits_of(head, captured).sigmoid()


def logits_of(head: CalibrationHead, captured_tokens: Batch) -> Tensor:
    """The head's logits [n]. captured_tokens: of `capture`; confidence is the draft's probability q of the token."""
    names = ("target_hidden", "draft_hidden", "position")
    return head(*(captured_tokens[name] for name in names), captured_tokens["confidence"].log())


@torch.no_grad()
def temper_head(head: CalibrationHead, heldout: Batch, *, keep: bool = True) -> Tempering:
    """Fit temperatures of `head` on the first half of the rounds of `heldout`; keep them if they improve the second.

    keep: false for the paper's head, which has none.
    Returns the scores on the second half. heldout: whole rounds, from `capture`.
    """
    rounds = rounds_of(logits_of(head, heldout), heldout["position"], heldout["label"])
    half_count = len(rounds.accepted) // 2
    temperatures, second_half = fit_temperatures(rounds.part(slice(half_count))), rounds.part(slice(half_count, None))
    unit_temps = torch.ones_like(temperatures)
    improves = keep and log_loss(second_half, temperatures) < log_loss(second_half, unit_temps)
    curves = (reliability_curve(*survival_products(second_half, scales)) for scales in (unit_temps, temperatures))
    error_before, error_after = map(expected_calibration_error, curves)
    head.temperature.copy_(temperatures if improves else unit_temps)
    rounded, count = [round(value, 4) for value in temperatures.tolist()], len(second_half.accepted)
    return Tempering(rounds=count, ece_before=error_before, ece_after=error_after, temperature=rounded, kept=improves)


def rounds_of_later_half(captured: Batch) -> Batch:
    """The rounds of `captured` that `temper_head` did not fit temperatures on."""
    round_indices = (captured["position"] == 1).cumsum(0) - 1
    is_later = round_indices >= (int(round_indices[-1]) + 1) // 2
    return {name: value[is_later] for name, value in captured.items()}


def brier_score(predicted_probs: Tensor, labels: Tensor) -> float:
    """Mean squared difference of predicted probability and outcome; 0 is a perfect prediction."""
    return float((predicted_probs - labels).square().mean())


def reliability_curve(predicted_probs: Tensor, labels: Tensor) -> list[dict[str, float]]:
    """For `BINS` equal bins of predicted probability: mean prediction, mean outcome, number of tokens."""
    bin_indices = (predicted_probs * BINS).long().clamp(0, BINS - 1)
    bin_stats = []
    for index in range(BINS):
        in_bin = bin_indices == index
        if in_bin.any():
            means = {"predicted": float(predicted_probs[in_bin].mean()), "observed": float(labels[in_bin].mean())}
            bin_stats.append({**means, "count": int(in_bin.sum())})
    return bin_stats


def expected_calibration_error(curve: Sequence[dict[str, float]]) -> float:
    """The ECE: |predicted − observed| of each bin, weighted by its share of the tokens."""
    token_count = sum(point["count"] for point in curve)
    return sum(abs(point["predicted"] - point["observed"]) * point["count"] for point in curve) / token_count


def score_head(head: CalibrationHead, train: Batch, heldout: Batch) -> HeadScores:
    """Brier score, ECE and reliability curve on held-out tokens: of the head, a constant, and the draft's own q."""
    labels = heldout["label"]
    probs_by_name = {
        "head": predict_acceptance(head, heldout),
        "constant": torch.full_like(labels, float(train["label"].mean())),
        "confidence": heldout["confidence"],
    }
    score_by_name = dict[str, PredictorScore]()
    for name, predicted in probs_by_name.items():
        brier, curve = brier_score(predicted, labels), reliability_curve(predicted, labels)
        score_by_name[name] = {"brier": brier, "ece": expected_calibration_error(curve), "reliability": curve}
    return {"tokens": len(labels), "accepted": float(labels.mean()), "predictors": score_by_name}


def plot_reliability(scores: HeadScores) -> bytes:
    """Predicted against observed acceptance, as a PNG; marker area ∝ tokens."""
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="black", linewidth=1, linestyle="--")
    for index, (name, score) in enumerate(scores["predictors"].items()):
        curve = score["reliability"]
        x, y = [point["predicted"] for point in curve], [point["observed"] for point in curve]
        axes.plot(x, y, color=f"C{index}", label=f"{name}: Brier {score['brier']:.3f}, ECE {score['ece']:.3f}")
        axes.scatter(x, y, s=[200 * p["count"] / scores["tokens"] + 8 for p in curve], color=f"C{index}")
    axes.set(xlabel="predicted", ylabel="accepted by the target", xlim=(0, 1), ylim=(0, 1))
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
