"""How far a pipeline is, and how long it will go on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.progress import Stage
from outrider.words import in_words

LEAST = 0.05  # of what a step was expected to take is taken to be left of it while it runs on


@dataclass
class Pace:
    """Seconds that steps were expected to take, in order (None: nobody knows), and that those done have taken.

    given: of those expected the ones that a step is given to work in, on any machine.
    """

    expected: Mapping[str, float | None]
    done: dict[str, float] = field(default_factory=dict)
    given: Mapping[str, float] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        """How much slower this machine is than the one that the expectations are from, by the steps done; 1 before.

        Time that a step is given says nothing of it.
        """
        known = [name for name in self.done if self.expected.get(name)]
        expected = sum((self.expected[name] or 0.0) - self.given.get(name, 0.0) for name in known)
        taken = sum(max(0.0, self.done[name] - self.given.get(name, 0.0)) for name in known)
        return taken / expected if expected > 0 else 1.0

    def left(self, current: str | None = None, spent: float = 0.0) -> float | None:
        """Seconds until all is done, of the `current` step `spent` seconds behind it; None where nobody knows."""
        total = 0.0
        for name, expected in self.expected.items():
            if name in self.done:
                continue
            if expected is None:
                return None
            given = self.given.get(name, 0.0)
            needed = given + (expected - given) * self.scale
            total += max(needed - spent, LEAST * needed) if name == current else needed
        return total

    def share(self, current: str | None = None, spent: float = 0.0) -> float:
        """Which part of all is behind: of the time, or of the steps where their time is not known."""
        left = self.left(current, spent)
        if left is None:
            return len(self.done) / len(self.expected)
        behind = sum(self.done.values()) + spent
        return behind / (behind + left) if behind + left else 1.0

    def words(self, current: str | None = None, spent: float = 0.0) -> str:
        """The time left, for people."""
        left = self.left(current, spent)
        return "unknown" if left is None else in_words(left)


def step_stage(pace: Pace, step: str, spent: float = 0.0) -> Stage:
    """The stage that a step is, with the time left of the whole pipeline. spent: seconds of the step's earlier runs."""
    names = list(pace.expected)
    stage = Stage(
        f"step {names.index(step) + 1}/{len(names)} {step}",
        left=lambda: pace.left(step, spent + stage.spent),
        share=lambda: pace.share(step, spent + stage.spent),
    )
    return stage
