"""Costs of passes by requests to a stand-in whose passes are known, and what they make of replayed rounds."""

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest

from outrider.base.errors import UserError
from outrider.base.streams import Streams
from outrider.inference.core.rounds import Generation, Round
from outrider.inference.measure.server_costs import (
    WIDTHS,
    ServerCosts,
    expect_speedup,
    measure_drafter,
    measure_server,
)

PASSES = {1: 0.040, 2: 0.044, 4: 0.052, 8: 0.080, 16: 0.150}


@dataclass
class StandIn:
    """A server with an overhead of 7 ms and noisy passes; blocks: it keeps whole blocks of the prompts that it saw."""

    blocks: bool = True
    noise: float = 0.02
    setting: str = "server=stand-in"
    seen: list[list[int]] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def stream(
        self, prompt: list[int], count: int, seed: int, **more: object
    ) -> tuple[object, list[tuple[int, ...]], list[float], object]:
        cached = max((self._shared(prompt, other) for other in self.seen), default=0) if self.blocks else 0
        self.seen.append(prompt)
        first = 0.007 + self._pass(max(1, len(prompt) - cached))
        times = [0.0, *itertools.accumulate([first, *(self._pass(1) for _ in range(count - 1))])]
        return None, [(7,)] * count, times, None

    def _shared(self, prompt: list[int], other: list[int]) -> int:
        """Whole blocks that both begin with, without the last token, which is always computed."""
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt[:-1], other, strict=False))
        return sum(1 for _ in pairs) // 16 * 16

    def _pass(self, width: int) -> float:
        seconds = np.interp(width, [*PASSES], [*PASSES.values()]) if width <= 16 else 0.01 * width
        return float(seconds * (1 + self.noise * self.random.random()))


def test_passes_are_those_of_the_engine() -> None:
    costs = measure_server(StandIn(), range(1000, 1300))
    seconds = costs.passes()
    assert [seconds[width] for width in WIDTHS] == pytest.approx([*PASSES.values()], rel=0.04)
    assert seconds[3] == pytest.approx((seconds[2] + seconds[4]) / 2)


def test_a_drafted_token_takes_a_token_of_the_drafters_server() -> None:
    assert np.median(measure_drafter(StandIn(blocks=False), range(1000, 1300))) == pytest.approx(PASSES[1], rel=0.04)


def test_a_server_that_keeps_no_prompt_or_whose_tokens_come_at_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"server=stand-in: it computes a known prompt again"):
        measure_server(StandIn(blocks=False), range(1000, 1300))
    monkeypatch.setattr(StandIn, "stream", lambda *_, **__: (None, [(7,) * 17], [0.0, 1.0], None))
    with pytest.raises(UserError, match="server=stand-in: an answer came in one piece"):
        measure_drafter(StandIn(), range(1000, 1300))


def rounds_of(widths: list[tuple[int, int]], drafting: float = 0.0) -> Generation:
    """A text of rounds (drafted, emitted). drafting: seconds of each that drafts."""
    rounds = (Round((1,) * n, k, n - 1, k, 0.0, draft_seconds=drafting * bool(k)) for k, n in widths)
    return Generation((1,), 0.0, 1.0, tuple(rounds))


def test_the_speedup_is_the_tokens_over_the_time_of_the_rounds() -> None:
    costs = ServerCosts((0.04,) * 5, {width: (0.007 + seconds,) * 5 for width, seconds in PASSES.items()})
    widths, spent = [(3, 3), (3, 1), (0, 1), (7, 5)], 2 * 0.052 + 0.040 + 0.080
    free, drafted = (expect_speedup([rounds_of(widths, step)] * 6, costs, Streams(0)) for step in (0.0, 0.003))
    assert free.median == pytest.approx(10 * 0.04 / spent)
    assert drafted.median == pytest.approx(10 * 0.04 / (spent + 3 * 0.003))
    there = expect_speedup([rounds_of(widths, 0.003)] * 6, costs, Streams(0), [0.001, 0.002, 0.9])
    assert there.median == pytest.approx(10 * 0.04 / (spent + (13 * 0.002 + 3 * 0.003) / 2))
    steady = expect_speedup([rounds_of(widths, 0.003)] * 6, costs, Streams(0), [0.002] * 5)
    assert steady.ci95 == pytest.approx((10 * 0.04 / (spent + 13 * 0.002), 10 * 0.04 / (spent + 3 * 0.003)), rel=0.02)
    faster = expect_speedup([rounds_of(widths, 0.003)] * 6, costs, Streams(0), [0.0001] * 3)
    assert faster.median == pytest.approx(10 * 0.04 / (spent + 13 * 0.0001))  # the engine drafts faster than we do
    assert expect_speedup([rounds_of([(0, 1)] * 9)] * 5, costs, Streams(0)).median == pytest.approx(1.0)
    at_once = expect_speedup([rounds_of(widths)] * 6, costs, Streams(0), [0.002], in_one_pass=True)
    assert at_once.median == pytest.approx(10 * 0.04 / (spent + 3 * 0.002 / 2))
    assert expect_speedup([], costs, Streams(0)).median is None


def test_the_turns_of_a_conversation_are_drawn_together() -> None:
    costs = ServerCosts((0.04,) * 5, {width: (seconds,) * 5 for width, seconds in PASSES.items()})
    texts = [rounds_of([(3, 1 + text % 3)] * 8) for text in range(6)]
    alone, pairs = (
        expect_speedup([text for text in texts for _ in range(2)], costs, Streams(0), units=units)
        for units in ([str(number) for number in range(12)], [str(number // 2) for number in range(12)])
    )
    assert (alone.prompts, pairs.prompts) == (12, 6)
    assert alone.median == pairs.median
    assert pairs.ci95[1] - pairs.ci95[0] >= alone.ci95[1] - alone.ci95[0]


def test_the_interval_holds_the_speedup_of_the_true_costs() -> None:
    """In nearly all of several measurements; it is wider where passes are less steady."""
    texts = [rounds_of([(4, 1 + (text + turn) % 4) for turn in range(20)]) for text in range(12)]
    truth = expect_speedup(texts, ServerCosts((0.04,), {w: (0.007 + s,) for w, s in PASSES.items()}), Streams(0))
    assert truth.median is not None
    widths = []
    for noise in (0.02, 0.3):
        measured = [StandIn(noise=noise, random=np.random.default_rng(seed)) for seed in range(100, 112)]
        found = [expect_speedup(texts, measure_server(server, range(300)), Streams(1)) for server in measured]
        intervals = [interval.ci95 for interval in found if interval.ci95 is not None]
        assert sum(low <= truth.median <= high for low, high in intervals) >= 10
        widths.append(np.mean([high - low for low, high in intervals]))
    assert widths[0] < widths[1]
