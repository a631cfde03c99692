"""The criterion for a significant speed-up."""

from collections.abc import Mapping
from typing import Any

MIN_PROMPTS = 5  # conversations of any number of turns; fewer give no meaningful interval, so no verdict
# Conditions common to all prompts of a run shift all its speed-ups together: memory placement, the kernels chosen at
# load, the machine's temperature. An interval over prompts does not include them.
MARGIN = 0.02


def verdict(speedup: Mapping[str, Any], busy: str | None = None) -> str:
    """ "faster" or "slower" if the whole interval is beyond 1 by more than `MARGIN`, else "undecided".

    speedup: its ci95 and number of prompts. busy: why speeds of that run are unreliable (see `machine_load`).
    """
    if busy or speedup["ci95"] is None or speedup["prompts"] < MIN_PROMPTS:
        return "undecided"
    low, high = speedup["ci95"]
    return "faster" if low > 1 + MARGIN else "slower" if high < 1 - MARGIN else "undecided"
