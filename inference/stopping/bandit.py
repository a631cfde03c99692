"""A bandit over stop rules: UCB1 chooses one for every round (as in TapOut, arXiv 2511.02017)."""

import math
from collections.abc import Sequence

from inference.stopping.interface import Step, StopRule


class UCB:
    """Uses every rule once, then the rule with the largest mean reward + √(2 ln t / n); t: all rounds, n: the rule's.

    The reward of a round is the mean of accepted / longest draft, which rewards tokens, and accepted / drafted, which
    punishes waste. Only the chosen rule decides in a round and observes its outcome.
    """

    def __init__(self, rules: Sequence[StopRule]):
        self.rules = rules
        self.max_draft = max(rule.max_draft for rule in rules)
        self.rounds, self.rewards = [0] * len(rules), [0.0] * len(rules)
        self.chosen = 0

    def stop(self, step: Step) -> bool:
        return self.rules[self.chosen].stop(step)

    def observe(self, drafted: int, accepted: int) -> None:
        self.rules[self.chosen].observe(drafted, accepted)
        if drafted:
            self.rounds[self.chosen] += 1
            self.rewards[self.chosen] += (accepted / self.max_draft + accepted / drafted) / 2
        self.chosen = max(range(len(self.rules)), key=self._bound)

    def _bound(self, rule: int) -> float:
        """The upper confidence bound of a rule's reward; infinite if it was never tried."""
        count = self.rounds[rule]
        if not count:
            return math.inf
        return self.rewards[rule] / count + math.sqrt(2 * math.log(sum(self.rounds)) / count)
