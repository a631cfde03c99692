"""Seconds of decoding passes by width, the basis of every choice of size, and the bound on the loss that it allows."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.inference.settings import MOST_NODES

WIDEST = MOST_NODES + 1  # rows of one pass: the root and the draft
SHOWN = (1, 2, 4, 8, 16, 32, 64)  # the widths that a report lists and that a padding runtime pads to


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a round. Item w of a curve is for a pass over w rows, w = 0 … WIDEST.

    step: one draft step: a forward pass of the drafter and the structure's work on its logits.
    verify: the target's pass over the root and the draft, and token selection. For an early-exit drafter only the
    layers that the draft has not run.
    rest: bookkeeping at the end of a round.
    plain: one token of autoregressive decoding.
    """

    step: tuple[float, ...]
    verify: tuple[float, ...]
    rest: float
    plain: float

    def of_one(self, texts: int) -> "Costs":
        """The costs of one of `texts` texts that share their passes: its part of those over the rows of all.

        All are taken to have as many rows. So drafts get shorter as rows cost more, and end where each costs its own.
        """

        def part(curve: tuple[float, ...]) -> tuple[float, ...]:
            widths, seconds = [*map(float, range(len(curve)))], [*curve]
            return tuple(_interpolate(widths, seconds, float(texts * width)) / texts for width in range(len(curve)))

        verify = part(self.verify)
        return Costs(part(self.step), verify, self.rest, self.plain * verify[1] / self.verify[1])

    def summary(self) -> dict[str, float | dict[str, float]]:
        """The curves at a few widths, for a report."""
        return {
            "draft_step": {str(width): self.step[width] for width in SHOWN},
            "target_pass": {str(width): self.verify[width] for width in SHOWN},
            "rest_of_round": self.rest,
            "autoregressive_step": self.plain,
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
    means = [statistics.fmean(width for width, _ in pool) for _, pool in sorted(pools.items())]
    widths = [2.0**power for power in sorted(pools)] if padded else means
    levels = _rising([typical([seconds for _, seconds in pool]) for _, pool in sorted(pools.items())])
    asked = [1 << (width - 1).bit_length() if padded and width else width for width in range(WIDEST + 1)]
    return tuple(_interpolate(widths, levels, width) for width in asked)


def typical(seconds: Sequence[float]) -> float:
    """The lower quartile: interference by other processes only adds time, often to half of the samples."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


def _rising(values: Sequence[float]) -> list[float]:
    """Isotonic regression of `values`: falling runs are replaced by their means until none is left."""
    runs: list[tuple[float, int]] = []  # mean, length
    for value in values:
        mean, length = value, 1
        while runs and runs[-1][0] > mean:
            before, count = runs.pop()
            mean, length = (before * count + mean * length) / (count + length), count + length
        runs.append((mean, length))
    return [mean for mean, length in runs for _ in range(length)]


def _interpolate(widths: list[float], levels: list[float], width: float) -> float:
    if width <= widths[0] or len(widths) == 1:
        return levels[0]
    right = next((i for i, known in enumerate(widths) if known >= width), len(widths) - 1)
    slope = (levels[right] - levels[right - 1]) / (widths[right] - widths[right - 1])
    return levels[right] + slope * (width - widths[right])


LOSS = 0.02  # share of plain decoding's rate
# Rounds that the running rate averages over: each round reduces the weight of earlier ones by 1 / MEMORY. A useful
# drafter is sometimes wrong several times in a row: with 33, two such rounds exceeded the allowance.
MEMORY = 100


class Allowance:
    """Skips drafting in rounds where drafts do not pay.

    The running rate is this generation's tokens per second by the measured costs, and starts at plain decoding's. While
    it is more than `loss` below plain decoding's rate, rounds skip drafting. Such rounds are plain decoding and raise
    the running rate again, so another draft is tried eventually. A useless drafter costs at most `loss` plus one draft;
    a useful one drafts in almost every round.

    loss: the share of plain decoding's rate that may be lost. A generation of N tokens loses at most
    (MEMORY + N) · loss tokens and one draft.
    """

    def __init__(self, costs: Costs, loss: float = LOSS):
        self._costs, self._loss = costs, loss
        self._emitted, self._seconds = float(MEMORY), MEMORY * costs.plain

    @property
    def rate(self) -> float:
        """Tokens per second so far."""
        return self._emitted / self._seconds

    def spent(self) -> bool:
        """Whether this round skips drafting."""
        return self.rate < (1 - self._loss) / self._costs.plain

    def observe(self, fed: list[int], submitted: int, emitted: int) -> None:
        """Learn from a round.

        fed: rows of each drafter pass, empty if drafting was skipped; submitted: drafted tokens that were verified;
        emitted: tokens that the round produced.
        """
        costs = self._costs
        seconds = costs.plain
        if fed:
            drafting = sum(costs.step[min(rows, WIDEST)] for rows in fed)
            seconds = drafting + costs.verify[min(submitted + 1, WIDEST)] + costs.rest
        kept = 1 - 1 / MEMORY
        self._emitted = kept * self._emitted + emitted
        self._seconds = kept * self._seconds + seconds
