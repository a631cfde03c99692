"""Seconds of decoding passes by width, the basis of every choice of a draft's size, and the bound on losses by drafts.

The width of a pass is its number of rows; a row is one token of a pass. In a round a draft of some steps is made, a
step is one pass of the drafter, and one pass of the target verifies the draft. Texts of a batch share passes.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from outrider.inference.settings import MOST_NODES

WIDEST = MOST_NODES + 1  # rows of one pass: the root and the draft
WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # the widths that a report lists and that a padding runtime pads to


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a round. Item w of a curve is for a pass over w rows, w = 0 … WIDEST.

    verify: for an early-exit drafter only of the layers that the draft has not run. unshared: of a step, of `verify`
    and of `autoregressive` the seconds that are not a pass, which no other text shares.
    """

    step: tuple[float, ...]  # curve of a draft step: a drafter's pass and the structure's work on its logits
    verify: tuple[float, ...]  # curve of the target's pass over the root and the draft, and token selection
    overhead: float  # bookkeeping at the end of a round
    autoregressive: float  # one token of autoregressive decoding
    unshared: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def shared_by(self, texts: int) -> "Costs":
        """The costs of one of `texts` texts that share their passes: its part of passes over all rows, and `unshared`.

        All texts are taken to have equally many rows. So a draft is worth less in a batch, where a wide pass costs more
        for every further row.
        """
        widths = [*map(float, range(len(self.verify)))]

        def part(cost_curve: tuple[float, ...], unshared_seconds: float) -> tuple[float, ...]:
            """The curve of one text's part of a pass."""
            pass_seconds = [_interpolate(widths, [*cost_curve], texts * width) - unshared_seconds for width in widths]
            return tuple(seconds / texts + unshared_seconds for seconds in pass_seconds)

        verify, (_, unshared, plain_unshared) = part(self.verify, self.unshared[1]), self.unshared
        # A token of plain decoding becomes cheaper as a pass over one row does.
        cost_ratio = (verify[1] - unshared) / (self.verify[1] - unshared) if self.verify[1] > unshared else 1.0
        autoregressive = (self.autoregressive - plain_unshared) * cost_ratio + plain_unshared
        return Costs(part(self.step, self.unshared[0]), verify, self.overhead, autoregressive, self.unshared)

    @cached_property
    def round_seconds(self) -> tuple[float, ...]:
        """Seconds of rounds with 0 … `MOST_NODES` nodes that one step drafts."""
        curve_pairs = zip(self.step, self.verify[1:], strict=False)
        return tuple(step_seconds + verify_seconds + self.overhead for step_seconds, verify_seconds in curve_pairs)

    def chain_seconds(self, draft_tokens: int) -> float:
        """Seconds of a round with a chain of so many tokens, drafted in as many steps."""
        return draft_tokens * self.step[1] + self.verify[draft_tokens + 1] + self.overhead

    def summary(self) -> dict[str, float | dict[str, float]]:
        """The curves at a few widths, for a report."""
        return {
            "draft_step": {str(width): self.step[width] for width in WIDTHS},
            "target_pass": {str(width): self.verify[width] for width in WIDTHS},
            "rest_of_round": self.overhead,
            "autoregressive_step": self.autoregressive,
        }


def curve(samples: Iterable[tuple[int, float]], *, padded: bool = False) -> tuple[float, ...]:
    """Seconds at widths 0 … `WIDEST`, from `samples` (width, seconds).

    Samples are pooled between powers of two (3 and 4, 5 to 8, …), and a pool's value is its `typical` seconds. Pools
    whose seconds would fall with growing width are averaged. The curve is linear between pools, continues with the last
    slope beyond the last pool (constant if it is the only one), and is constant below the first.
    padded: a pass takes as long as one at the next power of two, which is the width measured.
    """
    pools: dict[int, list[tuple[int, float]]] = {}
    for width, seconds in samples:
        pools.setdefault((width - 1).bit_length(), []).append((width, seconds))
    if not pools:
        raise ValueError("no samples to draw a curve through")
    mean_widths = [statistics.fmean(width for width, _ in pool) for _, pool in sorted(pools.items())]
    knot_widths = [2.0**power for power in sorted(pools)] if padded else mean_widths
    pool_seconds = _average_falling([typical([seconds for _, seconds in pool]) for _, pool in sorted(pools.items())])
    pass_widths = [1 << (width - 1).bit_length() if padded and width else width for width in range(WIDEST + 1)]
    return tuple(_interpolate(knot_widths, pool_seconds, width) for width in pass_widths)


def typical(seconds: Sequence[float]) -> float:
    """The lower quartile: interference by other processes only adds time, often to half of the samples."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


def _average_falling(values: Sequence[float]) -> list[float]:
    """Isotonic regression: falling runs are replaced by their means until none is left. 1, 3, 2, 4 → 1, 2.5, 2.5, 4."""
    runs: list[tuple[float, int]] = []  # mean, length
    for value in values:
        mean, run_length = value, 1
        while runs and runs[-1][0] > mean:
            earlier_mean, count = runs.pop()
            mean, run_length = (earlier_mean * count + mean * run_length) / (count + run_length), count + run_length
        runs.append((mean, run_length))
    return [mean for mean, run_length in runs for _ in range(run_length)]


def _interpolate(widths: list[float], seconds: list[float], width: float) -> float:
    """The value at `width` of the line through the points (widths, seconds), which goes on as in `curve`."""
    if width <= widths[0] or len(widths) == 1:
        return seconds[0]
    knot_index = next((i for i, knot in enumerate(widths) if knot >= width), len(widths) - 1)
    slope = (seconds[knot_index] - seconds[knot_index - 1]) / (widths[knot_index] - widths[knot_index - 1])
    return seconds[knot_index] + slope * (width - widths[knot_index])


MAX_LOSS = 0.02  # share of plain decoding's rate
# Rounds that the running rate averages over: each round reduces the weight of earlier ones by 1 / MEMORY. A useful
# drafter is sometimes wrong several times in a row: with 33, two such rounds exceeded the allowance.
MEMORY = 100
TRIAL_SHARE = 0.01  # share of plain decoding's time that may be spent on drafts that are not expected to pay

Sharing = Callable[[], tuple[int, int]]  # the number of texts that share passes now, and the index of their round


class Allowance:
    """Skips drafting in rounds where drafts do not pay; one for all texts of a batch, else one for each generation.

    A draft pays if more tokens are expected of it than plain decoding gives in the same time: its *gain*, in tokens, is
    above 0. Others are made as trials, whose expected losses are at most `TRIAL_SHARE` of all tokens.

    Expectations can be wrong. So the running rate, tokens per time that plain decoding takes for one by the measured
    costs, starts at 1. While it is more than `loss` below 1, rounds skip drafting. Such rounds are plain decoding and
    raise the running rate again, so another draft is made eventually. A useless drafter costs at most `loss` plus one
    draft; a useful one drafts in almost every round.

    costs: of a text alone. loss: the share of plain decoding's rate that may be lost. N tokens lose at most
    (MEMORY + N) · loss tokens and one draft. sharing: of the texts that share this allowance. trials: what the
    estimates behind a draft's size (`Evidence`) learn from all these texts: the numbers of trials, here of drafted
    tokens, and of right ones, by position in a chain or by band of q (see `Tuning`).
    """

    def __init__(self, costs: Costs, loss: float = MAX_LOSS, sharing: Sharing = lambda: (1, 0)):
        self._by_texts, self._loss, self.sharing = {1: costs}, loss, sharing
        self._emitted = self._plain_times = float(MEMORY)
        self._credit = 1.0  # tokens that trials may lose, ≤ 1 a text; not 0 at first: it may differ from the probe's
        self._gain, self._round, self._round_drafts = 0.0, -1, True  # of all texts: see `opens_round`
        self.trials: tuple[list[float], list[float]] = ([], [])

    @property
    def costs(self) -> Costs:
        """The costs of one of the texts that share passes now."""
        text_count = self.sharing()[0]
        if text_count not in self._by_texts:
            self._by_texts[text_count] = self._by_texts[1].shared_by(text_count)
        return self._by_texts[text_count]

    @property
    def rate(self) -> float:
        """The running rate so far, over plain decoding's."""
        return self._emitted / self._plain_times

    def blocks_drafts(self) -> bool:
        """Whether no round drafts at present."""
        return self.rate < 1 - self._loss

    def takes_trial(self, token_loss: float) -> bool:
        """Whether to make a draft that is expected to lose so many tokens."""
        is_affordable = self._credit >= token_loss
        self._credit -= token_loss * is_affordable
        return is_affordable

    def opens_round(self, gain: float | None) -> bool:
        """Whether a text drafts in this round, by passes that texts share: all texts or none.

        gain: of a draft of the length that its stop rule finds best (`StopRule.gain`); None: unknown, and taken to pay.
        """
        texts, round_number = self.sharing()
        self._gain += ((1.0 if gain is None else gain) - self._gain) / texts  # the mean of about the last `texts` gains
        if texts == 1 or round_number != self._round:
            self._round = round_number
            self._round_drafts = not self.blocks_drafts() and (self._gain > 0 or self.takes_trial(-self._gain * texts))
        return self._round_drafts

    def _seconds(self, rows_per_pass: Sequence[int], submit_count: int) -> float:
        """Seconds of a round with a draft, in units of plain decoding's seconds of a token."""
        costs = self.costs
        draft_seconds = sum(costs.step[min(row_count, WIDEST)] for row_count in rows_per_pass)
        return (draft_seconds + costs.verify[min(submit_count + 1, WIDEST)] + costs.overhead) / costs.autoregressive

    def observe(self, rows_per_pass: list[int], submit_count: int, emit_count: int) -> None:
        """Learn from a round.

        rows_per_pass: rows of each drafter pass, empty if drafting was skipped; submit_count: drafted tokens that were
        verified; emit_count: tokens that the round produced.
        """
        text_count = self.sharing()[0]
        time_ratio = self._seconds(rows_per_pass, submit_count) if rows_per_pass else 1.0
        decay = 1 - 1 / (MEMORY * text_count)
        self._emitted = decay * self._emitted + emit_count
        self._plain_times = decay * self._plain_times + time_ratio
        self._credit = 0.0 if self.blocks_drafts() else min(self._credit + TRIAL_SHARE, float(text_count))
