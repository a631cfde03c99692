"""Whether one more pass pays: against every choice tried, and what it learns."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.auto.costs import Costs
from inference.auto.feeding import BANDS, MOST_FED, Feeding, Gains
from inference.auto.policy import Tuning


def tuning(step: float = 0.1, row: float = 0.01, node: float = 0.02) -> Tuning:
    return Tuning(Costs(tuple(step + row * w for w in range(65)), tuple(1 + node * w for w in range(65)), 0.05, 1.0))


falling = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12).map(lambda values: sorted(values, reverse=True))


@settings(deadline=None)
@given(paths=falling, values=falling, step=st.floats(0.0, 1.0), waiting=st.integers(0, 30))
def test_the_step_is_the_one_of_most_tokens_a_second(
    paths: list[float], values: list[float], step: float, waiting: int
) -> None:
    known = tuning(step)
    feeding = Feeding(known, None, None, None)
    feeding.begin(waiting)

    def rate(rows: int) -> float:
        spent = known.costs.step[rows + waiting] if rows else 0.0
        emitted = 1 + math.fsum(paths) + math.fsum(values[:rows])
        return emitted / (spent + known.costs.verify[len(paths) + rows + 1] + known.costs.rest)

    best = max(map(rate, range(len(values) + 1)))
    assert rate(feeding.feed(paths, values)) == pytest.approx(best)


def test_what_waits_makes_the_first_step_dear_and_no_other() -> None:
    asked = {}
    for waiting in (0, 60):
        feeding = Feeding(tuning(0.01, row=0.02), None, None, None)
        feeding.begin(waiting)
        asked[waiting] = [feeding.feed([0.5], [0.3])]
    assert asked == {0: [1], 60: [0]}


def test_given_levels_are_all_made_and_a_round_feeds_only_so_many() -> None:
    feeding = Feeding(tuning(50.0), None, 3, None)
    feeding.begin(0)
    assert [feeding.feed([0.5], [0.3]) > 0 for _ in range(4)] == [True, True, True, False]
    unmeasured = Feeding(None, 24, 9, None)
    unmeasured.begin(0)
    fed = [unmeasured.feed([0.5] * 24, [0.1] * count) for count in (1, 24, 20, 24, 24)]
    assert fed == [1, 24, 20, MOST_FED - 44, 0]
    narrow = Feeding(None, 24, 9, 3)
    narrow.begin(0)
    assert [narrow.feed([0.5] * 24, [0.1] * 24) for _ in range(2)] == [3, 3]


def test_gains_follow_what_passes_brought_in_their_band_alone() -> None:
    gains, before = Gains(), Gains().shares()
    for _ in range(40):
        gains.add([2], [1.0], 0.9)
        gains.add([5, 5], [0.5, 0.25], 0.0)
    after = gains.shares()
    assert after[2] > 0.6 > before[2]
    assert after[5] < 0.5 * before[5]
    assert [after[band] for band in range(BANDS) if band not in (2, 5)] == [
        before[band] for band in range(BANDS) if band not in (2, 5)
    ]
