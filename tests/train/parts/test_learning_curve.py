"""Forecasts of τ: how often they hold on simulated curves, and what makes them wider."""

from dataclasses import replace

import numpy as np
import pytest

from outrider.base.streams import Streams
from outrider.train.parts import learning_curve
from outrider.train.parts.learning_curve import COVERED, SEED_STD, TrainedSize, forecast_tau

SIZES = (1.0, 2.0, 4.0, 8.0)
LATER = 64.0


def share_of_forecasts_that_hold(curves: int = 120) -> float:
    """Of simulated trainings at `SIZES`: the share of intervals that hold the τ of a training at `LATER`."""
    random, held = Streams(1).arrays("curves"), 0
    for _ in range(curves):
        start, gain, share = random.uniform(0, 0.6), random.uniform(0, 0.3), random.uniform(0.5, 0.99)
        taus = [1 + start + gain * (1 - share ** np.log2(size)) / (1 - share) for size in (*SIZES, LATER)]
        trained = [TrainedSize(size, tau, 400) for size, tau in zip((*SIZES, LATER), taus, strict=True)]
        *trained, outcome = (replace(p, tau=max(1.0, p.tau + random.normal() * p.error)) for p in trained)
        (forecast,) = forecast_tau(trained, [LATER])
        held += forecast.low <= outcome.tau <= forecast.high
    return held / curves


def test_intervals_hold_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_of_forecasts_that_hold() >= COVERED - 0.1
    monkeypatch.setattr(learning_curve, "GAIN_RATIOS", np.array([1.0]))  # every doubling adds as much as the first
    assert share_of_forecasts_that_hold() < COVERED - 0.2


def test_a_forecast_is_wider_where_less_is_known() -> None:
    trained = [TrainedSize(size, 1.2 + 0.1 * index, 600) for index, size in enumerate(SIZES)]
    near, far = forecast_tau(trained, [16.0, 256.0])
    (noisy,) = forecast_tau([replace(point, passes=60) for point in trained], [16.0])
    assert near.low <= near.tau <= near.high
    for wider in (far, noisy):
        assert wider.high - wider.low > near.high - near.low
    assert near.tau > trained[-1].tau  # it grew so far
    assert [near, far] == forecast_tau(trained, [16.0, 256.0])


def test_a_drafter_that_learns_nothing_is_not_expected_to() -> None:
    trained = [TrainedSize(size, 1.01, 4000) for size in SIZES]
    (later,) = forecast_tau(trained, [64.0])
    assert later.low >= 1
    assert later.high < 1.01 + 6 * SEED_STD


def test_one_size_has_no_curve() -> None:
    with pytest.raises(ValueError, match="two trainings"):
        forecast_tau([TrainedSize(2.0, 1.3, 100)] * 2, [4.0])
