"""Costs of passes that are lines: what a machine of the tests takes for them."""

from dataclasses import replace

import pytest

from outrider.inference.measure import probe
from outrider.inference.sizing.costs import WIDEST, Costs


def costs(
    step: float = 0.1, row: float = 0.0, verify: float = 1.0, node: float = 0.02, rest: float = 0.05, plain: float = 1.0
) -> Costs:
    """A draft step over w rows takes step + row·w seconds, a target pass over w rows verify + node·w."""
    widths = range(WIDEST + 1)
    return Costs(tuple(step + row * w for w in widths), tuple(verify + node * w for w in widths), rest, plain)


def price(patch: pytest.MonkeyPatch, prices: Costs) -> None:
    """What is measured costs this, however busy the machine is; drafts are right as often as they are."""
    measure = probe.measure_costs
    patch.setattr(probe, "SECONDS", 0.0)  # it measures for no longer than it must
    patch.setattr(probe, "measure_costs", lambda *given: replace(measure(*given), costs=prices))
