"""Training runs with a time limit in minutes: the limit ends the run, and the learning rate falls with the time."""

import math
from dataclasses import replace

from outrider.base.errors import warn
from outrider.base.processes import from_main, join_processes
from outrider.inference.measure.time_limit import TimeLimit
from outrider.train.settings.fit import FitConfig

MIN_STEPS = 20  # steps below which a training learns little


class StepBudget:
    """The number of optimizer steps of a run: `max_steps`, or with a time limit as many of them as fit.

    total: the number of steps. With a time limit it is estimated anew after every step, from the time left and the mean
    time of a step so far. Example: after 11 steps, 10 s since the first of them and 40 s left give 11 + 40 = 51 steps.
    So a schedule that is linear in steps is linear in time, and ends with the time. The first step of a run compiles
    and fills caches, so its time is spent but not part of the mean.

    limit: the minutes, the clock, and `earlier`, the seconds of the runs that this run resumes. Evaluations and
    checkpoints between the first and the last step count. start: the steps of earlier runs. The argument `total` is
    their estimate; None: estimated by the time that they took.
    """

    def __init__(self, limit: TimeLimit, max_steps: int, start: int = 0, total: int | None = None) -> None:
        if total is None:
            steps_left = limit.left(limit.earlier) * start / limit.earlier if start and limit.earlier else math.inf
            total = start + round(steps_left) if steps_left < math.inf else max_steps
        self.limit, self.max_steps, self.start, self.total = limit, max_steps, start, min(max_steps, total)
        self._state, self._first_seconds, self._warned = join_processes(), 0.0, False

    def begin(self) -> None:
        """Start the clock, right before the first step of this run."""
        self.limit = replace(self.limit, started=self.limit.clock())

    def update_total(self, step: int) -> int:
        """The total number of steps after `step` steps, `step` itself where the time is over.

        Every process calls it, and the main one decides.
        """
        if self.limit.minutes is not None and step < self.total:
            self.total = from_main(self._state, lambda: self._estimate(step))
        return self.total

    def _estimate(self, step: int) -> int:
        """The total number of steps by the time of the first `step` steps."""
        spent = self.limit.spent()  # seconds, of this run and of earlier ones
        self._first_seconds = self._first_seconds or spent - self.limit.earlier  # seconds of this run's first step
        step_seconds = (spent - self._first_seconds) / (step - 1) if step > 1 else self._first_seconds
        # Rounding lets a last step begin if half of it fits.
        steps_left = max(0, round(self.limit.left(spent) / max(step_seconds, 1e-9)))
        self._warn_of_long_steps(step_seconds, is_measured=step > self.start + 1 or not steps_left)
        return min(self.max_steps, step + steps_left) if step > 1 or not steps_left else self.total

    def _warn_of_long_steps(self, step_seconds: float, is_measured: bool) -> None:
        """Warn once, if the minutes hold too few steps of `step_seconds`, which options make a step shorter.

        is_measured: the time is that of a step after this run's first, or no other step will follow.
        """
        limit_seconds = self.limit.left(0.0)
        if is_measured and not self._warned and step_seconds > limit_seconds / MIN_STEPS:
            advice = f"with a smaller fit.batch_rows or seq_len there are more; a training wants {MIN_STEPS} or more"
            steps = max(1, round(limit_seconds / step_seconds))
            warn(f"minutes={self.limit.minutes:g}: one step takes {step_seconds:.3g} s, so they hold {steps}; {advice}")
        self._warned |= is_measured

    def ended_by(self, config: FitConfig, row_count: int) -> str:
        """The reason why a run on `row_count` rows ended, in words."""
        steps, minutes = self.total, self.limit.minutes
        if steps < self.max_steps:
            return f"minutes={minutes:g} ended it after {steps} of {self.max_steps} steps"
        cause = f"steps={config.steps}" if config.epochs is None else f"epochs={config.epochs:g} of {row_count} rows"
        unused_text = "" if minutes is None else f"; minutes={minutes:g} were not needed"
        advice = f"; {row_count} rows are far too few: give more data" if config.epochs and steps < MIN_STEPS else ""
        return f"{cause} ended it after {steps} steps{unused_text}{advice}"
