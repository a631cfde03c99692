"""The time that texts of a run show."""

from collections.abc import Callable
from datetime import datetime

RUNS: list[Callable[[], datetime]] = []  # that of this process's run (`begin_time`), recorded once it is read


def run_time() -> datetime | None:
    """The time that texts of this process's run show; None outside a run."""
    return RUNS[-1]() if RUNS else None
