"""A training run of so many minutes: how many steps it does follows from its own time, and is kept."""

import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from inference.measure.time_limit import TimeLimit
from outrider.errors import require, warn
from outrider.files import write_json
from outrider.processes import from_main, join_processes
from outrider.settings import read_as

STEPS_FILE = "steps.json"
FEW = 10  # steps after which the number of all is decided at the latest; the first ones compile and fill caches
SHARE = 0.1  # of the time, after which it is decided at the latest
LATE = 0.05  # share of the time by which a run may be late before its steps are cut
TOO_LATE = 0.1  # share of the time by which it may be late and begin one more step, in which the schedule ends


@dataclass(frozen=True)
class _Steps:
    """What `STEPS_FILE` holds. decided: of each decision, in order, the steps done by then and those in all."""

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
    """How many optimizer steps a run does: `most`, or with minutes those that there is time for.

    The number is decided from the time of the first steps, once there are `FEW` or `SHARE` of the time is over. From
    then on it only falls, namely when the run would end later than `LATE` allows. No step begins later than `TOO_LATE`.
    Every decision is in `STEPS_FILE` before the next step begins. So what holds at a step is a function of the step and
    of these decisions. A run that goes on at a checkpoint takes them over, and decides nothing before the last of them.

    limit: the minutes, and the clock. Evaluations and checkpoints between the first and the last step count.
    start: steps done before; without any, decisions on file are a killed run's, of which nothing is left.
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
        """The first step of this run begins."""
        self.limit = replace(self.limit, started=self.limit.clock())

    def spent(self) -> float:
        """Seconds since the first step, of all runs."""
        return self.limit.spent()

    def total(self, step: int) -> int:
        """How many steps there are in all, by what was decided before step `step` (from 0)."""
        return next((total for done, total in reversed(self._decided) if done <= step), self.most)

    def add_step(self, began: float) -> None:
        """A step is done that began when `began` seconds were spent."""
        if not self._decided:
            self._times.append(self.spent() - began)

    def decide(self, done: int) -> int:
        """How many steps there are in all, now that `done` are. Every process calls it; the main one's clock counts."""
        if self.limit.minutes is not None and done >= self._known:
            found = from_main(self._state, lambda: self._decide(done))
            self._decided += [] if found is None else [(done, found)]
        return self.total(done)

    def _decide(self, done: int) -> int | None:
        """Another number of steps, which is then on file; None: the number stays."""
        assert self.limit.minutes is not None
        spent, before, time = self.spent(), self.total(done), 60 * self.limit.minutes
        first, one_more = not self._decided, 0
        if first:
            # The first step alone tells little, unless it has taken much of the time.
            enough = spent >= SHARE * time and (len(self._times) > 1 or spent >= time / 4)
            if not (enough or done >= FEW or done == before):
                return None
            self._pace = max(1e-9, statistics.median(self._times[len(self._times) // 2 :]))
        elif spent + (before - done) * self._pace > (1 + LATE) * time:
            one_more = int(spent < (1 + TOO_LATE) * time)  # in which the schedule comes to its end
        else:
            return None
        found = min(before, done + max(one_more, int(max(0.0, time - spent) / self._pace)))
        if found == before and not first:
            return None
        record = _Steps(self.limit.minutes, self._pace, found, (*self._decided, (done, found)))
        write_json(self._file, asdict(record))
        why = "" if first else f" (before: {before}), as steps take longer than at first"
        print(f"minutes={self.limit.minutes:g} seconds_per_step={self._pace:.4f} steps={found}{why}", flush=True)
        if first and found == 1 < before:
            shorter = "a smaller fit.batch_rows or seq_len makes steps shorter"
            warn(f"minutes={self.limit.minutes:g}: one step takes {self._pace:.3g} s, so there is one; {shorter}")
        return found
