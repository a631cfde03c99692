"""The learning curve of a drafter: τ after short trainings, and what it will be after a longer one.

τ − 1, the drafted tokens that a pass accepts, grows with every doubling of data and minutes, and each doubling adds
less than the one before, or at the beginning a little more:

    τ(s) = 1 + a + g · (ρ^0 + … + ρ^(k−1)) after k = log2(s / s_0) doublings, which is a + g · (1 − ρ^k) / (1 − ρ)

a is τ − 1 at the least size s_0, g ≥ 0 the gain of the first doubling, ρ the share of its gain that the next one adds.
Few points determine ρ badly, so a forecast averages over all ρ, each weighted by how well it fits. Example: τ of 1.20,
1.32 and 1.43 at 1/8, 1/4 and 1/2 of a budget; with ρ = 0.9 the whole budget has about 1.53, with ρ = 0.6 about 1.47.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.base.streams import Streams

GAIN_RATIOS = np.linspace(0.4, 1.3, 61)  # ρ; above 1 for few answers (benchmarks/results/forecasts.md)
DRAWS = 4000  # curves drawn from the fits, from which a forecast's quantiles are taken
COVERED = 0.9  # probability of a forecast's interval
SEED_STD = 0.03  # standard deviation of τ between trainings that differ only by chance (their seeds)


@dataclass(frozen=True)
class TrainedSize:
    """A finished training. size: its data and minutes, in any unit. passes: of the target, by which τ was measured."""

    size: float
    tau: float
    passes: int

    @property
    def error(self) -> float:
        """The standard error of τ. The tokens of a pass are about geometric: of variance τ · (τ − 1), here ≥ 0.05."""
        return float(np.sqrt(max(self.tau * (self.tau - 1), 0.05) / self.passes + SEED_STD**2))


@dataclass(frozen=True)
class Forecast:
    """τ at a size that was not trained: median, and the interval that holds it with probability `COVERED`."""

    size: float
    tau: float
    low: float
    high: float


def forecast_tau(trained: Sequence[TrainedSize], forecast_sizes: Sequence[float]) -> list[Forecast]:
    """τ at each of `forecast_sizes`, from at least two trainings of different sizes.

    Raises `ValueError` for fewer. The same trainings give the same forecast.
    """
    if len({point.size for point in trained}) < 2:
        raise ValueError("a learning curve needs two trainings of different sizes")
    smallest_size = min(point.size for point in trained)  # s_0
    doublings = np.log2([point.size / smallest_size for point in trained])  # [n]
    tau_errors = np.array([point.error for point in trained])  # [n]
    scaled_gains = (np.array([point.tau for point in trained]) - 1) / tau_errors  # [n]
    size_doublings = np.log2(np.array(forecast_sizes) / smallest_size)  # [m]
    generator = Streams(0).arrays("learning curve")
    fits = [_fit(_columns(doublings, gain_ratio) / tau_errors[:, None], scaled_gains) for gain_ratio in GAIN_RATIOS]
    misfits = np.array([fit.misfit for fit in fits])
    fit_weights = np.exp(-(misfits - misfits.min()) / 2)  # likelihoods of ρ, up to a factor
    draw_counts = generator.multinomial(DRAWS, fit_weights / fit_weights.sum())
    curves = []
    for gain_ratio, fit, draw_count in zip(GAIN_RATIOS, fits, draw_counts, strict=True):
        intercepts, slopes = generator.multivariate_normal(fit.mean, fit.covariance, size=draw_count).T  # [draws] each
        curves.append(np.column_stack([intercepts, np.maximum(slopes, 0.0)]) @ _columns(size_doublings, gain_ratio).T)
    tau_draws = 1 + np.maximum(np.concatenate(curves), 0.0)  # [DRAWS, m]
    tail_prob = (1 - COVERED) / 2
    low, middle, high = np.quantile(tau_draws, (tail_prob, 0.5, 1 - tail_prob), axis=0)
    return [Forecast(*map(float, row)) for row in zip(forecast_sizes, middle, low, high, strict=True)]


@dataclass(frozen=True)
class _Fit:
    """The least-squares fit of (a, g) for one ρ. misfit: the sum of squares, in standard errors."""

    mean: np.ndarray  # [2]
    covariance: np.ndarray  # [2, 2]
    misfit: float


def _columns(doublings: np.ndarray, gain_ratio: float) -> np.ndarray:
    """The factors of a and g [n, 2] after so many doublings [n]."""
    gain_factors = doublings if gain_ratio == 1.0 else (1 - gain_ratio**doublings) / (1 - gain_ratio)
    return np.column_stack([np.ones_like(doublings), gain_factors])


def _fit(columns: np.ndarray, gains: np.ndarray) -> _Fit:
    """The fit of gains [n] by columns [n, 2]; both are divided by the standard errors of τ."""
    covariance = np.linalg.inv(columns.T @ columns)
    mean = covariance @ columns.T @ gains
    return _Fit(mean, covariance, float(np.sum((gains - columns @ mean) ** 2)))
