"""Training runs with a time limit in minutes: the number of steps follows from measured step times, and is stored."""

import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from inference.measure.time_limit import TimeLimit
from outrider.errors import require, warn
from outrider.files import write_json
from outrider.processes import from_main, join_processes
from outrider.settings import read_as
from train.settings.fit import FitConfig

STEPS_FILE = "steps.json"
FEW = 10  # steps after which the total is decided at the latest; the first steps compile and fill caches
ENOUGH = 20  # steps below which a training learns little
SHARE = 0.1  # share of the time limit after which the total is decided at the latest
LATE = 0.05  # share of the time limit by which a run may overrun before its steps are cut
TOO_LATE = 0.1  # share of the time limit by which it may overrun and begin one more step, which ends the schedule


@dataclass(frozen=True)
class _Steps:
    """The content of `STEPS_FILE`. decided: for each decision, in order, the steps done by then and the total."""

    minutes: float
    seconds_per_step: float
    steps: int
    decided: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        require(self.steps >= 1, "steps", self.steps, "an integer ≥ 1")
        require(self.seconds_per_step > 0, "seconds_per_step", self.seconds_per_step, "a number > 0")
        fits = all(0 < done <= steps for done, steps in self.decided) and self.steps in dict(self.decided).values()
        require(
            fits, "decided", self.decided, f"pairs of integers (steps done, steps in all), with {self.steps} in all"
        )


class StepBudget:
    """The number of optimizer steps of a run: `most`, or with a time limit as many of them as fit.

    The total is decided from the first step times, after `FEW` steps or `SHARE` of the time limit. It can only decrease
    after that, when the run would overrun by more than `LATE`. No step begins later than `TOO_LATE`. Every decision is
    written to `STEPS_FILE` before the next step begins. So the total at a step is a function of the step and of these
    decisions. A resumed run takes them over, and decides nothing before the step of the last decision.

    limit: the minutes, and the clock. Evaluations and checkpoints between the first and the last step count.
    start: steps done before; if 0, decisions on file belong to a killed run without checkpoints and are ignored.
    """

    def __init__(self, limit: TimeLimit, most: int, out_dir: Path, start: int) -> None:
        self.limit, self.most, self.start = limit, most, start
        self._state, self._file, self._times = join_processes(), out_dir / STEPS_FILE, list[float]()
        self._decided, self._pace = list[tuple[int, int]](), 0.0
        if limit.minutes is not None and start and self._file.exists():
            kept: _Steps = read_as(_Steps, self._file, "number of steps", "remove it, and the steps are measured anew")
            self._decided, self._pace = list(kept.decided), kept.seconds_per_step
        self._known = self._decided[-1][0] if self._decided else 0

    def begin(self) -> None:
        """Start the clock, right before the first step of this run."""
        self.limit = replace(self.limit, started=self.limit.clock())

    def spent(self) -> float:
        """Seconds since the first step, summed over all runs."""
        return self.limit.spent()

    def total(self, step: int) -> int:
        """The total number of steps according to the decisions made before step `step` (from 0)."""
        return next((total for done, total in reversed(self._decided) if done <= step), self.most)

    def ended_by(self, config: FitConfig, rows: int) -> str:
        """What ended a run on `rows` rows, in words."""
        steps, minutes = self.total(self.most), self.limit.minutes
        if steps < self.most:
            return f"minutes={minutes:g} ended it after {steps} of {self.most} steps"
        by = f"steps={config.steps}" if config.epochs is None else f"epochs={config.epochs:g} of {rows} rows"
        unused = "" if minutes is None else f"; minutes={minutes:g} were not needed"
        few = f"; {rows} rows are far too few: give more data" if config.epochs and steps < ENOUGH else ""
        return f"{by} ended it after {steps} steps{unused}{few}"

    def add_step(self, began: float) -> None:
        """Record the time of a finished step that began when `began` seconds were spent."""
        if not self._decided:
            self._times.append(self.spent() - began)

    def decide(self, done: int) -> int:
        """The total number of steps, decided after `done` steps. Every process calls it, and the main one decides."""
        if self.limit.minutes is not None and done >= self._known:
            found = from_main(self._state, lambda: self._decide(done))
            self._decided += [] if found is None else [(done, found)]
        return self.total(done)

    def _decide(self, done: int) -> int | None:
        """A new total number of steps, written to the file; None: the total is unchanged."""
        assert self.limit.minutes is not None
        spent, before, time = self.spent(), self.total(done), 60 * self.limit.minutes
        first, one_more = not self._decided, 0
        if first:
            # The first step alone is a poor estimate, unless it has taken much of the time.
            enough = spent >= SHARE * time and (len(self._times) > 1 or spent >= time / 4)
            if not (enough or done >= FEW or done == before):
                return None
            self._pace = max(1e-9, statistics.median(self._times[len(self._times) // 2 :]))
        elif spent + (before - done) * self._pace > (1 + LATE) * time:
            one_more = int(spent < (1 + TOO_LATE) * time)  # the step that ends the schedule
        else:
            return None
        found = min(before, done + max(one_more, int(max(0.0, time - spent) / self._pace)))
        if found == before and not first:
            return None
        record = _Steps(self.limit.minutes, self._pace, found, (*self._decided, (done, found)))
        write_json(self._file, asdict(record))
        why = "" if first else f" (before: {before}), as steps take longer than at first"
        print(f"minutes={self.limit.minutes:g} seconds_per_step={self._pace:.4f} steps={found}{why}", flush=True)
        if first and before > 1 and self._pace > time / ENOUGH:
            shorter = f"with a smaller fit.batch_rows or seq_len there are more; a training wants {ENOUGH} or more"
            held = max(1, int(time / self._pace))
            warn(f"minutes={self.limit.minutes:g}: one step takes {self._pace:.3g} s, so they hold {held}; {shorter}")
        return found
