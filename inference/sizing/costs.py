"""What decoding costs on a device, in seconds by width: the base of every choice of size (see policy.py)."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inference.settings.limits import MOST_NODES

WIDEST = MOST_NODES + 1  # rows of one pass: the root and the draft
SHOWN = (1, 2, 4, 8, 16, 32, 64)  # the widths a report lists, and those that a padding runtime pads to


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a round. Item w of a curve is a pass over w rows, w = 0 … WIDEST.

    step: one draft step: a forward pass of the drafter, and what the structure does with its logits.
    verify: what the target runs over the root and the draft, the choice of tokens included. For an early-exit drafter
    that is the layers that the draft has not been through.
    rest: bookkeeping at the end of a round.
    plain: one token of autoregressive decoding.
    """

    step: tuple[float, ...]
    verify: tuple[float, ...]
    rest: float
    plain: float

    def summary(self) -> dict[str, float | dict[str, float]]:
        """For a report: the curves at a few widths."""
        return {
            "draft_step": {str(width): self.step[width] for width in SHOWN},
            "target_pass": {str(width): self.verify[width] for width in SHOWN},
            "rest_of_round": self.rest,
            "autoregressive_step": self.plain,
        }


def curve(samples: Iterable[tuple[int, float]], *, padded: bool = False) -> tuple[float, ...]:
    """Seconds at widths 0 … `WIDEST`, from `samples` (width, seconds).

    Each measured width has its `typical` seconds, pooled between powers of two (3 and 4, 5 to 8, …). Widths whose
    seconds would fall as the width grows are averaged. Between measured widths the curve is linear. Beyond the last it
    is as steep as before it, or level where that is the only one. Below the first it is as at the first.

    padded: passes take as long as the next power of two, which is measured then.
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
    """The lower quartile: what else the machine does only ever adds to a time, and often to half of them."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


def _rising(values: Sequence[float]) -> list[float]:
    """The rising sequence nearest to `values`: falling runs are replaced by their means, until none is left."""
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
