"""Whether one more pass pays: against every choice tried, and what it learns."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.sizing.costs import Costs
from inference.sizing.feeding import BANDS, MOST_FED, Feeding, Gains
from inference.sizing.policy import Tuning


def tuning(step: float = 0.1, row: float = 0.01, node: float = 0.02) -> Tuning:
    return Tuning(Costs(tuple(step + row * w for w in range(65)), tuple(1 + node * w for w in range(65)), 0.05, 1.0))


falling = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12).map(lambda values: sorted(values, reverse=True))


def begun(feeding: Feeding, paths: list[float], waiting: int = 0) -> int:
    """A round of n-grams with such path probabilities, all after the root; how many of them would be submitted."""
    feeding.begin(waiting)
    return feeding.count(np.full(len(paths), -1), np.array(paths))


@settings(deadline=None)
@given(
    paths=falling,
    values=falling,
    later=st.lists(st.floats(0.0, 1.0), max_size=4),
    step=st.floats(0.0, 1.0),
    waiting=st.integers(0, 30),
)
def test_the_step_is_the_one_of_most_tokens_a_second(
    paths: list[float], values: list[float], later: list[float], step: float, waiting: int
) -> None:
    """And it is made where it pays, or where those that it leads to do."""
    known = tuning(step)
    costs, feeding = known.costs, Feeding(known, None, None, None)
    count = begun(feeding, paths, waiting)

    def rate(emitted: float, nodes: int, spent: float) -> float:
        return (1 + math.fsum(paths[:count]) + emitted) / (spent + costs.verify[nodes + 1] + costs.rest)

    best_count = max(
        range(len(paths) + 1), key=lambda n: (1 + math.fsum(paths[:n])) / (costs.verify[n + 1] + costs.rest)
    )
    assert count == best_count
    at_once = [rate(sum(values[:rows]), count + rows, costs.step[rows + waiting]) for rows in range(1, len(values) + 1)]
    plans = [
        rate(values[0] + sum(later[:more]), count + 1 + more, costs.step[1 + waiting] + more * costs.step[1])
        for more in range(1, len(later) + 1)
    ]
    fed = feeding.feed(count, values, later)
    if max(at_once + plans) > rate(0.0, count, 0.0):
        assert at_once[fed - 1] == pytest.approx(max(at_once))
    else:
        assert fed == 0


def test_what_waits_makes_the_first_step_dear_and_no_other() -> None:
    asked = {}
    for waiting in (0, 60):
        feeding = Feeding(tuning(0.01, row=0.02), None, None, None)
        asked[waiting] = [feeding.feed(begun(feeding, [0.5], waiting), [0.3])]
    assert asked == {0: [1], 60: [0]}


def test_given_levels_are_all_made_and_a_round_feeds_only_so_many() -> None:
    feeding = Feeding(tuning(50.0), None, 3, None)
    count = begun(feeding, [0.5])
    assert [feeding.feed(count, [0.3]) > 0 for _ in range(4)] == [True, True, True, False]
    unmeasured = Feeding(None, 24, 9, None)
    assert begun(unmeasured, [0.5] * 24) == 24
    fed = [unmeasured.feed(24, [0.1] * count) for count in (1, 24, 20, 24, 24)]
    assert fed == [1, 24, 20, MOST_FED - 44, 0]
    narrow = Feeding(None, 24, 9, 3)
    begun(narrow, [0.5] * 24)
    assert [narrow.feed(24, [0.1] * 24) for _ in range(2)] == [3, 3]


def test_a_pass_that_does_not_pay_is_tried_ever_more_seldom() -> None:
    """After 8 rounds without one, then after 16 and 32; once one has paid, after 8 again."""
    feeding = Feeding(tuning(), None, None, None)

    def rounds_without(gain: float) -> int:
        for number in itertools.count():
            fed = feeding.feed(begun(feeding, [0.5]), [gain])
            feeding.end()
            if fed:
                return number
        raise AssertionError

    assert [rounds_without(1e-4) for _ in range(3)] == [8, 16, 32]
    assert rounds_without(0.9) == 0
    assert [rounds_without(1e-4) for _ in range(2)] == [8, 16]


def test_nodes_whose_like_came_seldom_true_are_worth_less() -> None:
    feeding = Feeding(tuning(node=0.05), None, None, None)
    paths = [0.5] + [0.3] * 8
    before = begun(feeding, paths)
    for _ in range(40):  # the node of 0.5 was right; its like may be trusted, and the others' not
        feeding.observe(np.full(len(paths), -1), np.array(paths), [0])
    assert begun(feeding, paths) == 1 < before
    assert feeding.expected > 1.5


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
